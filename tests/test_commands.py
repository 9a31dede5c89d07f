"""Every command: JSON alone on stdout, one line where it refuses, exit codes as promised."""

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command, get_commands, load_command_class
from django.db import connection
from django.db.migrations.recorder import MigrationRecorder
from django.test import Client
from django.utils import timezone

from backend import command
from backend.command import ProgressBar, RatchetCommand
from feedback.accounts.authentication import key_create
from rl.jobs.lifecycle import run_claim, run_finish
from rl.jobs.progress import PhaseRecorder
from rl.management.commands.doctor import diagnosis
from rl.management.simulation import simulate
from rl.models import TrainingRun
from tests.support.registry_rows import make_run
from tests.support.said import printed as run
from tests.test_docs import reference

pytestmark = pytest.mark.django_db


def test_every_command_offers_json() -> None:
    assert [n for n, p in reference().commands().items() if "--json" not in p.format_help()] == []


def test_every_command_of_ours_is_a_ratchet_command() -> None:
    others = [
        name
        for name, app in get_commands().items()
        if app in ("feedback", "rl") and not isinstance(load_command_class(app, name), RatchetCommand)
    ]
    assert others == []


def test_a_newer_database_is_refused_by_writers(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removed plugin's migration is none of a newer version. Additive ones let this version go on."""
    migrations, worked = MigrationRecorder(connection), []
    migrations.record_applied("plugin_removed", "0001_initial")
    migrations.record_applied("rl", "9998_more_additive")
    names = [name for name, app in get_commands().items() if app in ("feedback", "rl")]

    def run_all() -> list[str]:
        refused = []
        for name in names:
            command = load_command_class(get_commands()[name], name)
            monkeypatch.setattr(command, "work", lambda options, name=name: worked.append(name))
            try:
                command.handle(json=False)
            except CommandError as refusal:
                refused += [name] if "rl.9999_later" in str(refusal) else []
        return refused

    assert run_all() == []
    assert client.get("/readyz").json()["migrations"] == "ok"
    found = [finding for finding in diagnosis() if finding.part == "migrations"]
    assert [(one.level, "rl.9998_more_additive" in one.found) for one in found] == [("remark", True)]
    migrations.record_applied("rl", "9999_later")
    worked.clear()
    assert set(names) - set(run_all()) == set(worked) == {"backup", "restore", "doctor", "hardware"}
    response = client.get("/readyz")
    assert (response.status_code, response.json()["migrations"]) == (503, "newer")
    found = [finding for finding in diagnosis() if finding.part == "migrations"]
    assert [(one.level, "rl.9999_later" in one.found) for one in found] == [("wrong", True)]


def test_json_is_one_object_and_nothing_else() -> None:
    found = json.loads(run("simulate", "widgets", "--scenarios", "2", "--json"))
    assert (found["agent"], found["decisions"], found["simulated"]) == ("widgets", 8, True)


def test_a_refusal_is_one_line() -> None:
    with pytest.raises(CommandError) as refusal:
        run("simulate", "nobody")
    assert "\n" not in str(refusal.value)
    assert refusal.value.returncode == 1


def test_training_without_feedback_says_what_to_do() -> None:
    with pytest.raises(CommandError, match="simulate widgets --rate simulated"):
        run("train_dpo")


def test_training_with_several_agents_asks_which() -> None:
    simulate("widgets", scenarios=1)
    simulate("filer", scenarios=1)
    with pytest.raises(CommandError, match="--agent with one of filer, widgets"):
        run("train_dpo")


@pytest.mark.slow
def test_a_dry_run_trains_nothing() -> None:
    simulate("widgets", scenarios=40, rated=True)
    plan = json.loads(run("train_dpo", "--config", "cpu", "--dry-run", "--json", "--set", "warmup_ratio=0.3"))
    assert set(plan) >= set(
        ("samples left_out estimated_steps estimated_minutes estimated_memory_gb recipe").split()
    )
    assert plan["recipe"]["warmup_ratio"] == 0.3
    assert plan["estimated_minutes"] > 0
    assert not TrainingRun.objects.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--set", "beta"], "KNOB=VALUE"),
        (["--set", "nope=1"], "no knob 'nope'"),
        (["--beta", "-1"], "beta must be above 0"),
        (["--loss", "nonsense"], "loss must be one of"),
        (["--epochs", "0"], "epochs must be above 0"),
    ],
)
def test_wrong_knobs_are_refused_with_what_is_allowed(arguments: list[str], complaint: str) -> None:
    simulate("widgets", scenarios=10, rated=True)
    with pytest.raises(CommandError, match=complaint):
        run("train_dpo", "--config", "cpu", *arguments)


