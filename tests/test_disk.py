"""Full and read-only disks: counting never breaks answering, what cannot be recorded is said, what was whole stays."""

import json
import os
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management.base import CommandError
from django.db import OperationalError, connection
from django.test import Client
from django.utils import timezone
from prometheus_client.multiprocess import MultiProcessCollector

from backend import database as backend_database
from backend import notifications
from backend.command import RatchetCommand
from backend.installation import disk_state, file_replace
from feedback.models import Decision
from feedback.recording.recorder import Recorder, Storage, decisions_ingest
from rl.api import health
from rl.export.artifact import ExportRefused, staged_file
from rl.serving import decide, gateway
from rl.serving.metrics import CountFile, count_files
from tests.support.api_client import ApiClient
from tests.support.server import ROOT
from tests.support.serving import Parrot, parrot_only, support_bot_allowed  # noqa: F401
from tests.support.small_disks import IN_NAMESPACE, SmallDisk, small_disk  # noqa: F401

pytestmark = pytest.mark.django_db(transaction=True)

ADDRESS = "/v1/chat/completions"
HELLO = {"model": "support-bot", "messages": [{"role": "user", "content": "hello"}]}

COUNT = """
import sys
from pathlib import Path
from {module} import {name}
file = {name}(sys.argv[1])
for number in range(2000):
    file.write_value(f"a counter with a name of its own {{number:>60}}", 1.0, 0.0)
print("alive")
"""


