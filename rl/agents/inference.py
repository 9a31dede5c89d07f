"""Infers the answer format of an agent without code from its recorded responses. Pure.

Responses that are always one of seven texts, or always an object with the same keys, define what a valid answer is.
Training, evaluation and serving then hold the agent to that format.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.agents.assistant import AGENT as ASSISTANT
from rl.agents.assistant import Assistant
from rl.agents.base import (
    InvalidResponse,
    JsonObject,
    State,
)
from rl.agents.fields import DEEPEST, Path, composed, json_read, leaves, plain
from rl.agents.template import MAX_SCHEMA, answer_of_schema

LEAST_RESPONSES = 40
"""Fewest recorded responses from which a format is inferred."""

MOST_ANSWERS = 32
"""Most distinct texts of a closed set of answers."""

UNSEEN_MASS = 0.05
"""A set is closed only if the estimated probability of a new text next is at most this."""

LABEL_WORDS = 5.0
"""Most words per distinct answer, on average, for answers to be labels; longer ones are replies."""

FEW_REPLIES, REPEATED = 12, 10
"""A closed set of replies has at most 12 of them, each given 10 times on average. A desk with more canned replies also
writes its own."""

COPIED_SHARE = 0.2
"""Above this share of responses found within their own prompts, the prompts list the options, not the agent."""

STRUCTURED_SHARE = 0.95
"""Least share of responses that are objects, of objects with a required key, and of a field's values with one type.
Below 1, so that a few broken rows do not hide the structure."""

RARE_KEY = 0.02
"""Keys in a smaller share of the objects are left out of the format."""

MOST_FIELDS, LONGEST_CHOICE, MOST_ITEMS = 256, 200, 64
"""Most keys of an object, characters of an enumerated value, and items of a list in the format."""

WIDE = 100
"""A field of integers gets bounds if they span at most this, or most of its values repeat."""

WORDING_WORDS = 3.0
"""Texts of more words on average are wordings, unless they are one of a few or copied from the prompt."""

MOST_TOKENS = 768
"""Most tokens of an inferred agent's answer."""


@dataclass(frozen=True)
class InferredAgent(Assistant):
    """An agent whose answer is one of `answers`, else an object that fits `schema`."""

    schema: Mapping[str, Any] | None = field(default=None, hash=False)
    repeats: bool = False
    """True if most responses repeat: the fields hold choices, not wordings."""
    wordings: frozenset[Path] = frozenset()
    """Fields of free wording. They do not count when two answers are compared."""
    choices_held: int = 0
    """Number of fields that hold choices, numbers, booleans or copies from the prompt."""

    @property
    def discrete(self) -> bool:
        chosen = self.repeats or self.choices_held > len(self.wordings)
        return bool(self.answers) or (self.schema is not None and chosen)

    def deed(self, response: str) -> object:
        if self.schema is None or self.repeats or not self.wordings:
            return super().deed(response)
        action = self.parse(response)
        return composed([(path, value) for path, value in leaves(action) if path not in self.wordings])

    @property
    def structured(self) -> bool:
        return self.schema is not None

    def response_schema(self, state: State | None = None) -> JsonObject | None:
        return None if self.schema is None else dict(self.schema)

    def parse(self, response: str, state: State | None = None) -> JsonObject:
        if self.schema is not None:
            return answer_of_schema(response, self.schema)
        action = super().parse(response, state)
        if self.answers and action["text"] not in self.answers:
            raise InvalidResponse(
                f"expected one of the {len(self.answers)} answers it was recorded with, found {response[:80]!r}"
            )
        return action


