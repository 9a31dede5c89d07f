"""Concordance: do better rated answers get higher scores? Intervals and tests clustered by prompt. Pure.

`gini_concordance` is half the Gini correlation of values and scores (Schechtman & Yitzhaki, Commun. Stat. 16 (1987)
207-231): with thumbs the area under the ROC curve minus 1/2; with stars and scores a pair of answers weighs by the
difference of their ratings. `concordance` (Harrell's C) weighs all pairs alike. Answers to one prompt are one cluster
(Obuchowski, Biometrics 53 (1997) 567-578).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from rl.statistics.intervals import Difference, Interval, wilson_bounds
from rl.statistics.permutation import DRAWS, LARGE, monte_carlo_p, seed_of


@dataclass(frozen=True)
class GiniConcordance:
    """P(score higher | rated better) minus 1/2, over answers to `clusters` prompts."""

    gain: float
    """In [-0.5, 0.5]; 0 if scores and values are unrelated."""
    error: float
    """Standard error of `gain`, between clusters."""
    effective: float
    """Effective sample size: independent coin flips that would be known as well as `gain`."""
    clusters: int

    def interval(self, confidence: float = 0.95) -> Difference:
        """Wilson's score interval at the effective sample size. It keeps a width if all agree and `error` is 0
        (Newcombe, Stat. Med. 25 (2006) 559-573, for areas under the curve)."""
        z = float(scipy.stats.t.ppf(0.5 + confidence / 2, max(self.clusters - 1, 1)))
        low, high = wilson_bounds(0.5 + self.gain, self.effective, z)
        return Difference(self.gain, low - 0.5, high - 0.5)


@dataclass(frozen=True)
class _Order:
    """Ranks of observations sorted by score: of a tie its first and its last rank."""

    first: np.ndarray
    last: np.ndarray

    @classmethod
    def of(cls, ordered: np.ndarray) -> _Order:
        """The ranks of sorted scores."""
        return cls(np.searchsorted(ordered, ordered, "left"), np.searchsorted(ordered, ordered, "right"))

    @property
    def rank_difference(self) -> np.ndarray:
        """Per observation: how many score lower minus how many score higher."""
        return self.first - (len(self.first) - self.last)


def gini_concordance(
    values: Sequence[float], scores: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> GiniConcordance | None:
    """The concordance of scores with values, one of each per answer; `clusters` names each answer's prompt.

    None if all values are equal. Raises ValueError on a value that is not finite.
    """
    value_array, order, members = _sort_by_score(values, scores, clusters)
    spread = _spread(value_array)
    if not spread.sum():
        return None
    n, groups = len(value_array), int(members.max()) + 1
    gini, variance = _correlations(value_array[None], spread[None], order, members)
    # variance of a linear rank statistic if scores and values are unrelated
    null = float(
        ((value_array - value_array.mean()) ** 2).sum() * (order.rank_difference.astype(float) ** 2).sum()
    )
    null = null / max(n - 1, 1) / float(spread.sum()) ** 2
    gain, error = float(gini[0]) / 2, math.sqrt(float(variance[0])) / 2
    share = 0.5 + gain
    # share (1 - share) / error^2 hardly changes with the share, so its value at 1/2 bounds it
    coin = 0.25 / max(null, 1e-12)
    effective = min(share * (1 - share) / error**2, coin) if error > 0 else coin
    return GiniConcordance(gain, error, max(effective, 1.0), groups)


def gini_concordance_p(
    values: Sequence[float],
    scores: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    draws: int = DRAWS,
) -> float:
    """One-sided p that better rated answers do not score higher; 1 if all values are equal. Pass -scores for the other
    side.

    Permutes values among clusters of equal size and within them; the statistic is gain over its standard error. Exact
    if values and scores are unrelated, asymptotically right if only the gain is 0 (e.g. liked answers spread further).
    Sources: Neubert & Brunner, Comput. Stat. Data Anal. 51 (2007) 5192-5204; Chung & Romano, J. Stat. Plan. Inference
    168 (2016) 97-105.
    """
    value_array, order, members = _sort_by_score(values, scores, clusters)
    spread = _spread(value_array)
    if not spread.sum():
        return 1.0
    gini, variance = _correlations(value_array[None], spread[None], order, members)
    observed = float(gini[0]) / math.sqrt(max(float(variance[0]), _MIN_VARIANCE))
    groups = int(members.max()) + 1
    if groups > LARGE:
        return float(scipy.stats.t.sf(observed, groups - 1))
    blocks = _blocks(members)

    def draw(random: np.random.Generator, count: int) -> np.ndarray:
        places = _permute(random, count, blocks, len(value_array))
        gini, variance = _correlations(value_array[places], spread[places], order, members)
        statistics: np.ndarray = gini / np.sqrt(np.maximum(variance, _MIN_VARIANCE))
        return statistics

    return monte_carlo_p(
        observed, draw, len(value_array), draws=draws, seed=seed_of(value_array, order.first, members)
    )


_MIN_VARIANCE = 1e-12
"""Floor of the variance, so that a perfect order is the most extreme."""


def _sort_by_score(
    values: Sequence[float], scores: Sequence[float], clusters: Sequence[Hashable] | None
) -> tuple[np.ndarray, _Order, np.ndarray]:
    """Values, order and cluster numbers, sorted by score."""
    value_array, score_array = np.asarray(values, float), np.asarray(scores, float)
    if value_array.shape != score_array.shape or not len(value_array):
        raise ValueError(
            f"expected a value for each of at least one score, found {value_array.shape} and {score_array.shape}"
        )
    if not (np.isfinite(value_array).all() and np.isfinite(score_array).all()):
        raise ValueError("expected finite values and scores, found NaN or infinity")
    numbers: dict[Hashable, int] = {}
    names = range(len(value_array)) if clusters is None else clusters
    members = np.array([numbers.setdefault(name, len(numbers)) for name in names])
    if len(members) != len(value_array):
        raise ValueError(f"expected a cluster for each of {len(value_array)} scores, found {len(members)}")
    places = np.argsort(score_array, kind="stable")
    return value_array[places], _Order.of(score_array[places]), members[places]


def _spread(value_array: np.ndarray) -> np.ndarray:
    """Per value the sum of its distances to all others."""
    places = np.argsort(value_array, kind="stable")
    ordered, n = value_array[places], len(value_array)
    below = np.concatenate([[0.0], np.cumsum(ordered)[:-1]])
    numbers = np.arange(n)
    apart = ordered * numbers - below + (ordered.sum() - below - ordered) - ordered * (n - 1 - numbers)
    spread = np.empty(n)
    spread[places] = np.where(apart > 1e-12 * max(1.0, float(np.abs(ordered).max())) * n, apart, 0.0)
    return spread


def _correlations(
    value_array: np.ndarray, spread: np.ndarray, order: _Order, members: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Gini correlations of rows of values [rows, answers] with the order, and their variances between clusters.

    The variance is the infinitesimal jackknife of a ratio of two U-statistics. With thumbs and one answer per prompt it
    is DeLong's (Biometrics 44 (1988) 837-845) with n in place of n - 1.
    """
    total = value_array.sum(1, keepdims=True)
    sums = np.concatenate([np.zeros((len(value_array), 1)), np.cumsum(value_array, 1)], 1)
    # per answer i: sum over j of (v_i - v_j) sign(s_i - s_j)
    parts = value_array * order.rank_difference - (sums[:, order.first] - (total - sums[:, order.last]))
    whole = spread.sum(1)  # counts each pair twice, as `parts` does
    gini = parts.sum(1) / whole
    influence = 2 * (parts - gini[:, None] * spread) / whole[:, None]
    groups = int(members.max()) + 1
    if groups < len(members):
        summed = np.zeros((len(value_array), groups))
        np.add.at(summed.T, members, influence.T)
        influence = summed
    variance = (influence**2).sum(1) * (groups / max(groups - 1, 1))
    return gini, variance


