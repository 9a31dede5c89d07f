"""SIGKILL at random moments of an import and an export: all or nothing in the database, whole or nothing on disk."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.campaign_scale import scaled
from tests.support.server import ROOT, Server, query

KILLS = scaled("COMMAND_KILLS", 3)
ROWS = scaled("COMMAND_ROWS", 4000)

Told = Callable[[str, object], None]


def killed(server: Server, after_s: float, *arguments: str) -> bool:
    """Start a command and kill it after so many seconds. Whether it was still at work."""
    process = subprocess.Popen(
        [sys.executable, ROOT / "manage.py", *arguments],
        env=server.environment,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    time.sleep(after_s)
    if process.poll() is not None:
        return False
    process.send_signal(signal.SIGKILL)
    process.wait()
    return True


def counts(server: Server) -> tuple[int, int, int]:
    """Decisions, ratings and imports."""
    tables = ("feedback_decision", "feedback_rating", "feedback_importbatch")
    return tuple(query(server, f"SELECT count(*) FROM {table}")[0][0] for table in tables)  # type: ignore[return-value]


def test_a_killed_import_or_export_is_all_or_nothing(tmp_path: Path, record_property: Told) -> None:
    dice = random.Random(scaled("SEED", 0))
    server = Server(f"sqlite:///{tmp_path / 'x.sqlite3'}", tmp_path)
    server.migrate()
    file, target = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"prompt": f"q{n}", "response": f"r{n} " * 20, "rating": "up" if n % 3 else "down"}
        for n in range(ROWS)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    importing = ("import_feedback", str(file), "--agent", "helper")
    exporting = ("export_training_data", "--agent", "helper", "--limit", "0", "--output", str(target))

    # how long the whole takes, so that kills fall on all of it; another database is thrown away for it
    other = Server(f"sqlite:///{tmp_path / 'y.sqlite3'}", tmp_path)
    other.migrate()
    began = time.monotonic()
    other.manage(*importing)
    import_s = time.monotonic() - began
    met = 0
    for _ in range(KILLS):
        met += killed(server, dice.uniform(0.2, 1.0) * import_s, *importing)
        assert counts(server) in ((0, 0, 0), (ROWS, ROWS, 1))
    server.manage(*importing)
    assert counts(server)[:2] == (ROWS, ROWS)
    again = json.loads(server.manage(*importing, "--json"))
    assert counts(server)[:2] == (ROWS, ROWS), again

    began = time.monotonic()
    server.manage(*exporting)
    export_s = time.monotonic() - began
    whole = target.read_bytes()
    assert whole.count(b"\n") >= ROWS
    for number in range(KILLS):
        if number % 2:
            target.unlink(missing_ok=True)
        met += killed(server, dice.uniform(0.2, 1.0) * export_s, *exporting)
        assert not target.exists() or target.read_bytes() == whole
        if not target.exists():
            target.write_bytes(whole)
    record_property("tried", met)
    assert met > 0, "no kill met a command at work"
