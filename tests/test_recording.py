"""Decisions recorded beside the answer: nobody waits, nothing is lost, everything is there once."""

import json
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import DataError, OperationalError, connection
from django.utils import timezone

from feedback.cache import TTLCache
from feedback.models import AgentSettings, Decision
from feedback.recording.recorder import (
    Recorder,
    Storage,
    decision_id_new,
    decisions_ingest,
    recorded_or_never,
)
from feedback.services import rating_submit
from feedback.storage.validation import DecisionPending, DecisionUnknown
from tests.support.api_client import ApiClient
from tests.support.server import ROOT

pytestmark = pytest.mark.django_db(transaction=True)


def facts(number: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "id": str(uuid.uuid4()),
        "agent": "support-bot",
        "messages": [{"role": "user", "content": f"q{number}"}],
        "response": "r",
        "created_at": timezone.now().isoformat(),
        **more,
    }


class Database:
    """Stands before the one writer: away, slow, or as it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = None
        self.block: threading.Event | None = None
        self.batches: list[int] = []
        ingest = decisions_ingest

        def guarded(items: Any, **more: Any) -> Any:
            self.batches.append(len(items))
            if self.block is not None:
                self.block.wait(10)
            if self.error is not None:
                raise self.error
            return ingest(items, **more)

        monkeypatch.setattr("feedback.recording.recorder.decisions_ingest", guarded)


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Database:
    monkeypatch.setattr("feedback.recording.recorder.FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr("feedback.recording.recorder.LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr("feedback.recording.recorder.IDLE_S", 0.05)
    return Database(monkeypatch)


@pytest.fixture
def recorder(tmp_path: Path, database: Database) -> Iterator[Recorder]:
    made = Recorder(lambda: tmp_path / "spool")
    yield made
    database.error = None
    made.stop()


def waiting_ids(recorder: Recorder) -> list[str]:
    return [record.body["body"]["id"] for record in recorder.outbox.pending()]


def test_a_decision_is_in_the_database_when_record_returns(recorder: Recorder) -> None:
    sent = facts()
    assert recorder.record(sent) is Storage.DATABASE
    assert str(Decision.objects.get().pk) == sent["id"]
    assert waiting_ids(recorder) == []


def test_decisions_lie_on_disk_during_an_outage(recorder: Recorder, database: Database) -> None:
    database.error = OperationalError("server closed the connection")
    sent = [facts(n) for n in range(5)]
    assert [recorder.record(one) for one in sent] == [Storage.DISK] * 5
    assert Decision.objects.count() == 0
    assert waiting_ids(recorder) == [one["id"] for one in sent]
    database.error = None
    assert recorder.drain(10)
    assert {str(pk) for pk in Decision.objects.values_list("pk", flat=True)} == {one["id"] for one in sent}


def test_a_slow_database(recorder: Recorder, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feedback.recording.recorder.WAIT_S", 0.05)
    database.block = threading.Event()
    sent = facts()
    assert recorder.record(sent) is Storage.DISK  # it did not wait for the ten seconds
    assert waiting_ids(recorder) == [sent["id"]]
    database.block.set()
    assert recorder.drain(10)
    assert str(Decision.objects.get().pk) == sent["id"]


def test_decisions_of_many_at_once_share_transactions(recorder: Recorder, database: Database) -> None:
    database.block = threading.Event()
    threads = [threading.Thread(target=recorder.record, args=(facts(n),)) for n in range(40)]
    for thread in threads:
        thread.start()
    database.block.set()
    for thread in threads:
        thread.join()
    assert recorder.drain(10)
    assert Decision.objects.count() == 40
    assert len(database.batches) < 20


def test_what_was_left_is_replayed(recorder: Recorder, database: Database, tmp_path: Path) -> None:
    database.error = OperationalError("away")
    sent = facts()
    recorder.record(sent)
    recorder.stop()
    database.error = None
    again = Recorder(lambda: tmp_path / "spool")
    assert again.replay() == 1
    assert str(Decision.objects.get().pk) == sent["id"]
    assert again.replay() == 0


def test_who_notes_a_decision_waits_for_nobody(recorder: Recorder, database: Database) -> None:
    database.block = threading.Event()
    sent = [facts(n) for n in range(3)]
    for one in sent:
        recorder.note(one)
    # on disk, while the database has said nothing
    assert all(recorder.journal.contains(one["id"]) for one in sent)
    assert Decision.objects.count() == 0
    database.block.set()
    assert recorder.drain(10)
    assert {str(pk) for pk in Decision.objects.values_list("pk", flat=True)} == {one["id"] for one in sent}
    assert recorder.journal.pending() == []
    assert waiting_ids(recorder) == []


def test_a_kill_loses_nothing(recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [facts(n) for n in range(3)]
    killed = """