def _blocks(members: np.ndarray) -> list[np.ndarray]:
    """Indices of the clusters' answers: one array [clusters, size] per cluster size."""
    order = np.argsort(members, kind="stable")
    sizes = np.bincount(members)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    return [
        np.array([order[starts[k] : starts[k] + size] for k in np.flatnonzero(sizes == size)])
        for size in np.unique(sizes)
    ]


def _permute(random: np.random.Generator, count: int, blocks: list[np.ndarray], n: int) -> np.ndarray:
    """`count` permutations [count, n]: the index of the answer whose value goes to each place."""
    found = np.empty((count, n), int)
    for block in blocks:
        clusters, size = block.shape
        drawn = np.tile(np.arange(clusters), (count, 1))
        drawn = random.permuted(drawn, axis=1)
        places = block[drawn]  # [count, clusters, size]
        if size > 1:
            places = random.permuted(places, axis=2)
        found[:, block.reshape(-1)] = places.reshape(count, -1)
    return found


MAX_ROWS = 2000
"""Most rows ranked against each other; the first ones count."""


@dataclass(frozen=True)
class Ranking:
    """Ranking quality of scores over responses that people valued."""

    share: Interval
    """Share of pairs ranked as people did, a tie counting half; n is the number of rows."""
    pair_count: int
    """Pairs of rows with different values."""