def agent_inferred(slug: str, recorded: Sequence[tuple[str, str]]) -> InferredAgent | None:
    """The agent inferred from recorded (prompt, response) texts; None for free text and for too few of them."""
    if len(recorded) < LEAST_RESPONSES:
        return None
    texts = [response.strip() for _, response in recorded]
    answers = () if _copies_prompt(recorded) else closed_answers(texts)
    form = None if answers else answer_form([prompt for prompt, _ in recorded], texts)
    if not answers and form is None:
        return None
    longest = max(map(len, texts)) if form else 0
    return InferredAgent(
        slug=slug,
        title=slug,
        description="Answers with one of a few texts." if answers else "Answers with objects of one form.",
        suggested_tags=ASSISTANT.suggested_tags,
        max_new_tokens=max(ASSISTANT.max_new_tokens, min(longest, MOST_TOKENS)),
        answers=answers,
        schema=form.schema if form else None,
        repeats=len(set(texts)) <= len(texts) / 2,
        wordings=frozenset(form.wordings) if form else frozenset(),
        choices_held=form.choices if form else 0,
    )


def closed_answers(texts: Iterable[str]) -> tuple[str, ...]:
    """The distinct texts of a closed set, most frequent first; empty if new texts are to be expected.

    The probability of a new text is estimated by the share of texts seen once (Good 1953, Biometrika 40).
    """
    counts = Counter(texts)
    total, once = sum(counts.values()), sum(count == 1 for count in counts.values())
    if not 2 <= len(counts) <= MOST_ANSWERS or once > UNSEEN_MASS * total or "" in counts:
        return ()
    if not are_labels(counts):
        return ()
    return tuple(text for text, _ in counts.most_common())


def are_labels(counts: Mapping[str, int]) -> bool:
    """True if answers (text -> count) are labels, or a few replies that repeat often. JSON values are labels."""
    words = sum(1 if json_read(text) is not None else len(text.split()) for text in counts)
    if words <= LABEL_WORDS * len(counts):
        return True
    return len(counts) <= FEW_REPLIES and sum(counts.values()) >= REPEATED * len(counts)


@dataclass
class AnswerForm:
    """The JSON schema that recorded answers share, with its fields of wordings and its number of choices."""

    schema: JsonObject = field(default_factory=dict)
    wordings: list[Path] = field(default_factory=list)
    choices: int = 0


def answer_form(prompts: Sequence[str], texts: Sequence[str]) -> AnswerForm | None:
    """The form that nearly all texts share as objects or as lists, inferred field by field; None without one."""
    read = [(prompt, json_read(text)) for prompt, text in zip(prompts, texts, strict=True)]
    for kind in (dict, list):
        values = [(prompt, value) for prompt, value in read if isinstance(value, kind) and value]
        if len(values) >= STRUCTURED_SHARE * len(texts):
            for closed in (True, False):
                form = AnswerForm()
                form.schema = _schema(values, (), form, closed)
                if kind is dict and not form.schema.get("required"):
                    return None  # objects that have no key in common
                if len(json.dumps(form.schema)) <= MAX_SCHEMA:
                    return form
    return None


Values = Sequence[tuple[str, Any]]
"""(prompt, value) of one field."""


def _schema(values: Values, path: Path, form: AnswerForm, closed: bool) -> JsonObject:
    """Schema of one field's values; adds its kind to `form`. closed: enumerate values that are one of a few."""
    known = [(prompt, value) for prompt, value in values if value is not None]
    nulls = len(values) - len(known)
    if not known:
        form.choices += 1
        return {"type": "null"}
    types = Counter(_type(value) for _, value in known)
    kind, count = types.most_common(1)[0]
    if types["integer"] + types["number"] >= STRUCTURED_SHARE * len(known) and types["number"]:
        kind, count = "number", types["integer"] + types["number"]
    if count < STRUCTURED_SHARE * len(known):
        form.wordings.append(path)
        mixed = sorted({*types, *(["null"] if nulls else [])})
        return {} if {"object", "array"} & types.keys() else {"type": mixed}
    alike = [
        (prompt, value)
        for prompt, value in known
        if _type(value) == kind or (kind == "number" and _type(value) == "integer")
    ]
    found = _typed_schema(kind, alike, path, form, closed)
    if nulls <= RARE_KEY * len(values):
        return found
    if set(found) == {"enum"}:
        return {"enum": [*found["enum"], None]}
    return {"anyOf": [found, {"type": "null"}]}