import json, os, sys
from pathlib import Path
import backend
from ratchet_client.outbox import Outbox
from ratchet_client.problem_log import ProblemLog
for one in json.loads(sys.argv[2]):
    Outbox(Path(sys.argv[1]), ProblemLog(), name="journal").put({"kind": "decision", "body": one}, key=one["id"])
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", killed, tmp_path / "spool", json.dumps(sent)], check=False, cwd=ROOT
    )
    assert done.returncode == -9
    assert recorder.replay() == 0  # a living process may have them in hand
    monkeypatch.setattr("feedback.recording.recorder.ORPHAN_S", 0.0)
    assert recorder.replay() == 3
    assert {str(pk) for pk in Decision.objects.values_list("pk", flat=True)} == {one["id"] for one in sent}
    assert recorder.journal.pending() == []


def test_overflow_is_spooled(recorder: Recorder, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feedback.recording.recorder.WAIT_S", 0.01)
    monkeypatch.setattr("feedback.recording.recorder.MOST_IN_HAND", 2)
    database.block = threading.Event()
    sent = [facts(n) for n in range(4)]
    for one in sent:
        recorder.note(one)
    assert waiting_ids(recorder) == [one["id"] for one in sent[2:]]
    database.block.set()
    assert recorder.drain(10)
    assert Decision.objects.count() == 4


def test_notes_come_back_after_an_outage(recorder: Recorder, database: Database) -> None:
    database.error = OperationalError("away")
    sent = [facts(n) for n in range(5)]
    for one in sent:
        recorder.note(one)
    while recorder._in_hand or recorder._queue:
        time.sleep(0.001)
    assert len(waiting_ids(recorder)) == 5
    database.error = None
    assert recorder.drain(10)
    assert Decision.objects.count() == 5


def test_raters_wait(recorder: Recorder, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feedback.recording.recorder.spool_folder", lambda: recorder.outbox.folder)
    monkeypatch.setattr("feedback.recording.recorder.WAIT_S", 10.0)
    database.block = threading.Event()
    sent = facts()
    recorder.note(sent)
    tries: list[int] = []

    def rate() -> Any:
        tries.append(1)
        if len(tries) == 1:
            threading.Timer(0.05, database.block.set).start()  # type: ignore[union-attr]
        return rating_submit(decision=sent["id"], rater="ada", thumb="up")

    assert recorded_or_never(sent["id"], then=rate).created
    assert len(tries) == 2


def test_unknown_decisions_are_said_at_once(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feedback.recording.recorder.spool_folder", lambda: recorder.outbox.folder)
    monkeypatch.setattr("feedback.recording.recorder.time.sleep", lambda _: pytest.fail("waited"))
    with pytest.raises(DecisionUnknown):
        recorded_or_never("x", then=lambda: rating_submit(decision=uuid.uuid4(), rater="ada", thumb="up"))


def test_spooled_are_rated(recorder: Recorder, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it was 404, and the client kept it for good as refused."""
    monkeypatch.setattr("feedback.recording.recorder.spool_folder", lambda: recorder.outbox.folder)
    monkeypatch.setattr("feedback.recording.recorder.WAIT_S", 0.02)
    database.error = OperationalError("away")
    noted, spooled = facts(), facts()
    recorder.record(spooled)
    recorder.note(noted)

    client = ApiClient("rate")

    def send(id: str) -> Any:
        rating = {"id": str(uuid.uuid4()), "thumb": "up"}
        return client.post(f"/api/decisions/{id}/ratings/", rating)

    for one in (noted, spooled):
        answer = send(one["id"])
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "pending")
        assert answer["Retry-After"] == "1"
    database.error = None
    assert recorder.drain(10)
    assert [send(one["id"]).status_code for one in (noted, spooled)] == [201, 201]
    assert send(str(uuid.uuid4())).status_code == 404


def test_a_hopeless_decision_is_no_wait(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feedback.recording.recorder.spool_folder", lambda: recorder.outbox.folder)
    refused = facts(agent="")
    recorder.record(refused)
    assert recorder.drain(10)
    recorder.replay()
    assert len(recorder.outbox.refused()) == 1
    with pytest.raises(DecisionUnknown):
        recorded_or_never(
            refused["id"], then=lambda: rating_submit(decision=refused["id"], rater="ada", thumb="up")
        )


def test_another_machine_may_have_a_young_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    young = decision_id_new()
    assert (young.version, young.variant) == (7, uuid.RFC_4122)
    assert young.int >> 80 <= decision_id_new().int >> 80

    def rate() -> Any:
        return rating_submit(decision=young, rater="ada", thumb="up")

    with pytest.raises(DecisionPending):
        recorded_or_never(young, then=rate)
    now = time.time()
    monkeypatch.setattr("feedback.recording.recorder.time.time", lambda: now + 121)
    with pytest.raises(DecisionUnknown):
        recorded_or_never(young, then=rate)


def test_a_decision_that_was_recorded_is_replayed_without_harm(recorder: Recorder) -> None:
    sent = facts()
    recorder.record(sent)
    recorder.outbox.put({"kind": "decision", "body": sent})
    recorder.outbox.put({"kind": "decision", "body": {**sent, "response": "another answer to a retry"}})
    recorder.replay()
    assert Decision.objects.get().response == "r"
    assert recorder.outbox.refused() == []


def test_what_cannot_be_recorded_is_kept_with_its_reason_and_holds_nothing_back(recorder: Recorder) -> None:
    recorder.outbox.put({"kind": "decision", "body": facts(agent="No Slug")})
    recorder.outbox.put({"kind": "nonsense"})
    recorder.outbox.put({"kind": "decision", "body": facts(1)})
    recorder.replay()
    assert Decision.objects.count() == 1
    assert ["slug" in entry["reason"] for entry in recorder.outbox.refused()] == [True, False]


def test_bad_rows_are_found_among_others(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    ingest = decisions_ingest

    def picky(items: Any, **more: Any) -> Any:
        if any(item["response"] == "poison" for item in items):
            raise DataError("value out of range")
        return ingest(items, **more)

    monkeypatch.setattr("feedback.recording.recorder.decisions_ingest", picky)
    for number, response in enumerate(["good", "poison", "good"]):
        recorder.outbox.put({"kind": "decision", "body": facts(number, response=response)})
    recorder.replay()
    assert Decision.objects.count() == 2
    assert ["out of range" in entry["reason"] for entry in recorder.outbox.refused()] == [True]


def test_an_agent_that_keeps_a_share_keeps_it_here_too(recorder: Recorder) -> None:
    AgentSettings.objects.create(agent="support-bot", collection_rate=0.0)
    assert recorder.record(facts()) is Storage.DATABASE
    assert Decision.objects.count() == 0


def test_memory_stands_in_for_a_database(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.FEEDBACK_REMEMBER_S = 0.0
    memory: TTLCache[str] = TTLCache()

    def away() -> str:
        raise OperationalError("away")

    assert memory.get("champion", lambda: "widgets-v1") == "widgets-v1"
    assert memory.get("champion", away) == "widgets-v1"
    with pytest.raises(OperationalError):
        memory.get("another", away)
    monkeypatch.setattr("feedback.cache.STALE_S", 0.0)
    with pytest.raises(OperationalError):
        memory.get("champion", away)
    assert connection.vendor  # the connection is as it was


def test_what_is_asked_for_often_is_read_again_beside_the_requests(settings: Any) -> None:
    settings.FEEDBACK_RENEW_AHEAD, settings.FEEDBACK_REMEMBER_S = True, 60.0
    memory: TTLCache[str] = TTLCache()
    renewed = threading.Event()
    makers: list[str] = []

    def make() -> str:
        makers.append(threading.current_thread().name)
        if len(makers) == 2:
            renewed.set()
        return f"value {len(makers)}"

    assert memory.get("key", make) == "value 1"
    assert memory.get("key", make) == "value 1"  # young: nobody reads again
    memory._kept["key"] = (memory._kept["key"][0] - 40, "value 1")
    assert memory.get("key", make) == "value 1"  # nobody waits
    assert renewed.wait(5)
    while memory._renewing:
        time.sleep(0.001)
    assert memory.get("key", make) == "value 2"
    assert makers == ["MainThread", "ratchet-renewer"]


def test_what_was_read_before_a_change_does_not_come_back_after_it(settings: Any) -> None:
    settings.FEEDBACK_RENEW_AHEAD, settings.FEEDBACK_REMEMBER_S = True, 60.0
    memory: TTLCache[str] = TTLCache()
    reading, go_on = threading.Event(), threading.Event()
    memory.get("key", lambda: "valid")
    memory._kept["key"] = (memory._kept["key"][0] - 40, "valid")

    def slow() -> str:
        reading.set()
        go_on.wait(5)
        return "valid"

    memory.get("key", slow)
    assert reading.wait(5)
    memory.clear()  # the key was revoked meanwhile
    go_on.set()
    assert memory.get("key", lambda: "revoked") == "revoked"
    memory.get("other", lambda: "x")
    time.sleep(0.05)
    assert memory.get("key", lambda: "revoked") == "revoked"
