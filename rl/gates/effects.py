"""Effects of a policy against another on held-out evidence: difference, interval, tests. Pure.

Three forms. Right or wrong on both sides (pairs, tests, corrections of structured agents): McNemar's table. A figure on
both sides (log-likelihood of what people wrote, rewards): mean paired difference. A rated value and how far the policy
moved that answer (labels, outcomes): concordance.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import scipy

from rl.gates.evidence_kinds import KINDS, REWARDS, UNITS, Figures, all_alike, lead_kind, telling_counts
from rl.gates.report import Case, Evidence, GateBounds, Item, RatedAnswer
from rl.statistics import (
    Difference,
    mcnemar_unconditional,
    mean_interval,
    not_inferior_p,
    paired_difference,
)
from rl.statistics.concordance import GiniConcordance, gini_concordance, gini_concordance_p
from rl.statistics.permutation import draws_for, lopsided_mean_p, sign_flip_p


class Effect(Protocol):
    """Effect of a policy: candidate minus rival, over `n` held-out prompts."""

    @property
    def n(self) -> int: ...

    @property
    def value(self) -> float: ...

    @property
    def sides(self) -> tuple[float, float]:
        """Figures of the policy and its rival; for a concordance the rival is chance, 0.5."""
        ...

    @property
    def unit(self) -> str:
        """`points` for differences of shares in [0, 1]; else the figure's unit."""
        ...

    def interval(self, confidence: float) -> Difference: ...

    def better(self, alpha: float = 0.05) -> float:
        """One-sided p that the policy is no better; `alpha`: the level it is compared with."""
        ...

    def worse(self, alpha: float = 0.05) -> float:
        """One-sided p that it is no worse."""
        ...

    def not_inferior(self, margin: float, alpha: float = 0.05) -> float:
        """One-sided p that it loses `margin` or more."""
        ...

    def p_larger(self, rest: Effect) -> float:
        """One-sided p that this effect is no larger than that of independent evidence."""
        ...


def points(share: float) -> str:
    """A difference of shares in percentage points, with enough digits to show its sign."""
    value = 100 * share
    return f"{value:+.1f} points" if abs(value) >= 0.05 or value == 0 else f"{value:+.2g} points"


def amount(effect: Effect, value: float) -> str:
    """A difference with its unit."""
    return points(value) if effect.unit == "points" else f"{value:+.3f} {effect.unit}"


@dataclass(frozen=True)
class TableEffect:
    """Right or wrong on both sides: Newcombe's interval, exact unconditional test, binomial test of the discordant
    cases."""

    both: int
    wins: int
    losses: int
    neither: int
    unit: str = "points"

    @property
    def n(self) -> int:
        return self.both + self.wins + self.losses + self.neither

    @property
    def value(self) -> float:
        return (self.wins - self.losses) / self.n

    @property
    def sides(self) -> tuple[float, float]:
        return (self.both + self.wins) / self.n, (self.both + self.losses) / self.n

    def interval(self, confidence: float) -> Difference:
        return paired_difference(self.both, self.wins, self.losses, self.neither, confidence)

    def better(self, alpha: float = 0.05) -> float:
        return mcnemar_unconditional(self.wins, self.losses, self.n)

    def worse(self, alpha: float = 0.05) -> float:
        return binomial_luck(self.losses, self.wins)

    def not_inferior(self, margin: float, alpha: float = 0.05) -> float:
        return not_inferior_p(self.wins, self.losses, self.n, margin)

    def p_larger(self, rest: Effect) -> float:
        assert isinstance(rest, TableEffect)
        table = [[self.wins, self.losses], [rest.wins, rest.losses]]
        return float(scipy.stats.fisher_exact(table, alternative="greater").pvalue)


def binomial_luck(wins: int, losses: int) -> float:
    """p of at least `wins` wins among the discordant cases of two equal policies (exact binomial)."""
    return float(scipy.stats.binom.sf(wins - 1, wins + losses, 0.5)) if wins + losses else 1.0