def concordance(
    values: Sequence[float], scores: Sequence[float], prompts: Sequence[str], confidence: float = 0.95
) -> Ranking:
    """Harrell's C of scores against people's values; with thumbs it is the area under the ROC curve.

    Variance by the jackknife over prompts. The interval is Wilson's at the effective sample size of that variance, at
    most that of independent rows, so that a perfect ranking of few rows is not certain. Sources: Harrell et al., JAMA
    247 (1982) 2543; Arvesen, Ann. Math. Stat. 40 (1969) 2076 (jackknife of U-statistics); Korn & Graubard, Survey
    Methodology 24 (1998) 193 (interval).
    """
    table = _Comparisons.of(values, scores, prompts)
    if table is None:
        return Ranking(Interval(None, None, None, 0), 0)
    share = table.share
    replicates = table.jackknife()
    groups = len(replicates)
    variance = (
        (groups - 1) / groups * float(((replicates - replicates.mean()) ** 2).sum()) if groups > 1 else 0.0
    )
    # at most the effective size at no association, reduced for prompts with several rows
    most = min(3 * table.pair_count / (table.rows + 1), 1.5 * table.rows) * groups / table.rows
    equivalent = min(share * (1 - share) / variance, most) if variance > 0 else most
    equivalent = max(equivalent, 1.0)
    z = float(scipy.stats.t.ppf(0.5 + confidence / 2, max(groups - 1, 1)))
    low, high = wilson_bounds(share, equivalent, z)
    return Ranking(Interval(share, low, high, table.rows), table.pair_count)


@dataclass(frozen=True)
class _Comparisons:
    """Counts over pairs of rows with different values: all, and those with a row of each prompt."""

    concordant: float
    pair_count: int
    rows: int
    concordant_by_prompt: np.ndarray
    pair_count_by_prompt: np.ndarray

    @property
    def share(self) -> float:
        return self.concordant / self.pair_count

    @classmethod
    def of(
        cls, values: Sequence[float], scores: Sequence[float], prompts: Sequence[str]
    ) -> _Comparisons | None:
        y, s = np.asarray(values[:MAX_ROWS], dtype=float), np.asarray(scores[:MAX_ROWS], dtype=float)
        order = np.sign(y[:, None] - y[None, :])
        agree = (order * np.sign(s[:, None] - s[None, :]) + 1) / 2 * (order != 0)
        comparable = (order != 0).astype(float)
        if not comparable.any():
            return None
        names, codes = np.unique(np.asarray(prompts[:MAX_ROWS]), return_inverse=True)
        member = np.zeros((len(names), len(y)))
        member[codes, np.arange(len(y))] = 1.0

        def by_prompt(table: np.ndarray) -> np.ndarray:
            touching = member @ table.sum(axis=1)
            within = np.einsum("gi,ij,gj->g", member, table, member, optimize=True) / 2
            counted: np.ndarray = touching - within
            return counted

        return cls(
            float(agree.sum() / 2),
            int(comparable.sum() / 2),
            len(y),
            by_prompt(agree),
            by_prompt(comparable),
        )

    def jackknife(self) -> np.ndarray:
        """The share with each prompt left out in turn; the share itself if nothing would be left."""
        compared = self.pair_count - self.pair_count_by_prompt
        safe = np.where(compared > 0, compared, 1.0)
        found: np.ndarray = np.where(
            compared > 0, (self.concordant - self.concordant_by_prompt) / safe, self.share
        )
        return found
