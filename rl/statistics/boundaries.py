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


def mixing_scale(v_opt: float, alpha: float, *, one_sided: bool = False) -> float:
    """The mixture's rho that makes its boundary tightest at v_opt: v / (2 log(1/a) + log(1 + 2 log(1/a))).

    Howard et al., section 3.5 (their closed approximation); a = alpha, twice that for one side.
    """
    if not v_opt > 0 or not 0 < alpha < 0.5:
        raise ValueError(f"expected v_opt above 0 and alpha in (0, 0.5), found {v_opt!r} and {alpha!r}")
    twice = 2 * math.log(1 / (2 * alpha if one_sided else alpha))
    return v_opt / (twice + math.log1p(twice))


def boundary(log_mixture: LogMixture, v: float, alpha: float, s_max: float = math.inf) -> float:
    """The s at which a mixture reaches log(1 / alpha) at time v; at most s_max, the largest s there is."""
    threshold = math.log(1 / alpha)

    def excess(s: float) -> float:
        return log_mixture(s, v) - threshold

    high = s_max
    if math.isinf(high):
        high = max(v, 1.0)
        while excess(high) < 0:
            high *= 2
    return high if excess(high) < 0 else float(scipy.optimize.brentq(excess, 0.0, high, xtol=1e-12))


def normal_two_sided(v: float, alpha: float, v_opt: float, alpha_opt: float = 0.05) -> float:
    """Two-sided normal mixture for sub-Gaussian walks, in closed form (Howard et al., eq. 14)."""
    rho = mixing_scale(v_opt, alpha_opt)
    return math.sqrt((v + rho) * (math.log1p(v / rho) + 2 * math.log(1 / alpha)))


def normal_one_sided(v_opt: float, alpha_opt: float = 0.05) -> LogMixture:
    """One-sided normal mixture (Howard et al., Proposition 6)."""
    rho = mixing_scale(v_opt, alpha_opt, one_sided=True)

    def log_mixture(s: float, v: float) -> float:
        scale = v + rho
        return (
            0.5 * math.log(4 * rho / scale)
            + s * s / (2 * scale)
            + float(scipy.stats.norm.logcdf(s / scale**0.5))
        )

    return log_mixture


def gamma_exponential(v_opt: float, c: float, alpha_opt: float = 0.05) -> LogMixture:
    """For sub-exponential walks of scale c, such as empirical Bernstein's (Howard et al., Proposition 9)."""
    rho = mixing_scale(v_opt, alpha_opt, one_sided=True) / c**2
    start = (
        rho * math.log(rho) - float(scipy.special.gammaln(rho)) - math.log(scipy.special.gammainc(rho, rho))
    )

    def log_mixture(s: float, v: float) -> float:
        shape, moved = v / c**2 + rho, s / c + v / c**2
        rate = moved + rho
        return float(
            start
            + scipy.special.gammaln(shape)
            + math.log(scipy.special.gammainc(shape, rate))
            - shape * math.log(rate)
            + moved
        )

    return log_mixture


def gamma_poisson(v_opt: float, c: float, alpha_opt: float = 0.05) -> LogMixture:
    """For sub-Poisson walks of scale c (Howard et al., Proposition 10)."""
    rho = mixing_scale(v_opt, alpha_opt, one_sided=True) / c**2
    start = (
        rho * math.log(rho) - float(scipy.special.gammaln(rho)) - math.log(scipy.special.gammaincc(rho, rho))
    )

    def log_mixture(s: float, v: float) -> float:
        rate = v / c**2 + rho
        shape = s / c + rate
        return float(
            start
            + scipy.special.gammaln(shape)
            + math.log(scipy.special.gammaincc(shape, rate))
            - shape * math.log(rate)
            + v / c**2
        )

    return log_mixture


def beta_binomial(
    v_opt: float, g: float, h: float, alpha_opt: float = 0.05, *, one_sided: bool = False
) -> LogMixture:
    """For sub-Bernoulli walks that fall by at most g and rise by at most h (Howard et al., Propositions 7 and 8)."""
    r = max(mixing_scale(v_opt, alpha_opt, one_sided=one_sided) - g * h, 1e-3 * g * h)
    both = g + h
    x = h / both if one_sided else 1.0

    def log_beta(a: float, b: float) -> float:
        whole = float(scipy.special.betaln(a, b))
        return whole if x == 1.0 else whole + math.log(scipy.special.betainc(a, b, x))

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


def poly_stitching(
    v: float, alpha: float, v_min: float, c: float = 0.0, s: float = 1.4, eta: float = 2.0
) -> float:
    """The stitched boundary of order sqrt(v log log v) for sub-gamma walks of scale c (Howard et al., eq. 10)."""
    time = max(v, v_min)
    ell = (
        s * math.log(math.log(eta * time / v_min))
        + math.log(scipy.special.zeta(s) / math.log(eta) ** s)
        + math.log(1 / alpha)
    )
    k1 = (eta**0.25 + eta**-0.25) / math.sqrt(2)
    drift = (math.sqrt(eta) + 1) / 2 * c * ell
    return math.sqrt(k1**2 * time * ell + drift**2) + drift


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
