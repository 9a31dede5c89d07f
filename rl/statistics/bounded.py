"""Tests of a mean whose distribution may be lopsided: rare large losses behind a small gain on all the rest. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy

from rl.statistics.permutation import DRAWS, LARGE, monte_carlo_p, seed_of


def lopsided_mean_p(values: Sequence[float], least: float | None = None, *, draws: int = DRAWS) -> float:
    """One-sided p that the mean of independent values, none below `least`, is 0 or less.

    Gaffke's bound: the chance that values weighted by a flat Dirichlet draw, with one more value of `least` among them,
    sum to 0 or less. Of two values it is the exact binomial bound (Clopper & Pearson); of more it is conjectured never
    to err more often than it says, and no case is known where it does. Student's t and sign flips do: they cannot see
    losses of which the sample holds few. Without `least` the worst that may come is as large as the largest value seen.
    Sources: Gaffke, Statistics 39 (2005) 391-405; Learned-Miller & Thomas, arXiv:1905.06208. 1 for no value above 0.
    Raises ValueError on a value that is not finite or is below `least`.
    """
    found = np.asarray(values, float)
    if not np.isfinite(found).all():
        raise ValueError("expected finite values, found NaN or infinity")
    if not len(found) or found.max() <= 0:
        return 1.0
    worst = -float(np.abs(found).max()) if least is None else least
    if found.min() < worst - 1e-9:
        raise ValueError(f"expected values of at least {worst:g}, found {found.min():g}")
    if len(found) > LARGE:
        error = float(found.std(ddof=1)) / len(found) ** 0.5
        return float(scipy.stats.t.sf(float(found.mean()) / error, len(found) - 1)) if error else 0.0
    weighed = np.append(found, worst)
    weighed = weighed / np.abs(weighed).max()

    def draw(random: np.random.Generator, count: int) -> np.ndarray:
        sums: np.ndarray = -(random.standard_exponential((count, len(weighed))) @ weighed)
        return sums

    return monte_carlo_p(0.0, draw, len(weighed), draws=draws, seed=seed_of(found))
