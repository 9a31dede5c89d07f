"""Before the first step: which prompts the rewards can judge, and whether they tell sampled answers apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from rl.agents import get_agent
from rl.rewards.base import RewardFunction
from rl.rewards.rows import inapplicable_reason
from rl.training.ppo.judge import Judge
from rl.training.ppo.prompts import Prompts
from rl.training.ppo.rollout import Rollout
from rl.training.probe import PROMPTS, SAMPLES, RewardProbe, probe_fault
from rl.training.result import TrainingRefused

NO_REWARD = "no reward applies"
"""Reason why a prompt was left out."""


def rewardable_prompts(
    prompts: Prompts,
    functions: Sequence[RewardFunction],
    agent: str,
    note: Callable[[str], None],
    *,
    held_out: bool,
) -> Prompts:
    """The prompts that at least one reward can judge answers to. Raises TrainingRefused for none to train on."""
    positions, reason = [], ""
    for i, row in enumerate(prompts.rows):
        reasons = [inapplicable_reason(function, row, agent) for function in functions]
        if all(reasons):
            reason = reasons[0]
        else:
            positions.append(i)
    if not prompts.rows or len(positions) == len(prompts.rows):
        return prompts
    if not positions and not held_out:
        raise TrainingRefused(f"no reward applies to any of {len(prompts.rows)} prompts: {reason}")
    note(
        f"{len(prompts.rows) - len(positions)} of {len(prompts.rows)} prompts left out, as {NO_REWARD}: {reason}"
    )
    return dataclasses.replace(
        prompts, rows=[prompts.rows[i] for i in positions], ids=[prompts.ids[i] for i in positions]
    )


def rewards_probe(
    prompts: Prompts, judge: Judge, answer: Callable[[list[list[int]], int], list[Rollout]], at_once: int
) -> str:
    """Reason why the rewards teach nothing on a few sampled answers; empty where they may.

    `answer` gives so many answers to each of some prompts (tokens), side by side; `at_once` of them at a time.
    """
    size = len(prompts.ids)
    chosen = sorted({size * i // PROMPTS for i in range(min(PROMPTS, size))})
    samples = max(2, min(SAMPLES, at_once))
    agent = get_agent(judge.agent or "assistant")
    probes: list[RewardProbe] = []
    share = max(1, at_once // samples)
    for start in range(0, len(chosen), share):
        asked = chosen[start : start + share]
        rows = [prompts.rows[i] for i in asked]
        rollouts = answer([prompts.ids[i] for i in asked], samples)
        scores = judge.judge(rows, rollouts).scores
        probes += [
            RewardProbe(
                asked[rollout.prompt],
                rollout.text,
                score,
                agent.is_valid(rollout.text, rows[rollout.prompt].get("state")),
            )
            for rollout, score in zip(rollouts, scores, strict=True)
        ]
    return probe_fault(probes)


def valid_share(rollouts: Sequence[Rollout], prompts: Sequence[object], agent: str) -> float:
    """Share of answers that the agent can act on; `prompts[rollout.prompt]` is the row an answer belongs to."""
    known = get_agent(agent or "assistant")
    states = [row.get("state") if isinstance(row, dict) else None for row in prompts]
    return sum(known.is_valid(one.text, states[one.prompt]) for one in rollouts) / len(rollouts)
