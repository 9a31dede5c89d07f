"""Reward functions by the names that `--reward` takes."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl.rewards.answers import AgentReward, AnswerMatchReward, FormatComplianceReward, SyntaxValidationReward
from rl.rewards.base import RAW_HIGH, RAW_LOW, RewardFunction, RewardSample, RewardValue
from rl.rewards.code_execution import CodeExecutionReward
from rl.rewards.graders import PREFIX, GraderError, grader_reward, runs_code
from rl.rewards.traces import EfficiencyReward, TaskCompletionReward, ToolSuccessReward

MODEL = "model:"
"""Prefix of a trained reward model, `model:RUN_OR_PATH`, which the training package opens."""


LEARNED_REWARD = "learned"
"""The agent's newest reward model that ranks better than chance; an order names its folder, `model:FOLDER`."""


AUTO = "auto"
"""The agent's reward model: the registered one if it is still valid, else one trained when the run begins."""


def reward_models_named(specs: str) -> int:
    """How many of the named rewards are reward models."""
    return sum(spec.strip().startswith((MODEL, AUTO)) for spec in specs.split(","))


def opened_in_training(spec: str) -> bool:
    """True if a spec is a trained model, which only the training package can open."""
    return spec in (LEARNED_REWARD, AUTO) or spec.startswith(MODEL)


CODE = "code_execution"

BUILT_IN: dict[str, Callable[[], RewardFunction]] = {
    "agent": AgentReward,
    "answer": AnswerMatchReward,
    CODE: CodeExecutionReward,
    "syntax": SyntaxValidationReward,
    "tool_success": ToolSuccessReward,
    "task_completion": TaskCompletionReward,
    "efficiency": EfficiencyReward,
    "format": FormatComplianceReward,
}
"""Name -> class of a built-in reward function."""

REWARDS: dict[str, RewardFunction] = {}
"""Name -> reward function of a plugin."""

NAME = r"[a-z0-9][a-z0-9_-]{0,63}"


class RewardRefused(ValueError):
    """A reward that is unknown or cannot be used; the message names known ones."""


@dataclass(frozen=True)
class FunctionReward:
    """A user's function of a sample, `(sample) -> raw value in [-2, 2] or None`."""

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
    """The reward functions of these specs, each once. Raises RewardRefused.

    code_execution: running a model's code is allowed. A dotted path names a user's class, instance or function. Trained
    models (`model:...`, `learned`, `auto`) are left out.
    """
    return [
        reward_named(spec, code_execution=code_execution)
        for spec in dict.fromkeys(specs)
        if not opened_in_training(spec)
    ]


def reward_named(spec: str, *, code_execution: bool = False) -> RewardFunction:
    """A reward function by name or dotted path."""
    if spec in BUILT_IN:
        try:
            return CodeExecutionReward(enabled=code_execution) if spec == CODE else BUILT_IN[spec]()
        except RuntimeError as error:
            raise RewardRefused(str(error)) from error
    if spec in REWARDS:
        return REWARDS[spec]
    if spec.startswith(PREFIX):
        return _grader_reward(spec, code_execution=code_execution)
    if opened_in_training(spec):
        raise RewardRefused(f"reward {spec} is a trained model, which works in training alone")
    if "." not in spec:
        raise RewardRefused(
            f"no reward {spec!r}; known are {', '.join(reward_names())}, learned, auto, model:RUN_OR_PATH, or the "
            "dotted path of a function"
        )
    return _custom_reward(spec)


def _grader_reward(spec: str, *, code_execution: bool) -> RewardFunction:
    try:
        reward = grader_reward(spec)
    except GraderError as error:
        raise RewardRefused(str(error)) from error
    if runs_code(reward.grader) and not code_execution:
        raise RewardRefused("a grader with Python code is off: set ENABLE_CODE_EXECUTION=true to turn it on")
    return reward


def reward_names() -> list[str]:
    """Names of built-in reward functions, then of plugins'."""
    return [*BUILT_IN, *REWARDS]


def reward_register(name: str, found: object) -> None:
    """Registers a plugin's reward (`backend.plugins`) under its own name, a plain function under `name`. Raises
    ValueError if it is no reward, or its name is taken."""
    reward = reward_from(found, name)
    if not re.fullmatch(NAME, reward.name):
        raise ValueError(f"expected a name of small letters, digits, _ and -, found {reward.name!r}")
    known = REWARDS.get(reward.name)
    if reward.name in (*BUILT_IN, LEARNED_REWARD, AUTO) or known not in (None, reward):
        raise ValueError(f"the name {reward.name!r} is taken by another reward: choose another name")
    REWARDS[reward.name] = reward


def _custom_reward(path: str) -> RewardFunction:
    module_name, _, name = path.rpartition(".")
    try:
        found: object = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise RewardRefused(f"reward {path}: cannot be imported ({error})") from error
    return reward_from(found, path)


def reward_from(found: Any, name: str) -> RewardFunction:
    """The reward of a class, an object, or a plain function (called `name`). Raises RewardRefused."""
    if inspect.isclass(found):
        found = found()
    if callable(getattr(found, "score", None)) and isinstance(getattr(found, "name", None), str):
        reward: RewardFunction = found
        return reward
    if callable(found):
        return FunctionReward(found, name)
    raise RewardRefused(
        f"reward {name}: expected a function of a sample, or an object with name and score; found {found!r:.80}"
    )
