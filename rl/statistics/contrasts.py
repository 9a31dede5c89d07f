"""Contrasts between arms: differences, always-valid intervals, the best arm, the check of the split. Pure.

Always-valid: the interval covers the true difference at ALL times at once with probability 1 - alpha, so one may look
every minute and stop at any look (`rl.statistics.sequences`). Source: Waudby-Smith, Arbour, Sinha, Kennedy & Ramdas,
"Time-uniform central limit theory and asymptotic confidence sequences", Annals of Statistics 52 (2024) 2613-2640.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from rl.statistics import Difference
from rl.statistics.sequences import critical_value, log_mixture


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
        """Of a mean over decisions where units made several: sum of `sums` over sum of `counts`, units independent.

        Linearised: a unit's part is mean + (s - mean c) / mean(c). Deng, Knoblich & Lu, KDD 2018, section 3 (the delta
        method for a ratio of two means over randomisation units). With one decision per unit it is the plain mean.
        The variance is the jackknife's: a residual is divided by 1 - c / sum(c), so that a unit that makes much of all
        decisions, and draws the mean to itself, is not taken for one that agrees (CR3: Bell & McCaffrey 2002).
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
        """For values in [0, 1]: the variance as if one unit more had been seen at either end.

        A few units that all say the same show no variance; taken at its word that would be certainty.
        """
        if self.n < 2:
            return self
        ends = self.mean**2 + (1 - self.mean) ** 2
        return Moments(self.n, self.mean, ((self.n - 1) * self.variance + ends) / (self.n + 1))

    @property
    def informative(self) -> bool:
        """True if it says anything: two units at least, that are not all the same."""
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


def uplift(new: Moments, old: Moments) -> Contrast:
    """(new - old) / |old|, its variance by the delta method; more is more, also where the old mean is negative.

    Raises ValueError where old's mean is 0.
    """
    if old.mean == 0:
        raise ValueError("an uplift over a mean of 0 says nothing")
    value = (new.mean - old.mean) / abs(old.mean)
    error = new.error / old.mean**2 + old.error * new.mean**2 / old.mean**4
    return Contrast(value, error, new.n + old.n)


# --- Fixed horizon: valid at one look, planned beforehand ---------------------------------------------------


# --- Always valid -------------------------------------------------------------------------------------------


def half_width(error: float, n: float, alpha: float, tuning: float) -> float:
    """Half width of the always-valid interval of a mean whose variance is `error` at n units."""
    return math.sqrt(error) * critical_value(n, alpha, tuning)


def always_valid(found: Contrast, alpha: float = 0.05, tuning: float = 1000) -> Difference:
    """The interval that may be looked at as often as one likes."""
    half = half_width(found.error, found.n, alpha, tuning)
    return Difference(found.value, found.value - half, found.value + half)


def always_valid_p(found: Contrast, alpha: float = 0.05, tuning: float = 1000) -> float:
    """The level at which the always-valid interval just touches 0; `alpha` is the level it is tuned for."""
    evidence = log_mixture(found.value / math.sqrt(found.error), found.n, alpha, tuning)
    return math.exp(-max(evidence, 0.0))


def always_valid_low(found: Contrast, alpha: float = 0.05, tuning: float = 1000) -> float:
    """The lower end alone, at level alpha: that of the two-sided interval at 2 alpha (which is a little wider than the
    one-sided mixture would be)."""
    return found.value - half_width(found.error, found.n, min(2 * alpha, 0.5), tuning)


HORIZON = 10_000_000
"""Units beyond which nobody waits."""


def units_needed(found: Contrast, alpha: float = 0.05, tuning: float = 1000) -> int | None:
    """Units that both arms together still need until the interval leaves 0 out, if the difference stays what it is.

    0 where it does already; None where it would take more than HORIZON, or there is no difference.
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


@dataclass(frozen=True)
class Posterior:
    """Of a difference under a flat prior: normal, with its chance to be above 0 and what either choice would cost."""

    value: float
    error: float
    chance: float
    interval: Difference
    risk_old: float
    """Expected loss of staying with the old: E[max(difference, 0)]."""
    risk_new: float
    """Expected loss of taking the new: E[max(-difference, 0)]."""


def posterior(found: Contrast, alpha: float = 0.05) -> Posterior:
    """A normal posterior with a flat prior. Without any spread the chance is a half."""
    if not (found.error > 0 and math.isfinite(found.error)):
        return Posterior(0.0, 0.0, 0.5, Difference(0.0, 0.0, 0.0), 0.0, 0.0)
    spread = math.sqrt(found.error)
    z = found.value / spread
    chance = float(scipy.stats.norm.cdf(z))
    gain = spread * float(scipy.stats.norm.pdf(z)) + found.value * chance
    half = float(scipy.stats.norm.ppf(1 - alpha / 2)) * spread
    interval = Difference(found.value, found.value - half, found.value + half)
    return Posterior(found.value, spread, chance, interval, gain, gain - found.value)


def best_chances(means: Sequence[float], errors: Sequence[float]) -> list[float]:
    """Chance of each arm to have the highest mean, for independent normal posteriors; the chances sum to 1.

    errors: variances of the means, above 0. P(k best) is the integral of arm k's density times the others' distribution
    functions, by the trapezoid rule over 8 standard deviations to both sides: the same every time, as a propensity has
    to be, and exact to 1e-6 as long as no arm's spread is a hundredth of another's.
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
    """Shares of a bandit: each arm its chance to be best, none below `floor`; they sum to 1.

    Thompson, Biometrika 25 (1933) 285-294; the floor keeps every propensity away from 0, so that the log can answer
    questions later. Raises ValueError where so many floors are more than everything.
    """
    spare = 1 - floor * len(chances)
    if spare < -1e-12:
        raise ValueError(f"{len(chances)} arms cannot have {floor:g} each")
    return [floor + max(spare, 0.0) * chance for chance in chances]


def bandit_chances(arms: Sequence[Moments], *, bounded: bool) -> list[float]:
    """Chance of each arm to be best by what is known of it so far; equal until every arm has two units.

    Of bounded values the mean is drawn towards 1/2 as by one unit at either end (a Beta(1, 1) prior on thumbs).
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
    """Chance of units split so unevenly if they were assigned by these weights (chi-square); arms of weight 0 are left
    out. 1 where there is nothing to compare. Below 0.001 the comparison is not to be trusted: Fabijan et al., KDD 2019.
    """
    pairs = [(u, w) for u, w in zip(units, weights, strict=True) if w > 0]
    total, weight = sum(u for u, _ in pairs), sum(w for _, w in pairs)
    if len(pairs) < 2 or total == 0:
        return 1.0
    expected = [total * w / weight for _, w in pairs]
    return float(scipy.stats.chisquare([u for u, _ in pairs], expected).pvalue)


def ratio_mismatch_anytime_p(
    units: Sequence[int], weights: Sequence[float], strength: float = 100.0
) -> float:
    """The same, but valid at every look: 1 over the Bayes factor of a Dirichlet around the weights against the weights.

    Lindon & Malek, "Anytime-valid inference for multinomial count data", NeurIPS 2022. strength: of the Dirichlet, in
    units; larger finds smaller mismatches, later.
    """
    pairs = [(u, w) for u, w in zip(units, weights, strict=True) if w > 0]
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