def _typed_schema(kind: str, values: Values, path: Path, form: AnswerForm, closed: bool) -> JsonObject:
    """Schema of values of one type."""
    if kind == "object":
        return _object_schema(values, path, form, closed)
    if kind == "array":
        return _list_schema(values, path, form, closed)
    if kind == "string":
        return _text_schema(values, path, form, closed)
    form.choices += 1
    numbers = [value for _, value in values]
    if kind == "integer" and closed:
        few = len(set(numbers)) <= len(numbers) / 2
        if few or max(numbers) - min(numbers) <= WIDE:
            return {"type": "integer", "minimum": min(numbers), "maximum": max(numbers)}
    return {"type": kind}


def _object_schema(values: Values, path: Path, form: AnswerForm, closed: bool) -> JsonObject:
    counts = Counter(name for _, value in values for name in value)
    names = [name for name, count in counts.items() if count >= max(RARE_KEY * len(values), 2)]
    within = sum(all(name in names for name in value) for _, value in values)
    if (
        not names
        or len(names) > MOST_FIELDS
        or within < STRUCTURED_SHARE * len(values)
        or len(path) >= DEEPEST
    ):
        form.wordings.append(path)
        required = [name for name in names if counts[name] >= STRUCTURED_SHARE * len(values)]
        return {"type": "object", **({"required": required} if required else {})}
    properties = {
        name: _schema(
            [(prompt, value[name]) for prompt, value in values if name in value], (*path, name), form, closed
        )
        for name in names
    }
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in names if counts[name] >= STRUCTURED_SHARE * len(values)],
        "additionalProperties": False,
    }


def _list_schema(values: Values, path: Path, form: AnswerForm, closed: bool) -> JsonObject:
    lengths = [len(value) for _, value in values]
    items = [(prompt, item) for prompt, value in values for item in value[:MOST_ITEMS]]
    if not items:
        form.choices += 1
        return {"type": "array", "maxItems": 0}
    inner = AnswerForm()
    found: JsonObject = {"type": "array", "items": _schema(items, (), inner, closed)}
    if inner.wordings and inner.choices <= len(inner.wordings):
        form.wordings.append(path)
    else:
        form.choices += 1
    if all(len(set(map(plain, value))) == len(value) for _, value in values) and "enum" in found["items"]:
        found["uniqueItems"] = True
    return found | {"minItems": min(lengths), "maxItems": max(lengths)}


def _text_schema(values: Values, path: Path, form: AnswerForm, closed: bool) -> JsonObject:
    texts = [value for _, value in values]
    copied = sum(bool(value) and value in prompt for prompt, value in values)
    counts = Counter(texts)
    once = sum(count == 1 for count in counts.values())
    few = len(counts) <= MOST_ANSWERS and once <= UNSEEN_MASS * len(texts)
    if few and copied <= COPIED_SHARE * len(texts) and max(map(len, counts)) <= LONGEST_CHOICE:
        form.choices += 1
        return {"enum": [text for text, _ in counts.most_common()]} if closed else {"type": "string"}
    words = sum(len(text.split()) for text in texts) / len(texts)
    if few or copied >= len(texts) / 2 or words <= WORDING_WORDS:
        form.choices += 1
    else:
        form.wordings.append(path)
    return {"type": "string"}


def _copies_prompt(recorded: Sequence[tuple[str, str]]) -> bool:
    """True if responses are copied from their prompts, so that a new prompt brings new options."""
    copied = sum(any(value in prompt for value in _values(response)) for prompt, response in recorded)
    return copied > COPIED_SHARE * len(recorded)


def _values(response: str) -> list[str]:
    found = json_read(response)
    values = found.values() if isinstance(found, dict) else [response.strip()]
    return [value for value in values if isinstance(value, str) and value]


def _type(value: object) -> str:
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
