"""How long an export of a million ratings with their prompts takes, and how much memory: PostgreSQL on this machine.

    python benchmarks/export_million.py [--ratings 1000000] [--formats ratchet trl-unpaired] [--rounds 1]

Starts a throwaway PostgreSQL cluster with its default settings, fills it with one rated decision of common size (1 kB
prompt) after the other, and writes each format to a file in a process of its own, whose peak memory is told. Prints one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.api_writes import machine  # noqa: E402
from tests.support.postgres import cluster  # noqa: E402

FILL = """
INSERT INTO feedback_decision (id, agent, messages, prompt_hash, response, reasoning, policy, unit, arm, propensity,
  run_id, tags, metadata, source, body_hash, created_at, ratings_human, ratings_wanted, annotation_priority)
SELECT gen_random_uuid(), 'support-bot',
  jsonb_build_array(jsonb_build_object('role', 'system', 'content', repeat('You answer customers of a shop. ', 4)),
    jsonb_build_object('role', 'user', 'content', 'Where is order ' || n || '? ' || repeat('It is late. ', 70))),
  encode(sha256(n::text::bytea), 'hex'), 'Order ' || n || ' is on its way. ' || repeat('I am sorry. ', 8), '',
  'support-bot-v1', 'user-' || (n % 5000), '', 0.5, '', '[]', '{"channel": "web"}', 'app', '',
  now() - (%(n)s - n) * interval '1 second', 1, 1, 0.5
FROM generate_series(1, %(n)s) AS n;
INSERT INTO feedback_rating (id, decision_id, rater, rater_kind, thumb, tags, notes, withdrawn, body_hash, created_at)
SELECT gen_random_uuid(), id, 'rater-' || abs(hashtext(id::text)) % 20, 'human',
  CASE WHEN abs(hashtext(id::text)) % 3 = 0 THEN 'down' ELSE 'up' END, '["polite"]', '', false, '',
  created_at + interval '1 hour'
FROM feedback_decision;
"""


def setup(url: str, home: Path) -> None:
    os.environ.update(DATABASE_URL=url, RATCHET_HOME=str(home), DJANGO_SETTINGS_MODULE="backend.settings")
    import django

    django.setup()


def fill(ratings: int) -> None:
    from django.core.management import call_command
    from django.db import connection

    call_command("migrate", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute(FILL.replace("%(n)s", str(ratings)))
        cursor.execute("VACUUM ANALYZE")
    connection.close()


def write(path: Path, name: str) -> dict[str, Any]:
    """Export into a file, in this process."""
    from feedback.transfer.export import file_export
    from feedback.transfer.export_views import Selection

    before = time.process_time()
    began = time.perf_counter()
    report = file_export(path, name, Selection())
    return {
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(time.process_time() - before, 2),
        "samples": report.samples,
        "bytes": path.stat().st_size,
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def measured(url: str, home: Path, name: str, rounds: int) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    for _ in range(rounds):
        command = [sys.executable, __file__, "--child", url, str(home), name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        found.append(json.loads(done.stdout))
    seconds = [one["seconds"] for one in found]
    return {**found[-1], "seconds": statistics.median(seconds), "rounds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratings", type=int, default=1_000_000)
    parser.add_argument("--formats", nargs="+", default=["ratchet", "trl-unpaired"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--child", nargs=3, metavar=("URL", "HOME", "FORMAT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        url, home, name = options.child
        setup(url, Path(home))
        sys.stdout.write(json.dumps(write(Path(home) / "export.jsonl", name)))
        return
    found = machine()
    with cluster(settings=()) as url, tempfile.TemporaryDirectory(prefix="ratchet-bench-") as home:
        setup(url, Path(home))
        fill(options.ratings)
        formats = {name: measured(url, Path(home), name, options.rounds) for name in options.formats}
    sys.stdout.write(
        json.dumps(
            {
                "benchmark": "export_million",
                "machine": found,
                "database": "PostgreSQL, default settings",
                "ratings": options.ratings,
                "formats": formats,
            },
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
