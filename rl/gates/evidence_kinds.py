"""Kinds of held-out evidence a policy is judged on, and the choice of the one that carries the accuracy rule. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

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
"""Kind -> what it counts, in the order in which kinds with the same number of prompts are taken. What people said goes
before what was measured, and that before what a program thinks."""

RATED, OFF_POLICY = "rated answers", "off-policy"
"""Estimators of the share of answers that people would like."""

ASSUMPTIONS = {
    RATED: "which answers to a prompt were rated is random",
    OFF_POLICY: "logged answers were sampled with the recorded propensities",
}
"""Estimator -> what it takes for granted."""

MEASURES = {
    PAIRS: "in preference accuracy",
    LABELS: "in concordance with thumbs, stars and scores",
    CORRECTIONS: "in agreement with what people wrote",
    TESTS: "in tests passed",
    KNOWN: "in right answers",
    OUTCOMES: "in concordance with the rewards of outcomes",
    REWARDS: "in mean reward",
}
"""Kind of evidence -> what a policy can be ahead in, as the end of a sentence."""

UNITS = {CORRECTIONS: "nats per token", REWARDS: "of reward"}
"""Kind -> the unit of its figures where they are not shares."""

POOLED = (PAIRS, LABELS, CORRECTIONS)
"""Kinds that `known` has on its lists, where two answers of the agent are the same or not."""

HALF = 0.5
"""Pairs lead only if they cover this share of the largest kind's prompts."""


def telling_counts(counts: Mapping[str, int], alike: Collection[str]) -> dict[str, int]:
    """The counts without the kinds whose held-out answers were all rated alike, which can tell no policy from another;
    as they are where no other kind has anything.

    So a hundred thumbs up and nothing else do not keep what people wrote from being asked. Which kinds these are is
    known from the feedback, before any policy is.
    """
    telling = {kind: 0 if kind in alike else n for kind, n in counts.items()}
    return telling if any(telling.values()) else dict(counts)


def all_alike(values: Iterable[float]) -> bool:
    """True of values that are all equal; false of none."""
    return len(set(values)) == 1


def lead_kind(counts: Mapping[str, int], needed: int, *, discrete: bool = False) -> str:
    """The kind that carries the accuracy rule, by numbers of held-out prompts and the kind of agent alone, never by a
    policy's figures.

    Known answers of `discrete` agents, where there are enough (`needed`), and always before what is on their lists
    (POOLED): the answers themselves are compared, and not the likelihoods of texts that a policy may never write.
    Else pairs, where there are enough and at least half as many as of any other kind: the two answers of a pair belong
    to one prompt, so nothing but the answers can tell them apart. Otherwise the kind with the most prompts, ties in the
    order of KINDS. Reward functions carry it only where no other kind has enough: they can be asked about any number of
    prompts, and are not what people said.
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
