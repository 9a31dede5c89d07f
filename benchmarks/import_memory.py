"""How much memory an import of a large file needs: a gigabyte by default, PostgreSQL on this machine.

    python benchmarks/import_memory.py [--megabytes 1024] [--row-bytes 2000] [--kind rated]

Writes a file of rated decisions, imports it in a process of its own into an empty database of a throwaway PostgreSQL
cluster, and tells that process's peak. Prints one JSON object. Kinds:

- rated: our own format, JSON lines; array: TRL labels as one JSON array
- anonymous: TRL labels, JSON lines, of raters without a name, who are numbered per response
- librechat: one JSON array of messages, of which each rated one stands before the question it answers
- open_webui: one JSON array of feedback, by turns with the chat it was given in and about a message of another one's
- simulation, tensorzero: two files of half the size, decisions and what was said of them, in the opposite order
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.api_writes import machine  # noqa: E402
from tests.support.postgres import cluster  # noqa: E402
from tests.support.server import Server  # noqa: E402


def words(number: int, size: int) -> str:
    return f"Order {number} has not arrived. What can I do about it? " * max(1, size // 60)


def answer(number: int) -> str:
    return f"Order {number} is on its way."


def rated(number: int, size: int) -> list[Any]:
    made = {
        "type": "decision",
        "id": str(uuid.uuid4()),
        "agent": "support-bot",
        "messages": [{"role": "user", "content": words(number, size)}],
        "response": answer(number),
        "ratings": [{"id": str(uuid.uuid4()), "rater": f"rater-{number % 50}", "thumb": "up"}],
    }
    return [made]


def anonymous(number: int, size: int) -> list[Any]:
    return [{"prompt": words(number, size), "completion": answer(number), "label": True}]


def librechat(number: int, size: int) -> list[Any]:
    about = {"conversationId": f"c{number}", "user": f"user-{number % 50}"}
    feedback = {"rating": "thumbsUp", "tag": None, "text": ""}
    return [
        {
            "messageId": f"a{number}",
            "parentMessageId": f"q{number}",
            "isCreatedByUser": False,
            "text": answer(number),
            "feedback": feedback,
            **about,
        },
        {
            "messageId": f"q{number}",
            "parentMessageId": None,
            "isCreatedByUser": True,
            "text": words(number, size),
            **about,
        },
    ]


def open_webui(number: int, size: int) -> list[Any]:
    asked = {"id": f"q{number}", "parentId": None, "role": "user", "content": words(number, size)}
    answers = [
        {
            "id": f"a{number}-{n}",
            "parentId": f"q{number}",
            "role": "assistant",
            "content": f"{answer(number)} {n}",
        }
        for n in range(2)
    ]
    messages = {message["id"]: message for message in (asked, *answers)}
    chat = {"chat": {"chat": {"history": {"messages": messages}}}}

    def feedback(n: int, **more: Any) -> dict[str, Any]:
        meta = {"message_id": f"a{number}-{n}", "chat_id": f"c{number}"}
        return {
            "id": f"f{number}-{n}",
            "user_id": f"user-{number % 50}",
            "type": "rating",
            "data": {"rating": 1},
            "meta": meta,
            "created_at": 1_760_000_000 + number,
            **more,
        }

    return [feedback(1), feedback(0, snapshot=chat)]


def simulation(number: int, size: int) -> tuple[list[Any], list[Any]]:
    entry = {"entry_id": f"e{number}", "prompt": words(number, size), "response": answer(number)}
    said = {"entry_id": f"e{number}", "rating": "up", "tags": [], "notes": words(number, size)}
    return [entry], [said]


def tensorzero(number: int, size: int) -> tuple[list[Any], list[Any]]:
    own, episode = str(uuid.uuid4()), str(uuid.uuid4())
    asked = {"messages": [{"role": "user", "content": words(number, size)}]}
    output = [{"type": "text", "text": answer(number)}]
    inference = {
        "id": own,
        "function_name": "support",
        "variant_name": "v1",
        "episode_id": episode,
        "input": json.dumps(asked),
        "output": json.dumps(output),
    }
    said = {
        "id": str(uuid.uuid4()),
        "target_id": own,
        "metric_name": "solved",
        "value": True,
        "tags": {"note": words(number, size)},
    }
    return [inference], [said]


Rows = Callable[[int, int], list[Any]]
KINDS: dict[str, Rows] = {
    "rated": rated,
    "anonymous": anonymous,
    "array": anonymous,
    "librechat": librechat,
    "open_webui": open_webui,
}
TWO_FILES = {"simulation": simulation, "tensorzero": tensorzero}
ARRAYS = ("array", "librechat", "open_webui")


def write(folder: Path, kind: str, megabytes: int, size: int) -> list[Path]:
    """The file, or the two of them; with TWO_FILES the second one is turned around, a block at a time."""
    if kind not in TWO_FILES:
        path = folder / "large.json"
        with path.open("w") as file:
            write_rows(file, kind, megabytes << 20, size)
        return [path]
    paths = [folder / "decisions.jsonl", folder / "said.jsonl"]
    blocks: list[str] = []
    written = number = 0
    with paths[0].open("w") as file, tempfile.TemporaryDirectory(dir=folder) as turned:
        while written < megabytes << 20:
            block = Path(turned) / str(len(blocks))
            lines = []
            for _ in range(10_000):
                decisions, said = TWO_FILES[kind](number, size)
                written += file.write("".join(json.dumps(row) + "\n" for row in decisions))
                lines += [json.dumps(row) + "\n" for row in said]
                number += 1
            written += block.write_text("".join(reversed(lines)))
            blocks.append(str(block))
        with paths[1].open("w") as other:
            for name in reversed(blocks):
                other.write(Path(name).read_text())
    return paths


def write_rows(file: IO[str], kind: str, most: int, size: int) -> None:
    opened, between, closed = ("[\n", ",\n", "\n]\n") if kind in ARRAYS else ("", "\n", "\n")
    written, number = file.write(opened), 0
    while written < most:
        text = between.join(json.dumps(row) for row in KINDS[kind](number, size))
        written += file.write((between if number else "") + text)
        number += 1
    file.write(closed)


def child(paths: Sequence[Path]) -> dict[str, Any]:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "backend.settings")
    import django

    django.setup()
    from feedback.transfer.import_ import ImportOrder, order_import

    began = time.perf_counter()
    report = order_import(ImportOrder(paths[0], ratings_path=paths[1] if len(paths) > 1 else None))
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "format": report.format,
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
    parser.add_argument("--kind", choices=[*KINDS, *TWO_FILES], default="rated")
    parser.add_argument("--child", type=Path, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        sys.stdout.write(json.dumps(child(options.child)))
        return
    found = machine()
    with cluster() as url, tempfile.TemporaryDirectory(prefix="ratchet-bench-") as home:
        paths = write(Path(home), options.kind, options.megabytes, options.row_bytes)
        server = Server(url, Path(home))
        server.migrate()
        done = subprocess.run(
            [sys.executable, __file__, "--child", *map(str, paths)],
            env=server.environment,
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        size = sum(path.stat().st_size for path in paths)
        result = {"file_mb": size >> 20, "row_bytes": options.row_bytes, **json.loads(done.stdout)}
    sys.stdout.write(
        json.dumps({"benchmark": "import_memory", "machine": found, "kind": options.kind, **result}, indent=2)
        + "\n"
    )


if __name__ == "__main__":
    main()
