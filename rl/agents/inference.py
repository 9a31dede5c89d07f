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
from rl.agents.base import (
    InvalidResponse,
    JsonObject,
    State,
)
from rl.agents.fields import DEEPEST, Path, composed, json_read, leaves, plain
from rl.agents.template import MAX_SCHEMA, answer_of_schema

LEAST_RESPONSES = 40
"""Recorded responses before anything is inferred from them."""

MOST_ANSWERS = 32
"""Distinct texts that still make a closed set of answers."""

UNSEEN_MASS = 0.05
"""Largest estimated probability that the next response is a text not recorded before, for the set to be closed."""

LABEL_WORDS = 5.0
"""Mean words of the distinct answers up to which these are labels; longer ones are replies."""

FEW_REPLIES, REPEATED = 12, 10
"""Replies that are still a closed set, at most, and how often each must have been given on average: a desk with 23
canned replies picks a macro where one fits and writes where none does."""

COPIED_SHARE = 0.2
"""Share of responses found within their own prompt from which on the prompt, not the agent, lists the options."""

STRUCTURED_SHARE = 0.95
"""Share of responses that must be objects, of objects that must have a key for it to be required, and of a field's
values that must have one type: a few broken rows do not undo the structure."""

RARE_KEY = 0.02
"""Share of objects that must have a key for it to be one of the form."""

MOST_FIELDS, LONGEST_CHOICE, MOST_ITEMS = 256, 200, 64
"""Keys of an object, characters of a value that is one of a few, and items of a list that the form tells of."""

WIDE = 100
"""Largest distance of a field's least and greatest whole number for the form to name both, unless most stand there
more than once."""

WORDING_WORDS = 3.0
"""Mean words of a field's texts above which they are wordings, unless they are one of a few or stand in the prompt."""

MOST_TOKENS = 768
"""Longest answer in tokens that an inferred agent is given room for."""


@dataclass(frozen=True)
class InferredAgent(Assistant):
    """Free text narrowed to what its recorded responses are: one of `answers`, else an object that fits `schema`."""

    schema: Mapping[str, Any] | None = field(default=None, hash=False)
    repeats: bool = False
    """Most responses are the same as another one: what the objects hold are choices, not wordings."""
    wordings: frozenset[Path] = frozenset()
    """Fields that hold wordings, which nobody writes the same way twice: two answers are the same without them."""
    choices_held: int = 0
    """Fields that hold choices, numbers, truth values, or what the prompt says."""

    @property
    def discrete(self) -> bool:
        chosen = self.repeats or self.choices_held > len(self.wordings)
        return bool(self.answers) or (self.schema is not None and chosen)

    def deed(self, response: str) -> Any:
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
    """The agent that recorded (prompt, response) texts show, or None where they show free text or are too few."""
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
    """The distinct texts, most frequent first, where they are a closed set; empty where more are to be expected.

    The probability of a text never seen is estimated by the share of texts seen once (Good 1953, Biometrika 40).
    """
    counts = Counter(texts)
    total, once = sum(counts.values()), sum(count == 1 for count in counts.values())
    if not 2 <= len(counts) <= MOST_ANSWERS or once > UNSEEN_MASS * total or "" in counts:
        return ()
    if not are_labels(counts):
        return ()
    return tuple(text for text, _ in counts.most_common())


def are_labels(counts: Mapping[str, int]) -> bool:
    """True of answers (text -> how often it was given) that are labels, or a few replies given again and again.

    JSON values are labels. Any other set of replies is free text, of which an agent's definition may say otherwise.
    """
    words = sum(1 if json_read(text) is not None else len(text.split()) for text in counts)
    if words <= LABEL_WORDS * len(counts):
        return True
    return len(counts) <= FEW_REPLIES and sum(counts.values()) >= REPEATED * len(counts)


@dataclass
class AnswerForm:
    """The JSON schema that recorded answers share, and the kinds of its fields."""

    schema: JsonObject = field(default_factory=dict)
    wordings: list[Path] = field(default_factory=list)
    choices: int = 0


def answer_form(prompts: Sequence[str], texts: Sequence[str]) -> AnswerForm | None:
    """The form of the objects, or lists, that most texts are, inferred field by field; None where they differ."""
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
    """Schema of the values of one field; notes in `form` what it holds. closed: values that are one of a few are
    named."""
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
    """True where responses are taken from their prompts: a new prompt then brings options nobody has recorded."""
    copied = sum(any(value in prompt for value in _values(response)) for prompt, response in recorded)
    return copied > COPIED_SHARE * len(recorded)


def _values(response: str) -> list[str]:
    """The texts a response consists of: itself, or the texts within an object."""
    found = json_read(response)
    values = found.values() if isinstance(found, dict) else [response.strip()]
    return [value for value in values if isinstance(value, str) and value]


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
