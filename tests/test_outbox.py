"""The server's outbox and its file locks: nothing torn, nothing twice, no lock outlives its holder."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from backend.file_locks import file_lock
from backend.logs import ProblemLog
from feedback.recording.outbox import Outbox, Progress

ROOT = Path(__file__).resolve().parent.parent


def bodies(outbox: Outbox) -> list[object]:
    return [record.body for day in outbox.days() for record in outbox.records(day, 0)]


def test_threads_share_a_file_and_no_line_is_torn(tmp_path: Path) -> None:
    outboxes = [Outbox(tmp_path), Outbox(tmp_path)]

    def work(number: int) -> None:
        for i in range(10):
            assert outboxes[number % 2].put({"n": f"{number}-{i}", "text": "x" * 5000})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [body["n"] for body in bodies(outboxes[0]) if isinstance(body, dict)]
    assert sorted(numbers) == sorted(f"{t}-{i}" for t in range(4) for i in range(10))


def test_a_record_after_a_torn_line_begins_on_a_line_of_its_own(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.put({"n": 1})
    (day,) = outbox.days()
    with day.open("ab") as file:
        file.write(b'{"n": "torn')  # the power went here
    outbox.put({"n": 2})
    first, torn, last = outbox.records(day, 0)
    assert (first.body, last.body) == ({"n": 1}, {"n": 2})
    assert torn.fault.startswith("expected a line of JSON")
    assert torn.raw.startswith('{"n": "torn')


def test_days_wholly_replayed_are_removed_and_others_stay(tmp_path: Path) -> None:
    line = json.dumps({"n": 1}) + "\n"
    replayed, pending = tmp_path / "2020-02-28.jsonl", tmp_path / "2020-02-29.jsonl"
    for path in (replayed, pending):
        path.write_text(line)
    outbox = Outbox(tmp_path)
    outbox.progress_save(replayed, Progress(position=len(line), sent=1))
    assert outbox.pending_days() == {pending: len(line)}
    outbox.sweep()
    assert sorted(path.name for path in tmp_path.glob("2020*")) == ["2020-02-29.jsonl"]


def test_progress_written_by_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Progress files had one field more, of which the server made no use."""
    day = tmp_path / "2020-02-28.jsonl"
    day.with_name("2020-02-28.progress.json").write_text(
        '{"position": 17, "held": [], "sent": 2, "refused": 1}'
    )
    assert Outbox(tmp_path).progress(day) == Progress(position=17, sent=2, refused=1)


def test_a_standing_problem_is_loud_once_and_again_after_it_has_passed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    problems = ProblemLog(logging.getLogger("tests.outbox"))
    with caplog.at_level(logging.DEBUG, "tests.outbox"):
        problems.report("disk", "full")
        problems.report("disk", "full")
        problems.resolve("disk", "free again")
        problems.resolve("disk", "free again")
        problems.report("disk", "full")
    assert [record.levelname for record in caplog.records] == ["ERROR", "DEBUG", "INFO", "ERROR"]


def test_a_lock_is_one_threads_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "append.lock"
    with file_lock(path) as held:
        assert held
        with file_lock(path, wait=False) as second:
            assert not second
    with file_lock(path, wait=False) as free:
        assert free


def test_a_worker_that_outlives_its_killed_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    code = """
import os, sys, time
from pathlib import Path
from backend.file_locks import file_lock
with file_lock(Path(sys.argv[1])):
    worker = os.fork()
    if not worker:
        print(os.getpid(), flush=True)
    time.sleep(60)
"""
    path = tmp_path / "append.lock"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        with file_lock(path, wait=False) as free:
            assert not free
        process.kill()
        process.wait(30)
        with file_lock(path, wait=False) as free:
            assert free
    finally:
        os.kill(worker, 9)
        process.communicate(timeout=30)
