"""Kinds of held-out evidence that a policy is judged on, and the choice of the leading kind. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

Figures: TypeAlias = Mapping[str, Any]
"""Figures of an evaluation or a rule, as JSON stores them: name -> number, text or further figures."""

PAIRS, LABELS, CORRECTIONS, TESTS, KNOWN, OUTCOMES, REWARDS = (
    "pairs",
    "labels",
    "corrections",
    "tests",
    "known",
    "outcomes",
    "rewards",
)

KINDS: dict[str, str] = {
    PAIRS: "pairs of answers to one prompt, one of them preferred",
    LABELS: "thumbs, stars and scores on single answers",
    CORRECTIONS: "answers that people wrote: corrections and demonstrations",
    TESTS: "prompts with tests that an answer passes or fails",
    KNOWN: "prompts of which right or wrong answers are known: from people or from the agent itself",
    OUTCOMES: "rewards of answers from their outcomes, where nobody rated them",
    REWARDS: "reward functions and reward models on generated answers",
}
"""Kind -> what it counts. Earlier kinds win ties: what people said, then what was measured, then reward functions."""

RATED, OFF_POLICY = "rated answers", "off-policy"
"""Estimators of the share of answers that people would like."""

ASSUMPTIONS = {
    RATED: "which answers to a prompt were rated is random",
    OFF_POLICY: "logged answers were sampled with the recorded propensities",
}
"""Estimator -> its assumption."""

MEASURES = {
    PAIRS: "in preference accuracy",
    LABELS: "in concordance with thumbs, stars and scores",
    CORRECTIONS: "in agreement with what people wrote",
    TESTS: "in tests passed",
    KNOWN: "in right answers",
    OUTCOMES: "in concordance with the rewards of outcomes",
    REWARDS: "in mean reward",
}
"""Kind of evidence -> what a policy gains in, as the end of a sentence."""

UNITS = {CORRECTIONS: "nats per token", REWARDS: "of reward"}
"""Kind -> the unit of its figures if they are not shares."""

POOLED = (PAIRS, LABELS, CORRECTIONS)
"""Kinds that `known` answers include, for agents with discrete answers."""

HALF = 0.5
"""Pairs lead only if they cover this share of the largest kind's prompts."""


def telling_counts(counts: Mapping[str, int], alike: Collection[str]) -> dict[str, int]:
    """The counts with 0 for kinds whose held-out answers were all rated alike; unchanged if no other kind has any.

    Such a kind can tell no policies apart: a hundred thumbs up must not outvote corrections.
    """
    telling = {kind: 0 if kind in alike else n for kind, n in counts.items()}
    return telling if any(telling.values()) else dict(counts)


def all_alike(values: Iterable[float]) -> bool:
    """True if all values are equal; false without any."""
    return len(set(values)) == 1


def lead_kind(counts: Mapping[str, int], needed: int, *, discrete: bool = False) -> str:
    """The kind that carries the accuracy rule. It depends on counts of held-out prompts and the agent, never on a
    policy.

    For `discrete` agents known answers lead if there are enough (`needed`), and always before POOLED kinds: they
    compare answers, not likelihoods. Else pairs lead if there are enough and at least HALF as many as of any other
    kind: both answers of a pair share a prompt. Else the kind with the most prompts. Reward functions lead only if no
    other kind has enough: they can score any number of prompts and are not what people said.
    """
    known = {kind: counts.get(kind, 0) for kind in KINDS}
    if discrete and known[KNOWN]:
        if known[KNOWN] >= needed:
            return KNOWN
        for kind in POOLED:
            known[kind] = 0
    machine = known.pop(REWARDS)
    most = max(known.values())
    if machine and most < needed and machine > most:
        return REWARDS
    if known[PAIRS] >= needed and known[PAIRS] >= HALF * most:
        return PAIRS
    # max returns the first of equals, and KINDS is in the order of preference
    return max(known, key=known.__getitem__)