def test_in_a_namespace() -> None:
    """Where this user may not mount, the tests of this file run in a namespace where they may."""
    if os.geteuid() == 0 or os.environ.get(IN_NAMESPACE):
        pytest.skip("small disks are mounted directly here")
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces of users are switched off on this machine")
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        cwd=ROOT,
        env=os.environ | {IN_NAMESPACE: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def counted(module: str, name: str, file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COUNT.format(module=module, name=name), str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_counting_on_a_full_disk_ends_no_process(small_disk: SmallDisk) -> None:  # noqa: F811
    small_disk.fill()
    mapped = counted("prometheus_client.mmap_dict", "MmapedDict", small_disk.folder / "counter_1.db")
    assert mapped.returncode == -7, "what we guard against: SIGBUS through a memory-mapped file"
    ours = counted("rl.serving.metrics", "CountFile", small_disk.folder / "counter_2.db")
    assert (ours.returncode, ours.stdout.strip()) == (0, "alive"), ours.stderr
    # what both left there, empty or of zeros, counts nothing
    assert list(MultiProcessCollector.merge(count_files(small_disk.folder))) == []


def test_counts_are_summed_over_processes_and_go_on_after_a_restart(tmp_path: Path) -> None:
    key = json.dumps(["ratchet_x", "ratchet_x_total", {"agent": "a"}, "Help"])
    for name, value in (("counter_3.db", 4.0), ("counter_4.db", 1.0)):
        file = CountFile(str(tmp_path / name))
        file.write_value(key, value, 0.0)
        file.close()
    assert CountFile(str(tmp_path / "counter_3.db")).read_value(key) == (4.0, 0.0)
    (metric,) = MultiProcessCollector.merge(count_files(tmp_path))
    assert [(s.name, s.labels, s.value) for s in metric.samples] == [("ratchet_x_total", {"agent": "a"}, 5.0)]


class Database:
    """Takes decisions, or does not, as a database on a full disk."""

    away = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ingest = decisions_ingest

        def guarded(items: Any, **more: Any) -> Any:
            if self.away:
                raise OperationalError("database or disk is full")
            return ingest(items, **more)

        monkeypatch.setattr("feedback.recording.recorder.decisions_ingest", guarded)


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Database:
    return Database(monkeypatch)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notices that went out."""
    events: list[str] = []
    monkeypatch.setattr(notifications, "notify", lambda event, text, **_: events.append(event))
    monkeypatch.setattr(gateway, "recording_outage", gateway.Outage())
    return events


@pytest.fixture
def recorder(
    small_disk: SmallDisk,  # noqa: F811
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Recorder]:
    """The gateway's, with its folder on the small disk."""
    made = Recorder(lambda: small_disk.folder / "spool" / "decisions")
    monkeypatch.setattr("feedback.recording.recorder.LONGEST_PAUSE_S", 60.0)
    monkeypatch.setattr("feedback.recording.recorder.FIRST_PAUSE_S", 60.0)
    for module in (gateway, decide, health):
        monkeypatch.setattr(module, "recorder", made)
    yield made
    database.away = False
    made._down_until = 0.0
    made.stop()


def spoil(disk: SmallDisk, way: str) -> None:
    disk.fill() if way == "full" else disk.lock()


def test_with_a_full_disk_decisions_go_to_the_database(
    small_disk: SmallDisk,  # noqa: F811
    recorder: Recorder,
    support_bot: None,
    parrot: Parrot,
    told: list[str],
) -> None:
    small_disk.fill()
    response = ApiClient("ingest").post(ADDRESS, HELLO)
    body = json.loads(response.content)
    assert (response.status_code, body["ratchet"]["recorded"]) == (200, True)
    assert str(Decision.objects.get().pk) == body["id"]
    assert told == []


@pytest.mark.parametrize("way", ["full", "read-only"])
def test_by_default_an_answer_that_cannot_be_recorded_is_given_and_says_so(
    small_disk: SmallDisk,  # noqa: F811
    recorder: Recorder,
    database: Database,
    support_bot: None,
    parrot: Parrot,
    told: list[str],
    way: str,
) -> None:
    api = ApiClient("ingest")
    spoil(small_disk, way)
    database.away = True
    plain = api.post(ADDRESS, HELLO)
    assert (plain.status_code, plain["X-Ratchet-Recorded"]) == (200, "no")
    assert json.loads(plain.content)["ratchet"]["recorded"] is False
    streamed: Any = api.post(ADDRESS, {**HELLO, "stream": True})
    text = b"".join(streamed.streaming_content).decode()
    assert (streamed["X-Ratchet-Recorded"], text.count('"recorded": false')) == ("no", 2)
    decided = api.post("/api/decide/", {"agent": "support-bot", "messages": "hello"})
    assert (decided.status_code, decided["X-Ratchet-Recorded"]) == (201, "no")
    assert told == ["recording_impossible"]
    assert (Decision.objects.count(), recorder.outbox.waiting) == (0, 3)
    # the database is back before the disk is: what waits in memory goes straight there
    database.away, recorder._down_until = False, 0.0
    recorder.replay()
    assert (Decision.objects.count(), recorder.outbox.waiting) == (3, 0)


def test_with_refuse_no_answer_is_given_and_nothing_is_recorded_later(
    small_disk: SmallDisk,  # noqa: F811
    recorder: Recorder,
    database: Database,
    support_bot: None,
    parrot: Parrot,
    told: list[str],
    settings: Any,
) -> None:
    settings.GATEWAY_WITHOUT_RECORDING = "refuse"
    api = ApiClient("ingest")
    small_disk.fill()
    database.away = True
    first = api.post(ADDRESS, HELLO)  # nobody knows yet: the model answers, and the answer is held back
    again = api.post(ADDRESS, HELLO)
    decided = api.post("/api/decide/", {"agent": "support-bot", "messages": "hello"})
    streamed = api.post(ADDRESS, {**HELLO, "stream": True})
    assert [r.status_code for r in (first, again, decided, streamed)] == [503] * 4
    assert int(first["Retry-After"]) >= 1
    assert "GATEWAY_WITHOUT_RECORDING" in json.loads(again.content)["error"]["message"]
    assert len(parrot.asked) == 1, "known to be impossible, no model works for it"
    assert Client().get("/readyz").status_code == 503
    small_disk.free()
    database.away, recorder._down_until = False, 0.0
    recorder.replay()
    assert (Decision.objects.count(), recorder.outbox.waiting) == (0, 0)


def test_an_unrecorded_decision_that_is_not_held_lies_nowhere(
    small_disk: SmallDisk,  # noqa: F811
    recorder: Recorder,
    database: Database,
) -> None:
    facts = {"id": str(uuid.uuid4()), "agent": "support-bot", "messages": [{"role": "user", "content": "q"}]}
    facts |= {"response": "r", "created_at": timezone.now().isoformat()}
    small_disk.fill()
    database.away = True
    assert recorder.note(facts, hold=False) is Storage.MEMORY
    assert (recorder.outbox.waiting, recorder.outbox.lost) == (0, 0)
    assert recorder.note(facts) is Storage.MEMORY
    assert recorder.outbox.waiting == 1


def test_ready_tells_of_disks_and_of_missing_migrations(
    small_disk: SmallDisk,  # noqa: F811
    recorder: Recorder,
    parrot: Parrot,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "_model", lambda: True)
    small_disk.fill()
    response = Client().get("/readyz")
    assert (response.status_code, response.json()["status"]) == (200, "degraded")
    assert (response.json()["spool"], response.json()["data"]) == ("full", "ok")
    small_disk.free()
    settings.RATCHET_HOME = small_disk.folder
    small_disk.lock()
    assert Client().get("/readyz").json()["data"] == "read-only"
    small_disk.unlock()
    monkeypatch.setattr(backend_database, "_complete", set())
    monkeypatch.setattr(backend_database, "migrations_waiting", lambda: 2)
    response = Client().get("/readyz")
    assert (response.status_code, response.json()["migrations"]) == (503, "missing")


class Writes(RatchetCommand):
    """A command that does what it was told."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        self.act()
        return {}


def refusal(act: Any) -> str:
    with pytest.raises(CommandError) as refused:
        Writes(act).handle(json=True)
    return str(refused.value)


def test_a_file_that_cannot_be_written_whole_leaves_the_one_before(small_disk: SmallDisk) -> None:  # noqa: F811
    path = small_disk.folder / "report.json"
    file_replace(path, "whole")
    small_disk.fill()
    text = refusal(lambda: file_replace(path, "x" * 100_000))
    assert str(path) in text
    assert "disk is full; free some space" in text
    assert path.read_text() == "whole"
    assert sorted(p.name for p in small_disk.folder.iterdir()) == ["filler", "report.json"]
    small_disk.free()
    small_disk.lock()
    assert "mount it writable" in refusal(lambda: file_replace(path, "new"))
    assert disk_state(small_disk.folder / "not" / "there").state == "read-only"


def test_the_full_disk_is_named(small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    file = small_disk.folder / "ratchet.sqlite3"
    database = sqlite3.connect(file)
    database.execute("CREATE TABLE t (x)")
    database.execute("INSERT INTO t VALUES (1)")
    database.commit()
    small_disk.fill()
    monkeypatch.setitem(connection.settings_dict, "NAME", str(file))

    def write() -> None:
        try:
            with database:
                database.executemany("INSERT INTO t VALUES (?)", [("x" * 10_000,)] * 100)
        except sqlite3.OperationalError as error:
            raise OperationalError(str(error)) from error

    text = refusal(write)
    assert str(file) in text
    assert "free some space" in text
    small_disk.free()
    assert database.execute("SELECT count(*) FROM t").fetchone() == (1,)
    database.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["full", "read-only"])
def test_writers_say_where_the_disk_is_full(small_disk: SmallDisk, way: str) -> None:  # noqa: F811
    from rl.datasets.snapshots import DatasetRefused, rows_write, temporary_file
    from rl.recipes import DPORecipe
    from rl.training.result import TrainingRefused
    from rl.training.run import folder_prepare, run_context

    context = run_context(DPORecipe(), "bundled", output_dir=small_disk.folder / "runs" / "1")
    (small_disk.folder / "snapshots").mkdir()
    (small_disk.folder / "snapshots" / "kept.jsonl").write_text("whole")
    spoil(small_disk, way)

    def snapshot() -> None:
        with temporary_file(small_disk.folder / "snapshots") as file:
            rows_write(file, [{"text": "x" * 100_000}])

    def exporting() -> None:
        with staged_file(small_disk.folder / "exports" / "model.gguf", 1000):
            pytest.fail("there is no place for it")

    for refused, act in (
        (DatasetRefused, snapshot),
        (ExportRefused, exporting),
        (TrainingRefused, lambda: folder_prepare(context)),
    ):
        with pytest.raises(refused, match=str(small_disk.folder)) as found:
            act()
        assert any(word in str(found.value) for word in ("free", "No space", "writable", "permissions"))
    left = {str(p.relative_to(small_disk.folder)) for p in small_disk.folder.rglob("*") if p.is_file()}
    assert left - {"filler"} == {"snapshots/kept.jsonl"}
