"""A reward model as a role on PPO's own base says what it says alone, and PPO learns from it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rl.recipes import PPORecipe, RewardModelRecipe
from rl.rewards.base import RewardSample
from rl.training.policy import load_policy
from rl.training.ppo import PPOTrainer
from rl.training.result import TrainingRefused
from rl.training.reward_model import RewardModel, train_reward_model
from rl.training.rewarding import SharedRewardModel, fits, rewards_of
from rl.training.shared_base import POLICY, REWARD, VALUE, SharedBase, adapter_of
from tests.support.tiny_models import HARDWARE, tiny_model

QUICK = PPORecipe(
    batch_size=4,
    mini_batch_size=4,
    ppo_epochs=1,
    lora_r=2,
    lora_alpha=4,
    max_length=96,
    max_new_tokens=6,
    max_steps=1,
)


def asks(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"how did revenue change over week {i}"}]


@pytest.fixture(scope="module")
def judge(base_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RewardModel, str]:
    """A reward model that learnt a little: the chart over the table."""
    rows = [{"prompt": asks(i), "chosen": "line_chart", "rejected": "table"} for i in range(8)]
    recipe = RewardModelRecipe(max_steps=3, learning_rate=1e-2, lora_r=4, lora_alpha=8, max_length=96)
    model, result = train_reward_model(
        rows,
        recipe,
        output_dir=tmp_path_factory.mktemp("judge"),
        base_model=str(base_path),
        hardware=HARDWARE,
    )
    return model, result.checkpoint


@pytest.fixture
def base(base_path: Path) -> SharedBase:
    return SharedBase(load_policy(str(base_path), hardware=HARDWARE), QUICK)


SAMPLES = [RewardSample(asks(i), text, "widgets") for i, text in enumerate(("line_chart", "table", "x " * 9))]


@pytest.mark.campaign
def test_on_the_shared_base_it_says_what_it_says_alone(judge: Any, base: SharedBase) -> None:
    alone, path = judge
    assert fits(path, base)
    with torch.no_grad():  # a policy that has moved must not move its judge
        for parameter in base.parameters_of(POLICY).values():
            parameter.add_(0.1)
    shared = SharedRewardModel(base, path)
    items = [(list(s.prompt), s.response) for s in SAMPLES]
    assert shared.scores(items) == pytest.approx(alone.scores(items), abs=1e-4)
    assert len({round(score, 2) for score in alone.scores(items)}) == 3
    assert [v.raw for v in shared.score(SAMPLES)] == pytest.approx(
        [v.raw for v in alone.score(SAMPLES)], abs=1e-3
    )


def test_it_is_not_trained_and_changes_nothing_that_is(judge: Any, base: SharedBase) -> None:
    before = {name: p.requires_grad for name, p in base.model.named_parameters()}
    micro = base.micro_batch([0], base.policy.encoder.responses([(asks(0), "line_chart")]))
    logps = base.policy_tokens(micro)[0]
    SharedRewardModel(base, judge[1]).score(SAMPLES)
    after = {name: p.requires_grad for name, p in base.model.named_parameters()}
    assert {name: after[name] for name in before} == before
    assert {adapter_of(name) for name, on in after.items() if on} == {POLICY, VALUE}
    assert REWARD in {adapter_of(name) for name in after}
    assert torch.equal(base.policy_tokens(micro)[0], logps)


@pytest.mark.slow
def test_one_of_another_base_stays_a_model_of_its_own(judge: Any, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", seed=1)
    base = SharedBase(load_policy(str(other), hardware=HARDWARE), QUICK)
    assert not fits(judge[1], base)
    (function,) = rewards_of(f"model:{judge[1]}", base)
    assert type(function) is RewardModel


@pytest.mark.slow
def test_a_folder_without_a_reward_model_is_refused(base: SharedBase, tmp_path: Path) -> None:
    with pytest.raises(TrainingRefused, match="expected a reward model"):
        rewards_of(f"model:{tmp_path}", base)


@pytest.mark.slow
def test_a_model_and_a_function_teach_together(judge: Any, base_path: Path, tmp_path: Path) -> None:
    recipe = QUICK.with_knobs(reward=f"model:{judge[1]},format")
    trainer = PPOTrainer(
        recipe, str(base_path), output_dir=tmp_path / "run", agent="assistant", hardware=HARDWARE
    )
    result = trainer.train([{"prompt": asks(i)} for i in range(8)])
    parts = [name for name in result.metrics if name.startswith("reward/")]
    assert len(parts) == 2
    assert isinstance(trainer.rewards[0], SharedRewardModel)
    assert (
        result.metrics["reward"] <= sum(result.metrics[name] for name in parts) / 2 + 1e-6
    )  # less what did not end
