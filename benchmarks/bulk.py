"""How many decisions, ratings and comparisons a second come in by the thousand: over HTTP and from files, PostgreSQL.

    python benchmarks/bulk.py [--rows 30000] [--seconds 10] [--connections 4] [--workers 2]

Starts a throwaway PostgreSQL cluster with its default durability and gunicorn; posts lists of 1,000 decisions over some
connections; then imports, each into an empty database in a process of its own, a file of bare decisions, one of rated
decisions (both `ratchet`), and one of preferences (`trl`). Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.api_writes import bulk, decision, machine, measured  # noqa: E402
from tests.support.postgres import cluster, fresh_database  # noqa: E402
from tests.support.server import Server  # noqa: E402


def rows(kind: str, count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        made = decision(number)
        if kind == "preferences":
            answers = {"chosen": made["response"], "rejected": f"No idea about order {number}."}
            yield {
                "prompt": made["messages"],
                **{k: [{"role": "assistant", "content": v}] for k, v in answers.items()},
            }
            continue
        row = {"type": "decision", **made, "created_at": "2026-03-02T10:30:00+00:00"}
        if kind == "rated decisions":
            said = {"rater": f"rater-{number % 50}", "thumb": "up", "tags": ["polite"]}
            row["ratings"] = [{"id": str(uuid.uuid4()), **said, "created_at": "2026-03-02T11:00:00+00:00"}]
        yield row


def imported(url: str, home: Path, kind: str, count: int) -> dict[str, Any]:
    """Import a file in a process of its own, as the command does."""
    path = home / "rows.jsonl"
    with path.open("w") as file:
        for row in rows(kind, count):
            file.write(json.dumps(row) + "\n")
    server = Server(fresh_database(url), home)
    server.migrate()
    child = [sys.executable, __file__, "--child", str(path)]
    done = subprocess.run(
        child, env=server.environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    seconds = found["seconds"]
    return {
        **found,
        "bytes_per_row": path.stat().st_size // count,
        "decisions_per_second": round(found["decisions"] / seconds),
        "verdicts_per_second": round((found["ratings"] + found["comparisons"]) / seconds),
    }


def child(path: Path) -> dict[str, Any]:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "backend.settings")
    import django

    django.setup()
    from feedback.transfer.import_ import ImportOrder, order_import

    began, before = time.perf_counter(), time.process_time()
    report = order_import(ImportOrder(path))
    return {
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(time.process_time() - before, 2),
        "decisions": report.decisions,
        "ratings": report.ratings,
        "comparisons": report.comparisons,
        "refused": len(report.refused),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=30_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        sys.stdout.write(json.dumps(child(options.child)))
        return
    found = machine()
    with cluster(settings=()) as url, tempfile.TemporaryDirectory(prefix="ratchet-bench-") as home:
        server = Server(url, Path(home), workers=options.workers, threads=2)
        server.migrate()
        key = server.key("ingest", "rate")
        with server:
            asyncio.run(bulk(server.port, key, options.connections, 2.0))  # caches are warm then
            posted = asyncio.run(measured(bulk(server.port, key, options.connections, options.seconds)))
        files = {
            kind: imported(url, Path(home), kind, options.rows)
            for kind in ("decisions", "rated decisions", "preferences")
        }
    sys.stdout.write(
        json.dumps(
            {
                "benchmark": "bulk",
                "machine": found,
                "database": "PostgreSQL, commits reach the disk",
                "posted_lists_of_1000": posted,
                "imported_files": files,
            },
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
