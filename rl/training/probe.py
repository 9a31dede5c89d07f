"""Probe of the rewards before training, on a few sampled answers: a reward that is the same for all of them cannot
teach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rl.rewards.rows import INSIST

PROMPTS, SAMPLES = 8, 8
"""Prompts that are asked, and answers to each. A reward that one answer in 20 earns is missed in 4 of 100 probes."""

FORM_PROMPTS = 4
"""Prompts with two different valid answers from which "valid answers earn the same" is reported."""


@dataclass(frozen=True)
class RewardProbe:
    """One sampled answer."""

    prompt: int
    text: str
    score: float
    valid: bool
    """True if the agent could act on it."""


def probe_fault(probed: Sequence[RewardProbe]) -> str:
    """Reason why these answers teach nothing; empty where they may.

    Answers compete with other answers to the same prompt, so what is looked for is one prompt with two scores.
    """
    prompts = sorted({one.prompt for one in probed})
    groups = [[one for one in probed if one.prompt == prompt] for prompt in prompts]
    sample = f"{len(probed)} sampled answers to {len(prompts)} prompts"
    low, high = (pick(one.score for one in probed) for pick in (min, max))
    if not any(one.valid for one in probed):
        return (
            f"none of {sample} is one the agent can act on (one says {probed[0].text[:60]!r}), so each earns the worst "
            "reward: nothing can be learnt from it. Show the form first: train_sft on answers people wrote or liked, "
            f"then --set start_from=POLICY here; or take a larger base model; {INSIST}"
        )
    if all(len({one.text for one in group}) == 1 for group in groups):
        fault = f"the policy gave the same answer each time ({sample}): nothing can be compared"
        return f"{fault}. Raise temperature; {INSIST}"
    if all(_is_uniform(group) for group in groups):
        spread = f"all {low:g}" if _close(low, high) else f"{low:g} to {high:g}, the same within each prompt"
        return (
            f"the reward is constant on a probe of {sample} ({spread}): nothing can be learnt from it. Where no answer "
            "is good enough yet, begin with easier prompts, train_sft on solutions, or a larger base model; where all "
            f"are, give a reward that tells them apart; {INSIST}"
        )
    several = [
        group
        for group in ([one for one in group if one.valid] for group in groups)
        if len({one.text for one in group}) > 1
    ]
    if len(several) >= FORM_PROMPTS and all(_is_uniform(group) for group in several):
        return (
            f"the reward is constant over valid answers on a probe of {sample} (each earned {several[0][0].score:g}): "
            f"only form can be learnt. Give a reward that tells right from wrong; {INSIST}"
        )
    return ""


def _is_uniform(group: Sequence[RewardProbe]) -> bool:
    return all(_close(one.score, group[0].score) for one in group)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
