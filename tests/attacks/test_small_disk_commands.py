"""Commands whose database and data folder lie on a disk that is full or read-only: the path and what to do, in a line;
what was whole stays."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.server import ROOT, Server, query
from tests.support.small_disks import SmallDisk, small_disk  # noqa: F401

ROWS = 400


def command(server: Server, *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of a command."""
    done = subprocess.run(
        [sys.executable, ROOT / "manage.py", *arguments],
        env=server.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("small_disk", ["16m"], indirect=True)
@pytest.mark.parametrize("way", ["full", "read-only"])
def test_commands_name_the_path_and_leave_what_was_whole(
    small_disk: SmallDisk,  # noqa: F811
    tmp_path: Path,
    way: str,
    record_property: Callable[[str, object], None],
) -> None:
    home = small_disk.folder / "home"
    home.mkdir()
    server = Server(f"sqlite:///{home / 'x.sqlite3'}", home)
    server.migrate()
    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    row = '{"prompt": "q%d", "response": "%s", "rating": "up"}\n'
    few.write_text("".join(row % (n, "r" * 20) for n in range(60)))
    many.write_text("".join(row % (n + 1000, "r" * 5000) for n in range(ROWS)))
    server.manage("import_feedback", str(few), "--agent", "helper")
    target = home / "out.jsonl"
    server.manage("export_training_data", "--agent", "helper", "--output", str(target))
    before, whole = query(server, "SELECT count(*) FROM feedback_decision"), target.read_bytes()
    small_disk.fill() if way == "full" else small_disk.lock()
    orders = (
        ("import_feedback", str(many), "--agent", "helper"),
        ("export_training_data", "--agent", "helper", "--output", str(target)),
        ("calculate_rewards", "--all"),
        ("forget", "--unit", "nobody"),
        ("backup", str(home / "backup")),
        ("train_sft", "--agent", "helper"),
    )
    faults, codes = [], []
    for order in orders:
        code, said = command(server, *order)
        last = said.strip().splitlines()[-1] if said.strip() else ""
        codes.append((order[0], code, last))
        if "Traceback" in said or code < 0 or (code and not last):
            faults.append((order[0], code, said[-600:]))
    record_property("tried", len(orders))
    assert target.read_bytes() == whole
    small_disk.free() if way == "full" else small_disk.unlock()
    assert faults == []
    assert [code for name, code, _ in codes if name in ("import_feedback", "backup")] == [1, 1], codes
    assert query(server, "SELECT count(*) FROM feedback_decision") == before
    shown = json.loads(server.manage("import_feedback", str(few), "--agent", "helper", "--json"))
    assert shown, "and it goes on where there is room again"
