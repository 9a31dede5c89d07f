"""Checks of generated answers as held-out evidence: tests of prompts, reward functions, reward models. No torch on
top."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from django.conf import settings

from rl.models import Policy
from rl.reward_models.specs import rewards_located
from rl.rewards import answers as right_answers
from rl.rewards.base import RewardFunction
from rl.rewards.catalogue import LEARNED_REWARD, MODEL, rewards_named
from rl.rewards.rows import rows_rewarded

Check = Callable[[Sequence[Mapping[str, Any]], Sequence[str]], list[float | None]]
"""(held-out rows, one answer each) -> a value each, or None where nothing can be said."""

TRAINED_BY_REWARDS = ("ppo", "grpo", "rlhf")
"""Methods whose recipe names rewards."""


def tests_check(agent: str) -> Check:
    """1 where an answer passes its prompt's tests or is the right one, else 0; None where neither is known.

    Code is run only where ENABLE_CODE_EXECUTION says so, in the sandbox.
    """
    answer = rewards_named(["answer"])
    code = rewards_named(["code_execution"], code_execution=True) if settings.ENABLE_CODE_EXECUTION else []

    def check(rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[float | None]:
        verdicts: list[float | None] = [None] * len(rows)
        answered = [
            i
            for i, row in enumerate(rows)
            if any((row.get("facts") or {}).get(n) for n in right_answers.COLUMNS)
        ]
        rest = [i for i in range(len(rows)) if i not in set(answered)]
        for functions, places in ((answer, answered), (code, rest)):
            if functions and places:
                given = rows_rewarded(
                    functions, [rows[i] for i in places], [texts[i] for i in places], agent=agent
                )
                for i, reward in zip(places, given, strict=True):
                    verdicts[i] = None if reward.passed is None else float(reward.passed)
        return verdicts

    return check


def rewards_check(specs: str, agent: str) -> Check:
    """The mean reward in [0, 1] of what applies, of located specs separated by commas; the models are loaded once."""
    from rl.training.rewarding import rewards_of

    functions: list[RewardFunction] = rewards_of(specs)

    def check(rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[float | None]:
        return [reward.value for reward in rows_rewarded(functions, rows, texts, agent=agent)]

    return check


def rewards_of_training(policy: Policy | None) -> str:
    """The rewards a policy was trained on, as its recipe names them; empty where it was not trained on any."""
    if policy is None or policy.run is None or policy.run.method not in TRAINED_BY_REWARDS:
        return ""
    return str(policy.run.recipe.get("reward", ""))


def barred_reason(specs: str, policy: Policy | None, agent: str) -> str:
    """Reason why rewards may not carry the accuracy rule: a learnt one among them is what the policy was
    trained on, and every policy pleases the judge it was trained to please (Gao, Schulman & Hilton 2023,
    arXiv 2210.10760). It is named as in `specs`. Empty where none is."""
    trained = _reward_model_folders(rewards_of_training(policy), agent)
    same = [name for folder, name in _reward_model_folders(specs, agent).items() if folder in trained]
    return f"{same[0]} is the reward that {policy.name if policy else 'it'} was trained with" if same else ""


def _reward_model_folders(specs: str, agent: str) -> dict[str, str]:
    """The learnt rewards among specs: the folder each lies in, where that can be told -> how it is named."""
    found = {}
    for spec in (one.strip() for one in specs.split(",")):
        if spec.startswith((MODEL, LEARNED_REWARD)):
            try:
                found[rewards_located(spec, agent)] = spec
            except ValueError:
                found[spec] = spec  # its files are gone: the name has to do
    return found
