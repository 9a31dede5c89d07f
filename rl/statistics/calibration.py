"""Calibration: probabilities of being liked fitted from a score, and reliability of given probabilities. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

FOLDS = 5
STEPS = 50


@dataclass(frozen=True)
class CalibratedProbabilities:
    """Per answer the probability that it is liked, and its errors."""

    probabilities: tuple[float, ...]
    log_losses: tuple[float, ...]
    """In nats; log 2 for a coin."""
    brier: tuple[float, ...]
    """Squared error, in [0, 1]."""


def cross_fitted(
    values: Sequence[float], scores: Sequence[float], clusters: Sequence[Hashable], folds: int = FOLDS
) -> CalibratedProbabilities:
    """Probabilities of being liked for values in [0, 1], each from a fit on the other folds' clusters.

    Platt scaling (Platt 1999, with smoothed targets) of the standardised score. A negative slope is set to 0, so that a
    score that ranks against people earns nothing. A constant score gives the share of liked answers.
    Raises ValueError unless there are as many values and clusters as scores.
    """
    value_array, score_array = np.asarray(values, float), np.asarray(scores, float)
    if value_array.shape != score_array.shape or not len(value_array) or len(clusters) != len(value_array):
        raise ValueError(
            f"expected as many values and clusters as scores, found {len(value_array)} and {len(score_array)}"
        )
    numbers: dict[Hashable, int] = {}
    fold = np.array([numbers.setdefault(name, len(numbers)) % folds for name in clusters])
    probabilities = np.empty(len(value_array))
    for number in range(folds):
        rest = fold != number
        if rest.all():
            continue
        probabilities[~rest] = _fit(value_array[rest], score_array[rest], score_array[~rest])
    losses = -(value_array * np.log(probabilities) + (1 - value_array) * np.log1p(-probabilities))
    return CalibratedProbabilities(
        tuple(probabilities.tolist()),
        tuple(losses.tolist()),
        tuple(((probabilities - value_array) ** 2).tolist()),
    )


def _fit(value_array: np.ndarray, scores: np.ndarray, asked: np.ndarray) -> np.ndarray:
    liked, disliked = float(value_array.sum()), float((1 - value_array).sum())
    above, below = (liked + 1) / (liked + 2), 1 / (disliked + 2)
    share = (liked + 1) / (liked + disliked + 2)
    centre, scale = (float(scores.mean()), float(scores.std())) if len(scores) else (0.0, 0.0)
    # a spread of rounding errors counts as constant
    if scale <= 1e-9 * max(1.0, abs(centre)):
        return np.full(len(asked), share)
    targets = below + value_array * (above - below)
    x = (scores - centre) / scale
    slope, intercept = 0.0, math.log(share / (1 - share))
    for _ in range(STEPS):
        p = 1 / (1 + np.exp(-(slope * x + intercept)))
        weights = np.maximum(p * (1 - p), 1e-12)
        hessian = np.array(
            [[(weights * x * x).sum() + 1e-6, (weights * x).sum()], [0.0, weights.sum() + 1e-6]]
        )
        hessian[1, 0] = hessian[0, 1]
        step = np.linalg.solve(hessian, [((targets - p) * x).sum(), (targets - p).sum()])
        # Newton may overshoot if the classes are nearly separable
        step *= min(1.0, 4.0 / max(float(np.abs(step).max()), 1e-12))
        slope, intercept = slope + float(step[0]), intercept + float(step[1])
        if float(np.abs(step).max()) < 1e-8:
            break
    if slope <= 0:
        return np.full(len(asked), share)
    z = np.clip(slope * (asked - centre) / scale + intercept, -30, 30)
    fitted: np.ndarray = 1 / (1 + np.exp(-z))
    return fitted


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
