"""Rewards read off an agent's trace: whether its tools worked and its tasks were done."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.rewards.base import RAW_HIGH, RAW_LOW, RewardSample, RewardValue

SUCCESS_WORDS = ("completed", "complete", "done", "succeeded", "success", "ok")
FAILURE_WORDS = (
    "failed",
    "failure",
    "error",
    "errored",
    "aborted",
    "cancelled",
    "canceled",
    "timeout",
    "timed_out",
)
"""Words with which an app says how a task ended. Any other word (returned, running, open) leaves it open: that a
function came back says nothing of its task."""


NO_TRACE = "it reads the trace of a recorded decision, and a sampled answer has none"


def steps_of(sample: RewardSample, kind: str) -> list[Mapping[str, Any]]:
    """The steps of a kind in `facts["steps"]`, as the collector sends them."""
    steps = sample.facts.get("steps") or []
    return [step for step in steps if isinstance(step, Mapping) and step.get("kind") == kind]


def share_to_raw(share: float) -> float:
    """A share in [0, 1] as a raw reward: none is -2, all is 2."""
    return RAW_LOW + (RAW_HIGH - RAW_LOW) * share


def call_failed(call: Mapping[str, Any]) -> bool:
    """True if a tool call went wrong: it raised, or its result says so itself (`error`, `is_error`, `ok:
    false`)."""
    if call.get("error"):
        return True
    result = call.get("result")
    if not isinstance(result, Mapping):
        return False
    return bool(result.get("error") or result.get("is_error")) or any(
        result.get(name) is False for name in ("ok", "success")
    )


@dataclass(frozen=True)
class ToolSuccessReward:
    """Share of tool calls that brought something: no error, and not what an earlier call had brought already.

    A call that failed costs, however often it is tried again; one that repeats an earlier call that had worked, name
    and arguments alike, costs too. A call whose end nobody saw is not counted. Does not apply where no tool was called.
    """

    name: str = "tool_success"

    def inapplicable(self, sample: RewardSample) -> str:
        """Reason why no sampled answer can be judged."""
        return NO_TRACE

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        return [self._value(sample) for sample in samples]

    def _value(self, sample: RewardSample) -> RewardValue:
        calls = [call for call in steps_of(sample, "tool_call") if not call.get("unfinished")]
        if not calls:
            return RewardValue(None, {"why": "no tool was called"})
        failures: list[str] = []
        repeats: list[str] = []
        successes: set[str] = set()
        useful = 0
        for call in calls:
            name = str(call.get("name", "?"))
            key = json.dumps([name, call.get("arguments")], sort_keys=True, default=str)
            if call_failed(call):
                failures.append(name)
            elif key in successes and call.get("arguments") is not None:
                repeats.append(name)
            else:
                useful += 1
                successes.add(key)
        detail = {"calls": len(calls), "failed": failures} | ({"repeated": repeats} if repeats else {})
        return RewardValue(share_to_raw(useful / len(calls)), detail)


@dataclass(frozen=True)
class TaskCompletionReward:
    """Share of the trace's tasks that were completed, of those of which the app says how they ended.

    A trace without such a task counts as one failed task where it ended with an error (`facts["trace_status"]`).
    Otherwise it does not apply: completion is said by the app, never taken from a function that returned.
    """

    name: str = "task_completion"

    def inapplicable(self, sample: RewardSample) -> str:
        """Reason why no sampled answer can be judged."""
        return NO_TRACE

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        return [self._value(sample) for sample in samples]

    def _value(self, sample: RewardSample) -> RewardValue:
        ends = [end for task in steps_of(sample, "task") if (end := task_end(task)) is not None]
        if not ends and str(sample.facts.get("trace_status", "")).lower() in FAILURE_WORDS:
            return RewardValue(RAW_LOW, {"tasks": 0, "why": "the run ended with an error"})
        if not ends:
            return RewardValue(None, {"why": "the app says of no task how it ended"})
        return RewardValue(share_to_raw(sum(ends) / len(ends)), {"tasks": len(ends), "completed": sum(ends)})


def task_end(task: Mapping[str, Any]) -> bool | None:
    """True if a task step was completed; None where it does not say."""
    if task.get("error"):
        return False
    status = str(task.get("status", "")).strip().lower()
    return True if status in SUCCESS_WORDS else False if status in FAILURE_WORDS else None
