"""Every command: JSON alone on stdout, one line where it refuses, exit codes as promised."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from backend.command import ProgressBar, RatchetCommand
from rl.management.simulation import simulate
from rl.models import TrainingRun
from tests.test_docs import reference


def run(name: str, *arguments: str, **options: Any) -> str:
    out = io.StringIO()
    call_command(name, *arguments, stdout=out, stderr=io.StringIO(), **options)
    return out.getvalue()


DJANGO_QS = {"qcluster"}
"""Commands of django-q2 that ours stand in front of: they serve for ever and have nothing to print."""


def test_every_command_offers_json() -> None:
    commands = reference().commands().items()
    without = [n for n, p in commands if n not in DJANGO_QS and "--json" not in p.format_help()]
    assert without == []


def test_every_command_of_ours_is_a_ratchet_command() -> None:
    from django.core.management import get_commands, load_command_class

    others = [
        name
        for name, app in get_commands().items()
        if app in ("feedback", "rl")
        and name not in DJANGO_QS
        and not isinstance(load_command_class(app, name), RatchetCommand)
    ]
    assert others == []


@pytest.mark.django_db
def test_json_is_one_object_and_nothing_else() -> None:
    found = json.loads(run("simulate", "widgets", "--scenarios", "2", "--json"))
    assert (found["agent"], found["decisions"], found["simulated"]) == ("widgets", 8, True)


@pytest.mark.django_db
def test_a_refusal_is_one_line() -> None:
    with pytest.raises(CommandError) as refusal:
        run("simulate", "nobody")
    assert "\n" not in str(refusal.value)
    assert refusal.value.returncode == 1


@pytest.mark.django_db
def test_training_without_feedback_says_what_to_do() -> None:
    with pytest.raises(CommandError, match="simulate widgets --rate simulated"):
        run("train_dpo")


@pytest.mark.django_db
def test_training_with_several_agents_asks_which() -> None:
    simulate("widgets", scenarios=1)
    simulate("filer", scenarios=1)
    with pytest.raises(CommandError, match="--agent with one of filer, widgets"):
        run("train_dpo")


@pytest.mark.slow
@pytest.mark.django_db
def test_a_dry_run_trains_nothing() -> None:
    simulate("widgets", scenarios=40, rated=True)
    plan = json.loads(run("train_dpo", "--config", "cpu", "--dry-run", "--json", "--set", "warmup_ratio=0.3"))
    assert set(plan) >= {
        "samples", "left_out", "estimated_steps", "estimated_minutes", "estimated_memory_gb", "recipe"
    }  # fmt: skip
    assert plan["recipe"]["warmup_ratio"] == 0.3
    assert plan["estimated_minutes"] > 0
    assert not TrainingRun.objects.exists()


@pytest.mark.slow
@pytest.mark.django_db
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
@pytest.mark.django_db
def test_a_broken_data_file_names_its_line(tmp_path: Path) -> None:
    broken = tmp_path / "pairs.jsonl"
    broken.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a", "chosen": \n')
    with pytest.raises(CommandError, match="line 2"):
        run("train_dpo", "--config", "cpu", "--data-file", str(broken))


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["evaluate_model", "export_model"])
def test_a_folder_that_is_no_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    with pytest.raises(CommandError, match=r"adapter_config\.json"):
        run(name, "--checkpoint", str(tmp_path))


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["evaluate_model", "export_model"])
def test_policy_or_checkpoint_but_not_both(name: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="either --policy NAME or --checkpoint DIR"):
        run(name)
    with pytest.raises(CommandError, match="either --policy NAME or --checkpoint DIR"):
        run(name, "--policy", "widgets-v1", "--checkpoint", str(tmp_path))


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
