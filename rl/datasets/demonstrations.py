"""Demonstrations for SFT: preferred answers of judged prompts, or random valid answers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

from rl.agents.base import UNREADABLE, Agent, JsonObject
from rl.datasets.feedback_types import NEUTRAL, Row
from rl.datasets.snapshots import DatasetRefused
from rl.linear.rows import single_text
from rl.recipes import PREFERRED, SFTRecipe

MOST_ITEMS = 3
"""Most items of a drawn list if its schema gives no bound."""

HIGHEST = 10
"""Largest drawn number if its schema gives no bound."""

ROW_COLUMNS = ("prompt", "prompt_hash", "state", "facts")
"""Columns that a demonstration copies from its row."""


class Undrawable(ValueError):
    """A schema whose values cannot be drawn, such as free text or a reference."""


def draw_answers(rows: Iterable[Mapping[str, object]], agent: Agent, *, seed: int = 42) -> list[JsonObject]:
    """One demonstration with a random valid answer for each prompt of pairs, labels or scores.

    Drawn uniformly from the agent's choices; else from the valid recorded answers to the prompt, liked or not; else
    from the agent's schema. Prompts for which all three are empty are left out.
    """
    given: dict[str, list[str]] = {}
    first: dict[str, Mapping[str, object]] = {}
    for row in rows:
        name = str(row.get("prompt_hash") or row["prompt"])
        first.setdefault(name, row)
        texts = (row.get(side) for side in ("chosen", "rejected", "completion"))
        given.setdefault(name, []).extend(text for text in texts if isinstance(text, str))
    made = []
    for name, row in first.items():
        answer = _draw_answer(agent, row.get("state"), given[name], Random(f"{seed} {name}"))
        if answer is not None:
            made.append(
                {**{column: row[column] for column in ROW_COLUMNS if column in row}, "completion": answer}
            )
    return made


def _draw_answer(agent: Agent, state: Any, given: Sequence[str], random: Random) -> str | None:
    try:
        able = agent.choices(state) or sorted({text for text in given if agent.is_valid(text, state)})
        if able:
            return random.choice(able)
        schema = agent.response_schema(state if isinstance(state, Mapping) else None)
        answer = json.dumps(draw_value(schema, random), ensure_ascii=False) if schema else ""
        return answer if schema and agent.is_valid(answer, state) else None
    except UNREADABLE:
        return None


def draw_value(schema: Mapping[str, Any], random: Random) -> object:
    """A random value of a JSON schema made of enums, numbers, booleans, lists and objects of them.

    Raises Undrawable for any other schema, such as one of free text.
    """
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return random.choice(list(schema["enum"]))
    for several in ("anyOf", "oneOf"):
        if schema.get(several):
            return draw_value(random.choice(list(schema[several])), random)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((one for one in kind if one != "null"), "null")
    if kind == "object":
        inner = schema.get("properties") or {}
        return {name: draw_value(inner[name], random) for name in inner}
    if kind == "array":
        return _draw_list(schema, random)
    if kind in ("integer", "number"):
        low = schema.get("minimum", 0)
        high = schema.get("maximum", max(low, HIGHEST))
        return (
            random.randint(int(low), int(high)) if kind == "integer" else round(random.uniform(low, high), 2)
        )
    if kind == "boolean":
        return random.random() < 0.5
    if kind == "null":
        return None
    raise Undrawable(f"expected a schema of enums, numbers, lists and objects, found {schema!r}")


def _draw_list(schema: Mapping[str, Any], random: Random) -> list[object]:
    item = schema.get("items") or {}
    least = int(schema.get("minItems", 1))
    if schema.get("uniqueItems") and item.get("enum"):
        names = list(item["enum"])
        return random.sample(
            names, random.randint(least, min(int(schema.get("maxItems", len(names))), len(names)))
        )
    most = int(schema.get("maxItems", max(least, MOST_ITEMS)))
    return [draw_value(item, random) for _ in range(random.randint(least, most))]


def demonstration_rows(
    recipe: SFTRecipe, train: Sequence[Row], held_out: Sequence[Row], agent: Agent
) -> tuple[list[Row], list[Row], str]:
    """(training demonstrations, held-out demonstrations, note on their origin), by `recipe.teacher`.

    preferred: preferred or liked answers. form: random valid answers. Raises DatasetRefused if there are none.
    """
    if recipe.teacher == PREFERRED:
        demonstrations, eval_rows = preferred_rows(train), preferred_rows(held_out)
        note = "the answers that people preferred or liked are the demonstrations, of {:,} prompts"
        lack = "an answer that people preferred or liked: rate at /rate/?agent={}, or write corrections"
    else:
        demonstrations, eval_rows = (
            draw_answers(rows, agent, seed=recipe.seed) for rows in (train, held_out)
        )
        note = "the form was shown: a valid answer, drawn by lot, to each of {:,} prompts"
        lack = (
            "an answer that the agent can act on, and none can be drawn from its schema: rate valid answers at "
            "/rate/?agent={}, or correct some"
        )
    if not demonstrations:
        raise DatasetRefused(f"agent {agent.slug}: none of {len(train):,} rows has {lack.format(agent.slug)}")
    return demonstrations, eval_rows, note.format(len(demonstrations))


def preferred_rows(rows: Sequence[Row]) -> list[Row]:
    """The best answer per prompt as a demonstration; prompts without a preferred or liked answer are left out.

    An answer's worth is pairs won minus pairs lost, plus its scores minus neutral.
    """
    first: dict[str, Mapping[str, object]] = {}
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


def _worths(row: Row) -> list[tuple[object, float]]:
    """(answer, worth) for each answer of a row."""
    if "chosen" in row:
        return [(row["chosen"], 1.0), (row["rejected"], -1.0)]
    return [(row["completion"], float(row["score"]) - NEUTRAL)]
