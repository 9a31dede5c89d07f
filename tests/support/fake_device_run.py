"""Trainings on a simulated device, in a process of its own: `tests.support.fake_device` changes PyTorch for good.

    python -m tests.support.fake_device_run BASE FOLDER

Prints, as JSON, what each of `RUNS` found there, and what the device refused.
"""

import dataclasses
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rl.training import estimates as training_estimates
from rl.training.dpo import DPOTrainer
from rl.training.evaluate import evaluate_policy
from rl.training.grpo import GRPOTrainer
from rl.training.hardware import Hardware
from rl.training.kto import KTOTrainer
from rl.training.policy import load_policy
from rl.training.ppo import PPOTrainer
from rl.training.result import TrainResult
from rl.training.reward_model import RewardModel, RewardModelTrainer
from rl.training.scoring import score_pairs
from rl.training.sft import SFTTrainer
from tests import test_grpo, test_kto_sft, test_ppo, test_reward_model
from tests.support import dpo_runs, fake_device

Found = dict[str, Any]

TIMES = ("seconds", "per_second", "runtime", "step_time")
"""Parts of the names of measured times."""

EXACT = 1e-4
"""Margins in nats below which two log-probabilities are one number twice, but for rounding."""


def history(result: TrainResult) -> Found:
    assert result.status == "succeeded"
    # before the first step the policy is its reference: where the margins are exact ties, the side that rounding falls
    # on says nothing; an accuracy over margins that are no ties is compared as all else is
    tied = abs(result.history.get("rewards/margins", [1.0])[0]) < EXACT
    return {
        name: values[1:] if tied and name == "rewards/accuracies" else values
        for name, values in result.history.items()
        if not any(part in name for part in TIMES)
    } | {"packed": [any("split+last_layer" in note for note in result.notes)]}


def dpo(base: str, folder: Path, hardware: Hardware) -> Found:
    """Trained, evaluated on the way, then loaded and asked."""
    recipe = dataclasses.replace(dpo_runs.QUICK, max_steps=3, eval_steps=3)
    trainer = DPOTrainer(recipe, base, output_dir=folder, hardware=hardware)
    result = trainer.train(dpo_runs.some_pairs(12), dpo_runs.some_pairs(4, seed=1))
    policy = load_policy(base, adapter=result.checkpoint, hardware=hardware)
    rows = dpo_runs.some_pairs(12, seed=2)
    judged = evaluate_policy(policy, rows, agent=dpo_runs.WIDGETS, against="base", generate_samples=4)
    answers = [answer["answer"] for answer in judged["held_out"]["answers"]]
    return history(result) | {
        "accuracy": [judged["preference_accuracy"]["value"]],
        "margins": [chosen.logp - rejected.logp for chosen, rejected in score_pairs(policy, rows)],
        "answers": answers,
    }


def kto(base: str, folder: Path, hardware: Hardware) -> Found:
    recipe = dataclasses.replace(test_kto_sft.KTO, max_steps=3)
    trainer = KTOTrainer(recipe, base, output_dir=folder, hardware=hardware)
    return history(trainer.train(test_kto_sft.labels(12)))


def sft(base: str, folder: Path, hardware: Hardware) -> Found:
    recipe = dataclasses.replace(test_kto_sft.SFT, max_steps=3)
    trainer = SFTTrainer(recipe, base, output_dir=folder, hardware=hardware)
    return history(trainer.train(test_kto_sft.demonstrations(12)))


def reward_model(base: str, folder: Path, hardware: Hardware) -> Found:
    """Trained, its facts counted, then loaded and asked."""
    recipe = dataclasses.replace(test_reward_model.RECIPE, max_steps=3)
    trainer = RewardModelTrainer(recipe, base, output_dir=folder, hardware=hardware)
    result = trainer.train(dpo_runs.some_pairs(24), dpo_runs.some_pairs(8, seed=1))
    model = RewardModel.load(Path(result.checkpoint), hardware)
    rows = dpo_runs.some_pairs(4, seed=2)
    return history(result) | {"scores": model.scores([(row["prompt"], row["chosen"]) for row in rows])}


def ppo(base: str, folder: Path, hardware: Hardware) -> Found:
    trainer = PPOTrainer(
        test_ppo.QUICK,
        base,
        output_dir=folder,
        hardware=hardware,
        agent="assistant",
        rewards=[test_ppo.Length()],
    )
    return history(trainer.train(test_ppo.ROWS, test_ppo.ROWS[:3]))


def grpo(base: str, folder: Path, hardware: Hardware) -> Found:
    trainer = GRPOTrainer(
        test_grpo.QUICK,
        base,
        output_dir=folder,
        hardware=hardware,
        agent="assistant",
        rewards=[test_ppo.Length()],
    )
    return history(trainer.train(test_ppo.ROWS, test_ppo.ROWS[:3]))


def estimates(base: str, folder: Path, hardware: Hardware) -> Found:
    """An estimate before training, measured on the device."""
    told = training_estimates.dpo(base, dpo_runs.QUICK, dpo_runs.some_pairs(12), hardware=hardware)
    assert told.minutes
    assert told.memory_gb
    return {"steps": [told.steps]}


RUNS: dict[str, Callable[[str, Path, Hardware], Found]] = {
    run.__name__: run for run in (dpo, kto, sft, reward_model, ppo, grpo, estimates)
}


def refusals() -> dict[str, str]:
    """What the device says to what CUDA or Apple's GPUs would not do."""
    there, here = torch.ones(3, device=fake_device.NAME), torch.ones(3)
    asked: dict[str, Callable[[], Any]] = {
        "a sum": lambda: there + here,
        "a product": lambda: torch.nn.Linear(3, 2)(there),
        "a generator": lambda: torch.rand(3, device=fake_device.NAME, generator=torch.Generator()),
        "numpy": lambda: there.numpy(),
        "float64": lambda: there.double(),
        "a number": lambda: there + torch.tensor(1.0),
        "an index": lambda: there[torch.tensor([0, 2])],
        "a copy": lambda: here.copy_(there),
    }
    said = {}
    for name, ask in asked.items():
        try:
            ask()
        except (RuntimeError, TypeError) as error:
            said[name] = str(error)
    return said


def main() -> None:
    base, folder = sys.argv[1], Path(sys.argv[2])
    hardware = dataclasses.replace(dpo_runs.HARDWARE, device=fake_device.NAME)
    found: dict[str, Any] = {}
    with fake_device.install():
        said = refusals()
        for name, run in RUNS.items():
            try:
                found[name] = run(base, folder / name, hardware)
            except Exception:
                found[name] = {"failed": traceback.format_exc()}
    print(json.dumps({"refused": said, "found": found}))


if __name__ == "__main__":
    main()
