"""The prompts a run answers, as tokens: each once, with room for an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.agents import get_agent
from rl.recipes import GRPORecipe, PPORecipe
from rl.training.constrained_generation import AnswerForms
from rl.training.encoding import Encoder, prompt_messages
from rl.training.policy import LoadedPolicy
from rl.training.result import TrainingRefused


@dataclass(frozen=True)
class Prompts:
    """Prompts as tokens, each once, and the rows they came from."""

    rows: list[Mapping[str, Any]]
    ids: list[list[int]]
    truncated: int
    duplicates: int
    not_written: dict[str, int] = field(default_factory=dict)
    """Rows whose prompt the template cannot write, by reason."""

    @property
    def left_out(self) -> dict[str, int]:
        return self.not_written | ({"repeated prompts": self.duplicates} if self.duplicates else {})


def answer_forms(policy: LoadedPolicy, agent: str, *prompts: Prompts) -> AnswerForms:
    """Forms of the answers to these prompts, as the agent serves them; of no agent, and of one of free text, none."""
    forms, definition = policy.answer_forms(), get_agent(agent or "assistant")
    for some in prompts:
        for row, ids in zip(some.rows, some.ids, strict=True):
            forms.add(ids, definition.form_served(row.get("state")))
    forms.start(prompts[0].ids[:1])  # a form that cannot be enforced is noted before training
    return forms


def prompts_encoded(
    encoder: Encoder,
    rows: Sequence[Any],
    recipe: PPORecipe | GRPORecipe,
    say: Callable[[str], None],
    most: int | None = None,
) -> Prompts:
    """Each prompt of the rows once, at most `most` of them, without those that the template cannot write. Raises
    TrainingRefused for rows of another shape."""
    try:
        rows, left_out = encoder.written(rows)
        messages = [prompt_messages(row, number) for number, row in enumerate(rows)]
        first: dict[str, int] = {}
        for number, row in enumerate(rows):
            first.setdefault(
                json.dumps([messages[number], messages[number].tools, row.get("state")], sort_keys=True),
                number,
            )
        kept = list(first.values())[:most]
        ids, cut = encoder.prompts([messages[i] for i in kept], recipe.max_new_tokens, recipe.max_length)
    except ValueError as error:
        raise TrainingRefused(str(error)) from error
    for note in left_out.notes("prompts"):
        say(note)
    if cut:
        say(f"{cut} prompts were cut (oldest tokens): max_length is {recipe.max_length}")
    return Prompts([rows[i] for i in kept], ids, cut, len(rows) - len(first), left_out.counts)
