"""Metrics of a reward model on held-out feedback: accuracy, Brier score, calibration. Numbers in, no model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rl.statistics import calibration_curve, concordance, expected_calibration_error


@dataclass(frozen=True)
class HeldOutMetrics:
    """Agreement of predicted and given feedback on held-out rows."""

    accuracy: float
    """Share of pairs ranked as people did, or of responses on the right side of neutral."""
    brier: float
    """Mean squared error of the stated probability (of the score, for regression); 0.25 is a coin."""
    calibration_error: float
    """Expected calibration error over ten bins."""
    curve: list[dict[str, float]]
    """Per bin that holds any: predicted and observed share, count."""


def held_out_metrics(
    scores: Sequence[tuple[float, float]], targets: Sequence[float], objective: str
) -> HeldOutMetrics:
    """Metrics from the head's numbers for each response and the other of its pair, and from what people said.

    `targets` are the scores (regression) or thumbs (binary), in [0, 1]; of pairs (pairwise) people's choice is the
    first and they are not looked at.
    """
    if objective == "pairwise":
        chances = [sigmoid(first - other) for first, other in scores]
        # people's choice is always the first: the model is asked how sure it is of its own choice, and whether it is
        # right
        sure = [max(p, 1 - p) for p in chances]
        right = [float(p > 0.5) for p in chances]
        brier = statistics.fmean((1 - p) ** 2 for p in chances)
        curve = calibration_curve(sure, right)
        return HeldOutMetrics(statistics.fmean(right), brier, expected_calibration_error(sure, right), curve)
    alone = [first for first, _ in scores]
    chances = [sigmoid(s) if objective == "binary" else min(1.0, max(0.0, s)) for s in alone]
    decided = [(p, t) for p, t in zip(chances, targets, strict=True) if t != 0.5]
    accuracy = statistics.fmean((p > 0.5) == (t > 0.5) for p, t in decided) if decided else math.nan
    brier = statistics.fmean((p - t) ** 2 for p, t in zip(chances, targets, strict=True))
    return HeldOutMetrics(
        accuracy, brier, expected_calibration_error(chances, targets), calibration_curve(chances, targets)
    )


def ranked_share(
    scores: Sequence[Sequence[float]], targets: Sequence[float], prompts: Sequence[str]
) -> float | None:
    """Share of feedback ranked as people did: of pairs (two scores a row, people's choice first), else of any two
    responses that people valued differently, a tie counted half (concordance). None where nothing compares."""
    if not scores:
        return None
    if len(scores[0]) == 2:
        return statistics.fmean(first > other for first, other in scores)
    return concordance(targets, [score for (score,) in scores], prompts).share.value


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
