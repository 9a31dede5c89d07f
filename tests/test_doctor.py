"""`doctor`: each fault is found, has a next step, and makes the exit status 1; a sound installation has none."""

import json
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import OperationalError
from django.utils import timezone
from django_q.models import OrmQ

from backend.installation import DiskState
from feedback.models import Decision
from feedback.recording.recorder import outbox_of
from feedback.services import decision_record
from rl.management.commands import doctor
from rl.management.commands.doctor import Diagnosis, diagnosis
from rl.models import Policy, TrainingRun
from tests.support.experiments import policy_of
from tests.support.said import command
from tests.support.stub_server import StubHandler, StubServer

pytestmark = pytest.mark.django_db


class Healthy(StubHandler):
    health = b'{"status": "ok"}'

    def do_GET(self) -> None:
        self.answer(200, self.health)


@pytest.fixture
def served() -> Iterator[int]:
    """The port of something that answers as ours does."""
    with StubServer(Healthy) as server:
        yield server.server_port


@pytest.fixture
def sound(
    served: int, ratchet_home: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[Diagnosis]]:
    """Findings of an installation in which nothing is wrong, until a test changes that."""
    ratchet_home.chmod(0o700)
    settings.LOCAL_BACKENDS = ["http://localhost:1/v1"]
    monkeypatch.setattr(doctor, "LITTLE_DISK_BYTES", 0)
    return lambda: diagnosis(port=served)


def parts(findings: list[Diagnosis]) -> list[tuple[str, str]]:
    assert all(finding.found and finding.next_step for finding in findings)
    return [(finding.part, finding.level) for finding in findings]


@pytest.mark.slow
def test_a_sound_installation_has_no_findings(sound: Any) -> None:
    decision_record(agent="a", messages="q", response="r")
    assert sound() == []


@pytest.mark.slow
def test_a_data_folder_open_to_all_and_a_key_open_to_others(sound: Any, ratchet_home: Path) -> None:
    (ratchet_home / "secret_key").write_text("x")
    (ratchet_home / "secret_key").chmod(0o644)
    ratchet_home.chmod(0o755)
    found = sound()
    assert parts(found) == [("data folder", "wrong"), ("data folder", "wrong")]
    assert found[0].next_step == f"chmod 700 {ratchet_home}"


@pytest.mark.slow
def test_a_disk_that_is_full(sound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "disk_state", lambda path: DiskState(path, "full", "free some space"))
    assert ("disk", "wrong") in parts(sound())


@pytest.mark.slow
def test_a_database_that_is_away_and_one_that_is_behind(sound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "migrations_waiting", lambda: 3)
    (behind,) = sound()
    assert (behind.part, behind.next_step) == ("migrations", "python manage.py migrate")

    def away() -> int:
        raise OperationalError("connection refused")

    monkeypatch.setattr(doctor, "migrations_waiting", away)
    (gone,) = sound()
    assert (gone.part, "DATABASE_URL" in gone.next_step) == ("database", True)


@pytest.mark.slow
def test_jobs_and_runs_that_nobody_takes(sound: Any) -> None:
    long_ago = timezone.now() - timedelta(minutes=20)
    OrmQ.objects.create(key="ratchet", payload="x", lock=timezone.now())
    assert sound() == []
    OrmQ.objects.update(lock=long_ago)
    (finding,) = sound()
    assert finding.found.startswith("1 jobs have waited for more than 2 minutes")
    OrmQ.objects.all().delete()
    run = TrainingRun.objects.create(agent="a", method="dpo", base_model="bundled", status="queued")
    TrainingRun.objects.update(created_at=long_ago)
    assert parts(sound()) == [("workers", "wrong")]
    TrainingRun.objects.update(status="running", heartbeat_at=long_ago)
    (finding,) = sound()
    assert f"run {run.pk} (a) has sent no heartbeat" in finding.found


@pytest.mark.slow
def test_a_decision_of_tomorrow(sound: Any) -> None:
    decision_record(agent="a", messages="q", response="r")
    Decision.objects.update(created_at=timezone.now() + timedelta(days=1))
    assert parts(sound()) == [("clock", "wrong")]


@pytest.mark.slow
def test_the_file_of_a_champion_is_missing(sound: Any, ratchet_home: Path) -> None:
    policy_of("widgets-v1", "champion")
    policy_of("widgets-v2", "retired")
    (finding,) = sound()
    assert finding.part == "artifacts"
    path = ratchet_home / Policy.objects.get(stage="champion").adapter_path
    assert str(path) in finding.found
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"weights")
    assert sound() == []


@pytest.mark.slow
def test_a_port_that_another_program_has(sound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Healthy, "health", b"hello")
    (finding,) = sound()
    assert finding.found.startswith("another program listens")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = free.getsockname()[1]
    assert parts(diagnosis(port=closed)) == [("port", "remark")]


@pytest.mark.slow
def test_llama_cpp_that_is_not_there(sound: Any, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    settings.LOCAL_BACKENDS = ["in-process", "http://localhost:1/v1"]
    assert parts(sound()) == [("llama.cpp", "remark")]


@pytest.mark.slow
def test_decisions_that_wait_in_the_spool_are_a_remark(sound: Any, ratchet_home: Path) -> None:
    outbox_of(ratchet_home / "spool/decisions").put({"kind": "decision", "body": {"id": "1"}})
    assert parts(sound()) == [("spool", "remark")]


@pytest.mark.slow
def test_the_command_ends_with_1_and_one_object(sound: Any, served: int, ratchet_home: Path) -> None:
    out = command("doctor", "--port", str(served))
    assert out == {"wrong": 0, "findings": []}
    ratchet_home.chmod(0o777)
    out = StringIO()
    with pytest.raises(SystemExit) as ended:
        call_command("doctor", "--json", "--port", str(served), stdout=out)
    assert ended.value.code == 1
    body = json.loads(out.getvalue())
    assert (body["wrong"], body["findings"][0]["part"]) == (1, "data folder")
    assert body["next"] == f"chmod 700 {ratchet_home}"
