"""Always-valid inference: intervals and tests that hold at every look, so that one may stop at any time. Pure.

Three parts: a mean (`critical_value`), a proportion (`proportion_sequence`), a win share (`WinShare`).

Mean. A Wiener process W exceeds the mixture of exp(d W(n) - d^2 n / 2) over effects d at level 1 / alpha with
probability at most alpha, at any time (Robbins, Ann. Math. Statist. 41 (1970) 1397-1409, for every mixing
distribution). A sum of independent units with an estimated variance follows such a process: the strong approximation of
Waudby-Smith, Arbour, Sinha, Kennedy & Ramdas, Annals of Statistics 52 (2024) 2613-2640 (Theorem 2.2: normal mixture).
Here nine tenths of the mixture lie on effects that are settled around `tuning` units, one tenth on a normal mixture.
Power against the normal mixture alone, at the units where a fixed horizon has 80 %, `tuning` 1,000, 4,000 processes
each: 400 units 42 -> 50 %, 706 units 49 -> 55 %, 2,747 units 48 -> 51 %, 10,000 units 48 -> 46 %.

Proportion. Howard, Ramdas, McAuliffe & Sekhon, Annals of Statistics 49 (2021) 1055-1080. `s` is a sum of centred
observations, `v` the sum of their variances. `log_mixture(s, v)` is the logarithm of a supermartingale that starts at
or below 1; the boundary at v is the s at which it reaches log(1 / alpha). It is tightest at `v_opt`.

Win share. A prompt is won, lost or tied; the share p is the probability of a win among prompts that are not tied. The
evidence against "p <= b" is the likelihood ratio of the counts, averaged over shares above b:
    E(b) = integral over p > b of (p / b)^wins ((1 - p) / (1 - b))^losses dBeta(p; 2, 2), the prior scaled to p > b.
If p <= b, E(b) is a supermartingale that starts at 1, so it ever reaches 1 / alpha with probability at most alpha
(Ville 1939). The shares b that are not rejected form a confidence sequence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import scipy

PLACES: tuple[tuple[float, float], ...] = ((0.4, 0.4), (1.6, 0.35), (6.4, 0.15))
"""(multiple of `tuning` at which an effect is settled, mass of the mixture on it, half on either side of 0)."""

SPREAD = 1 - sum(mass for _, mass in PLACES)
"""Mass of the normal mixture, through which the intervals shrink to 0 in the end."""


def mixing_rho(alpha: float, tuning: float) -> float:
    """Standard deviation of a normal mixture that is tightest at `tuning` units (Waudby-Smith et al., Appendix B.2)."""
    twice = -2 * math.log(alpha)
    return math.sqrt((twice + math.log1p(twice)) / tuning)


def log_normal_mixture(z: float, n: float, alpha: float, tuning: float) -> float:
    """The normal part of the mixture; alone it is the sequence of Waudby-Smith et al., Theorem 2.2."""
    spent = n * mixing_rho(alpha, tuning) ** 2
    return z * z * spent / (2 * (1 + spent)) - 0.5 * math.log1p(spent)


def log_mixture(z: float, n: float, alpha: float, tuning: float) -> float:
    """Logarithm of the mixture if a sum of n units lies z standard deviations from its expectation.

    The mass at a place lies on +d and -d, d = sqrt(2 log(2 / alpha) / units): the effect whose linear boundary is
    tightest at that many units.
    """
    walk = abs(z) * math.sqrt(n)
    terms = []
    for place, mass in PLACES:
        effect = math.sqrt(2 * math.log(2 / alpha) / (place * tuning))
        cosh = effect * walk + math.log1p(math.exp(-2 * effect * walk)) - math.log(2)
        terms.append(math.log(mass) + cosh - effect**2 * n / 2)
    terms.append(math.log(SPREAD) + log_normal_mixture(z, n, alpha, tuning))
    top = max(terms)
    return top + math.log(math.fsum(math.exp(term - top) for term in terms))


@functools.lru_cache(maxsize=65_536)
def critical_value(n: float, alpha: float, tuning: float) -> float:
    """Half width of the interval in standard errors: it covers the mean at every look with probability 1 - alpha."""
    threshold = -math.log(alpha)

    def excess(z: float) -> float:
        return log_mixture(z, n, alpha, tuning) - threshold

    high = 4.0
    while excess(high) < 0:
        high *= 2
    return float(scipy.optimize.brentq(excess, 0.0, high, xtol=1e-9))


# --- A proportion ---


LogMixture = Callable[[float, float], float]


def mixing_scale(v_opt: float, alpha: float) -> float:
    """Rho for a boundary that is tightest at v_opt: v / (2 log(1/a) + log(1 + 2 log(1/a))), a = alpha.

    Howard et al., section 3.5, closed approximation.
    """
    if not v_opt > 0 or not 0 < alpha < 0.5:
        raise ValueError(f"expected v_opt above 0 and alpha in (0, 0.5), found {v_opt!r} and {alpha!r}")
    twice = 2 * math.log(1 / alpha)
    return v_opt / (twice + math.log1p(twice))


def beta_binomial(v_opt: float, g: float, h: float, alpha_opt: float = 0.05) -> LogMixture:
    """Two-sided mixture for walks whose steps lie in [-g, h] (sub-Bernoulli; Howard et al., Prop. 7)."""
    r = max(mixing_scale(v_opt, alpha_opt) - g * h, 1e-3 * g * h)
    both = g + h

    def log_beta(a: float, b: float) -> float:
        return float(scipy.special.betaln(a, b))

    start = log_beta(r / (g * both), r / (h * both))

    def log_mixture(s: float, v: float) -> float:
        down, up = (v - g * s) / (g * both), (v + h * s) / (h * both)
        return (
            v / (g * h) * math.log(both)
            - up * math.log(g)
            - down * math.log(h)
            + log_beta(r / (g * both) + down, r / (h * both) + up)
            - start
        )

    return log_mixture


def proportion_sequence(
    successes: int, n: int, alpha: float = 0.05, n_opt: int = 1000
) -> tuple[float, float]:
    """Always-valid interval of a probability from independent trials: exact at every n, tightest near n_opt.

    It holds the probabilities that a two-sided beta-binomial mixture does not reject. Raises ValueError unless
    0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"expected 0 <= successes <= n, found {successes} of {n}")
    if n == 0:
        return 0.0, 1.0
    share, threshold = successes / n, math.log(1 / alpha)

    def excess(p: float) -> float:
        v = p * (1 - p)
        return beta_binomial(v * n_opt, p, 1 - p)((share - p) * n, v * n) - threshold

    tiny = 1e-9
    inside = min(max(share, tiny), 1 - tiny)
    low = float(scipy.optimize.brentq(excess, tiny, inside)) if successes and excess(tiny) > 0 else 0.0
    high = (
        float(scipy.optimize.brentq(excess, inside, 1 - tiny))
        if successes < n and excess(1 - tiny) > 0
        else 1.0
    )
    return low, high


