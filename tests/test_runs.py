"""Runs: claimed once, resumed after a kill, ended with a reason; from feedback to a policy in the registry."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError
from django.utils import timezone

from rl.datasets import DatasetRefused
from rl.jobs import lifecycle, train
from rl.jobs.lifecycle import TrainOrder
from rl.jobs.run_recipe import recipe_for
from rl.jobs.trainer import hardware_detect
from rl.management.simulation import simulate
from rl.models import Policy, RunMetric, Snapshot, TrainingRun
from rl.models.runs import RunRefused
from rl.recipes import RecipeError
from tests.support.migrated_database import template_copy

pytestmark = pytest.mark.django_db

ROOT = Path(__file__).resolve().parent.parent
QUICK = {"max_steps": 4, "batch_size": 4, "logging_steps": 1, "warm_up_steps": 0, "lora_r": 2}
QUICK |= {"lora_alpha": 4, "max_length": 256}


def order(base: str, **changes: Any) -> TrainOrder:
    facts: dict[str, Any] = {
        "agent": "widgets",
        "config": "cpu",
        "base_model": base,
        "knobs": QUICK,
        **changes,
    }
    return TrainOrder(**facts)


def run_row(**facts: Any) -> TrainingRun:
    return TrainingRun.objects.create(agent="widgets", method="dpo", base_model="bundled", **facts)


def test_a_queued_run_is_claimed_once() -> None:
    run = run_row()
    claimed = lifecycle.run_claim(run.pk)
    own = [socket.gethostname(), str(os.getpid())]
    assert (claimed.status, claimed.worker.split(":")[:2]) == ("running", own)
    with pytest.raises(RunRefused, match="is running"):
        lifecycle.run_claim(run.pk)
    with pytest.raises(RunRefused, match="still being trained by"):
        lifecycle.run_claim(run.pk, resume=True)
    with pytest.raises(RunRefused, match=rf"there is no run {run.pk + 1}.*{run.pk}"):
        lifecycle.run_claim(run.pk + 1)
    TrainingRun.objects.update(status="succeeded", finished_at=timezone.now())
    with pytest.raises(RunRefused, match="is succeeded"):
        lifecycle.run_claim(run.pk, resume=True)


def test_a_run_of_a_dead_worker_is_resumed() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    run = run_row(status="running", worker=f"{socket.gethostname()}:{dead.pid}:1")
    assert lifecycle.run_claim(run.pk, resume=True).status == "running"


def test_another_hosts_worker_lives_by_its_heartbeat() -> None:
    run = run_row(status="running", worker="elsewhere:17:1", heartbeat_at=timezone.now())
    with pytest.raises(RunRefused, match="elsewhere"):
        lifecycle.run_claim(run.pk, resume=True)
    TrainingRun.objects.update(heartbeat_at=timezone.now() - timedelta(minutes=10))
    assert lifecycle.run_claim(run.pk, resume=True).worker.startswith(socket.gethostname())


@pytest.mark.slow
def test_what_cannot_be_trained_is_refused_before_anything_is_made(base: str) -> None:
    simulate("widgets", scenarios=4, rated=True)
    with pytest.raises(DatasetRefused, match=r"500"):
        train.train(order(base, min_samples=500))
    with pytest.raises(RecipeError, match="no knob 'lerning_rate'"):
        train.train(order(base, knobs={"lerning_rate": 1}))
    assert not TrainingRun.objects.exists()
    assert not Snapshot.objects.exists()


@pytest.mark.slow
def test_the_operators_file_lies_between_preset_and_command_line(settings: Any) -> None:
    settings.RATCHET_CONFIG = {"dpo": {"beta": 0.3, "epochs": 2}}
    hardware = hardware_detect()
    _, recipe = recipe_for(TrainOrder(agent="widgets", config="cpu", knobs={"epochs": 5}), hardware)
    assert (recipe.beta, recipe.epochs) == (0.3, 5.0)


@pytest.mark.training
def test_feedback_becomes_a_registered_policy(base: str, ratchet_home: Path) -> None:
    simulate("widgets", scenarios=40, rated=True)
    told: list[tuple[int, int]] = []
    report = train.train(order(base), lambda done, total, _: told.append((done, total)))
    steps = [done for done, total in told if total == 4]  # the others are phases
    policy = Policy.objects.get(name=report["policy"])
    run = policy.run
    assert steps == [1, 2, 3, 4]
    assert (policy.name, policy.stage) == ("widgets-v276", "candidate")
    assert (ratchet_home / policy.adapter_path / "adapter_model.safetensors").is_file()
    assert (run.status, run.steps_done, run.steps_total) == ("succeeded", 4, 4)
    assert run.base_model_hash == policy.base_model_hash != ""
    assert set(RunMetric.objects.filter(run=run).values_list("step", flat=True)) >= {1, 2, 3, 4}
    assert json.loads((ratchet_home / "runs" / str(run.pk) / "result.json").read_text())["steps"] == 4
    assert (ratchet_home / "runs" / str(run.pk) / "training.png").stat().st_size > 10_000
    assert report["simulated_share"] == 1.0


@pytest.mark.training
def test_a_failure_is_stored_and_raised(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate("widgets", scenarios=40, rated=True)
    with monkeypatch.context() as patched:
        patched.setattr(
            train, "policy_publish", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left"))
        )
        with pytest.raises(OSError, match="No space left"):
            train.train(order(base))
    run = TrainingRun.objects.get()
    assert (run.status, Policy.objects.count()) == ("failed", 0)
    assert "No space left" in run.reason
    # nothing is lost: the same run goes on from its checkpoint and enters the registry
    assert train.train_resume(run.pk, actor="test")["policy"] == "widgets-v276"


@pytest.mark.slow
def test_a_lost_database_sends_the_run_back(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*_: Any, **__: Any) -> None:
        raise OperationalError("terminating connection due to administrator command\nDETAIL: none")

    monkeypatch.setattr(train, "trainer_run", cut)
    monkeypatch.setattr(train.connection, "close", lambda: None)  # it is the test's
    simulate("widgets", scenarios=40, rated=True)
    run = lifecycle.run_enqueue(order(base))
    lifecycle.run_dispatch(run)
    for attempt in range(1, lifecycle.MAX_ATTEMPTS + 1):
        with pytest.raises(OperationalError):
            train.train_queued(run.pk, actor="test")
        run.refresh_from_db()
        assert run.attempts == attempt
        if attempt < lifecycle.MAX_ATTEMPTS:
            assert (run.status, run.dispatched_at) == ("queued", None)
            assert run.reason.endswith("terminating connection due to administrator command")
            lifecycle.run_dispatch(run)
    assert run.status == "failed"  # not for ever


def manage(*arguments: str, home: Path, start_only: bool = False) -> Any:
    environment = {**os.environ, "RATCHET_HOME": str(home), "DJANGO_SETTINGS_MODULE": "backend.settings"}
    process = subprocess.Popen(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    if start_only:
        return process
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


TRAINING = (
    "train_dpo --agent widgets --config cpu --max-steps 30 --batch-size 4 --lora-r 2 --max-length 256 "
    "--set save_steps=5 --set warm_up_steps=0 --set logging_steps=1 --json"
).split()


@pytest.fixture(scope="module")
def rated_home(tmp_path_factory: pytest.TempPathFactory, django_db_setup: None) -> Path:
    """A data folder of a real SQLite file with rated decisions in it."""
    home = tmp_path_factory.mktemp("rated")
    assert template_copy(home / "ratchet.sqlite3")
    done = manage("simulate", "widgets", "--scenarios", "40", "--rate", "simulated", home=home)
    assert done.returncode == 0, done.stderr
    return home


def interrupted(home: Path, command: list[str], step: int, number: signal.Signals) -> tuple[int, str]:
    """Start a training, send a signal once the checkpoint of `step` is there; the run's id, what stderr said."""
    process = manage(*command, home=home, start_only=True)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        # without "**", which would look into older checkpoints while they are removed
        if fresh := list((home / "runs").glob(f"*/checkpoints/checkpoint-{step}/complete.json")):
            process.send_signal(number)
            _, err = process.communicate(timeout=120)
            return int(fresh[0].relative_to(home / "runs").parts[0]), err
        time.sleep(0.01)
    out, err = process.communicate()
    raise AssertionError(f"no checkpoint to interrupt at: rc {process.returncode}, {out} {err}")


@pytest.mark.campaign
@pytest.mark.training
def test_a_stopped_and_killed_run_ends_with_the_same_steps(rated_home: Path, base: str) -> None:
    run, err = interrupted(rated_home, [*TRAINING, "--model", base], 5, signal.SIGINT)
    assert f"resume with: python manage.py train_dpo --resume {run}" in err
    assert "Traceback" not in err
    resume = ["train_dpo", "--resume", str(run), "--json"]
    assert interrupted(rated_home, resume, 20, signal.SIGKILL)[0] == run
    resumed = manage(*resume, home=rated_home)
    assert resumed.returncode == 0, resumed.stderr
    report = json.loads(resumed.stdout)
    assert (report["run"], report["status"], report["steps"]) == (run, "succeeded", 30)
