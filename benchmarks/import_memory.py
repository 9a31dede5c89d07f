"""How much memory an import of a large file needs: a gigabyte by default, PostgreSQL on this machine.

    python benchmarks/import_memory.py [--megabytes 1024] [--row-bytes 2000] [--kind rated|anonymous|array]

Writes a file of rated decisions (`rated`: our own format, JSON lines; `anonymous`: TRL labels of raters without a name,
who are numbered per response; `array`: the same rows as one JSON array), imports it in a process of its own into an
empty database of a throwaway PostgreSQL cluster, and tells that process's peak. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.api_writes import machine  # noqa: E402
from tests.postgres import cluster  # noqa: E402
from tests.server import Server  # noqa: E402


def row(kind: str, number: int, size: int) -> str:
    words = f"Order {number} has not arrived. What can I do about it? " * (size // 60)
    if kind != "rated":
        return json.dumps({"prompt": words, "completion": f"Order {number} is on its way.", "label": True})
    made = {
        "type": "decision",
        "id": str(uuid.uuid4()),
        "agent": "support-bot",
        "messages": [{"role": "user", "content": words}],
        "response": f"Order {number} is on its way.",
        "ratings": [{"id": str(uuid.uuid4()), "rater": f"rater-{number % 50}", "thumb": "up"}],
    }
    return json.dumps(made)


def write(path: Path, kind: str, megabytes: int, size: int) -> int:
    """Rows written."""
    number = written = 0
    with path.open("w") as file:
        file.write("[\n" if kind == "array" else "")
        while written < megabytes << 20:
            text = (",\n" if kind == "array" and number else "") + row(kind, number, size)
            written += file.write(text if kind == "array" else text + "\n")
            number += 1
        file.write("\n]\n" if kind == "array" else "")
    return number


def child(path: Path) -> dict[str, Any]:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "backend.settings")
    import django

    django.setup()
    from feedback.importing import file_import

    began = time.perf_counter()
    report = file_import(path)
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "decisions": report.decisions,
        "ratings": report.ratings,
        "refused": len(report.refused),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--row-bytes", type=int, default=2000)
    parser.add_argument("--kind", choices=["rated", "anonymous", "array"], default="rated")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        sys.stdout.write(json.dumps(child(options.child)))
        return
    found = machine()
    with cluster() as url, tempfile.TemporaryDirectory(prefix="ratchet-bench-") as home:
        path = Path(home) / "large.json"
        count = write(path, options.kind, options.megabytes, options.row_bytes)
        server = Server(url, Path(home))
        server.migrate()
        done = subprocess.run(
            [sys.executable, __file__, "--child", str(path)],
            env=server.environment, capture_output=True, text=True, check=False, cwd=ROOT,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(done.stderr)
        result = {"rows": count, "file_mb": path.stat().st_size >> 20, **json.loads(done.stdout)}
    sys.stdout.write(
        json.dumps({"benchmark": "import_memory", "machine": found, "kind": options.kind, **result}, indent=2)
        + "\n"
    )


if __name__ == "__main__":
    main()
