"""PPO runs on a tiny model: they start unbiased, learn, stop, resume, refuse and tell."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl.recipes import PPO_CONFIG, PPORecipe, RecipeError
from rl.rewards.base import RewardSample, RewardValue
from rl.training.policy import load_policy
from rl.training.ppo import PPOConfig, PPOTrainer
from rl.training.result import TrainingFailed, TrainingRefused, TrainResult, checkpoint_is_whole
from tests.support.dpo_runs import ListenerCallback
from tests.support.rollout_runs import ROWS, Length, trainers
from tests.support.tiny_models import HARDWARE

QUICK = PPORecipe(
    batch_size=8,
    mini_batch_size=4,
    ppo_epochs=2,
    learning_rate=5e-3,
    lora_r=4,
    lora_alpha=8,
    max_length=96,
    max_new_tokens=8,
    max_steps=2,
    top_k=0,
    top_p=1.0,
)


@pytest.fixture
def trainer(base_path: Path, tmp_path: Path) -> Callable[..., PPOTrainer]:
    return trainers(PPOTrainer, QUICK, base_path, tmp_path)


def weights(result: TrainResult) -> dict[str, torch.Tensor]:
    return load_file(Path(result.checkpoint) / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["adapter", "shared"])
def test_the_ratio_begins_at_one(trainer: Callable[..., PPOTrainer], backbone: str) -> None:
    row = trainer(value_backbone=backbone, ppo_epochs=1, mini_batch_size=8, max_steps=1).train(ROWS).metrics
    assert row["optimiser_steps"] == 1
    assert row["ratio"] == pytest.approx(1, abs=1e-6)
    assert row["policy_kl"] == pytest.approx(0, abs=1e-9)
    assert row["clip_fraction"] == 0
    assert row["policy_loss"] == pytest.approx(0, abs=1e-5)  # minus the mean of whitened advantages
    assert row["kl"] == pytest.approx(0, abs=1e-4)  # LoRA starts as the base


@pytest.mark.slow
def test_the_step_does_not_depend_on_how_a_mini_batch_is_cut(trainer: Callable[..., PPOTrainer]) -> None:
    whole = trainer("whole", ppo_epochs=1, mini_batch_size=8, max_steps=1).train(ROWS)
    cut = trainer("cut", ppo_epochs=1, mini_batch_size=8, gradient_accumulation=4, max_steps=1).train(ROWS)
    assert cut.metrics["loss"] == pytest.approx(whole.metrics["loss"], abs=1e-5)
    assert cut.metrics["grad_norm"] == pytest.approx(whole.metrics["grad_norm"], rel=1e-3)
    # Adam's first step is the gradient's sign: a weight whose gradient is rounding error may go either way
    apart = [(a - b).abs() for a, b in zip(weights(whole).values(), weights(cut).values(), strict=True)]
    assert torch.cat([x.flatten() for x in apart]).mean() < 1e-5


@pytest.mark.campaign
def test_a_resumed_run_takes_the_same_steps(trainer: Callable[..., PPOTrainer]) -> None:
    straight = trainer("straight", max_steps=4, save_steps=2).train(ROWS, ROWS[:2])
    first = trainer("broken", max_steps=4, save_steps=2, listener=ListenerCallback(stop_after=2)).train(
        ROWS, ROWS[:2]
    )
    assert (first.status, first.steps, first.total_steps) == ("cancelled", 2, 4)
    assert checkpoint_is_whole(Path(first.checkpoint))
    second = trainer("broken", max_steps=4, save_steps=2, resume=True).train(ROWS, ROWS[:2])
    assert second.status == "succeeded"
    for name in ("loss", "reward", "kl", "kl_coef", "value_error", "grad_norm", "eval_reward"):
        assert second.history[name] == straight.history[name], name
    for name, weight in weights(straight).items():
        assert torch.equal(weights(second)[name], weight), name


@pytest.mark.slow
def test_a_resumed_run_must_be_the_same_run(trainer: Callable[..., PPOTrainer]) -> None:
    trainer(listener=ListenerCallback(stop_after=1)).train(ROWS)
    with pytest.raises(TrainingRefused, match=r"init_kl_coef \(0.2, now 0.3\)"):
        trainer(resume=True, init_kl_coef=0.3).train(ROWS)
    with pytest.raises(TrainingRefused, match="started with other rows"):
        trainer(resume=True).train(ROWS[:6])


@pytest.mark.slow
def test_a_folder_in_use_is_refused(trainer: Callable[..., PPOTrainer]) -> None:
    trainer(max_steps=1, ppo_epochs=1).train(ROWS)
    with pytest.raises(TrainingRefused, match="found those of an earlier run"):
        trainer().train(ROWS)


@pytest.mark.slow
def test_every_step_tells_every_metric(trainer: Callable[..., PPOTrainer], tmp_path: Path) -> None:
    follower = ListenerCallback()
    result = trainer(listener=follower, eval_steps=1, samples_per_prompt=2).train(ROWS, ROWS[:4])
    assert [step for step, _ in follower.rows] == [0, 1, 2]
    assert set(follower.rows[0][1]) == {"eval_reward", "eval_kl", "eval_tokens", "eval_ended"}
    told = set(follower.rows[1][1])
    assert told >= {
        "loss", "policy_loss", "value_loss", "entropy", "clip_fraction", "value_clip_fraction", "ratio", "policy_kl",
        "value_error", "explained_variance", "kl", "kl_coef", "reward", "reward_std", "reward_less_kl", "reward/short",
        "log_ratio", "valid", "repetition", "grad_norm", "learning_rate", "tokens", "ended", "optimiser_steps",
        "early_stopped", "tokens_per_second",
    }  # fmt: skip
    # ragged ends: 8 responses, 2 passes in halves
    assert follower.rows[1][1]["optimiser_steps"] == 4
    assert follower.rows[0][1]["eval_kl"] == pytest.approx(0, abs=1e-4)
    loaded = TrainResult.load(result.save(tmp_path / "result.json"))
    assert loaded == result
    assert loaded.history["step"] == [1, 2]
    assert loaded.history["eval_step"] == [0, 1, 2]
    assert loaded.metrics["eval_reward_before"] == loaded.history["eval_reward"][0]
    assert loaded.plot(tmp_path / "reward.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_adapter_of_a_run_is_a_policy(trainer: Callable[..., PPOTrainer], base_path: Path) -> None:
    result = trainer(max_steps=1).train(ROWS)
    policy = load_policy(str(base_path), result.checkpoint, hardware=HARDWARE)
    assert policy.model.active_adapter == "default"
    assert not any("value" in name for name in weights(result))


@pytest.mark.slow
def test_the_price_of_kl_follows_only_an_adaptive_controller(trainer: Callable[..., PPOTrainer]) -> None:
    adaptive = trainer("adaptive", target_kl=50.0, kl_horizon=100).train(ROWS).history["kl_coef"]
    # far below the target: the error is clipped to -0.2, 8 responses of a horizon of 100
    assert adaptive == pytest.approx([0.2, 0.2 * (1 - 0.2 * 8 / 100)])
    assert trainer("fixed", kl_controller="fixed").train(ROWS).history["kl_coef"] == [0.2, 0.2]


@pytest.mark.slow
def test_a_step_that_goes_too_far_is_ended_early(trainer: Callable[..., PPOTrainer]) -> None:
    row = trainer(early_stop_kl=1e-6, max_steps=1).train(ROWS).metrics
    assert row["early_stopped"] == 1
    assert row["optimiser_steps"] == 1  # the first moved it; the second saw that


@pytest.mark.slow
def test_prompts_given_twice_count_once(trainer: Callable[..., PPOTrainer]) -> None:
    result = trainer(max_steps=1, ppo_epochs=1).train([*ROWS, *ROWS])
    assert result.samples["train"] == 12
    assert result.left_out == {"repeated prompts": 12}


@pytest.mark.slow
def test_an_epoch_sees_every_prompt_once(trainer: Callable[..., PPOTrainer]) -> None:
    seen: list[int] = []

    class Watching(Length):
        def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
            seen.extend(sample.facts["state"]["week"] for sample in samples)
            return super().score(samples)

    result = trainer(
        reward=Watching(), max_steps=-1, epochs=1, batch_size=4, ppo_epochs=1, allow_constant_reward=True
    ).train(ROWS)
    assert result.total_steps == 3
    assert sorted(seen) == list(range(12))
    assert seen != list(range(12))


class Broken:
    name = "broken"

    def __init__(self, *raws: float | None) -> None:
        self.raws = raws

    def score(self, samples: Sequence[RewardSample]) -> list[Any]:
        from types import SimpleNamespace

        return [SimpleNamespace(raw=raw, detail={"why": "no state"}) for raw in self.raws]


@pytest.mark.parametrize(
    ("raws", "error", "message"),
    [
        ([math.nan] * 8, TrainingFailed, "reward broken gave nan: expected a finite number"),
        ([1.0] * 7, TrainingFailed, "gave 7 values for 8 responses"),
        ([1.0] * 7 + [None], TrainingRefused, r"applies to 1 of 8 responses \(broken: {'why': 'no state'}\)"),
    ],
)
def test_a_reward_that_breaks_ends_the_run(
    trainer: Callable[..., PPOTrainer], raws: list[Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        trainer(reward=Broken(*raws)).train(ROWS)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run(trainer: Callable[..., PPOTrainer]) -> None:
    with pytest.raises(
        TrainingFailed, match=r"the loss became (nan|inf).*Lower learning_rate \(now 1e\+30\)"
    ):
        trainer(learning_rate=1e30, max_steps=3).train(ROWS)


def test_nothing_to_learn_from(trainer: Callable[..., PPOTrainer], base_path: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingRefused, match="at least one prompt"):
        trainer().train([])
    with pytest.raises(TrainingRefused, match="row 0: expected `prompt`"):
        trainer().train([{"text": "no prompt"}])


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"batch_size": 6, "mini_batch_size": 4}, r"batch_size \(6\) must be a multiple of mini_batch_size"),
        ({"gradient_accumulation": 3}, "multiple of gradient_accumulation"),
        ({"samples_per_prompt": 3}, "multiple of samples_per_prompt"),
        ({"kl_controller": "none"}, "adaptive or fixed"),
        ({"lam": 1.1}, "lam must be at most 1"),
        ({"max_length": 8}, "room for a prompt"),
        ({"lora_dropout": 0.1}, "lora_dropout must be 0"),
    ],
)
def test_knobs_out_of_range_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        QUICK.with_knobs(**knobs)


def test_the_defaults_are_the_documented_ones() -> None:
    recipe = PPOConfig()
    expected = {"learning_rate": 1.41e-5, "batch_size": 8, "mini_batch_size": 4, "ppo_epochs": 4}
    expected |= {"init_kl_coef": 0.2, "target_kl": 6.0, "gamma": 1.0, "lam": 0.95, "cliprange": 0.2}
    expected |= {"vf_coef": 0.1, "max_new_tokens": 128, "temperature": 1.0, "top_k": 50, "top_p": 0.95}
    assert {name: getattr(recipe, name) for name in expected} == expected
    long = PPO_CONFIG["prioritizer"]
    assert (long.max_length - long.max_new_tokens, long.max_new_tokens) == (1024, 256)
