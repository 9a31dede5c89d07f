"""Statistics of agreement among raters: Krippendorff's alpha, Cohen's kappa. numpy only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Metric = Literal["nominal", "ordinal", "interval"]

_Z95 = 1.959963984540054
"""97.5 % quantile of the normal distribution."""
_MANY_VALUES = 50
"""With more distinct values, alpha is computed from moments instead of a (values, values) table."""


@dataclass(frozen=True)
class AgreementEstimate:
    """A coefficient of agreement (at most 1) and its 95 % interval; None where undefined."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    """Sample size: pairable ratings for alpha, shared decisions for kappa."""


NO_ESTIMATE = AgreementEstimate(None, None, None, 0)


# --- Krippendorff's alpha -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alpha:
    """Krippendorff's alpha, and each rating's disagreement with the others."""

    estimate: AgreementEstimate
    disagreement: Floats
    """(n,): mean squared distance to the unit's other ratings, divided by the distance expected by chance.

    NaN if the unit has no other rating. 1 - mean over all ratings is alpha; over one rater's ratings, that rater's
    alpha with the others."""


def krippendorff_alpha(units: ArrayLike, values: ArrayLike, metric: Metric) -> Alpha:
    """Alpha = 1 - observed / expected disagreement, over units with two or more ratings.

    Args:
        units: (n,) what was rated.
        values: (n,) numbers.
        metric: nominal (equal or not), ordinal (ranks in between, weighted by use) or interval (squared difference).

    Undefined with fewer than two pairable ratings, or if all of them are equal. The 95 % interval is a jackknife over
    units, absent without any disagreement. In simulation it covered 91 % with 20 units, 93 to 96 % from 50 units on.

    Source: Krippendorff, Content Analysis (2004), chapter 11, and "Computing Krippendorff's alpha-reliability" (2011).
    Jackknife: Efron & Stein, Ann. Statist. 9 (1981) 586-596.
    """
    unit_of, value_of = np.asarray(units), np.asarray(values, dtype=np.float64)
    if unit_of.shape != value_of.shape or unit_of.ndim != 1:
        raise ValueError(
            f"expected units and values of one length, found {unit_of.shape} and {value_of.shape}"
        )
    if not np.isfinite(value_of).all():
        raise ValueError("expected finite values, found NaN or infinity")
    _, unit_of = np.unique(unit_of, return_inverse=True)
    alone = np.bincount(unit_of, minlength=1)[unit_of] < 2 if unit_of.size else np.zeros(0, dtype=bool)
    _, paired_unit = np.unique(unit_of[~alone], return_inverse=True)
    levels, code = np.unique(value_of[~alone], return_inverse=True)
    disagreement = np.full(value_of.shape, np.nan)
    if levels.size < 2:
        return Alpha(AgreementEstimate(None, None, None, int((~alone).sum())), disagreement)
    if levels.size > _MANY_VALUES and metric == "interval":
        observed, expected, sums, chance = _by_moments(paired_unit, levels[code])
    elif levels.size > _MANY_VALUES:
        raise ValueError(
            f"expected at most {_MANY_VALUES} distinct values for a {metric} scale, found {levels.size}"
        )
    else:
        observed, expected, sums, chance = _by_table(paired_unit, code, levels, metric)
    disagreement[~alone] = observed / expected
    value = 1 - float(observed.mean()) / expected
    return Alpha(_jackknife(value, sums, chance, int(code.size)), disagreement)


Chance = Callable[[Floats], Floats]
"""Sums of features over units (k, features) -> alpha (k,)."""


def _by_table(
    unit: Ints, code: Ints, levels: Floats, metric: Metric
) -> tuple[Floats, float, tuple[Floats, Floats], Chance]:
    """From the coincidence matrix of values; units with equal ratings are computed once."""
    many = levels.size
    counts = np.bincount(unit * many + code, minlength=(unit.max() + 1) * many).reshape(-1, many)
    kinds, kind_of, times = np.unique(counts, axis=0, return_inverse=True, return_counts=True)
    # o_ck = sum over units of n_uc (n_uk - [c = k]) / (m_u - 1): (kinds, values, values)
    pairs = kinds[:, :, None] * (kinds[:, None, :] - np.eye(many))
    pairs = pairs / (kinds.sum(axis=1) - 1)[:, None, None]
    squared_distance = _distances(levels, metric)

    def alpha(sums: Floats) -> Floats:
        coincidences = sums.reshape(-1, many, many)
        used = coincidences.sum(axis=2)
        total = used.sum(axis=1)
        distance = squared_distance(used)
        seen = (coincidences * distance).sum(axis=(1, 2)) / total
        chance = np.einsum("bc,bk,bck->b", used, used, distance) / (total * (total - 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(1 - seen / chance)

    used = counts.sum(axis=0)[None, :].astype(np.float64)
    distance = squared_distance(used)[0]
    total = float(used.sum())
    expected = float((used[0] @ distance @ used[0]) / (total * (total - 1)))
    to_others = (kinds @ distance) / (kinds.sum(axis=1) - 1)[:, None]
    observed = to_others[kind_of.ravel()[unit], code]
    return observed, expected, (pairs.reshape(len(kinds), -1), times.astype(np.float64)), alpha


def _distances(levels: Floats, metric: Metric) -> Callable[[Floats], Floats]:
    """Counts of each value (b, values) -> squared distances (b, values, values)."""
    if metric == "ordinal":

        def ranks(used: Floats) -> Floats:
            # Ranks between two values: all in between, and half of each of the two.
            middle = np.cumsum(used, axis=1) - used / 2
            return np.asarray((middle[:, :, None] - middle[:, None, :]) ** 2)

        return ranks
    fixed = (levels[:, None] - levels[None, :]) ** 2 if metric == "interval" else 1.0 - np.eye(levels.size)
    return lambda used: np.broadcast_to(fixed, (len(used), *fixed.shape))


def _by_moments(unit: Ints, value: Floats) -> tuple[Floats, float, tuple[Floats, Floats], Chance]:
    """Interval metric on a continuous scale, without a table of values."""
    value = value - value.mean()  # Keeps precision in the sums of squares.
    size = np.bincount(unit).astype(np.float64)
    first = np.bincount(unit, weights=value)
    second = np.bincount(unit, weights=value * value)
    others = size[unit] - 1
    observed = (size[unit] * value * value - 2 * value * first[unit] + second[unit]) / others
    features = np.stack([size, first, second, np.bincount(unit, weights=observed)], axis=1)

    def alpha(sums: Floats) -> Floats:
        total, one, two, seen = sums.T
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(1 - (seen / total) / (2 * (total * two - one * one) / (total * (total - 1))))

    total, one, two, _ = features.sum(axis=0)
    expected = float(2 * (total * two - one * one) / (total * (total - 1)))
    return observed, expected, (features, np.ones(len(features))), alpha


def _jackknife(value: float, sums: tuple[Floats, Floats], alpha: Chance, n: int) -> AgreementEstimate:
    """Interval from alpha without each unit in turn; `sums` is (features per kind of unit, units of that kind)."""
    features, times = sums
    many = float(times.sum())
    if many < 2 or value >= 1.0:
        return AgreementEstimate(value, None, None, n)
    without = alpha((times @ features)[None, :] - features)
    known = np.isfinite(without)
    if not known.all():
        return AgreementEstimate(value, None, None, n)
    mean = float(times @ without) / many
    error = math.sqrt((many - 1) / many * float(times @ (without - mean) ** 2))
    return AgreementEstimate(value, max(value - _Z95 * error, -1.0), min(value + _Z95 * error, 1.0), n)


# --- Cohen's kappa ------------------------------------------------------------------------------------------


def cohen_kappa(table: ArrayLike, weights: Literal["linear", "quadratic"] | None = None) -> AgreementEstimate:
    """Kappa of two raters.

    Args:
        table: (V, V) counts; the first rater's values in rows, ascending.
        weights: Weight of a disagreement by the steps between the values (linear) or their square; None: all equal.

    Undefined if both raters always gave the same single value. The 95 % interval is asymptotic.

    Source: Cohen, Educ. Psychol. Meas. 20 (1960) 37-46; Psychol. Bull. 70 (1968) 213-220. Standard error: Fleiss, Cohen
    & Everitt, Psychol. Bull. 72 (1969) 323-327, equation 13.
    """
    counts = np.asarray(table, dtype=np.float64)
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1] or (counts < 0).any():
        raise ValueError(f"expected a square table of counts, found shape {counts.shape}")
    n = float(counts.sum())
    if n == 0:
        return NO_ESTIMATE
    shares = counts / n
    rows, columns = shares.sum(axis=1), shares.sum(axis=0)
    steps = np.abs(np.subtract.outer(np.arange(len(counts)), np.arange(len(counts)))) / max(
        len(counts) - 1, 1
    )
    agree = 1.0 - (steps > 0 if weights is None else steps if weights == "linear" else steps**2)
    seen, chance = float((agree * shares).sum()), float(rows @ agree @ columns)
    if 1 - chance < 1e-12:
        return AgreementEstimate(None, None, None, round(n))
    kappa = (seen - chance) / (1 - chance)
    mean = (agree @ columns)[:, None] + (rows @ agree)[None, :]
    spread = float((shares * (agree - mean * (1 - kappa)) ** 2).sum()) - (kappa - chance * (1 - kappa)) ** 2
    error = math.sqrt(max(spread, 0.0) / n) / (1 - chance)
    return AgreementEstimate(kappa, max(kappa - _Z95 * error, -1.0), min(kappa + _Z95 * error, 1.0), round(n))


def kappa_of_scores(first: ArrayLike, second: ArrayLike) -> AgreementEstimate:
    """Quadratically weighted kappa of two raters' scores (n,) on a continuous scale; no interval.

    1 - mean squared difference / the difference expected by chance. Equals Lin's concordance correlation coefficient
    with variances over n (Lin, Biometrics 45 (1989) 255-268, equation 3).
    """
    x, y = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"expected scores of one length, found {x.shape} and {y.shape}")
    if x.size == 0:
        return NO_ESTIMATE
    chance = float(x.var() + y.var() + (x.mean() - y.mean()) ** 2)
    kappa = None if chance < 1e-12 else 1 - float(((x - y) ** 2).mean()) / chance
    return AgreementEstimate(kappa, None, None, int(x.size))


def rated_by_both(units: Ints, raters: Ints, values: Floats) -> Iterator[tuple[int, int, Floats, Floats]]:
    """(rater, other, rater's values, other's values) for every two raters with a shared unit, lower number first.

    Each rater rated a unit at most once. Time and memory grow with the number of pairs of ratings.
    """
    order = np.lexsort((raters, units))
    unit, rater, value = units[order], raters[order], values[order]
    one: list[Ints] = []
    second: list[Ints] = []
    here = np.arange(len(unit))
    for step in range(1, len(unit)):
        here = here[here + step < len(unit)]
        here = here[unit[here] == unit[here + step]]
        if not here.size:
            break
        one.append(here)
        second.append(here + step)
    if not one:
        return
    left, right = np.concatenate(one), np.concatenate(second)
    order = np.lexsort((left, rater[right], rater[left]))
    left, right = left[order], right[order]
    changes = np.flatnonzero(np.diff(rater[left]) | np.diff(rater[right])) + 1
    for piece in np.split(np.arange(len(left)), changes):
        i, j = left[piece], right[piece]
        yield int(rater[i[0]]), int(rater[j[0]]), value[i], value[j]
