"""Prediction-powered inference: a mean from few labels and many predictions, unbiased for any predictor. Pure.

Angelopoulos, Duchi & Zrnic 2023 (PPI++, arXiv 2311.01453), for a mean. `labelled` items have a label y and a prediction
f; `unlabelled` items have a prediction alone. For a weight w the estimate is
    mean(y) + w (mean(f of unlabelled) - mean(f of labelled)).
It is unbiased for every w; at w = 0 it is the labels' mean. The weight with the smallest variance is
    w = cov(y, f) / ((1 + n / N) var(f)),
with n labels and N unlabelled predictions (section 6, power tuning): a useless predictor gets a weight near 0.

Differs from the paper, which is asymptotic: for few labels the weight is estimated on the other items of each fold
(cross-fitting), and the interval has Student's quantile with one degree of freedom less for the estimated weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

FEWEST_LABELS = 10
"""Fewest labels for an interval."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PoweredMean:
    """A mean with its interval, and how much the predictions helped."""

    value: float
    low: float
    high: float
    labels: int
    predictions: int
    """Predictions without a label."""
    weight: float
    """How far predictions are believed; 0: not at all."""
    labels_alone: tuple[float, float]
    """Interval of the labels alone (Student)."""

    @property
    def narrower(self) -> float:
        """Share by which the interval is narrower than that of the labels alone; negative if it is wider."""
        alone = self.labels_alone[1] - self.labels_alone[0]
        return 1 - (self.high - self.low) / alone if alone > 0 else 0.0

    @property
    def helps(self) -> bool:
        return self.narrower > 0


def powered_mean(
    labels: Sequence[float],
    predictions: Sequence[float],
    unlabelled: Sequence[float],
) -> PoweredMean:
    """Mean of the labels' population from labels with predictions, and predictions without labels.

    labels, predictions: [n], of the same items, which were drawn at random, all alike. unlabelled: [N]. Raises
    ValueError for fewer than FEWEST_LABELS labels, no prediction, or lengths that differ.
    """
    y, f, others = (np.asarray(column, float) for column in (labels, predictions, unlabelled))
    if len(y) < FEWEST_LABELS or not len(others) or len(y) != len(f):
        raise ValueError(
            f"expected at least {FEWEST_LABELS} labels, a prediction of each, and predictions without a label; found "
            f"{len(y)}, {len(f)} and {len(others)}"
        )
    if not all(np.isfinite(column).all() for column in (y, f, others)):
        raise ValueError("expected finite values, found NaN or infinity")
    n, size = len(y), len(others)
    alone = _interval(y, 0.0, 0, n - 1)
    left_out = _weights_left_out(y, f, size)
    residuals = y - left_out * (f - others.mean())
    weight = float(left_out.mean())
    # labelled part: variance of the residuals; unlabelled part: the error of the predictions' mean
    error = weight**2 * float(others.var(ddof=1)) / size if size > 1 else 0.0
    value, low, high = _interval(residuals, error, 1, n - 2)
    return PoweredMean(value, low, high, n, size, weight, alone[1:])


def _weights_left_out(y: Floats, f: Floats, size: int) -> Floats:
    """[n]: the best weight for each item, estimated without it, so that the estimate stays unbiased."""
    n = len(y)
    rest = n - 1
    mean_y, mean_f = (y.sum() - y) / rest, (f.sum() - f) / rest
    covariance = ((y * f).sum() - y * f) / rest - mean_y * mean_f
    variance = ((f * f).sum() - f * f) / rest - mean_f**2
    safe = np.where(variance > 1e-12, variance, 1.0)
    found: Floats = np.where(variance > 1e-12, covariance / safe, 0.0) / (1 + n / size)
    return found


def _interval(values: Floats, error: float, fitted: int, freedom: int) -> tuple[float, float, float]:
    """Mean, low and high (95 %) of values with a further variance `error`; fitted: weights estimated from them."""
    n = len(values)
    mean = float(values.mean())
    spread = float(((values - mean) ** 2).sum()) / (n - 1 - fitted)
    half = float(scipy.stats.t.ppf(0.975, freedom)) * math.sqrt(spread / n + error)
    return mean, mean - half, mean + half
