"""Agents without a file or a definition whose recorded responses show what an answer of theirs looks like. Pure.

An app that always answers with one of seven texts, or with an object of the same keys, has told what a valid answer is
without saying so. It is judged and served by that: an answer it could not act on is no answer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.agents.assistant import AGENT as ASSISTANT
from rl.agents.assistant import Assistant
from rl.agents.base import InvalidResponse, State
from rl.agents.template import answer_of_schema

LEAST_RESPONSES = 40
"""Recorded responses before anything is inferred from them."""

MOST_ANSWERS = 32
"""Distinct texts that still make a closed set of answers."""

UNSEEN_MASS = 0.05
"""Largest estimated probability that the next response is a text not recorded before, for the set to be closed."""

COPIED_SHARE = 0.2
"""Share of responses found within their own prompt from which on the prompt, not the agent, lists the options."""

SAME_KEYS = 0.95
"""Share of responses that are objects of the same keys for that to be the form of an answer."""


@dataclass(frozen=True)
class InferredAgent(Assistant):
    """Free text narrowed to what its recorded responses are: one of `answers`, else an object that fits `schema`."""

    schema: Mapping[str, Any] | None = field(default=None, hash=False)
    repeats: bool = False
    """Most responses are the same as another one: what the objects hold are choices, not wordings."""

    @property
    def discrete(self) -> bool:
        return bool(self.answers) or (self.schema is not None and self.repeats)

    @property
    def structured(self) -> bool:
        return self.schema is not None

    def response_schema(self, state: State | None = None) -> dict[str, Any] | None:
        return None if self.schema is None else dict(self.schema)

    def parse(self, response: str, state: State | None = None) -> dict[str, Any]:
        if self.schema is not None:
            return answer_of_schema(response, self.schema)
        action = super().parse(response, state)
        if self.answers and action["text"] not in self.answers:
            raise InvalidResponse(
                f"expected one of the {len(self.answers)} answers it was recorded with, found {response[:80]!r}"
            )
        return action


def agent_inferred(slug: str, recorded: Sequence[tuple[str, str]]) -> InferredAgent | None:
    """The agent that recorded (prompt, response) texts show, or None where they show free text or are too few."""
    if len(recorded) < LEAST_RESPONSES:
        return None
    texts = [response.strip() for _, response in recorded]
    answers = () if _copies_prompt(recorded) else closed_answers(texts)
    schema = None if answers else common_schema(texts)
    if not answers and schema is None:
        return None
    return InferredAgent(
        slug=slug,
        title=slug,
        description="Answers with one of a few texts." if answers else "Answers with objects of one form.",
        suggested_tags=ASSISTANT.suggested_tags,
        max_new_tokens=ASSISTANT.max_new_tokens,
        answers=answers,
        schema=schema,
        repeats=len(set(texts)) <= len(texts) / 2,
    )


def closed_answers(texts: Iterable[str]) -> tuple[str, ...]:
    """The distinct texts, most frequent first, where they are a closed set; empty where more are to be expected.

    The probability of a text never seen is estimated by the share of texts seen once (Good 1953, Biometrika 40).
    """
    counts = Counter(texts)
    total, once = sum(counts.values()), sum(count == 1 for count in counts.values())
    if not 2 <= len(counts) <= MOST_ANSWERS or once > UNSEEN_MASS * total or "" in counts:
        return ()
    return tuple(text for text, _ in counts.most_common())


def common_schema(texts: Sequence[str]) -> dict[str, Any] | None:
    """A JSON schema of the objects most texts are, with the types their values have; None where they differ."""
    objects = [found for text in texts if isinstance(found := _json(text), dict) and found]
    keys = Counter(tuple(sorted(found)) for found in objects)
    if not keys or keys.most_common(1)[0][1] < SAME_KEYS * len(texts):
        return None
    names = keys.most_common(1)[0][0]
    alike = [found for found in objects if tuple(sorted(found)) == names]
    order = [name for name in alike[0] if name in names]
    return {
        "type": "object",
        "properties": {name: {"type": _types([found[name] for found in alike])} for name in order},
        "required": order,
        "additionalProperties": False,
    }


def _copies_prompt(recorded: Sequence[tuple[str, str]]) -> bool:
    """True where responses are taken from their prompts: a new prompt then brings options nobody has recorded."""
    copied = sum(any(value in prompt for value in _values(response)) for prompt, response in recorded)
    return copied > COPIED_SHARE * len(recorded)


def _values(response: str) -> list[str]:
    """The texts a response consists of: itself, or the texts within an object."""
    found = _json(response)
    values = found.values() if isinstance(found, dict) else [response.strip()]
    return [value for value in values if isinstance(value, str) and value]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _types(values: Sequence[Any]) -> str | list[str]:
    """JSON schema types of values, one or several."""
    found = sorted({_type(value) for value in values})
    if found == ["integer", "number"]:
        return "number"
    return found[0] if len(found) == 1 else found


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {
        str: "string",
        int: "integer",
        float: "number",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return names[type(value)]
