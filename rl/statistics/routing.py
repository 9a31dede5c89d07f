"""Routing by confidence: a threshold above which a cheaper model answers, with a guarantee on what quality is lost.

Learn then Test (Angelopoulos, Bates, Candès, Jordan and Lei 2021) with fixed-sequence testing: thresholds of a fixed
grid are tested from the strictest down at level alpha, until one fails. The loss of a prompt is 1 if it is answered by
the cheaper model and that answer is worse, else 0. Each test is a likelihood ratio, averaged over lower losses, that
starts at 1 and is a supermartingale where the mean loss is higher than `loss` (Ville 1939). So one may look after every
judgement: with probability 1 - alpha no threshold that was ever set loses more than `loss` on average over prompts like
the judged ones, whatever the confidence means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import betainc, betaln
from scipy.stats import beta

GRID = 1 / (1 + np.exp(-np.arange(12.0, -6.0, -0.02)))
"""Thresholds tested, strictest first: dense near 1, and chosen before any data is seen."""

SHOWN = 8
"""Points of a curve."""


@dataclass(frozen=True)
class RoutePoint:
    """What a threshold comes to on judged prompts; shares of all prompts in [0, 1]."""

    threshold: float
    local: float
    """Share answered by the cheaper model: its confidence is at least the threshold."""
    loss: float
    """Share answered by it and worse."""
    low: float
    high: float
    """Ends of the exact interval of `loss`, each wrong with probability alpha."""


def route_threshold(
    confidences: Sequence[float], worse: Sequence[bool], *, loss: float, alpha: float
) -> RoutePoint | None:
    """The lowest threshold whose loss is shown to be at most `loss`; None if there is none, as with few judgements.

    confidences: of the cheaper model's answers, in [0, 1]; worse: whether that answer is worse, in the same order.
    """
    ordered, errors = _ordered(confidences, worse)
    counts = np.searchsorted(-ordered, -GRID, side="right")
    failed = np.flatnonzero(log_evidence(errors[counts], len(ordered), loss) < -np.log(alpha))
    last = failed[0] - 1 if len(failed) else len(GRID) - 1
    return None if last < 0 or not len(ordered) else _point(float(GRID[last]), ordered, errors, alpha)


def log_evidence(errors: np.ndarray, n: int, loss: float) -> np.ndarray:
    """Logarithm of the evidence that fewer than `loss` of all prompts are lost, by the number lost among n.

    Half of the mixture lies on no loss at all, half is spread evenly from 0 to `loss`.
    """
    with np.errstate(divide="ignore"):  # so many errors that the evidence is 0
        spread = np.log(betainc(errors + 1, n - errors + 1, loss)) + betaln(errors + 1, n - errors + 1)
    spread -= (errors + 1) * np.log(loss) + (n - errors) * np.log1p(-loss)
    none = np.where(errors == 0, -n * np.log1p(-loss), -np.inf)
    return np.logaddexp(spread, none) - np.log(2)


def route_curve(confidences: Sequence[float], worse: Sequence[bool], *, alpha: float) -> list[RoutePoint]:
    """Points from few prompts answered by the cheaper model to all; empty without judgements."""
    ordered, errors = _ordered(confidences, worse)
    if not len(ordered):
        return []
    places = np.unique(np.ceil(len(ordered) * np.arange(1, SHOWN + 1) / SHOWN).astype(int)) - 1
    found = {
        threshold: _point(threshold, ordered, errors, alpha) for threshold in map(float, ordered[places])
    }
    return list(found.values())


def _ordered(confidences: Sequence[float], worse: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
    """Confidences, highest first, and the number of worse answers among the first 0, 1, 2, ... of them."""
    order = np.argsort(-np.asarray(confidences, dtype=float), kind="stable")
    errors = np.concatenate([[0], np.cumsum(np.asarray(worse, dtype=int)[order])])
    return np.asarray(confidences, dtype=float)[order], errors


def _point(threshold: float, ordered: np.ndarray, errors: np.ndarray, alpha: float) -> RoutePoint:
    n = len(ordered)
    count = int(np.searchsorted(-ordered, -threshold, side="right"))
    lost = int(errors[count])
    low = float(beta.ppf(alpha, lost, n - lost + 1)) if lost else 0.0
    high = float(beta.ppf(1 - alpha, lost + 1, n - lost)) if lost < n else 1.0
    return RoutePoint(threshold, count / n, lost / n, low, high)