# --- A win share ---


BETTER, NOT_WORSE, WORSE, OPEN = "better", "not_worse", "worse", "open"
"""Verdicts: the share is shown to be above 1/2; above 1/2 minus the margin; below 1/2; none of these yet."""

PRIOR = 2.0
"""Both parameters of the prior. Median decided prompts to a verdict at true shares of 60, 70 and 80 %: 177, 41 and 18;
with 1 it takes 181, 41 and 18, with 10 it takes 168, 50 and 27 (alpha 1/30, 4,000 walks each)."""

MOST_DECISIONS = 5_000
"""Forecasts stop here: people will not judge more prompts."""

EXPECTED_SHARE = 0.7
"""Share that a forecast assumes before the first decision."""


@functools.lru_cache(maxsize=65_536)
def log_evidence(wins: float, losses: float, bound: float) -> float:
    """Logarithm of E(bound), the evidence that the win share is above `bound`. Forecasts pass fractions as counts."""
    up, down = PRIOR + wins, PRIOR + losses
    above = float(scipy.special.betainc(down, up, 1 - bound))
    if above <= 0:
        return -math.inf
    return (
        float(scipy.special.betaln(up, down) - scipy.special.betaln(PRIOR, PRIOR))
        + math.log(above)
        - math.log(float(scipy.special.betainc(PRIOR, PRIOR, 1 - bound)))
        - wins * math.log(bound)
        - losses * math.log1p(-bound)
    )


