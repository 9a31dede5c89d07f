"""Rewards read off an agent's trace: whether its tools worked and its tasks were done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.rewards.base import RAW_HIGH, RAW_LOW, RewardSample, RewardValue

DONE = ("completed", "done", "succeeded", "success")


def steps_of(sample: RewardSample, kind: str) -> list[Mapping[str, Any]]:
    """The steps of a kind in `facts["steps"]`, as the collector sends them."""
    steps = sample.facts.get("steps") or []
    return [step for step in steps if isinstance(step, Mapping) and step.get("kind") == kind]


def share_to_raw(share: float) -> float:
    """A share in [0, 1] as a raw reward: none is -2, all is 2."""
    return RAW_LOW + (RAW_HIGH - RAW_LOW) * share


@dataclass(frozen=True)
class ToolSuccessReward:
    """Share of tool calls without an error; does not apply where no tool was called."""

    name: str = "tool_success"

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        values = []
        for sample in samples:
            calls = steps_of(sample, "tool_call")
            if not calls:
                values.append(RewardValue(None, {"why": "no tool was called"}))
                continue
            failed = [str(call.get("name", "?")) for call in calls if call.get("error")]
            share = 1 - len(failed) / len(calls)
            values.append(RewardValue(share_to_raw(share), {"calls": len(calls), "failed": failed}))
        return values


@dataclass(frozen=True)
class TaskCompletionReward:
    """Share of tasks completed; does not apply where the trace names none."""

    name: str = "task_completion"

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        values = []
        for sample in samples:
            tasks = steps_of(sample, "task")
            if not tasks:
                values.append(RewardValue(None, {"why": "no task in the trace"}))
                continue
            done = sum(
                str(task.get("status", "")).lower() in DONE and not task.get("error") for task in tasks
            )
            values.append(
                RewardValue(share_to_raw(done / len(tasks)), {"tasks": len(tasks), "completed": done})
            )
        return values
