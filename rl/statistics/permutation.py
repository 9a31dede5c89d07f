"""Monte-Carlo permutation tests: one-sided p-values that never err more often than they say. Pure, deterministic.

Sources: Phipson & Smyth, Stat. Appl. Genet. Mol. Biol. 9 (2010) 39 (the observed outcome counts as one draw, so p is
never 0); Besag & Clifford, Biometrika 78 (1991) 301-304 (drawing ends early where nothing is to be seen).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import scipy

DRAWS = 4_999
"""Permutations drawn at most, unless a smaller chance is asked about: the least p is 1 in 5,000."""

EXCEEDANCES = 50
"""Drawing ends once so many permutations are as extreme as what was observed."""

CELLS = 1_000_000
"""Numbers held at once: permutations times observations."""

LARGE = 3_000
"""Observations from which a studentised statistic is compared with Student's t instead: permuting tells nothing
more."""

ALL_SIGNS = 12
"""Differences up to which every one of the sign patterns is looked at."""

Draw = Callable[[np.random.Generator, int], np.ndarray]
"""(random, count) -> so many values of the statistic under permutation."""


def draws_for(alpha: float) -> int:
    """Draws that tell a p-value of `alpha` from a larger one: ten times as many as make so small a one possible."""
    return max(DRAWS, min(round(10 / alpha), 99_999))


def seed_of(*columns: np.ndarray) -> int:
    """A seed by the data themselves: the same data are always permuted alike, and other data independently of them.

    One seed for all would judge all policies by one set of permutations, and where that set is unlucky err for all.
    """
    return zlib.crc32(b"".join(np.ascontiguousarray(column, float).tobytes() for column in columns))


def monte_carlo_p(
    observed: float, draw: Draw, observations: int, *, draws: int = DRAWS, seed: int = 0
) -> float:
    """Chance of a statistic of at least `observed` under random permutation; always the same for the same data.

    p = EXCEEDANCES / draws where so many are reached early (Besag & Clifford, eq. 2), else (exceedances + 1) / (draws +
    1). Both are valid p-values: P(p <= a) <= a for every a where the permutations are exchangeable with the data.
    """
    random = np.random.default_rng(seed)
    # rounding in a sum must not make an equal outcome a lesser one
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
    """One-sided p that paired differences are no larger than 0 on average, by flipping their signs at random.

    Exact where the differences are symmetric about 0 under the hypothesis, and right in large samples wherever their
    mean is 0 (the sum over flipped signs is a studentised statistic, as flips leave the sum of squares as it is).
    Source: Fisher, The Design of Experiments (1935) section 21; Janssen, J. Stat. Plan. Inference 81 (1999) 133-148. 1
    without a difference that is not 0. Raises ValueError on a value that is not finite.
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
    # the largest may be 1e-300 or 1e300: only proportions matter
    values = values / np.abs(values).max()
    if len(values) <= ALL_SIGNS:
        signs = 1.0 - 2.0 * (np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1)
        return float((signs @ values >= values.sum() - 1e-9).mean())

    def draw(random: np.random.Generator, count: int) -> np.ndarray:
        signs = random.integers(0, 2, (count, len(values)), dtype=np.int8)
        sums: np.ndarray = (2.0 * signs - 1.0) @ values
        return sums

    return monte_carlo_p(float(values.sum()), draw, len(values), draws=draws, seed=seed_of(values))
