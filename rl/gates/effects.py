"""Effects of a policy against another on held-out evidence: what it is ahead by, the interval, the tests. Pure.

Three forms. Right or wrong on both sides (pairs, tests, corrections of structured agents): McNemar's table. A figure on
both sides (log-likelihood of what people wrote, rewards): the mean paired difference. A value people gave and how far
the policy moved that answer (labels, outcomes): concordance.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import scipy

from rl.gates.clusters import one_per_cluster, one_per_prompt
from rl.gates.evidence_kinds import KINDS, REWARDS, UNITS, all_alike, lead_kind, telling_counts
from rl.gates.report import Case, Evidence, GateBounds, Item, RatedAnswer
from rl.statistics import Difference, mcnemar_unconditional, mean_interval, paired_difference
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
        """The figure of the policy and of its rival; for a concordance the rival is a coin, 0.5."""
        ...

    @property
    def unit(self) -> str:
        """`points` for differences of shares in [0, 1]; else the unit of the figure."""
        ...

    def interval(self, confidence: float) -> Difference: ...

    def better(self, alpha: float = 0.05) -> float:
        """One-sided p that the policy is no better; `alpha`: the level it will be held against."""
        ...

    def worse(self, alpha: float = 0.05) -> float:
        """One-sided p that it is no worse."""
        ...

    def p_larger(self, rest: Effect) -> float:
        """One-sided p that this effect is no larger than that of other, independent evidence."""
        ...


def points(share: float) -> str:
    """A difference of shares in percentage points, with as many digits as show on which side of 0 it lies."""
    value = 100 * share
    return f"{value:+.1f} points" if abs(value) >= 0.05 or value == 0 else f"{value:+.2g} points"


def amount(effect: Effect, value: float) -> str:
    """A difference with its unit."""
    return points(value) if effect.unit == "points" else f"{value:+.3f} {effect.unit}"


@dataclass(frozen=True)
class TableEffect:
    """Right or wrong on both sides: Newcombe's interval, the exact unconditional test, a coin on the discordant."""

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

    def p_larger(self, rest: Effect) -> float:
        assert isinstance(rest, TableEffect)
        table = [[self.wins, self.losses], [rest.wins, rest.losses]]
        return float(scipy.stats.fisher_exact(table, alternative="greater").pvalue)


def binomial_luck(wins: int, losses: int) -> float:
    """Chance of so many wins or more among the discordant cases of two equal policies (exact binomial)."""
    return float(scipy.stats.binom.sf(wins - 1, wins + losses, 0.5)) if wins + losses else 1.0


@dataclass(frozen=True)
class MeanEffect:
    """A figure on both sides: the mean paired difference, Student's t interval, sign flips and Gaffke's bound.

    Sign flips are exact where differences are symmetric when nobody is better; the bound holds where they are not.
    """

    differences: tuple[float, ...]
    policy_mean: float
    reference_mean: float
    unit: str
    minimum: float | None = None
    """The lowest difference there can be; None where there is no such bound."""

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
    """Values people gave against how far the policy moved each answer: gain over a coin, clusters are prompts."""

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

    def p_larger(self, rest: Effect) -> float:
        assert isinstance(rest, ConcordanceEffect)
        error = math.hypot(self.concordance.error, rest.concordance.error)
        return float(scipy.stats.norm.sf((self.value - rest.value) / error)) if error else 1.0


def effect_of(kind: str, items: Sequence[Item], among: Sequence[Item] | None = None) -> Effect | None:
    """The effect that a kind of evidence shows; None without an item, or where nothing tells better from worse.

    among: all the evidence of the kind where `items` is a part of it; the form of the effect is that of the whole.
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
    # of cases that are right or wrong, those of one cluster were averaged: shares still, and no log-likelihood is one
    shares = all(0 <= side <= 1 for case in cases for side in (case.policy_score, case.reference_score))
    return MeanEffect(
        tuple(case.policy_score - case.reference_score for case in cases),
        math.fsum(case.policy_score for case in cases) / n,
        math.fsum(case.reference_score for case in cases) / n,
        "points" if shares and kind != REWARDS else UNITS.get(kind, "points"),
        -1.0 if shares else None,
    )


def items_of(stored: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Stored items of one kind as a gate's rules take them: the pairs of a prompt are one, and so is a cluster."""
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
    """Both right, own alone, other alone, neither."""
    own_only = sum(bool(case.policy_score and not case.reference_score) for case in cases)
    other_only = sum(bool(case.reference_score and not case.policy_score) for case in cases)
    both = sum(bool(case.policy_score and case.reference_score) for case in cases)
    return both, own_only, other_only, len(cases) - both - own_only - other_only


def prompts_of(items: Sequence[Item]) -> int:
    """Distinct held-out prompts among items: a case is one prompt, rated answers say to which they belong."""
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
