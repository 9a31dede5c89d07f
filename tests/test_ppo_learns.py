"""PPO on the bundled model: a reward that can be learnt is learnt, on prompts never seen; one that cannot is not."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rl.agents import widgets
from rl.recipes import PPO_CONFIG
from rl.rewards.base import RewardSample, RewardValue
from rl.training.hardware import Hardware
from rl.training.policy import LoadedPolicy, generate, load_policy
from rl.training.ppo import PPOTrainer

HARDWARE = Hardware("cpu", "a test", 1.0, 1.0, 1, "a test", "float32", "highest", True, "cpu")
RECIPE = PPO_CONFIG["cpu"].with_knobs(
    batch_size=32, mini_batch_size=16, max_steps=5, learning_rate=8e-4, max_new_tokens=16
)

pytestmark = pytest.mark.training


class Paid:
    name = "paid"

    def __init__(self, pay: Callable[[RewardSample], float]) -> None:
        self.pay = pay

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        return [RewardValue(self.pay(sample)) for sample in samples]


def likes(sample: RewardSample) -> float:
    return 4 * widgets.AGENT.hidden_preference(sample.facts["state"], sample.response) - 2


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    scenarios = widgets.AGENT.scenarios()
    Random(0).shuffle(scenarios)
    return [{"prompt": widgets.AGENT.render(s.state), "state": s.state} for s in scenarios]


def liking(policy: LoadedPolicy, rows: list[dict[str, Any]]) -> float:
    """Mean liking of sampled answers by the simulated rater, in [0, 1]."""
    answers = generate(policy, [row["prompt"] for row in rows], max_new_tokens=16, temperature=1.0, seed=7)
    return statistics.fmean(
        widgets.AGENT.hidden_preference(row["state"], answer.text)
        for row, answer in zip(rows, answers, strict=True)
    )


@pytest.fixture(scope="module")
def base(rows: list[dict[str, Any]]) -> float:
    return liking(load_policy("bundled", hardware=HARDWARE), rows[:128])


def trained(folder: Path, rows: list[dict[str, Any]], pay: Callable[[RewardSample], float]) -> float:
    trainer = PPOTrainer(RECIPE, output_dir=folder, agent="widgets", hardware=HARDWARE, rewards=[Paid(pay)])
    result = trainer.train(rows[128:])
    assert result.history["kl"][0] == pytest.approx(0, abs=1e-3)
    assert result.metrics["kl"] < 6
    return liking(load_policy("bundled", result.checkpoint, hardware=HARDWARE), rows[:128])


@pytest.mark.campaign
def test_what_is_paid_for_is_learnt_on_prompts_never_seen(
    rows: list[dict[str, Any]], base: float, tmp_path: Path
) -> None:
    assert trained(tmp_path / "liked", rows, likes) > 1.15 * base


@pytest.mark.campaign
def test_a_reward_drawn_without_looking_teaches_no_taste(
    rows: list[dict[str, Any]], base: float, tmp_path: Path
) -> None:
    random = Random(1)
    assert trained(tmp_path / "random", rows, lambda _: random.uniform(-2, 2)) < 1.15 * base
