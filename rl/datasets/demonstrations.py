"""Demonstrations for SFT from judged answers: the preferred ones, or random valid ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rl.agents.random_answers import draw_answers
from rl.datasets.feedback_types import NEUTRAL, Row
from rl.datasets.snapshots import DatasetRefused
from rl.linear.rows import single_text
from rl.models.agent_definitions import agent_served
from rl.recipes import PREFERRED, SFTRecipe

ROW_COLUMNS = ("prompt", "prompt_hash", "state", "facts")
"""Columns that a demonstration copies from its row."""


def demonstration_rows(
    recipe: SFTRecipe, train: Sequence[Row], held_out: Sequence[Row], agent: str
) -> tuple[list[Row], list[Row], str]:
    """(training demonstrations, held-out demonstrations, note on their origin), by `recipe.teacher`.

    preferred: preferred or liked answers. form: random valid answers. Raises DatasetRefused if there are none.
    """
    if recipe.teacher == PREFERRED:
        demonstrations, eval_rows = preferred_rows(train), preferred_rows(held_out)
        note = "the answers that people preferred or liked are the demonstrations, of {:,} prompts"
        lack = "an answer that people preferred or liked: rate at /rate/?agent={}, or write corrections"
    else:
        served = agent_served(agent)
        demonstrations, eval_rows = (
            draw_answers(rows, served, seed=recipe.seed) for rows in (train, held_out)
        )
        note = "the form was shown: a valid answer, drawn by lot, to each of {:,} prompts"
        lack = (
            "an answer that the agent can act on, and none can be drawn from its schema: rate valid answers at "
            "/rate/?agent={}, or correct some"
        )
    if not demonstrations:
        raise DatasetRefused(f"agent {agent}: none of {len(train):,} rows has {lack.format(agent)}")
    return demonstrations, eval_rows, note.format(len(demonstrations))


def preferred_rows(rows: Sequence[Row]) -> list[Row]:
    """The best answer per prompt as a demonstration; prompts without a preferred or liked answer are left out.

    An answer's worth is pairs won minus pairs lost, plus its scores minus neutral.
    """
    first: dict[str, Mapping[str, Any]] = {}
    worth: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        prompt = str(row.get("prompt_hash") or row["prompt"])
        first.setdefault(prompt, row)
        for answer, value in _worths(row):
            if (text := single_text(answer)) is not None:
                worth[prompt][text] += value
    best = {prompt: max(values, key=values.__getitem__) for prompt, values in worth.items()}
    return [
        {**{name: first[prompt][name] for name in ROW_COLUMNS if name in first[prompt]}, "completion": answer}
        for prompt, answer in best.items()
        if worth[prompt][answer] > 0
    ]


def _worths(row: Row) -> list[tuple[Any, float]]:
    """(answer, worth) for each answer of a row."""
    if "chosen" in row:
        return [(row["chosen"], 1.0), (row["rejected"], -1.0)]
    return [(row["completion"], float(row["score"]) - NEUTRAL)]
