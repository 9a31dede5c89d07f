"""Reward functions by the names that `--reward` takes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl.rewards.answers import AnswerMatchReward
from rl.rewards.base import RAW_HIGH, RAW_LOW, RewardFunction, RewardSample, RewardValue
from rl.rewards.code_execution import CodeExecutionReward
from rl.rewards.efficiency import EfficiencyReward
from rl.rewards.formats import AgentReward, FormatComplianceReward, SyntaxValidationReward
from rl.rewards.traces import TaskCompletionReward, ToolSuccessReward

MODEL = "model:"
"""Prefix of a trained reward model, `model:RUN_OR_PATH`; the training room opens those itself."""


LEARNED = "learned"
"""The reward learnt from people's ratings; the training room opens its folder, `learned:FOLDER`, itself too."""


AUTO = "auto"
"""The agent's reward model: the registered one that still holds, else one trained when the run begins."""


def opened_in_training(spec: str) -> bool:
    """True if a spec is a trained model, which only the training room can open."""
    return spec in (LEARNED, AUTO) or spec.startswith((MODEL, f"{LEARNED}:"))


class RewardRefused(ValueError):
    """A reward nobody knows or that cannot be used; the message says what there is."""


@dataclass(frozen=True)
class FunctionReward:
    """A user's plain function of a sample, `(sample) -> raw value in [-2, 2] or None`."""

    function: Callable[[RewardSample], float | None]
    name: str

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        values = []
        for sample in samples:
            raw = self.function(sample)
            if raw is not None and not RAW_LOW <= float(raw) <= RAW_HIGH:
                raise RewardRefused(f"reward {self.name} gave {raw!r}: expected a number in [-2, 2], or None")
            values.append(RewardValue(None if raw is None else float(raw)))
        return values


def rewards_named(specs: Sequence[str], *, code_execution: bool = False) -> list[RewardFunction]:
    """The reward functions of these names, each once. Raises RewardRefused.

    `code_execution` says whether running a model's code is switched on. A dotted path names a user's class, instance or
    function. Specs of trained models (`model:...`, `learned`) are left out: see MODEL and LEARNED.
    """
    return [
        reward_named(spec, code_execution=code_execution)
        for spec in dict.fromkeys(specs)
        if not opened_in_training(spec)
    ]


def reward_named(spec: str, *, code_execution: bool = False) -> RewardFunction:
    """One reward function by name or dotted path."""
    known: dict[str, Callable[[], RewardFunction]] = {
        "agent": AgentReward,
        "answer": AnswerMatchReward,
        "code_execution": lambda: CodeExecutionReward(enabled=code_execution),
        "syntax": SyntaxValidationReward,
        "tool_success": ToolSuccessReward,
        "task_completion": TaskCompletionReward,
        "efficiency": EfficiencyReward,
        "format": FormatComplianceReward,
    }
    if spec in known:
        try:
            return known[spec]()
        except RuntimeError as error:
            raise RewardRefused(str(error)) from error
    if opened_in_training(spec):
        raise RewardRefused(f"reward {spec} is a trained model, which works in training alone")
    if "." not in spec:
        raise RewardRefused(
            f"no reward {spec!r}; known are {', '.join(known)}, learned, auto, model:RUN_OR_PATH, or the dotted path "
            "of a function"
        )
    return _users_own(spec)


def _users_own(path: str) -> RewardFunction:
    module_name, _, name = path.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise RewardRefused(f"reward {path}: cannot be imported ({error})") from error
    if inspect.isclass(found):
        found = found()
    if callable(getattr(found, "score", None)) and isinstance(getattr(found, "name", None), str):
        reward: RewardFunction = found
        return reward
    if callable(found):
        return FunctionReward(found, path)
    raise RewardRefused(f"reward {path}: expected a function of a sample, or an object with name and score")
