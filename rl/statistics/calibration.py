"""Calibrated probability that an answer is liked, from a score: logistic, cross-fitted, never against the score.
Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

FOLDS = 5
STEPS = 50


@dataclass(frozen=True)
class CalibratedProbabilities:
    """Per answer the probability that it is liked, and how good it was."""

    probabilities: tuple[float, ...]
    log_losses: tuple[float, ...]
    """Nats; log 2 for a coin."""
    brier: tuple[float, ...]
    """Squared error, in [0, 1]."""


def cross_fitted(
    values: Sequence[float], scores: Sequence[float], clusters: Sequence[Hashable], folds: int = FOLDS
) -> CalibratedProbabilities:
    """Probabilities of being liked for values in [0, 1], each from a fit that never saw its cluster.

    Platt scaling (Platt 1999, with his smoothed targets) of the standardised score. A slope below 0 is set to 0: a
    score that is lower for what people like knows nothing, however reliably. A score that never varies gives the share
    of the liked ones. Raises ValueError without values for each score.
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
    # a few tenths of rounding are no score
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
        # Newton may overshoot where the classes are nearly apart
        step *= min(1.0, 4.0 / max(float(np.abs(step).max()), 1e-12))
        slope, intercept = slope + float(step[0]), intercept + float(step[1])
        if float(np.abs(step).max()) < 1e-8:
            break
    if slope <= 0:
        return np.full(len(asked), share)
    z = np.clip(slope * (asked - centre) / scale + intercept, -30, 30)
    fitted: np.ndarray = 1 / (1 + np.exp(-z))
    return fitted
