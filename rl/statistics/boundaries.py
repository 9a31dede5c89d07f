"""Curves that a random walk never crosses but with probability alpha, whenever one looks. Pure: numpy and scipy.

Howard, Ramdas, McAuliffe & Sekhon, "Time-uniform, nonparametric, nonasymptotic confidence sequences", Annals of
Statistics 49 (2021) 1055-1080. `s` is a sum of centred observations, `v` its intrinsic time (the sum of their
variances); a mixture's `log_mixture(s, v)` is the logarithm of a supermartingale that starts at or below 1, and its
boundary at v is the s at which that reaches log(1 / alpha). `v_opt` is the time at which the boundary is tightest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import scipy

LogMixture = Callable[[float, float], float]


def mixing_scale(v_opt: float, alpha: float) -> float:
    """The mixture's rho that makes its boundary tightest at v_opt: v / (2 log(1/a) + log(1 + 2 log(1/a))).

    Howard et al., section 3.5 (their closed approximation); a = alpha.
    """
    if not v_opt > 0 or not 0 < alpha < 0.5:
        raise ValueError(f"expected v_opt above 0 and alpha in (0, 0.5), found {v_opt!r} and {alpha!r}")
    twice = 2 * math.log(1 / alpha)
    return v_opt / (twice + math.log1p(twice))


def beta_binomial(v_opt: float, g: float, h: float, alpha_opt: float = 0.05) -> LogMixture:
    """Two-sided, for sub-Bernoulli walks that fall by at most g and rise by at most h (Howard et al., Prop. 7)."""
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

    The probabilities that a two-sided beta-binomial mixture does not rule out. Raises ValueError unless
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
