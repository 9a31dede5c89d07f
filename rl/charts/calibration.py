"""Calibration of suggested ratings as dots on a square: stated chance (x), observed share (y)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SIDE = 200
"""Side of the square in drawing units."""


def calibration_dots(curve: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A dot per point of a calibration curve (`stated`, `observed` in [0, 1], `n`); its area grows with `n`."""
    most = max(point["n"] for point in curve)
    return [
        {
            "x": round(SIDE * point["stated"], 1),
            "y": round(SIDE * (1 - point["observed"]), 1),
            "r": round(3 + 7 * (point["n"] / most) ** 0.5, 1),
            "words": f"stated {point['stated']:.2f}, observed {point['observed']:.2f}, {point['n']} ratings",
        }
        for point in curve
    ]
