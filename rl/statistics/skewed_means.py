"""Tests and intervals of a mean whose distribution may be lopsided: rare large values behind many small ones. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy

from rl.statistics.permutation import CELLS, DRAWS, LARGE, monte_carlo_p, seed_of

INTERVAL_DRAWS = 2_000
"""Draws for the bounds of an interval: the share of 2.5 % is then known to a third of a percent."""


def lopsided_mean_p(values: Sequence[float], least: float | None = None, *, draws: int = DRAWS) -> float:
    """One-sided p that the mean of independent values, none below `least`, is 0 or less.

    Gaffke's bound: the chance that values weighted by a flat Dirichlet draw, with one more value of `least` among them,
    sum to 0 or less. Of two values it is the exact binomial bound (Clopper & Pearson); of more it is conjectured never
    to err more often than it says, and no case is known where it does. Student's t and sign flips do: they cannot see
    losses of which the sample holds few. Without `least` the worst that may come is as large as the largest value seen.
    Sources: Gaffke, Statistics 39 (2005) 391-405; Learned-Miller & Thomas, arXiv:1905.06208. 1 for no value above 0.
    Raises ValueError on a value that is not finite or is below `least`.
    """
    sample = np.asarray(values, float)
    if not np.isfinite(sample).all():
        raise ValueError("expected finite values, found NaN or infinity")
    if not len(sample) or sample.max() <= 0:
        return 1.0
    worst = -float(np.abs(sample).max()) if least is None else least
    if sample.min() < worst - 1e-9:
        raise ValueError(f"expected values of at least {worst:g}, found {sample.min():g}")
    if len(sample) > LARGE:
        error = float(sample.std(ddof=1)) / len(sample) ** 0.5
        return float(scipy.stats.t.sf(float(sample.mean()) / error, len(sample) - 1)) if error else 0.0
    weighed = np.append(sample, worst)
    weighed = weighed / np.abs(weighed).max()

    def draw(random: np.random.Generator, count: int) -> np.ndarray:
        sums: np.ndarray = -(random.standard_exponential((count, len(weighed))) @ weighed)
        return sums

    return monte_carlo_p(0.0, draw, len(weighed), draws=draws, seed=seed_of(sample))


def mean_bounds(
    values: Sequence[float] | np.ndarray, least: float, most: float, confidence: float = 0.95
) -> tuple[float, float]:
    """Bounds (low, high) of the mean of independent values in [least, most], each missed by (1 - confidence) / 2.

    Gaffke's bound of `lopsided_mean_p`, once from each side. `-inf` and `inf` are a side of which nothing is known: its
    bound is infinite too. The same values always have the same bounds. Raises ValueError for no values, and for values
    that are not finite or lie beyond [least, most].
    """
    sample = np.asarray(values, float)
    if not len(sample) or not np.isfinite(sample).all():
        raise ValueError(
            f"expected finite values, found {len(sample)} with {np.count_nonzero(~np.isfinite(sample))} not"
        )
    slack = 1e-9 * max(1.0, float(np.abs(sample).max()))
    if sample.min() < least - slack or sample.max() > most + slack:
        raise ValueError(
            f"expected values in [{least:g}, {most:g}], found {sample.min():g} to {sample.max():g}"
        )
    share = (1 - confidence) / 2
    low = _lower_bound(sample - least, share) + least if np.isfinite(least) else -np.inf
    high = most - _lower_bound(most - sample, share) if np.isfinite(most) else np.inf
    return float(low), float(high)


def _lower_bound(values: np.ndarray, share: float) -> float:
    """Gaffke's lower bound of the mean of values of at least 0, missed by `share`."""
    positive = values[values > 0]
    # zeros, and the one that is added, weigh by their number alone: a sum of so many draws is a Gamma draw
    zeros = len(values) - len(positive) + 1
    random = np.random.default_rng(seed_of(values))
    means = []
    rows = max(1, min(INTERVAL_DRAWS, CELLS // max(len(positive), 1)))
    for start in range(0, INTERVAL_DRAWS, rows):
        drawn = random.standard_exponential((min(rows, INTERVAL_DRAWS - start), len(positive)))
        means.append(drawn @ positive / (drawn.sum(axis=1) + random.standard_gamma(zeros, len(drawn))))
    return float(np.quantile(np.concatenate(means), share))
