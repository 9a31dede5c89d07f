"""Demonstrations made of judged answers: by a classifier that learns from them, or drawn by lot for their form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.agents.drawing import draw_answers
from rl.linear.distillation import rows_taught
from rl.linear.rows import LinearRefused
from rl.models.agent_definitions import agent_served
from rl.recipes import FORM, SFTRecipe

Rows = Sequence[Mapping[str, Any]]


def demonstration_rows(
    recipe: SFTRecipe, train: Rows, held_out: Rows, agent: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Demonstrations for both sides of a training, and a note of how they came about.

    The answers of a classifier that learns from the training rows, or with the teacher `form` valid ones drawn by lot.
    Raises LinearRefused where neither can be had.
    """
    definition = agent_served(agent)
    if recipe.teacher == FORM:
        shown, watched = (draw_answers(rows, definition, seed=recipe.seed) for rows in (train, held_out))
        if not shown:
            raise LinearRefused(
                f"none of {len(train):,} rows has an answer that agent {agent} can act on, and none can be drawn from "
                f"its schema: rate valid answers at /rate/?agent={agent}, or correct some"
            )
        return (
            shown,
            watched,
            f"the form was shown: a valid answer, drawn by lot, to each of {len(shown):,} prompts",
        )
    taught = rows_taught(train, held_out, definition, seed=recipe.seed)
    return taught.train, taught.held_out, taught.note
