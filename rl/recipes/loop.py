"""Knobs of the loop beside a method's: how feedback becomes a dataset, and when an agent learns by itself."""

from __future__ import annotations

from typing import Any

DATASET_CONFIG: dict[str, Any] = {
    "min_samples": 10,
    "rating_margin": 0.25,
    "max_pairs_per_prompt": 4,
    "reward_threshold": 0.5,
}
"""Knobs that make pairs of feedback: fewest samples to train on; smallest difference of mean rating (in [0,
1]) between two responses that makes a pair; most training pairs one prompt may give (held-out prompts give
one each, so that they are independent); reward in [0, 1] from which a response that nobody rated is a good
one, and below which a bad one."""


ONLINE_LEARNING_CONFIG: dict[str, Any] = {
    "min_samples_to_retrain": 100,
    "max_buffer_size": 10_000,
    "retrain_interval_hours": 24.0,
    "method": "auto",
    "start_from": "base",
    "replay_share": 1.0,
    "gate": "champion",
    "auto_export": True,
    "auto_deploy": False,
    "auto_rollback": True,
    "keep_best": 3,
    "keep_newest": 5,
    "tick_seconds": 60,
}
"""Defaults of continuous learning (docs/online-learning.md); the section `continuous_learning` of
RATCHET_CONFIG lies over it, the agent's row in the admin over both."""


AB_TESTING_KNOBS = (
    "ramp", "allocation", "floor", "group_reserve", "metric", "goal", "alpha", "tuning", "min_units",
    "guardrails", "slices", "on_win",
)  # fmt: skip
"""Fields of a new experiment that the section `ab_testing` of RATCHET_CONFIG may set."""
