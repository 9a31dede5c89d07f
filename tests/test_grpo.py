"""GRPO runs on a tiny model: groups share their prompt, log-probabilities are TRL's, runs learn, resume and refuse."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trl

from packed_forward import selftest
from packed_forward.packing import Strategy, StrategyChoice
from rl.recipes import GRPORecipe, RecipeError
from rl.rewards.base import RewardSample, RewardValue
from rl.training import grpo
from rl.training.grpo import GRPOTrainer
from rl.training.result import TrainingRefused
from tests.support.dpo_runs import ListenerCallback
from tests.support.rollout_runs import ROWS, trainers
from tests.test_ppo import weights

QUICK = GRPORecipe(
    batch_size=8,
    num_generations=4,
    learning_rate=5e-3,
    lora_r=4,
    lora_alpha=8,
    max_length=96,
    max_new_tokens=8,
    max_steps=2,
)

GOOD, BAD, WORSE = "by a line chart", "as a table", "I do not know"


@pytest.fixture
def trainer(base_path: Path, tmp_path: Path) -> Callable[..., GRPOTrainer]:
    return trainers(GRPOTrainer, QUICK, base_path, tmp_path)


@pytest.mark.slow
def test_a_run_tells_reward_and_kl(trainer: Callable[..., GRPOTrainer]) -> None:
    follower = ListenerCallback()
    result = trainer(listener=follower).train(ROWS, ROWS[:3])
    assert (result.status, result.steps, follower.total) == ("succeeded", 2, 2)
    assert result.samples == {"train": 12, "eval": 3}
    assert result.history["step"] == [1.0, 2.0]
    assert result.history["eval_step"] == [0.0, 2.0]
    assert set(result.history) >= set("loss reward kl entropy reward/short eval_reward eval_kl".split())
    assert result.history["eval_kl"][0] == pytest.approx(0, abs=1e-4)  # LoRA starts as the base
    assert result.metrics["eval_reward_before"] == result.history["eval_reward"][0]
    assert [step for step, _ in follower.rows] == [0, 1, 2, 2]
    assert any(note.startswith("forward split") for note in result.details), result.details


@pytest.mark.campaign
def test_a_step_with_held_out_answers_keeps_its_row(trainer: Callable[..., GRPOTrainer]) -> None:
    result = trainer(eval_steps=1).train(ROWS, ROWS[:3])
    assert result.history["eval_step"] == [0.0, 1.0, 2.0]
    assert result.history["step"] == [1.0, 2.0]
    assert len(result.history["loss"]) == len(result.history["reward"]) == 2


@pytest.mark.slow
def test_gradients_are_trls(trainer: Callable[..., GRPOTrainer], monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of two groups at temperature 0.7, with an adapter that is not zero, both ways."""
    seen: list[Any] = []

    def both_ways(self: Any, model: Any, inputs: Any) -> torch.Tensor:
        found = []
        for strategy in (self.choice.strategy, Strategy.STOCK):
            selftest.install(self.policy, strategy)
            self.choice = StrategyChoice(strategy, "", {})
            model.zero_grad()
            torch.nn.init.constant_(
                model.base_model.model.model.layers[0].mlp.up_proj.lora_B.default.weight, 0.05
            )
            loss = trl.GRPOTrainer._compute_loss(self, model, inputs)
            loss.backward()
            found.append(
                (loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            )
        seen.append(found)
        raise KeyboardInterrupt

    monkeypatch.setattr(grpo.GroupTrainer, "_compute_loss", both_ways)
    with pytest.raises(KeyboardInterrupt):
        trainer(temperature=0.7).train(ROWS)
    (ours, our_gradients), (theirs, their_gradients) = seen[0]
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert set(our_gradients) == set(their_gradients)
    largest = max(float(g.norm()) for g in their_gradients.values())
    assert largest > 0
    for name, gradient in their_gradients.items():
        assert float((our_gradients[name] - gradient).norm()) < 1e-4 * largest, name


@pytest.mark.slow
def test_prompts_are_read_once(trainer: Callable[..., GRPOTrainer], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    real = grpo.generate_tokens

    def noted(model: Any, prompts: Any, samples: int, *rest: Any) -> Any:
        asked.append((len(prompts), samples))
        return real(model, prompts, samples, *rest)

    monkeypatch.setattr(grpo, "generate_tokens", noted)
    trainer(gradient_accumulation=2, max_steps=1).train(ROWS)
    assert asked == [(4, 4)]  # 16 responses of a step: four prompts, each answered four times


@pytest.mark.campaign
def test_whole_groups(trainer: Callable[..., GRPOTrainer], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[int] = []
    real = grpo.GroupTrainer._compute_loss

    def noted(self: Any, model: Any, inputs: Any) -> torch.Tensor:
        prompts.append(len({tuple(row) for row in inputs["prompt_ids"].tolist()}))
        return real(self, model, inputs)

    monkeypatch.setattr(grpo.GroupTrainer, "_compute_loss", noted)
    trainer(gradient_accumulation=3, max_steps=2).train(ROWS)
    assert prompts == [2] * 6


@pytest.mark.training
def test_reward_rises_and_a_constant_reward_teaches_nothing(trainer: Callable[..., GRPOTrainer]) -> None:
    class Constant:
        name = "constant"

        def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
            return [RewardValue(1.0) for _ in samples]

    learnt = trainer(
        "learnt", max_steps=12, learning_rate=1e-2, batch_size=16, missing_eos_penalty=0, max_kl=0
    ).train(ROWS, ROWS)
    assert learnt.metrics["eval_reward"] > learnt.metrics["eval_reward_before"] + 0.5
    nothing = trainer(
        "nothing", reward=Constant(), missing_eos_penalty=0, beta=0, allow_constant_reward=True
    ).train(ROWS)
    assert all(
        torch.all(tensor == 0) for name, tensor in weights(nothing).items() if "lora_B" in name
    )  # B starts at zero, and no gradient ever moved it


@pytest.mark.parametrize(
    ("knobs", "complaint"),
    [
        ({"num_generations": 1}, "must be a multiple of num_generations .1., and that at least 2"),
        ({"num_generations": 3}, "must be a multiple of num_generations .3."),
        ({"scale_rewards": "row"}, "scale_rewards must be one of group, batch, none"),
        ({"max_new_tokens": 96}, "must leave room for a prompt"),
        ({"lora_dropout": 0.1}, "lora_dropout must be 0"),
    ],
)
def test_knobs_outside_their_range_are_refused(knobs: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RecipeError, match=complaint):
        QUICK.with_knobs(**knobs)


def test_vllm_is_named_where_it_is_missing(trainer: Callable[..., GRPOTrainer]) -> None:
    with pytest.raises(TrainingRefused, match="vllm=colocate needs vLLM"):
        trainer(vllm="colocate").train(ROWS)
