"""List the imports, newest first."""

from __future__ import annotations

from backend.command import CommandOptions, RatchetCommand, Result
from feedback.api.imports import Import
from feedback.transfer.import_report import batches, count_text

COUNT_NAMES = ("decisions", "ratings", "comparisons", "corrections", "outcomes", "traces")


class Options(CommandOptions):
    agent: str = ""
    """SLUG: Only imports of this agent (default: all). Example: --agent filer"""
    limit: int = 50
    """N: List at most N imports (default 50). Example: --limit 10"""


class Command(RatchetCommand[Options, Result]):
    help = (
        "List imported files, newest first: what each contained, who imported it and when, and whether "
        "it was undone. Example: manage.py imports --agent support-bot"
    )

    def work(self, options: Options) -> Result:
        rows = batches(options.agent)
        return {
            "count": rows.count(),
            "imports": [Import.of(row) for row in rows[: max(options.limit, 1)]],
        }

    def show(self, result: Result) -> None:
        if not result["imports"]:
            self.stdout.write("No imports yet.")
            return
        rows = [
            (
                str(row["batch"]),
                row["file"],
                row["format"],
                row["agent"] or "several",
                ", ".join(count_text(n, name) for name in COUNT_NAMES if (n := row["counts"].get(name))),
                row["actor"],
                row["created_at"][:16].replace("T", " "),
                "undone" if row["undone_at"] else "",
            )
            for row in result["imports"]
        ]
        self.table(rows, ("import", "file", "format", "agent", "brought", "by", "at", ""))
        if (more := result["count"] - len(result["imports"])) > 0:
            self.stdout.write(f"and {more:,} older ones (--limit {result['count']})")

    def next_step(self, result: Result) -> str:
        standing = [row["batch"] for row in result["imports"] if not row["undone_at"]]
        if not standing:
            return "python manage.py import_feedback FILE --agent SLUG"
        return f"python manage.py undo_import {standing[0]} --dry-run, or the page /imports/"
