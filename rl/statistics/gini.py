"""Concordance of a score with values people gave: do better rated answers score higher? Clusters, interval, test. Pure.

The statistic is half the Gini correlation of values and scores (Schechtman & Yitzhaki, Commun. Stat. 16 (1987)
207-231): with thumbs it is the area under the ROC curve minus one half, with stars and scores every two answers count
by how much better the one was rated (`rl.statistics.ranking` counts every two alike). Answers to one prompt are one
cluster (Obuchowski, Biometrics 53 (1997) 567-578).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

from rl.statistics.intervals import Difference
from rl.statistics.permutation import DRAWS, LARGE, monte_carlo_p, seed_of


@dataclass(frozen=True)
class GiniConcordance:
    """Distance of P(score higher | rated better) above one half, over answers to `clusters` prompts."""

    gain: float
    """In [-0.5, 0.5]; 0 where scores have nothing to do with values."""
    error: float
    """Standard error of `gain`, between clusters."""
    effective: float
    """Independent draws a coin would need to be known as well as `gain`: the interval rests on them."""
    clusters: int

    def interval(self, confidence: float = 0.95) -> Difference:
        """Wilson's score interval at the effective number of draws, which keeps a width where all agree and `error`
        is 0: at its ends an area under the curve has the interval of a proportion (Newcombe, Stat. Med. 25 (2006)
        559-573, reaches the same by another way)."""
        share, n = 0.5 + self.gain, self.effective
        z = float(scipy.stats.t.ppf(0.5 + confidence / 2, max(self.clusters - 1, 1)))
        centre, scale = share + z * z / (2 * n), 1 + z * z / n
        spread = z * math.sqrt(max(share * (1 - share), 0.0) / n + z * z / (4 * n * n))
        return Difference(
            self.gain,
            max((centre - spread) / scale, 0.0) - 0.5,
            min((centre + spread) / scale, 1.0) - 0.5,
        )


@dataclass(frozen=True)
class _Order:
    """Observations in the order of their scores; where scores tie, the first and the last place of the tie."""

    first: np.ndarray
    last: np.ndarray

    @classmethod
    def of(cls, ordered: np.ndarray) -> _Order:
        """From scores that are sorted already."""
        return cls(np.searchsorted(ordered, ordered, "left"), np.searchsorted(ordered, ordered, "right"))

    @property
    def rank_difference(self) -> np.ndarray:
        """Per place, how many score lower minus how many score higher."""
        return self.first - (len(self.first) - self.last)


def gini_concordance(
    values: Sequence[float], scores: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> GiniConcordance | None:
    """The concordance of scores with values, one of each per answer; `clusters` names the prompt of each.

    None where all values are the same: nothing tells better from worse. Raises ValueError on a value that is not
    finite.
    """
    value_array, order, members = _sort_by_score(values, scores, clusters)
    spread = _spread(value_array)
    if not spread.sum():
        return None
    n, groups = len(value_array), int(members.max()) + 1
    gini, variance = _correlations(value_array[None], spread[None], order, members)
    # under no association each answer's place is drawn at random: the variance of a linear rank statistic
    null = float(
        ((value_array - value_array.mean()) ** 2).sum() * (order.rank_difference.astype(float) ** 2).sum()
    )
    null = null / max(n - 1, 1) / float(spread.sum()) ** 2
    gain, error = float(gini[0]) / 2, math.sqrt(float(variance[0])) / 2
    share = 0.5 + gain
    # share (1 - share) / error^2 hardly changes with the share, so its value at one half bounds it: n draws at most
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
    """One-sided p that scores are no higher where people rated better; for the other side give -scores.

    Values are permuted among clusters of one size and within them; the statistic is gain over its standard error. So
    the test is exact where values have nothing to do with scores, and right in large samples also where only the gain
    is 0 but, say, the scores of liked answers spread further. Sources: Neubert & Brunner, Comput. Stat. Data Anal. 51
    (2007) 5192-5204; Chung & Romano, J. Stat. Plan. Inference 168 (2016) 97-105. 1 where all values are the same.
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
"""Variance below which all agree; a perfect order then counts as more extreme than any other."""


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
    numbers: dict[Any, int] = {}
    names = range(len(value_array)) if clusters is None else clusters
    members = np.array([numbers.setdefault(name, len(numbers)) for name in names])
    if len(members) != len(value_array):
        raise ValueError(f"expected a cluster for each of {len(value_array)} scores, found {len(members)}")
    places = np.argsort(score_array, kind="stable")
    return value_array[places], _Order.of(score_array[places]), members[places]


def _spread(value_array: np.ndarray) -> np.ndarray:
    """Per value the sum of its distances to all the others."""
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

    The variance is the infinitesimal jackknife of a ratio of two U-statistics; with thumbs and one answer per prompt it
    is DeLong's (DeLong, DeLong & Clarke-Pearson, Biometrics 44 (1988) 837-845) but for n against n - 1 below the line.
    """
    total = value_array.sum(1, keepdims=True)
    sums = np.concatenate([np.zeros((len(value_array), 1)), np.cumsum(value_array, 1)], 1)
    # per answer: what all its comparisons add, (v_i - v_j) sign(s_i - s_j) over j
    parts = value_array * order.rank_difference - (sums[:, order.first] - (total - sums[:, order.last]))
    whole = spread.sum(1)  # each comparison stands there twice, as in `parts`
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
    """Places of the clusters' answers, [clusters, size] for each size there is."""
    order = np.argsort(members, kind="stable")
    sizes = np.bincount(members)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    return [
        np.array([order[starts[k] : starts[k] + size] for k in np.flatnonzero(sizes == size)])
        for size in np.unique(sizes)
    ]


def _permute(random: np.random.Generator, count: int, blocks: list[np.ndarray], n: int) -> np.ndarray:
    """Rows of places [count, n]: which answer's value stands at each place."""
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
