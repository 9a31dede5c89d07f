"""Monte-Carlo tests and bounds of means: valid one-sided p-values, the same for the same data. Pure.

Sources: Phipson & Smyth, Stat. Appl. Genet. Mol. Biol. 9 (2010) 39 (the observed outcome counts as one draw, so p is
never 0); Besag & Clifford, Biometrika 78 (1991) 301-304 (drawing stops early if p is clearly large).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import scipy

DRAWS = 4_999
"""Most permutations drawn, unless `draws_for` asks for more; the smallest p is then 1 in 5,000."""

EXCEEDANCES = 50
"""Drawing stops after this many permutations as extreme as the observation."""

CELLS = 1_000_000
"""Most numbers held at once: permutations times observations."""

LARGE = 3_000
"""Above this many observations Student's t replaces permutation: the two agree."""

ALL_SIGNS = 12
"""Up to this many differences all sign patterns are enumerated."""

Draw = Callable[[np.random.Generator, int], np.ndarray]
"""(random, count) -> `count` values of the statistic under permutation."""


def draws_for(alpha: float) -> int:
    """Draws that can tell a p-value of `alpha` from a larger one: 10 / alpha, between DRAWS and 99,999."""
    return max(DRAWS, min(round(10 / alpha), 99_999))


def seed_of(*columns: np.ndarray) -> int:
    """A seed made of the data: equal data get equal permutations, other data independent ones.

    With one fixed seed an unlucky set of permutations would err for every policy.
    """
    return zlib.crc32(b"".join(np.ascontiguousarray(column, float).tobytes() for column in columns))


def monte_carlo_p(
    observed: float, draw: Draw, observations: int, *, draws: int = DRAWS, seed: int = 0
) -> float:
    """Chance of a statistic of at least `observed` under random permutation.

    p = EXCEEDANCES / draws if that many are reached early (Besag & Clifford, eq. 2), else (exceedances + 1) /
    (draws + 1). Both are valid, P(p <= a) <= a for every a, if the permutations are exchangeable with the data.
    """
    random = np.random.default_rng(seed)
    # a tolerance, so that rounding never makes an equal outcome smaller
    limit = observed - 1e-9 * max(1.0, abs(observed))
    draw_count = exceedances = 0
    count = 100
    while draw_count < draws:
        count = max(1, min(count, draws - draw_count, CELLS // max(observations, 1)))
        extreme = draw(random, count) >= limit
        if exceedances + extreme.sum() >= EXCEEDANCES:
            last = int(np.flatnonzero(extreme)[EXCEEDANCES - exceedances - 1]) + 1
            return EXCEEDANCES / (draw_count + last)
        exceedances += int(extreme.sum())
        draw_count += count
        count *= 2
    return (exceedances + 1) / (draw_count + 1)


def sign_flip_p(differences: Sequence[float], *, draws: int = DRAWS) -> float:
    """One-sided p that the mean of paired differences is at most 0, by random sign flips; 1 if all are 0.

    Exact if the differences are symmetric about 0 under the hypothesis, and asymptotically right for any with mean 0:
    flips keep the sum of squares, so the sum is a studentised statistic.
    Sources: Fisher, The Design of Experiments (1935) section 21; Janssen, J. Stat. Plan. Inference 81 (1999) 133-148.
    Raises ValueError on a value that is not finite.
    """
    values = np.asarray(differences, float)
    if not np.isfinite(values).all():
        raise ValueError("expected finite differences, found NaN or infinity")
    values = values[values != 0]
    if not len(values):
        return 1.0
    if len(values) > LARGE:
        error = float(values.std(ddof=1)) / len(values) ** 0.5
        return float(scipy.stats.t.sf(float(values.mean()) / error, len(values) - 1)) if error else 0.0
    # scaled, because values may be as small as 1e-300 or as large as 1e300
    values = values / np.abs(values).max()
    if len(values) <= ALL_SIGNS:
        signs = 1.0 - 2.0 * (np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1)
        return float((signs @ values >= values.sum() - 1e-9).mean())

    def draw(random: np.random.Generator, count: int) -> np.ndarray:
        signs = random.integers(0, 2, (count, len(values)), dtype=np.int8)
        sums: np.ndarray = (2.0 * signs - 1.0) @ values
        return sums

    return monte_carlo_p(float(values.sum()), draw, len(values), draws=draws, seed=seed_of(values))


# --- Means of lopsided values ---


INTERVAL_DRAWS = 2_000
"""Draws for the bounds of an interval; the 2.5 % tail is then known to a third of a percent."""


def lopsided_mean_p(values: Sequence[float], least: float | None = None, *, draws: int = DRAWS) -> float:
    """One-sided p that the mean of independent values of at least `least` is 0 or less; 1 if no value is above 0.

    For lopsided values, where Student's t and sign flips err: they miss rare large losses. Gaffke's bound is the chance
    that the values and one more of `least`, weighted by a flat Dirichlet draw, sum to 0 or less. For two values it is
    the exact binomial bound (Clopper & Pearson); for more its validity is a conjecture without a known counterexample.
    Without `least` the worst possible value is minus the largest absolute value seen.
    Sources: Gaffke, Statistics 39 (2005) 391-405; Learned-Miller & Thomas, arXiv:1905.06208.
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

    Gaffke's bound (`lopsided_mean_p`) from each side. A side without a limit (`-inf`, `inf`) has an infinite bound.
    Raises ValueError for no values, and for values that are not finite or outside [least, most].
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
    """Gaffke's lower bound of the mean of values >= 0, missed with probability `share`."""
    positive = values[values > 0]
    # the zeros, and the one added, only add weight: the sum of that many exponential draws is a Gamma draw
    zeros = len(values) - len(positive) + 1
    random = np.random.default_rng(seed_of(values))
    means = []
    rows = max(1, min(INTERVAL_DRAWS, CELLS // max(len(positive), 1)))
    for start in range(0, INTERVAL_DRAWS, rows):
        drawn = random.standard_exponential((min(rows, INTERVAL_DRAWS - start), len(positive)))
        means.append(drawn @ positive / (drawn.sum(axis=1) + random.standard_gamma(zeros, len(drawn))))
    return float(np.quantile(np.concatenate(means), share))
