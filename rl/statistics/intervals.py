"""Pure statistics over counts and small samples: intervals, paired comparison, calibration. numpy and scipy only."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import scipy  # loads `scipy.stats` (half a second) on first use
from numpy.typing import NDArray

Figure: TypeAlias = dict[str, float | None]
"""A number with its interval as JSON: `value`, `low`, `high`, and `n` where it is a share."""


@dataclass(frozen=True)
class Interval:
    """A value with its confidence interval from `n` observations; None if unknown."""

    value: float | None
    low: float | None
    high: float | None
    n: int

    def as_dict(self) -> Figure:
        return {"value": self.value, "low": self.low, "high": self.high, "n": self.n}


@dataclass(frozen=True)
class Difference:
    """A difference with its confidence interval."""

    value: float
    low: float
    high: float

    def as_dict(self) -> Figure:
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
    return NormalDist().inv_cdf(0.5 + confidence / 2)


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


@functools.lru_cache(maxsize=4096)
def not_inferior_p(wins: int, losses: int, n: int, margin: float) -> float:
    """One-sided exact p that of two policies judged on the same n cases the first loses `margin` or more.

    Outcomes are ordered by the score statistic of the hypothesis "wins - losses = -margin" (shares). p is the
    probability of outcomes at least as extreme, maximised over the share of losses in its exact interval of confidence
    1 - GAMMA, plus GAMMA.
    Sources: Tango, Stat. Med. 17 (1998) 891-908 (the statistic); Hsueh, Liu & Chen, Biometrics 57 (2001) 478-483
    (unconditional); Berger & Boos (1994) as above.
    """
    if min(wins, losses, n - wins - losses) < 0 or not 0 < margin < 1:
        raise ValueError(
            f"expected wins and losses within {n} cases and a margin in (0, 1), found {wins}, {losses}, {margin}"
        )
    observed = float(_tango(np.array(wins), np.array(losses), n, margin)) - 1e-9
    lost = np.arange(n + 1)
    # fewest wins at each count of losses that are as extreme; the statistic rises with wins
    low, high = np.zeros(n + 1, int), n - lost + 1
    while (low < high).any():
        middle = (low + high) // 2
        extreme = _tango(np.minimum(middle, n - lost), lost, n, margin) >= observed
        open_ = low < high
        low, high = np.where(open_ & ~extreme, middle + 1, low), np.where(open_ & extreme, middle, high)
    least = scipy.stats.beta.ppf(GAMMA / 2, losses, n - losses + 1) if losses else 0.0
    most = scipy.stats.beta.ppf(1 - GAMMA / 2, losses + 1, n - losses) if losses < n else 1.0
    ends = np.clip([least, most], margin, (1 + margin) / 2)
    shares = np.linspace(ends[0], ends[1], SHARES)[:, None]
    tails = scipy.stats.binom.sf(low - 1, n - lost, np.clip((shares - margin) / (1 - shares), 0, 1))
    chances = (scipy.stats.binom.pmf(lost, n, shares) * tails).sum(1)
    return min(1.0, float(chances.max()) + GAMMA)


def _tango(wins: NDArray[np.int64], losses: NDArray[np.int64], n: int, margin: float) -> NDArray[np.float64]:
    """Score statistic of "share of wins minus share of losses = -margin", with the estimate under it."""
    b = -(wins + losses) - (2 * n - wins + losses) * margin
    c = losses * margin * (1 + margin)
    share = (np.sqrt(np.maximum(b * b - 8 * n * c, 0)) - b) / (4 * n)
    variance = n * (2 * share - margin * (1 + margin))
    found: NDArray[np.float64] = (wins - losses + n * margin) / np.sqrt(np.maximum(variance, 1e-12))
    return found


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


def calibration_curve(
    predicted: Sequence[float], observed: Sequence[float], bins: int = 10
) -> list[dict[str, float]]:
    """Reliability diagram: {predicted, observed, count} per non-empty bin of equal width over [0, 1].

    predicted in [0, 1]; observed 0, 1 or a share. Source: Niculescu-Mizil & Caruana 2005.
    """
    held: dict[int, list[tuple[float, float]]] = {}
    for p, o in zip(predicted, observed, strict=True):
        held.setdefault(min(int(p * bins), bins - 1), []).append((p, o))
    return [
        {
            "predicted": sum(p for p, _ in pairs) / len(pairs),
            "observed": sum(o for _, o in pairs) / len(pairs),
            "count": float(len(pairs)),
        }
        for _, pairs in sorted(held.items())
    ]


def expected_calibration_error(
    predicted: Sequence[float], observed: Sequence[float], bins: int = 10
) -> float:
    """Mean distance between predicted and observed over the bins, weighted by their counts; NaN without any.

    Source: Naeini et al. 2015 (AAAI), eq. 3.
    """
    curve = calibration_curve(predicted, observed, bins)
    total = sum(bin["count"] for bin in curve)
    if not total:
        return math.nan
    return sum(bin["count"] * abs(bin["predicted"] - bin["observed"]) for bin in curve) / total
