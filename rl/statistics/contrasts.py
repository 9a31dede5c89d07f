"""Contrasts between arms: differences, always-valid intervals, the best arm, the split, adjustment by the past. Pure.

An always-valid interval covers the true difference at ALL times at once with probability 1 - alpha, so one may look
every minute and stop at any look (`rl.statistics.sequential`).

Adjustment (CUPED; Deng, Xu, Kohavi & Walker, WSDM 2013) subtracts a prediction from each unit's outcome. The prediction
uses what was known before the unit had an arm. Arms are random, so it shifts no effect and removes the variance it
explains. It comes from a ridge regression on the units of the other folds, in any arm, and so knows neither the unit's
outcome nor its arm: confidence sequences stay valid however wrong it is (cross-fitting: Waudby-Smith et al., Annals of
Statistics 52 (2024), section 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

import numpy as np
import scipy
from numpy.typing import NDArray

from rl.statistics import Difference
from rl.statistics.sequential import critical_value, log_mixture


@dataclass(frozen=True)
class Moments:
    """`n` independent units with their mean and the variance of one unit (not of the mean)."""

    n: int
    mean: float
    variance: float

    @property
    def error(self) -> float:
        """Variance of the mean."""
        return self.variance / self.n

    @classmethod
    def of_ratio(cls, sums: Sequence[float], counts: Sequence[float]) -> Moments:
        """Moments of a mean over decisions of independent units with several decisions each: sum(sums) / sum(counts).

        Delta method for a ratio of means (Deng, Knoblich & Lu, KDD 2018, section 3): a unit's part is
        mean + (s - mean c) / mean(c). With one decision per unit it is the plain mean. Residuals are divided by
        1 - c / sum(c), as in the jackknife (CR3: Bell & McCaffrey 2002): a unit with most of the decisions pulls the
        mean to itself and would otherwise seem to agree with it.
        """
        s, c = np.asarray(sums, float), np.asarray(counts, float)
        n = len(s)
        if n == 0 or c.sum() <= 0:
            return cls(n, math.nan, math.nan)
        mean = float(s.sum() / c.sum())
        with np.errstate(divide="ignore", invalid="ignore"):
            residual = (s - mean * c) / c.mean() / (1 - c / c.sum())
        variance = float((residual**2).sum() * (n - 1) / n**2) if n > 1 else math.nan
        return cls(n, mean, variance if math.isfinite(variance) else math.inf)

    def with_pseudo_unit(self) -> Moments:
        """For values in [0, 1]: the variance with one more unit at either end, so that a few equal units are not
        certain."""
        if self.n < 2:
            return self
        ends = self.mean**2 + (1 - self.mean) ** 2
        return Moments(self.n, self.mean, ((self.n - 1) * self.variance + ends) / (self.n + 1))

    @property
    def informative(self) -> bool:
        """True with at least two units that are not all equal."""
        return self.n >= 2 and math.isfinite(self.variance) and self.variance > 0


@dataclass(frozen=True)
class Contrast:
    """A difference of two arms, its variance, and the units it rests on."""

    value: float
    error: float
    """Variance of `value`."""
    n: int
    """Units of both arms together."""


def difference(new: Moments, old: Moments) -> Contrast:
    """new minus old."""
    return Contrast(new.mean - old.mean, new.error + old.error, new.n + old.n)


# --- Always valid -------------------------------------------------------------------------------------------


def half_width(error: float, n: float, alpha: float, tuning: float) -> float:
    """Half width of the always-valid interval of a mean whose variance is `error` at n units."""
    return math.sqrt(error) * critical_value(n, alpha, tuning)


def always_valid(found: Contrast, alpha: float = 0.05, tuning: float = 1000) -> Difference:
    half = half_width(found.error, found.n, alpha, tuning)
    return Difference(found.value, found.value - half, found.value + half)


def always_valid_p(found: Contrast, alpha: float = 0.05, tuning: float = 1000) -> float:
    """The level at which the always-valid interval touches 0; `alpha` is the level it is tuned for."""
    evidence = log_mixture(found.value / math.sqrt(found.error), found.n, alpha, tuning)
    return math.exp(-max(evidence, 0.0))


def always_valid_low(found: Contrast, alpha: float = 0.05, tuning: float = 1000) -> float:
    """One-sided lower end at level alpha: that of the two-sided interval at 2 alpha, which is slightly conservative."""
    return found.value - half_width(found.error, found.n, min(2 * alpha, 0.5), tuning)


HORIZON = 10_000_000
"""`units_needed` returns None above this."""


def units_needed(found: Contrast, alpha: float = 0.05, tuning: float = 1000) -> int | None:
    """Further units of both arms together until the interval excludes 0 at the present difference.

    0 if it already does; None above HORIZON, and without a difference.
    """
    if found.value == 0 or not found.error > 0:
        return None
    per_unit = found.error * found.n

    def is_decisive(n: float) -> bool:
        return half_width(per_unit / n, n, alpha, tuning) < abs(found.value)

    if is_decisive(found.n):
        return 0
    low, high = found.n, found.n * 2
    while not is_decisive(high):
        low, high = high, high * 2
        if high > HORIZON:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_decisive(middle) else (middle, high)
    return high - found.n


# --- Who is best --------------------------------------------------------------------------------------------


def chance_above_zero(found: Contrast) -> float:
    """Chance of a difference to be above 0, by the normal posterior under a flat prior; 1/2 without any spread."""
    if not (found.error > 0 and math.isfinite(found.error)):
        return 0.5
    return float(scipy.stats.norm.cdf(found.value / math.sqrt(found.error)))


def best_chances(means: Sequence[float], errors: Sequence[float]) -> list[float]:
    """Chance of each arm to have the highest mean, for independent normal posteriors; the chances sum to 1.

    errors: variances of the means, above 0. P(k best) is the integral of arm k's density times the others' distribution
    functions, by the trapezoid rule over 8 standard deviations on both sides. It is deterministic, as propensities must
    be, and exact to 1e-6 unless one arm's spread is below a hundredth of another's.
    """
    m, s = np.asarray(means, float), np.sqrt(np.asarray(errors, float))
    z = np.linspace(-8.0, 8.0, 8001)
    density = scipy.stats.norm.pdf(z)
    chances = []
    for k in range(len(m)):
        at = m[k] + s[k] * z
        others = np.prod([scipy.stats.norm.cdf((at - m[j]) / s[j]) for j in range(len(m)) if j != k], axis=0)
        chances.append(float((density * others).sum()))
    total = sum(chances)
    return [chance / total for chance in chances]


def thompson_shares(chances: Sequence[float], floor: float) -> list[float]:
    """Shares of a bandit: each arm's chance to be best, at least `floor`; they sum to 1.

    Thompson, Biometrika 25 (1933) 285-294. The floor keeps propensities above 0, so that off-policy estimates work
    later. Raises ValueError if the floors sum to more than 1.
    """
    spare = 1 - floor * len(chances)
    if spare < -1e-12:
        raise ValueError(
            f"expected a floor of at most 1/{len(chances)} for {len(chances)} arms, found {floor:g}"
        )
    return [floor + max(spare, 0.0) * chance for chance in chances]


def bandit_chances(arms: Sequence[Moments], *, bounded: bool) -> list[float]:
    """Chance of each arm to be best; equal until every arm has two units.

    bounded: values lie in [0, 1]; a Beta(1, 1) prior (one more unit at either end) draws their mean towards 1/2.
    """
    if any(arm.n < 2 or not math.isfinite(arm.variance) for arm in arms):
        return [1 / len(arms)] * len(arms)
    if bounded:
        known = [(arm.with_pseudo_unit(), (arm.n * arm.mean + 1) / (arm.n + 2)) for arm in arms]
        return best_chances([mean for _, mean in known], [arm.variance / (arm.n + 2) for arm, _ in known])
    if not all(arm.informative for arm in arms):
        return [1 / len(arms)] * len(arms)
    return best_chances([arm.mean for arm in arms], [arm.error for arm in arms])


# --- Were units split as meant? -----------------------------------------------------------------------------


def ratio_mismatch_p(units: Sequence[int], weights: Sequence[float]) -> float:
    """p of the chi-square test that units were assigned by these weights; arms of weight 0 are left out.

    1 without two arms or a unit. Below 0.001 do not trust the comparison (Fabijan et al., KDD 2019).
    """
    pairs = [(u, w) for u, w in zip_longest(units, weights, fillvalue=0) if w > 0]
    total, weight = sum(u for u, _ in pairs), sum(w for _, w in pairs)
    if len(pairs) < 2 or total == 0:
        return 1.0
    expected = [total * w / weight for _, w in pairs]
    return float(scipy.stats.chisquare([u for u, _ in pairs], expected).pvalue)


def ratio_mismatch_anytime_p(
    units: Sequence[int], weights: Sequence[float], strength: float = 100.0
) -> float:
    """`ratio_mismatch_p`, valid at every look: 1 / Bayes factor of a Dirichlet around the weights against the weights.

    Lindon & Malek, "Anytime-valid inference for multinomial count data", NeurIPS 2022. strength: of the Dirichlet, in
    units; a larger one finds smaller mismatches, later.
    """
    pairs = [(u, w) for u, w in zip_longest(units, weights, fillvalue=0) if w > 0]
    if len(pairs) < 2:
        return 1.0
    counts = np.array([u for u, _ in pairs], float)
    shares = np.array([w for _, w in pairs], float)
    shares /= shares.sum()
    prior = strength * shares
    log_factor = float(
        scipy.special.gammaln(strength)
        - scipy.special.gammaln(strength + counts.sum())
        + (scipy.special.gammaln(prior + counts) - scipy.special.gammaln(prior)).sum()
        - (counts * np.log(shares)).sum()
    )
    return math.exp(-max(log_factor, 0.0))


# --- Adjustment by the past ---


Floats: TypeAlias = NDArray[np.float64]

FOLDS = 5

PENALTIES = np.logspace(-2, 4, 13)
"""Ridge penalties on features of variance 1; generalised cross-validation picks one."""

LEAST_UNITS = 40
"""Fewest units with a value for an adjustment: eight per fold."""


def unit_parts(sums: Floats, counts: Floats) -> Floats:
    """Centred parts of an arm's units in its mean: (s - mean c) / mean(c), shape [units], as in `Moments.of_ratio`.

    A unit without a value has count 0 and part 0.
    """
    total = counts.sum()
    if total <= 0:
        return np.zeros_like(sums)
    return np.asarray((sums - sums.sum() / total * counts) * (len(counts) / total))


def cross_predictions(features: Floats, parts: Floats, folds: NDArray[np.int64], sizes: Floats) -> Floats:
    """Predicted part of each unit by a regression on the units of the other folds.

    features: [units, covariates], known before a unit had an arm; constant columns are left out. parts: [units],
    centred within arms. folds: [units] in 0 .. FOLDS - 1, drawn independently of the data. sizes: [units], number of
    past decisions. A unit weighs 1 / sqrt(1 + size), so that a very frequent one does not decide the fit: on traffic
    with Pareto sizes of index 1.3 the worst of 150 unweighted regressions made the variance five times as large, the
    worst weighted one 1 % larger, at the same median.
    """
    spread = features.std(axis=0)
    useful = spread > 1e-9
    if not useful.any():
        return np.zeros_like(parts)
    x = (features[:, useful] - features[:, useful].mean(axis=0)) / spread[useful]
    root = (1 + sizes) ** -0.25
    sums = [
        _Sums.of(x[own] * root[own, None], parts[own] * root[own])
        for own in (folds == fold for fold in range(FOLDS))
    ]
    found = np.zeros_like(parts)
    for fold in range(FOLDS):
        rest = _Sums.total([one for number, one in enumerate(sums) if number != fold])
        found[folds == fold] = x[folds == fold] @ rest.weights()
    return found


def adjusted_moments(
    sums: Floats,
    counts: Floats,
    arms: NDArray[np.int64],
    features: Floats,
    folds: NDArray[np.int64],
    sizes: Floats,
) -> list[Moments] | None:
    """Moments of each arm after subtracting what its units' past explains; None with too few units.

    sums, counts: [units], of the metric, 0 for a unit without a value; arms: [units], numbers from 0; features, folds,
    sizes: see `cross_predictions`. The mean is the arm's mean minus the predicted distance of its units from all units;
    `n` counts units with a value.
    """
    has_value = counts > 0
    numbers = range(int(arms.max()) + 1) if len(arms) else range(0)
    if has_value.sum() < LEAST_UNITS or any((has_value & (arms == arm)).sum() < 2 for arm in numbers):
        return None
    parts = np.zeros_like(sums)
    for arm in numbers:
        parts[arms == arm] = unit_parts(sums[arms == arm], counts[arms == arm])
    predicted = cross_predictions(features, parts, folds, sizes)
    overall = predicted.mean()
    found = []
    for arm in numbers:
        own = arms == arm
        rest = (parts[own] - predicted[own]) / (1 - counts[own] / counts[own].sum())
        units, n = int(own.sum()), int((own & has_value).sum())
        mean = sums[own].sum() / counts[own].sum() - (predicted[own].mean() - overall)
        # units without a value are in the sums with 0; the variance is per unit with a value, as elsewhere
        found.append(Moments(n, float(mean), float((rest - rest.mean()).var() * n / units)))
    return found


class _Sums:
    """Sums of products of some units, enough to solve a ridge regression."""

    def __init__(self, n: int, xx: Floats, xy: Floats, yy: float) -> None:
        self.n, self.xx, self.xy, self.yy = n, xx, xy, yy

    @classmethod
    def of(cls, x: Floats, y: Floats) -> _Sums:
        return cls(len(y), x.T @ x, x.T @ y, float(y @ y))

    @classmethod
    def total(cls, parts: Sequence[_Sums]) -> _Sums:
        xx, xy = (np.sum([getattr(one, name) for one in parts], axis=0) for name in ("xx", "xy"))
        return cls(sum(one.n for one in parts), xx, xy, sum(one.yy for one in parts))

    def weights(self) -> Floats:
        """Ridge weights, the penalty by generalised cross-validation (Golub, Heath & Wahba, Technometrics 1979)."""
        values, vectors = np.linalg.eigh(self.xx)
        values = np.maximum(values, 0.0)
        turned = vectors.T @ self.xy
        shrunk = turned / (values + PENALTIES[:, None])
        residual = self.yy - 2 * shrunk @ turned + (shrunk**2) @ values
        freedom = (values / (values + PENALTIES[:, None])).sum(axis=1)
        left = np.maximum(self.n - freedom, 1.0)
        best = int(np.argmin(self.n * residual / left**2))
        return np.asarray(vectors @ shrunk[best])
