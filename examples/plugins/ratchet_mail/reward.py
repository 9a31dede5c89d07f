"""Reward `brief`: short answers earn more."""

from __future__ import annotations

from rl.rewards.base import RewardSample

WORDS = 40
"""Words of an answer that earns nothing more, and nothing less."""


def brief(sample: RewardSample) -> float | None:
    """2 for an answer of one word, 0 at WORDS, -2 at twice as many and beyond; None for an empty answer."""
    words = len(sample.response.split())
    return max(-2.0, 2.0 - 2.0 * (words - 1) / (WORDS - 1)) if words else None
