"""Pure statistics over counts and small samples: intervals, paired comparison. numpy and scipy only."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # loads `scipy.stats` (half a second) on first use
from numpy.typing import NDArray


@dataclass(frozen=True)
class Interval:
    """A value with its confidence interval from `n` observations; None if unknown."""

    value: float | None
    low: float | None
    high: float | None
    n: int

    def as_dict(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high, "n": self.n}


@dataclass(frozen=True)
class Difference:
    """A difference with its confidence interval."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Score interval of a proportion, without continuity correction; always within [0, 1].

    Source: Wilson, J. Am. Stat. Assoc. 22 (1927) 209-212; equation (4) in Agresti & Coull, Am. Stat. 52 (1998) 119-126.
    value, low and high are None for n = 0. Raises ValueError unless 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"expected 0 <= successes <= n, found {successes} of {n}")
    if n == 0:
        return Interval(None, None, None, 0)
    low, high = wilson_bounds(successes / n, n, _z(confidence))
    return Interval(successes / n, low, high, n)


def wilson_bounds(share: float, n: float, z: float) -> tuple[float, float]:
    """Wilson's bounds of a share at sample size n, within [0, 1]; exactly 0 or 1 at a share of 0 or 1."""
    centre, scale = share + z * z / (2 * n), 1 + z * z / n
    spread = z * math.sqrt(max(share * (1 - share), 0.0) / n + z * z / (4 * n * n))
    low = 0.0 if share <= 0 else max((centre - spread) / scale, 0.0)
    high = 1.0 if share >= 1 else min((centre + spread) / scale, 1.0)
    return low, high


def _z(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"expected a confidence in (0, 1), found {confidence!r}")
    return float(scipy.stats.norm.ppf(0.5 + confidence / 2))


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided exact p that two paired shares are equal, from the counts of pairs right on one side only.

    Twice the smaller binomial tail at 1/2, at most 1; 1 without such a pair.
    Source: McNemar, Psychometrika 12 (1947) 153-157, in its exact binomial form (Mosteller 1952).
    """
    if b < 0 or c < 0:
        raise ValueError(f"expected counts of at least 0, found {b} and {c}")
    if b + c == 0:
        return 1.0
    return min(1.0, 2 * float(scipy.stats.binom.cdf(min(b, c), b + c, 0.5)))


GAMMA, SHARES = 1e-6, 128
"""Of `mcnemar_unconditional`: chance that the share of discordant cases lies outside its interval, and number of points
tried within it."""


@functools.lru_cache(maxsize=4096)
def mcnemar_unconditional(wins: int, losses: int, n: int) -> float:
    """One-sided exact p that of two policies judged on the same n cases the first is no better.

    Outcomes are ordered by the mid-p of the conditional test. p is the probability of outcomes at least as extreme,
    maximised over the share of discordant cases in its exact interval of confidence 1 - GAMMA, plus GAMMA. Unlike the
    mid-p itself it is exact, and it has more power than the conditional test.
    Sources: Suissa & Shuster, Biometrics 47 (1991) 361-372 (unconditional); Berger & Boos, J. Am. Stat. Assoc. 89
    (1994) 1012-1016 (the interval); Fagerland, Lydersen & Laake, BMC Med. Res. Methodol. 13 (2013) 91 (the mid-p).
    """
    if min(wins, losses, n - wins - losses) < 0:
        raise ValueError(f"expected wins and losses within {n} cases, found {wins} and {losses}")
    discordant = wins + losses
    if wins <= losses:
        return float(scipy.stats.binom.sf(wins - 1, discordant, 0.5)) if discordant else 1.0
    counts = np.arange(1, n + 1)
    observed = _mid_p(np.array(wins), np.array(discordant)) * (1 + 1e-12)
    # the found count may have a larger mid-p, by half its own probability; the next count does not
    least = scipy.stats.binom.isf(observed, counts, 0.5)
    least = np.where(_mid_p(least, counts) <= observed, least, least + 1)
    tails = scipy.stats.binom.sf(least - 1, counts, 0.5)
    low = scipy.stats.beta.ppf(GAMMA / 2, discordant, n - discordant + 1)
    high = scipy.stats.beta.ppf(1 - GAMMA / 2, discordant + 1, n - discordant) if discordant < n else 1.0
    chances = scipy.stats.binom.pmf(counts, n, np.linspace(low, high, SHARES)[:, None]) @ tails
    return min(1.0, float(chances.max()) + GAMMA)


def _mid_p(wins: NDArray[np.int64], discordant: NDArray[np.int64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = scipy.stats.binom.sf(wins, discordant, 0.5)
    return found + 0.5 * scipy.stats.binom.pmf(wins, discordant, 0.5)


def paired_difference(
    both: int, first_only: int, second_only: int, neither: int, confidence: float = 0.95
) -> Difference:
    """First minus second of two proportions measured on the same n cases, with a score interval.

    The arguments count the cases in which both, only the first, only the second, or neither succeeded.
    Source: Newcombe, Statistics in Medicine 17 (1998) 2635-2650, method 10: Wilson limits of the two margins, combined
    with the continuity-corrected correlation phi. Raises ValueError without a case.
    """
    counts = (both, first_only, second_only, neither)
    if min(counts) < 0:
        raise ValueError(f"expected counts of at least 0, found {counts}")
    n = sum(counts)
    if n == 0:
        raise ValueError("expected at least one pair of cases, found none")
    z = _z(confidence)
    first, second = both + first_only, both + second_only
    p1, p2 = first / n, second / n
    l1, u1 = wilson_bounds(p1, n, z)
    l2, u2 = wilson_bounds(p2, n, z)
    phi = _phi_corrected(both, first_only, second_only, neither)
    value = (first_only - second_only) / n
    below = (p1 - l1) ** 2 - 2 * phi * (p1 - l1) * (u2 - p2) + (u2 - p2) ** 2
    above = (p2 - l2) ** 2 - 2 * phi * (p2 - l2) * (u1 - p1) + (u1 - p1) ** 2
    return Difference(value, value - math.sqrt(max(below, 0.0)), value + math.sqrt(max(above, 0.0)))


def _phi_corrected(a: int, b: int, c: int, d: int) -> float:
    """Newcombe's phi-hat: (ad - bc - n/2, floored at 0, where ad > bc; else ad - bc) over the root of the margins."""
    margins = (a + b) * (c + d) * (a + c) * (b + d)
    if margins == 0:
        return 0.0
    product = float(a * d - b * c)
    if product > 0:
        product = max(product - (a + b + c + d) / 2, 0.0)
    return product / math.sqrt(margins)


def mean_interval(
    values: Sequence[float], confidence: float = 0.95, bounds: tuple[float, float] | None = None
) -> Interval:
    """Mean of independent values with Student's t interval, cut to `bounds`, the values' possible range.

    With one value low and high are `bounds`, or None without them; with no value everything is None. Raises ValueError
    on a value that is not finite.
    """
    n = len(values)
    if not all(math.isfinite(value) for value in values):
        raise ValueError("expected finite values, found NaN or infinity")
    if n == 0:
        return Interval(None, None, None, 0)
    mean = math.fsum(values) / n
    if n == 1:
        low, high = bounds if bounds is not None else (None, None)
        return Interval(mean, low, high, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = float(scipy.stats.t.ppf(0.5 + confidence / 2, n - 1)) * math.sqrt(variance / n)
    low, high = mean - half, mean + half
    if bounds is not None:
        low, high = max(low, bounds[0]), min(high, bounds[1])
    return Interval(mean, low, high, n)