@dataclass(frozen=True)
class MeanEffect:
    """A figure on both sides: mean paired difference, Student's t interval, sign flips and Gaffke's bound.

    Sign flips are exact for differences that are symmetric under the hypothesis; Gaffke's bound holds for others.
    """

    differences: tuple[float, ...]
    policy_mean: float
    reference_mean: float
    unit: str
    minimum: float | None = None
    """Lowest possible difference; None if there is no bound."""

    @property
    def n(self) -> int:
        return len(self.differences)

    @property
    def value(self) -> float:
        return math.fsum(self.differences) / self.n

    @property
    def sides(self) -> tuple[float, float]:
        return self.policy_mean, self.reference_mean

    def interval(self, confidence: float) -> Difference:
        found = mean_interval(self.differences, confidence)
        if found.low is None or found.high is None:  # a single prompt has no spread to judge by
            return Difference(self.value, -math.inf, math.inf)
        return Difference(self.value, found.low, found.high)

    def better(self, alpha: float = 0.05) -> float:
        return self._above_zero(self.differences, alpha)

    def worse(self, alpha: float = 0.05) -> float:
        return self._above_zero([-one for one in self.differences], alpha)

    def not_inferior(self, margin: float, alpha: float = 0.05) -> float:
        # shifted differences are lopsided: sign flips alone do not hold for them
        least = None if self.minimum is None else self.minimum + margin
        return lopsided_mean_p([one + margin for one in self.differences], least, draws=draws_for(alpha))

    def _above_zero(self, differences: Sequence[float], alpha: float) -> float:
        draws = draws_for(alpha)
        symmetric = sign_flip_p(differences, draws=draws)
        return (
            symmetric
            if symmetric > alpha
            else max(symmetric, lopsided_mean_p(differences, self.minimum, draws=draws))
        )

    def p_larger(self, rest: Effect) -> float:
        assert isinstance(rest, MeanEffect)
        found = scipy.stats.ttest_ind(
            self.differences, rest.differences, equal_var=False, alternative="greater"
        )
        return float(found.pvalue) if math.isfinite(found.pvalue) else 1.0


@dataclass(frozen=True)
class ConcordanceEffect:
    """Rated values against how far the policy moved each answer: gain over chance, clustered by prompt."""

    items: tuple[RatedAnswer, ...]
    concordance: GiniConcordance
    unit: str = "points"

    @property
    def n(self) -> int:
        return self.concordance.clusters

    @property
    def value(self) -> float:
        return self.concordance.gain

    @property
    def sides(self) -> tuple[float, float]:
        return 0.5 + self.concordance.gain, 0.5

    def interval(self, confidence: float) -> Difference:
        return self.concordance.interval(confidence)

    @functools.cached_property
    def _columns(self) -> tuple[list[float], list[float], list[str]]:
        return (
            [item.value for item in self.items],
            [item.shift for item in self.items],
            [item.prompt for item in self.items],
        )

    def better(self, alpha: float = 0.05) -> float:
        values, shifts, prompts = self._columns
        return gini_concordance_p(values, shifts, prompts, draws=draws_for(alpha))

    def worse(self, alpha: float = 0.05) -> float:
        values, shifts, prompts = self._columns
        return gini_concordance_p(values, [-shift for shift in shifts], prompts, draws=draws_for(alpha))

    def not_inferior(self, margin: float, alpha: float = 0.05) -> float:
        error = self.concordance.error
        return float(scipy.stats.norm.sf((self.value + margin) / error)) if error else 1.0

    def p_larger(self, rest: Effect) -> float:
        assert isinstance(rest, ConcordanceEffect)
        error = math.hypot(self.concordance.error, rest.concordance.error)
        return float(scipy.stats.norm.sf((self.value - rest.value) / error)) if error else 1.0


def effect_of(kind: str, items: Sequence[Item], among: Sequence[Item] | None = None) -> Effect | None:
    """The effect of one kind of evidence; None without items, or if all were rated alike.

    among: all evidence of the kind if `items` is a part of it; it decides the form of the effect.
    """
    if not items:
        return None
    rated = tuple(item for item in items if isinstance(item, RatedAnswer))
    if rated:
        values, shifts, prompts = zip(*((one.value, one.shift, one.prompt) for one in rated), strict=True)
        found = gini_concordance(values, shifts, prompts)
        return None if found is None else ConcordanceEffect(rated, found)
    cases = [item for item in items if isinstance(item, Case)]
    if all(
        side in (0, 1)
        for case in (items if among is None else among)
        if isinstance(case, Case)
        for side in (case.policy_score, case.reference_score)
    ):
        return TableEffect(*table_of(cases))
    n = len(cases)
    # right or wrong cases of one cluster were averaged: still shares in [0, 1]; log-likelihoods never are
    shares = all(0 <= side <= 1 for case in cases for side in (case.policy_score, case.reference_score))
    return MeanEffect(
        tuple(case.policy_score - case.reference_score for case in cases),
        math.fsum(case.policy_score for case in cases) / n,
        math.fsum(case.reference_score for case in cases) / n,
        "points" if shares and kind != REWARDS else UNITS.get(kind, "points"),
        -1.0 if shares else None,
    )


def items_of(stored: Sequence[Figures]) -> list[Item]:
    """Stored items of one kind as the rules take them, averaged per prompt and per cluster."""
    facts = [{"slices": tuple(one["slices"]), "raters": tuple(one.get("raters", ()))} for one in stored]
    clusters = [one.get("cluster", "") for one in stored]
    found: list[Item]
    if any("shift" in one for one in stored):
        found = [
            RatedAnswer(one["prompt_hash"], one["value"], one["shift"], **known)
            for one, known in zip(stored, facts, strict=True)
        ]
    else:
        pairs = [Case(one["own"], one["other"], **known) for one, known in zip(stored, facts, strict=True)]
        prompts = one_per_prompt(pairs, [one.get("prompt_hash", "") for one in stored])
        found, clusters = list(prompts.values()), [clusters[place] for place in prompts]
    return one_per_cluster(found, clusters)


