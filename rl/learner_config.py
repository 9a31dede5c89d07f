"""The knobs of online learning: the defaults, with the operator's file and the agent's row in the admin over them."""

from __future__ import annotations

from typing import Any

from django.conf import settings

from rl.models import LearnerSettings
from rl.recipes import ONLINE_LEARNING_CONFIG, RECIPES, RecipeError


def learner_config() -> dict[str, Any]:
    """ONLINE_LEARNING_CONFIG with the operator's section `continuous_learning` over it. Raises RecipeError."""
    given = settings.RATCHET_CONFIG.get("continuous_learning", {})
    if unknown := sorted(set(given) - set(ONLINE_LEARNING_CONFIG)):
        raise RecipeError(
            f"continuous_learning: no knob {unknown[0]!r}; there are {', '.join(ONLINE_LEARNING_CONFIG)}"
        )
    return {**ONLINE_LEARNING_CONFIG, **given}


def learner_settings(agent: str) -> LearnerSettings:
    """The agent's row, or one of the defaults that is not stored."""
    stored = LearnerSettings.objects.filter(agent=agent).first()
    if stored is not None:
        return stored
    return learner_defaults(agent)


def retrain_knobs(wanted: LearnerSettings, method: str) -> dict[str, Any]:
    """Whose weights a retrain begins with, and how much older feedback it sees again, for a recipe of that method."""
    asked = {"start_from": wanted.start_from, "replay_share": wanted.replay_share}
    known = RECIPES[method]["default"].as_dict()
    return {name: value for name, value in asked.items() if name in known}


def learner_defaults(agent: str = "") -> LearnerSettings:
    """What counts where nothing is set in the admin; a row that is not stored."""
    return LearnerSettings(agent=agent, **{k: v for k, v in learner_config().items() if k != "tick_seconds"})