@pytest.mark.slow
def test_a_broken_data_file_names_its_line(tmp_path: Path) -> None:
    broken = tmp_path / "pairs.jsonl"
    broken.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a", "chosen": \n')
    with pytest.raises(CommandError, match="line 2"):
        run("train_dpo", "--config", "cpu", "--data-file", str(broken))


@pytest.mark.parametrize("name", ["evaluate_model", "export_model"])
def test_a_folder_that_is_no_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    with pytest.raises(CommandError, match=r"adapter_config\.json"):
        run(name, "--checkpoint", str(tmp_path))


@pytest.mark.parametrize("name", ["evaluate_model", "export_model"])
def test_policy_or_checkpoint_but_not_both(name: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="either --policy NAME or --checkpoint DIR"):
        run(name)
    with pytest.raises(CommandError, match="either --policy NAME or --checkpoint DIR"):
        run(name, "--policy", "widgets-v1", "--checkpoint", str(tmp_path))


@pytest.mark.django_db
def test_the_unexpected_is_one_line_with_its_kind() -> None:
    class Broken(RatchetCommand):
        def work(self, options: dict[str, Any]) -> dict[str, Any]:
            raise ZeroDivisionError("division by zero")

    with pytest.raises(CommandError, match=r"ZeroDivisionError: division by zero .*--traceback"):
        call_command(Broken())
    with pytest.raises(ZeroDivisionError):
        call_command(Broken(), traceback=True)


def test_a_bar_without_a_terminal_writes_a_line_now_and_then() -> None:
    stream = io.StringIO()
    with ProgressBar("training", stream) as bar:
        for step in range(1, 101):
            bar.update(step, 100, "loss 0.5")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[-1] == "training: 100 of 100 loss 0.5"


def test_a_phase_is_a_line_and_its_steps_follow_without_its_name() -> None:
    said = io.StringIO()
    with ProgressBar("training", said) as bar:
        bar.update(0, 0, "loading the model")
        bar.update(0, 0, "loading the model")
        bar.update(0, 0, "training")
        bar.update(1, 2)
        bar.update(2, 2, "loss 0.500")
    assert said.getvalue().splitlines() == [
        "training: loading the model",
        "training: training",
        "training: 1 of 2",
        "training: 2 of 2 loss 0.500",
    ]


def test_silence_is_broken_with_what_is_done_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "QUIET_S", 0.04)
    said = io.StringIO()
    with ProgressBar("dry run", said) as bar:
        bar.update(0, 0, "asking the model a few prompts")
        for _ in range(500):
            if "few prompts, " in said.getvalue():
                break
            time.sleep(0.01)
    assert re.search(r"dry run: asking the model a few prompts, \d+ s so far", said.getvalue())
    length = len(said.getvalue())
    time.sleep(0.1)
    assert len(said.getvalue()) == length


def test_the_phase_stands_in_the_run_until_it_ends() -> None:
    run = run_claim(make_run(status="queued", finished_at=None).pk)
    told: list[tuple[int, int, str]] = []
    record = PhaseRecorder(run, lambda *figures: told.append(figures))
    record(0, 0, "reference pass")
    run.refresh_from_db()
    began = run.phase_at
    assert (run.phase, began is not None) == ("reference pass", True)
    record.written_at -= 7200
    record.pace.total, record.pace.start_s = 300, record.pace.start_s - 60
    record(32, 300)
    run.refresh_from_db()
    assert (run.phase, run.phase_at) == ("reference pass, 32 of 300", began)
    assert told == [(0, 0, "reference pass"), (32, 300, "")]
    run_finish(run, TrainingRun.Status.CANCELLED, reason="a test")
    assert (run.phase, run.phase_at) == ("", None)


def test_rest_says_the_phase() -> None:
    run = make_run(
        status="running",
        finished_at=None,
        phase="training",
        steps_done=12,
        steps_total=58,
        phase_at=timezone.now(),
    )
    client = Client(headers={"Authorization": f"Bearer {key_create('reader', ['read'])[1]}"})
    found = client.get(f"/api/runs/{run.pk}/").json()
    assert found["phase"] == "training, step 12 of 58"
    assert found["phaseAt"].startswith(str(timezone.now().year))
