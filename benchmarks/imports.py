"""Imports every file of some folders by itself: its format, what it brought, what an undo leaves.

    python benchmarks/imports.py tests/formats ../shared/data [--json] [--map prompt=question,response=answer]

Each file is imported into an empty database in a throwaway folder, imported a second time, which must add nothing, and
undone, which must leave nothing. A file that only speaks of decisions elsewhere (feedback on runs) is imported after
the file given here that holds them; one that says nothing without a second file is read with the other file of its
format.
Rows that cannot be read are left out and counted. Prints a table in Markdown, or one JSON object; ends with exit code 1
where a second import added something or an undo left something.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

COLUMNS = (
    "file format rows decisions ratings comparisons corrections outcomes skipped refused again left"
).split()
COUNTS = ("rows", "decisions", "ratings", "comparisons", "corrections", "outcomes", "skipped")
NO_FEEDBACK = ("README.md", "LICENSE", "dataset_info.json", "llamafactory_dataset_info.json")


@dataclass
class Result:
    """One file in the table."""

    file: str
    format: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    again: int | None = None
    """Rows a second import added."""
    left: int | None = None
    """Rows in the database after both were undone."""
    with_file: str = ""
    """The file imported before it, or read beside it."""
    said: str = ""
    """Why nothing came in."""
    seconds: float = 0.0

    def cells(self) -> list[str]:
        shown = {
            "file": self.file,
            "format": self.format,
            "refused": self.refused,
            "again": self.again,
            "left": self.left,
        }
        values = [shown.get(name, self.counts.get(name, "")) for name in COLUMNS]
        return ["-" if value is None else str(value) for value in values]


def files_in(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        found = sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else [path]
        yield from (item for item in found if item.name not in NO_FEEDBACK and not item.name.startswith("."))


def detected(files: Sequence[Path]) -> dict[Path, str]:
    """File -> its format, of those that are of one."""
    from feedback.transfer import formats
    from feedback.transfer.formats.records import FormatRefused

    found: dict[Path, str] = {}
    for path in files:
        try:
            found[path] = formats.detect(path)
        except FormatRefused:
            continue
    return found


def rows_in_database() -> int:
    from feedback.models import Comparison, Decision, Outcome, Rating, Trace

    return sum(model.objects.count() for model in (Decision, Rating, Comparison, Outcome, Trace))


def attempt(path: Path, before: Path | None, beside: Path | None, how: dict[str, Any]) -> Result:
    """Import, import again, undo both, newest first."""
    from feedback.transfer.formats.records import FormatRefused
    from feedback.transfer.import_ import ImportOrder, order_import
    from feedback.transfer.import_undo import import_undo

    result = Result(path.name, with_file=(before or beside).name if before or beside else "")
    batches: list[int] = []
    order = ImportOrder(path, ratings_path=beside, skip_bad=True, **how)
    started = time.perf_counter()
    try:
        if before is not None:
            batches += filter(None, [order_import(ImportOrder(before, skip_bad=True)).batch])
        report = order_import(order)
    except FormatRefused as error:
        result.said = str(error)
    else:
        result.seconds = time.perf_counter() - started
        result.format = report.format
        result.counts = {name: getattr(report, name) for name in COUNTS}
        result.refused = report.refused_count
        reasons = [row.reason for row in report.refused[:1]] or list(report.skipped_because)[:1]
        result.said = reasons[0] if reasons and not report.stored_rows else ""
        full = rows_in_database()
        again = order_import(order)
        result.again = rows_in_database() - full
        batches += filter(None, [report.batch, again.batch])
    for number in reversed(batches):
        import_undo(number, actor="benchmark")
    result.left = rows_in_database()
    return result


def imported(path: Path, known: dict[Path, str], how: dict[str, Any]) -> Result:
    """A file by itself; where it says nothing alone, with another file of its tool, nearest folder first."""
    result = attempt(path, None, None, how)
    if not result.format or result.left or any(result.counts[name] for name in COUNTS[1:-1]):
        return result
    family = result.format.partition("_")[0]
    others = [
        other for other, format in known.items() if other != path and format.partition("_")[0] == family
    ]
    others.sort(key=lambda other: (other.parent != path.parent, other.name))
    from feedback.transfer.formats import FORMATS

    for other in others:
        tries = [(other, None), (None, other)] if FORMATS[result.format].two_files else [(other, None)]
        for before, beside in tries:
            joined = attempt(path, before, beside, how)
            # read beside it, the other file alone must not be all that came in
            whole = before is not None or not joined.refused
            if joined.format and whole and any(joined.counts[name] for name in COUNTS[1:-1]):
                return joined
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="Files or folders.")
    parser.add_argument("--map", default="", help="As import_feedback --map, for every file.")
    parser.add_argument("--json", action="store_true", help="One JSON object in place of the table.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"RATCHET_HOME": home, "DJANGO_SETTINGS_MODULE": "backend.settings"}
        os.environ.pop("DATABASE_URL", None)
        import django

        django.setup()
        from django.core.management import call_command

        from feedback.transfer.formats import ColumnMap

        call_command("migrate", verbosity=0)
        how = {"columns": ColumnMap.parse(options.map) or None}
        files = list(files_in(options.paths))
        known = detected(files)
        results: list[Result] = []
        for number, path in enumerate(files, 1):
            print(f"{number}/{len(files)} {path.name}", file=sys.stderr)
            results.append(imported(path, known, how))
    kinds = {result.format for result in results if any(result.counts.get(name) for name in COUNTS[1:-1])}
    wrong = [result.file for result in results if result.again or result.left]
    summary = {
        "files": len(files),
        "files_imported": sum(bool(any(r.counts.get(name) for name in COUNTS[1:-1])) for r in results),
        "formats": len(kinds),
        "second_import_added": sum(result.again or 0 for result in results),
        "left_after_undo": sum(result.left or 0 for result in results),
        "wrong": wrong,
    }
    if options.json:
        print(json.dumps({**summary, "results": [vars(result) for result in results]}, ensure_ascii=False))
        return bool(wrong)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for result in results:
        print(f"| {' | '.join(result.cells())} |")
    for result in results:
        if result.with_file:
            print(f"\n{result.file}: with {result.with_file}", end="")
        elif result.said:
            print(f"\n{result.file}: {result.said[:200]}", end="")
    print(f"\n\n{json.dumps(summary)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
