"""Reward of a response: the mean of the reward functions that apply to it, a reward model among them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.rewards.base import RewardFunction, RewardSample
from rl.rewards.formats import reward_with_validity
from rl.rewards.rows import row_sample
from rl.training.ppo.rollout import Rollout
from rl.training.result import TrainingFailed, TrainingRefused


@dataclass(frozen=True)
class Judgement:
    """Scores of a batch, one per response, and each function's own mean over the responses it applied to."""

    scores: list[float]
    parts: dict[str, float]


class Judge:
    """Reward functions and reward models with one voice: their plain mean, and the worst reward for an answer that an
    agent with a schema cannot act on."""

    def __init__(self, functions: Sequence[RewardFunction], *, agent: str = "") -> None:
        if not functions:
            raise TrainingRefused(
                "expected at least one reward, found none: give --reward agent, a reward model (model:RUN) or the "
                "dotted path of a function"
            )
        self.functions, self.agent = list(functions), agent

    def judge(self, rows: Sequence[Mapping[str, Any]], rollouts: Sequence[Rollout]) -> Judgement:
        """`rows[rollout.prompt]` is the prompt a response answers: its messages under `prompt`, its `state`.

        Raises TrainingRefused where no function applies to a response, TrainingFailed for a value that is not finite.
        """
        samples = [self._sample(rows[rollout.prompt], rollout) for rollout in rollouts]
        reward_values: list[list[float]] = [[] for _ in rollouts]
        parts: dict[str, float] = {}
        why = ""
        for function in self.functions:
            values = function.score(samples)
            found = [value.raw for value in values]
            why = next((f"{function.name}: {dict(v.detail)}" for v in values if v.raw is None), why)
            self._add(function.name, found, reward_values, parts)
        if not all(reward_values):
            missing = sum(not values for values in reward_values)
            raise TrainingRefused(
                f"no reward applies to {missing} of {len(rollouts)} responses ({why}): give another reward, "
                "or prompts that it applies to"
            )
        means = [math.fsum(values) / len(values) for values in reward_values]
        return Judgement(
            [reward_with_validity(mean, one) for mean, one in zip(means, samples, strict=True)], parts
        )

    def _sample(self, row: Mapping[str, Any], rollout: Rollout) -> RewardSample:
        return row_sample(
            row, rollout.text, self.agent, tokens=len(rollout.item.response_ids), ended=rollout.ended
        )

    @staticmethod
    def _add(
        name: str, found: Sequence[float | None], given: list[list[float]], parts: dict[str, float]
    ) -> None:
        if len(found) != len(given):
            raise TrainingFailed(
                f"reward {name} gave {len(found)} values for {len(given)} responses: it must give one for each"
            )
        own = [value for value in found if value is not None]
        broken = next((value for value in own if not math.isfinite(value)), None)
        if broken is not None:
            raise TrainingFailed(f"reward {name} gave {broken!r}: expected a finite number")
        for values, value in zip(given, found, strict=True):
            if value is not None:
                values.append(value)
        if own:
            parts[name] = math.fsum(own) / len(own)
