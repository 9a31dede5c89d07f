"""The outbox of client and server: nothing twice, nothing half, and no lock outlives its holder."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ratchet_client.outbox import MAX_WAITING, Outbox
from ratchet_client.problem_log import ProblemLog
from ratchet_client.processes import exclusive


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "spool", ProblemLog())


def bodies(outbox: Outbox) -> list[Any]:
    return [record.body["n"] for record in outbox.pending()]


def test_threads_and_outboxes_share_a_file(outbox: Outbox) -> None:
    other = Outbox(outbox.folder, ProblemLog())

    def work(number: int) -> list[bool]:
        return [
            (outbox, other)[number % 2].put({"n": f"{number}-{i}", "text": "x" * 5000}) for i in range(10)
        ]

    with ThreadPoolExecutor(4) as pool:
        assert all(map(all, pool.map(work, range(4))))
    assert sorted(bodies(other)) == sorted(f"{t}-{i}" for t in range(4) for i in range(10))


def test_what_was_tried_less_goes_first_and_what_is_settled_or_refused_waits_no_more(outbox: Outbox) -> None:
    for n in range(4):
        outbox.put({"n": n})
    first, second, third, _ = outbox.pending()
    outbox.defer(first.number)
    outbox.settle([second.number])
    outbox.refuse(third.number, "no such decision")
    assert bodies(outbox) == [3, 0]
    assert outbox.refused() == [{"reason": "no such decision", "record": {"n": 2}}]
    assert (outbox.pending_count(), outbox.pending_count(up_to=first.number), outbox.newest()) == (2, 1, 4)


def test_a_key_finds_a_record_and_young_ones_can_be_let_be(outbox: Outbox) -> None:
    assert not outbox.contains("a")
    outbox.put({"n": 1}, key="a")
    assert outbox.contains("a")
    assert outbox.pending(older_than_s=60) == []
    outbox.remove(["a"])
    assert (outbox.contains("a"), bodies(outbox)) == (False, [])


def test_while_the_disk_fails_records_wait_in_memory_unless_they_may_not(outbox: Outbox) -> None:
    outbox.folder.write_text("a file where the folder should be")
    assert outbox.put({"n": 0}, hold=False) is False
    assert (outbox.waiting, outbox.lost) == (0, 0)
    assert outbox.put({"n": 1}) is outbox.put({"n": 2}) is False
    assert outbox.waiting_bodies(10) == [{"n": 1}, {"n": 2}]
    assert outbox.take_back({"n": 1})
    assert not outbox.take_back({"n": 1})
    for n in range(MAX_WAITING):
        outbox.put({"n": n})
    assert (outbox.waiting, outbox.lost) == (MAX_WAITING, 1)
    outbox.folder.unlink()
    assert outbox.write_waiting()
    assert (outbox.waiting, bodies(outbox)[0]) == (0, 2)


def test_erased_records_leave_no_byte_and_the_others_stay(outbox: Outbox) -> None:
    for name in ("ada", "bob", "ada"):
        outbox.put({"n": name, "text": f"words of {name}"})
    outbox.refuse(1, "too long")

    def owns(record: Any) -> bool:
        return bool(record["n"] == "ada")

    assert outbox.erase(owns, dry_run=True) == 2
    assert outbox.erase(owns) == 2
    assert (bodies(outbox), outbox.refused()) == (["bob"], [])
    data = b"".join(path.read_bytes() for path in outbox.folder.iterdir())
    assert (b"words of bob" in data, b"words of ada" in data) == (True, False)


def test_a_lock_is_one_threads_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "sender.lock"
    with exclusive(path) as held:
        assert held
        with exclusive(path, wait=False) as second:
            assert not second
    with exclusive(path, wait=False) as free:
        assert free


def test_without_fsync_removing_records_moves_the_log_into_the_file(tmp_path: Path) -> None:
    journal = Outbox(tmp_path, ProblemLog(), name="journal", fsync=False)
    for number in range(400):  # a log of over 1,000 pages, from which SQLite would move it within `put`
        assert journal.put({"n": number, "text": "x" * 12_000}, key=str(number))
    assert journal.path.stat().st_size < 12_000
    journal.remove(str(number) for number in range(399))
    assert journal.path.stat().st_size > 400 * 12_000
    assert bodies(journal) == [399]
