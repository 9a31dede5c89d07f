"""Two processes of one launch train what one process trains, and enter one policy."""

import json
import os
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file

from rl.jobs.child_process import command_line
from rl.jobs.train import Launch
from rl.models.runs import RunRefused
from tests.support.migrated_database import template_copy
from tests.support.tiny_models import tiny_model

ROOT = Path(__file__).resolve().parent.parent
KNOBS = (
    "gradient_accumulation=1 lora_dropout=0 logging_steps=1 lora_alpha=4 sft_weight=0 warm_up_steps=0"
).split()
TRAIN = ("train_dpo", "--agent", "widgets", "--config", "cpu", "--lora-r", "2", "--max-steps", "4", "--json")
TWO = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
SHARDED = (
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--config_file",
    str(ROOT / "docs" / "launch" / "fsdp.yaml"),
    *"--num_processes 2 --main_process_port 0".split(),
)


def manage(home: Path, *arguments: str, through: tuple[str, ...] = (sys.executable,)) -> Any:
    """Run a command with its data below `home`; its exit code, what it printed on stdout, and on stderr."""
    environment = {**os.environ, "RATCHET_HOME": str(home), "OMP_NUM_THREADS": "1", "DATABASE_URL": ""}
    done = subprocess.run(
        [*through, str(ROOT / "tests" / "support" / "launch_command.py"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def train(home: Path, base: Path, batch_size: int, *more: str, **how: Any) -> Any:
    knobs = [part for knob in KNOBS for part in ("--set", knob)]
    return manage(home, *TRAIN, "--model", str(base), "--batch-size", str(batch_size), *knobs, *more, **how)


@dataclass
class World:
    """A home with rated decisions and a first run on them, by one process alone."""

    home: Path
    base: Path
    alone: dict[str, Any]

    def result(self, report: dict[str, Any]) -> dict[str, Any]:
        path = self.home / "runs" / str(report["run"]) / "result.json"
        return dict(json.loads(path.read_text("utf-8")))

    def train(
        self, batch_size: int, *more: str, through: tuple[str, ...] = (sys.executable,)
    ) -> dict[str, Any]:
        """The report of a run; one object, so a second process is silent."""
        code, said, complained = train(self.home, self.base, batch_size, *more, through=through)
        assert code == 0, complained
        return dict(json.loads(said))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, django_db_setup: None) -> World:
    folder = tmp_path_factory.mktemp("launch")
    home, base = folder / "home", tiny_model(folder / "base")
    home.mkdir()
    assert template_copy(home / "ratchet.sqlite3")
    told = manage(home, "simulate", "widgets", "--scenarios", "60", "--rate", "simulated")
    assert told[0] == 0, told[2]
    made = World(home, base, {})
    made.alone = made.train(4)
    return made


@pytest.mark.campaign
@pytest.mark.training
@pytest.mark.parametrize("how", [TWO, SHARDED], ids=["whole weights", "sharded weights"])
def test_two_processes_train_as_one_and_enter_one_policy(world: World, how: tuple[str, ...]) -> None:
    report = world.train(2, through=how)
    # general prompts are not rehearsed where weights are sharded
    alone = world.train(4, "--set", "general_weight=0") if how is SHARDED else world.alone
    one, two = world.result(alone), world.result(report)
    assert two["history"]["loss"] == pytest.approx(one["history"]["loss"], abs=1e-5)
    assert len(set(one["history"]["loss"])) == 4
    assert two["metrics"]["eval_loss"] == pytest.approx(one["metrics"]["eval_loss"], abs=1e-5)
    weights, same = (
        load_file(Path(said["checkpoint"]) / "adapter_model.safetensors") for said in (alone, report)
    )
    assert weights.keys() == same.keys()
    for name, weight in weights.items():
        assert torch.allclose(weight, same[name], atol=1e-5), name
    assert any("its weights are sharded" in line for line in two["details"]) == (how is SHARDED)
    with sqlite3.connect(world.home / "ratchet.sqlite3") as database:
        policies = [name for (name,) in database.execute("SELECT name FROM rl_policy")]
    assert len(policies) == len(set(policies))
    assert {alone["policy"], report["policy"]} <= set(policies)


@pytest.mark.training
def test_a_launch_whose_first_process_refuses_ends(tmp_path: Path, django_db_setup: None) -> None:
    """Without the first one's word the second would wait for it, until the network's own patience ends."""
    home, base = tmp_path / "home", tiny_model(tmp_path / "base")
    assert template_copy(home / "ratchet.sqlite3")
    code, said, complained = train(home, base, 2, through=TWO)
    assert code != 0
    assert said == ""
    assert "no decision of agent 'widgets'" in complained


class Heard:
    """Processes of a launch as one of them sees them: what the first says is given."""

    main = False

    def __init__(self, said: Any) -> None:
        self.said = said

    def agree(self, _: Any) -> Any:
        return self.said


def test_a_further_process_follows_the_first_one_s_word() -> None:
    assert Launch(Heard((7, True))).follow() == (7, True)
    with pytest.raises(RunRefused, match="started no run"):
        Launch(Heard(None)).follow()


def test_the_workers_start_trainings_through_the_launcher_that_is_set(settings: Any) -> None:
    manage_py = str(settings.BASE_DIR / "manage.py")
    assert command_line(["train_dpo", "--queued", "7"])[:2] == [sys.executable, manage_py]
    settings.TRAIN_LAUNCHER = ["accelerate", "launch", "--num_processes", "2"]
    started = command_line(["train_dpo", "--queued", "7"])
    expected = ["accelerate", "launch", "--num_processes", "2", manage_py, "train_dpo", "--queued", "7"]
    assert started == expected
    assert command_line(["run_pipeline", "--run", "7"])[:2] == [sys.executable, manage_py]


def test_every_configuration_shipped_is_one_accelerate_reads() -> None:
    files = sorted((ROOT / "docs" / "launch").glob("*.yaml"))
    assert {file.stem for file in files} >= {"ddp", "fsdp", "deepspeed"}
    for file in files:
        assert load_config_from_file(str(file)).num_processes >= 2, file
