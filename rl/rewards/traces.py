"""Rewards from an agent's trace: tool calls that work, tasks that are completed, tokens and calls used."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
"""Words of apps for how a task ended. Any other word (returned, running, open) leaves it open."""


NO_TRACE = "it reads the trace of a recorded decision, and a sampled answer has none"


def steps_of(sample: RewardSample, kind: str) -> list[Mapping[str, object]]:
    """The steps of a kind in `facts["steps"]`, as the collector sends them."""
    steps = sample.facts.get("steps") or []
    return [step for step in steps if isinstance(step, Mapping) and step.get("kind") == kind]


def share_to_raw(share: float) -> float:
    """A share in [0, 1] as a raw reward in [-2, 2]."""
    return RAW_LOW + (RAW_HIGH - RAW_LOW) * share


def call_failed(call: Mapping[str, object]) -> bool:
    """True if a tool call raised, or its result reports an error (`error`, `is_error`, `ok: false`)."""
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
    """Share of useful tool calls: no error, and not a repetition of an earlier successful call.

    Failed calls and repeated calls (same name and arguments) both count against it. Unfinished calls are ignored. Does
    not apply without a tool call.
    """

    name: str = "tool_success"

    def inapplicable(self, sample: RewardSample) -> str:
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
    """Share of completed tasks among the trace's tasks whose end the app reports.

    Without such a task, a trace that ended with an error (`facts["trace_status"]`) counts as one failed task; any other
    does not apply.
    """

    name: str = "task_completion"

    def inapplicable(self, sample: RewardSample) -> str:
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


def task_end(task: Mapping[str, object]) -> bool | None:
    """True if a task step was completed, False if it failed; None if it does not say."""
    if task.get("error"):
        return False
    status = str(task.get("status", "")).strip().lower()
    return True if status in SUCCESS_WORDS else False if status in FAILURE_WORDS else None


# --- Tokens and calls against a budget ---


@dataclass(frozen=True)
class EfficiencyReward:
    """2 up to half the budget, 0 at the budget, -2 from one and a half times it, linear between.

    Tokens are `facts["tokens"]` (else a quarter of the characters), calls the trace's tool calls; the worse of the two
    counts.
    """

    token_budget: int = 256
    call_budget: int = 10
    name: str = "efficiency"

    def __post_init__(self) -> None:
        if self.token_budget < 1 or self.call_budget < 1:
            raise ValueError("a budget is at least 1")

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        values = []
        for sample in samples:
            told = sample.facts.get("tokens")
            tokens = float(told) if isinstance(told, (int, float)) else len(sample.response) / 4
            calls = len(steps_of(sample, "tool_call"))
            used = max(tokens / self.token_budget, calls / self.call_budget)
            raw = min(RAW_HIGH, max(RAW_LOW, RAW_HIGH - 4 * (used - 0.5)))
            values.append(RewardValue(raw, {"tokens": tokens, "calls": calls, "of_budget": round(used, 4)}))
        return values