def table_of(cases: Sequence[Case]) -> tuple[int, int, int, int]:
    """Counts of cases: both right, only the policy, only its rival, neither."""
    own_only = sum(bool(case.policy_score and not case.reference_score) for case in cases)
    other_only = sum(bool(case.reference_score and not case.policy_score) for case in cases)
    both = sum(bool(case.policy_score and case.reference_score) for case in cases)
    return both, own_only, other_only, len(cases) - both - own_only - other_only


def prompts_of(items: Sequence[Item]) -> int:
    """Number of distinct held-out prompts among items."""
    rated = {item.prompt for item in items if isinstance(item, RatedAnswer)}
    return len(rated) + sum(isinstance(item, Case) for item in items)


def lead_of(evidence: Evidence, bounds: GateBounds) -> str:
    """The kind of evidence that carries the accuracy rule: see `rl.gates.evidence_kinds.lead_kind`."""
    counts = {kind: prompts_of(evidence.items(kind)) for kind in KINDS if kind not in evidence.exclusions}
    rated = {
        kind: [item.value for item in evidence.items(kind) if isinstance(item, RatedAnswer)]
        for kind in counts
    }
    alike = [kind for kind, values in rated.items() if all_alike(values)]
    return lead_kind(telling_counts(counts, alike), bounds.min_evidence, discrete=evidence.discrete)


# --- One vote per prompt or cluster ---


def one_per_prompt(cases: Sequence[Case], prompts: Sequence[str]) -> dict[int, Case]:
    """One case per prompt, the mean of its pairs: index of its first pair -> case. prompts: each case's, or ""."""
    members: dict[str, list[int]] = {}
    for place, name in enumerate(prompts):
        members.setdefault(name or f"\0{place}", []).append(place)
    return {
        places[0]: _mean_case([cases[place] for place in places]) if len(places) > 1 else cases[places[0]]
        for places in members.values()
    }


def one_per_cluster(items: Sequence[Item], clusters: Sequence[str]) -> list[Item]:
    """One item per cluster of near-identical prompts, the mean of its members; the others unchanged, in order.

    clusters: per item the name of its prompt's cluster, or "". Tests then see independent items: counted one by one,
    groups of three near-identical prompts promoted 18 % of series at alpha 5 %. Several answers to one prompt stay
    separate: the tests cluster them.
    """
    members: dict[str, list[int]] = {}
    for place, name in enumerate(clusters):
        if name:
            members.setdefault(name, []).append(place)
    merged: dict[int, Item] = {}
    dropped: set[int] = set()
    for name, places in members.items():
        group = [items[place] for place in places]
        prompts = {item.prompt if isinstance(item, RatedAnswer) else str(i) for i, item in enumerate(group)}
        if len(prompts) > 1:
            merged[places[0]] = _mean(name, group)
            dropped |= set(places[1:])
    return [merged.get(place, item) for place, item in enumerate(items) if place not in dropped]


def _mean(name: str, group: Sequence[Item]) -> Item:
    """Mean figures of a group, in all its slices and with all its raters."""
    rated = [item for item in group if isinstance(item, RatedAnswer)]
    if rated:
        slices = tuple(dict.fromkeys(one for item in group for one in item.slices))
        raters = tuple(dict.fromkeys(one for item in group for one in item.raters))
        value, shift = (
            math.fsum(column) / len(rated)
            for column in zip(*((r.value, r.shift) for r in rated), strict=True)
        )
        return replace(rated[0], prompt=name, value=value, shift=shift, slices=slices, raters=raters)
    return _mean_case([item for item in group if isinstance(item, Case)])


def _mean_case(cases: Sequence[Case]) -> Case:
    """Mean figures of cases, and per slice if those differ."""
    slices = tuple(dict.fromkeys(one for case in cases for one in case.slices))
    raters = tuple(dict.fromkeys(one for case in cases for one in case.raters))
    own, other = _figures(cases)
    parts = (
        (name, *_figures([case.restrict_to_slice(name) for case in cases if name in case.slices]))
        for name in slices
    )
    return Case(own, other, slices, raters, tuple(part for part in parts if part[1:] != (own, other)))


def _figures(cases: Sequence[Case]) -> tuple[float, float]:
    own, other = (
        math.fsum(side) / len(cases)
        for side in zip(*((c.policy_score, c.reference_score) for c in cases), strict=True)
    )
    return own, other