def share_low(wins: int, losses: int, alpha: float) -> float:
    """Lower end of the confidence sequence, below the win share at all times with probability 1 - alpha."""
    if not wins:
        return 0.0
    threshold, tiny = -math.log(alpha), 1e-9
    inside = min(wins / (wins + losses), 1 - tiny)

    def excess(bound: float) -> float:
        return log_evidence(wins, losses, bound) - threshold

    return float(scipy.optimize.brentq(excess, tiny, inside)) if excess(tiny) > 0 > excess(inside) else 0.0


@dataclass(frozen=True)
class WinShare:
    """Prompts won, lost and tied, and the verdict they allow.

    alpha: probability that a policy that is no better is ever called "better", and that one worse by the margin is ever
    called "not worse". "Worse" gets half of it, so that equal policies get a wrong verdict with at most 1.5 alpha.
    """

    wins: int
    losses: int
    ties: int
    alpha: float
    margin: float
    not_inferior: bool = False
    """True if "not worse" is what the round asks: it settles then, and "worse" means worse by more than the margin."""

    @property
    def decided(self) -> int:
        return self.wins + self.losses

    @property
    def value(self) -> float | None:
        """Share of the decided prompts that were won; None if none is decided."""
        return self.wins / self.decided if self.decided else None

    @property
    def low(self) -> float:
        return share_low(self.wins, self.losses, self.alpha)

    @property
    def high(self) -> float:
        return 1 - share_low(self.losses, self.wins, self.alpha / 2)

    @property
    def confidence(self) -> float:
        """Confidence of the interval from low to high, over all looks."""
        return 1 - 1.5 * self.alpha

    @property
    def verdict(self) -> str:
        threshold = -math.log(self.alpha)
        if log_evidence(self.wins, self.losses, 0.5) >= threshold:
            return BETTER
        if log_evidence(self.losses, self.wins, self.worse_above) >= threshold + math.log(2):
            return WORSE
        if log_evidence(self.wins, self.losses, 0.5 - self.margin) >= threshold:
            return NOT_WORSE
        return OPEN

    @property
    def worse_above(self) -> float:
        """Share of losses that "worse" must exceed."""
        return 0.5 + self.margin if self.not_inferior else 0.5

    @property
    def settled(self) -> bool:
        """True if the verdict answers the round's question, so that no further judgement is needed."""
        return self.verdict in (BETTER, WORSE) or (self.not_inferior and self.verdict == NOT_WORSE)

    @property
    def further(self) -> int | None:
        """About how many more decided prompts settle the round at the present share; None above MOST_DECISIONS. Before
        the first decision the share counts as EXPECTED_SHARE."""
        share = (self.wins + PRIOR) / (self.decided + 2 * PRIOR) if self.decided else EXPECTED_SHARE
        least = 0.5 - self.margin if self.not_inferior else 0.5
        is_ahead = share >= least
        threshold = -math.log(self.alpha) + (0.0 if is_ahead else math.log(2))
        ahead, behind = (self.wins, self.losses) if is_ahead else (self.losses, self.wins)
        lead, bound = (share, least) if is_ahead else (1 - share, self.worse_above)

        def reached(count: int) -> bool:
            return log_evidence(ahead + lead * count, behind + (1 - lead) * count, bound) >= threshold

        if reached(0):
            return 0
        if not reached(MOST_DECISIONS):
            return None
        below, enough = 0, MOST_DECISIONS
        while enough - below > 1:
            middle = (below + enough) // 2
            below, enough = (below, middle) if reached(middle) else (middle, enough)
        return enough
