"""The skeleton that every method trains in."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rl.recipes import DPORecipe, GRPORecipe, KTORecipe, PPORecipe, SFTRecipe
from rl.training import adapter_trainer, ppo
from rl.training.dpo import DPOTrainer
from rl.training.grpo import GRPOTrainer
from rl.training.kto import KTOTrainer
from rl.training.loading import PolicyLoadError
from rl.training.ppo import PPOTrainer
from rl.training.run import Processes
from rl.training.sft import SFTTrainer
from tests.support.dpo_runs import HARDWARE, some_pairs

pytestmark = pytest.mark.training

METHODS = [
    (DPOTrainer, DPORecipe()),
    (KTOTrainer, KTORecipe()),
    (SFTTrainer, SFTRecipe()),
    (GRPOTrainer, GRPORecipe()),
    (PPOTrainer, PPORecipe()),
]

PROMPT = [{"role": "user", "content": "how did revenue change"}]
ROWS = [
    {"prompt": PROMPT, "completion": "a line chart", "chosen": "a", "rejected": "b", "label": label}
    for label in (True, False)
]


@pytest.mark.parametrize(("trainer", "recipe"), METHODS)
def test_silent_followers(trainer: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def load(context: Any, **_: Any) -> None:
        seen.append(context.main_process)
        raise PolicyLoadError("far enough")

    monkeypatch.setattr(Processes, "main", False)
    monkeypatch.setattr(adapter_trainer, "base_load", load)
    monkeypatch.setattr(ppo, "base_load", load)
    with pytest.raises(PolicyLoadError, match="far enough"):
        trainer(recipe, output_dir=tmp_path / "run", hardware=HARDWARE).train(ROWS)
    assert seen == [False]


def test_a_recipe_that_a_check_changed_is_the_one_that_trains(base: str, tmp_path: Path) -> None:
    """As the preflight check does where an agent's form has to be shown too."""
    recipe = KTORecipe(
        batch_size=4,
        lora_r=4,
        lora_alpha=8,
        max_length=96,
        max_completion_length=32,
        max_steps=1,
        logging_steps=1,
        warm_up_steps=0,
        sft_weight=0.0,
    )
    rows = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in some_pairs(4)
        for side in ("chosen", "rejected")
    ]
    losses = []
    for weight in (0.0, 1.0):
        trainer = KTOTrainer(recipe, base, output_dir=tmp_path / str(weight), hardware=HARDWARE)
        trainer.recipe = dataclasses.replace(recipe, sft_weight=weight)
        result = trainer.train(rows)
        assert result.recipe["sft_weight"] == weight
        losses += result.history["loss"]
    assert losses[1] > losses[0] + 1
