"""Outlook of a gain that is not shown yet: about how many held-out prompts would show it, if it stays as large. Pure.

An interval shrinks with the square root of the prompts. The next attempt on a holdout may spend less of alpha than this
one did (`rl.gates.rules.alpha_of_attempt`), so its interval is wider at the same number: both are in the estimate. It
is one: the gain itself was measured with error, and is as likely to turn out smaller as larger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from rl.gates.rules import alpha_of_attempt

MAX_PROMPTS = 100_000
"""Prompts beyond which a number would say no more than that this is no way."""


def prompts_to_show(value: float, low: float, margin: float, n: int, widening: float = 1.0) -> int | None:
    """Held-out prompts at which the lower end of the interval reaches the margin, if the difference stays at `value`.

    value, low: the difference and the lower end over n prompts. widening: how much wider the next interval is at the
    same n. None where no number would do: nothing above the margin was measured.
    """
    if value <= margin:
        return None
    wanted = n * ((value - low) * widening / (value - margin)) ** 2
    return min(math.ceil(wanted), MAX_PROMPTS) if math.isfinite(wanted) else MAX_PROMPTS


def prompts_for_gain(figures: Mapping[str, Any], alpha: float) -> int | None:
    """The same of the accuracy rule's stored figures, at the next attempt; None where nothing can be said. alpha: what
    all attempts together may spend."""
    value, low, n = (figures.get(name) for name in ("value", "low", "n"))
    attempt = figures.get("attempt")
    if value is None or low is None or not n or attempt is None:
        return None
    normal = NormalDist()
    now, then = (normal.inv_cdf(1 - alpha_of_attempt(alpha, number)) for number in (attempt, attempt + 1))
    return prompts_to_show(value, low, figures.get("margin", 0.0), n, then / now)
