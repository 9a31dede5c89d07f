"""Round values for axes, and numbers as short text."""

from __future__ import annotations

import math
from collections.abc import Sequence

TICKS = 4
"""Values on an axis, about."""
SMALLEST = 1e-300
"""Distance below which values are alike: a fourth of it has no logarithm."""


def round_step(low: float, high: float, ticks: int = TICKS) -> float:
    """Distance of ticks that puts about `ticks` of them between low and high: 1, 2 or 5 times a power of ten."""
    rough = (high - low) / ticks
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


def round_values(low: float, high: float, ticks: int = TICKS) -> list[float]:
    """About `ticks` values between low and high that are 1, 2 or 5 times a power of ten apart."""
    return _multiples(low, high, round_step(low, high, ticks))


def round_range(low: float, high: float, ticks: int = TICKS) -> list[float]:
    """Round values of which the first is at most low and the last at least high; a flat figure stands in the middle."""
    if high - low <= max(1e-9 * max(abs(low), abs(high)), SMALLEST):
        # also where means of one value differ in their last bits
        pad = max(abs(low) * 0.1, SMALLEST) if abs(low) > SMALLEST else 1.0
        low, high = low - pad, high + pad
    step = round_step(low, high, ticks)
    return _multiples(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, step)


def _multiples(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first
    return [(first + number) * step for number in range(count + 1)]


def tick_texts(values: Sequence[float]) -> list[str]:
    """Labels of ticks that are equally far apart, with as many decimals as their distance needs."""
    step = values[1] - values[0] if len(values) > 1 else 1.0
    largest = max(abs(value) for value in values)
    if largest < 1e-3 or largest >= 1e7:
        digits = (
            max(0, math.floor(math.log10(largest)) - math.floor(math.log10(step) + 1e-9)) if largest else 0
        )
        return ["0" if abs(value) < step / 1000 else _exponent(value, digits) for value in values]
    decimals = next(places for places in range(12) if abs(round(step, places) - step) < step / 1000)
    return ["0" if abs(value) < step / 1000 else f"{value:,.{decimals}f}" for value in values]


def number_text(value: float) -> str:
    """Three figures, without an exponent where a plain number is short enough."""
    if 0 < abs(value) < 1e-3:
        return _exponent(value, 1)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def _exponent(value: float, decimals: int) -> str:
    digits, _, power = f"{value:.{decimals}e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits}e{int(power)}"
