"""The knobs of online learning: the defaults, with the operator's file and the agent's row in the admin over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from django.conf import settings

from rl.models import LearnerSettings
from rl.models.learning import method_choices
from rl.recipes import ONLINE_LEARNING_CONFIG, RecipeError
from rl.recipes.methods import method_named


def learner_config() -> dict[str, Any]:
    """ONLINE_LEARNING_CONFIG with the operator's section `continuous_learning` over it. Raises RecipeError."""
    given = settings.RATCHET_CONFIG.get("continuous_learning", {})
    if unknown := sorted(set(given) - set(ONLINE_LEARNING_CONFIG)):
        raise RecipeError(
            f"continuous_learning: no knob {unknown[0]!r}; there are {', '.join(ONLINE_LEARNING_CONFIG)}"
        )
    config = {**ONLINE_LEARNING_CONFIG, **given}
    for name, choices in CHOICES.items():
        _one_of("continuous_learning: " + name, config[name], choices())
    return config


CHOICES: dict[str, Callable[[], Sequence[str]]] = {
    "method": lambda: [slug for slug, _ in method_choices()],
    "start_from": lambda: LearnerSettings.Start.values,
    "gate": lambda: LearnerSettings.Gate.values,
}
"""Knobs with a list of values -> those there are."""


def _one_of(name: str, found: Any, allowed: Sequence[str]) -> None:
    if found not in allowed:
        raise RecipeError(f"{name}: expected one of {', '.join(allowed)}; found {found!r}")


def learner_checked(wanted: LearnerSettings) -> LearnerSettings:
    """The settings themselves. Raises RecipeError where a row, written past the admin, holds a value nobody knows."""
    for name, choices in CHOICES.items():
        _one_of(
            f"learner settings of {wanted.agent}, {name} (change it in the admin under Learner settings)",
            getattr(wanted, name),
            choices(),
        )
    return wanted


def learner_settings(agent: str) -> LearnerSettings:
    """The agent's row, or one of the defaults that is not stored."""
    stored = LearnerSettings.objects.filter(agent=agent).first()
    if stored is not None:
        return stored
    return learner_defaults(agent)


def retrain_knobs(wanted: LearnerSettings, method: str) -> dict[str, Any]:
    """Recipe knobs of a retrain by that method: the weights it begins with, and the share of older
    feedback."""
    knobs = {"start_from": wanted.start_from, "replay_share": wanted.replay_share}
    known = method_named(method).presets["default"].as_dict()
    return {name: value for name, value in knobs.items() if name in known}


def learner_defaults(agent: str = "") -> LearnerSettings:
    """Settings of an agent without a row in the admin; a row that is not stored."""
    return LearnerSettings(agent=agent, **{k: v for k, v in learner_config().items() if k != "tick_seconds"})
