"""Find and redact text of erased decisions in its copies: JSON, logs, files."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from feedback.models import Comparison, Decision, Rating, Trace

SHORTEST_TEXT = 12
"""Shortest text, in characters, that is searched for in copies. Shorter texts are too common."""
BEGINNING = 40
"""A longer text is also searched for by this many leading characters, because logs cut quotes."""
SHORTEST_UNIT = 4
"""Shortest unit name that is searched for, as a whole word, in free text."""
REDACTION = "[erased]"
"""Replaces erased text."""
CONTENT = {
    "messages",
    "prompt",
    "answer",
    "answers",
    "chosen",
    "rejected",
    "completion",
    "completions",
    "response",
}
CONTENT |= {
    "responses",
    "state",
    "facts",
    "correction",
    "text",
    "content",
    "candidates",
    "preferred",
    "dispreferred",
}
CONTENT |= {"accepted", "forbidden", "reasoning", "reasoning_content"}
"""Keys of prompt and answer texts in evaluations, samples and dataset rows."""
INSTRUCTIONS = ("system", "developer")
"""Roles of messages written by the app, not by a unit."""
HEADER = frozenset({"role", "type"})


@dataclass(frozen=True)
class Marks:
    """What identifies the decisions being erased: ids, hashes and texts."""

    unit: str
    decisions: frozenset[uuid.UUID]
    prompts: Mapping[str, frozenset[str]]
    """Agent -> hashes of the erased prompts."""
    own_prompts: frozenset[str]
    """Hashes of prompts that no other decision has."""
    responses: frozenset[str]
    """Responses to the erased prompts, and their corrections."""
    texts: tuple[str, ...]
    """Texts of at least SHORTEST_TEXT characters that no other decision of these agents holds, and the BEGINNING of
    longer ones; longest first."""
    _ids: frozenset[str] = field(default=frozenset(), compare=False)

    def in_text(self, text: str) -> bool:
        """True if a text quotes an erased decision or names the unit."""
        return any(mark in text for mark in self.texts) or self._unit_in(text)

    def redact(self, text: str) -> str:
        for mark in self.texts:
            if mark in text:
                text = text.replace(mark, REDACTION)
        return self._unit_word.sub(REDACTION, text) if self._unit_in(text) else text

    def redact_json(self, value: object) -> object:
        """A redacted copy of JSON.

        An object with an erased prompt loses every text under the keys of CONTENT, because the answer to a prompt
        reveals the prompt.
        """
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, list):
            return [self.redact_json(item) for item in value]
        if not isinstance(value, dict):
            return value
        redacted = {self.redact(str(name)): self.redact_json(item) for name, item in value.items()}
        prompt_keys = [name for name in ("messages", "prompt") if name in value]
        if value.get("prompt_hash") in self.own_prompts or any(
            redacted.get(n) != value[n] for n in prompt_keys
        ):
            return {name: _without_text(item) if name in CONTENT else item for name, item in redacted.items()}
        return redacted

    def redacted_bytes(self, data: bytes) -> bytes:
        """A redacted text file of the same length, so that it can be overwritten while a process appends to it.

        Texts are also searched for as JSON escapes them.
        """
        for mark in self.texts:
            for form in dict.fromkeys(
                (mark, json.dumps(mark)[1:-1], json.dumps(mark, ensure_ascii=False)[1:-1])
            ):
                encoded = form.encode("utf-8", "replace")
                if encoded in data:
                    data = data.replace(encoded, _filler(len(encoded)))
        if len(self.unit) >= SHORTEST_UNIT and self.unit.encode() in data:
            word = re.compile(self._unit_word.pattern.encode())
            data = word.sub(lambda found: _filler(len(found[0])), data)
        return data

    def owns(self, record: object) -> bool:
        """True if a spooled record names an erased decision or the unit."""
        if isinstance(record, Mapping):
            for name, value in record.items():
                if name == "unit" and value == self.unit:
                    return True
                if (
                    name in ("id", "decision", "left", "right")
                    and isinstance(value, str)
                    and value in self._ids
                ):
                    return True
                if isinstance(value, (Mapping, list)) and self.owns(value):
                    return True
        elif isinstance(record, list):
            return any(self.owns(item) for item in record)
        return False

    @property
    def _unit_word(self) -> re.Pattern[str]:
        return re.compile(rf"(?<![\w-]){re.escape(self.unit)}(?![\w-])")

    def _unit_in(self, text: str) -> bool:
        return (
            len(self.unit) >= SHORTEST_UNIT and self.unit in text and self._unit_word.search(text) is not None
        )


def _filler(length: int) -> bytes:
    return REDACTION.encode()[:length].ljust(length)


def _without_text(value: object) -> object:
    if isinstance(value, str):
        return REDACTION
    if isinstance(value, list):
        return [_without_text(item) for item in value]
    if isinstance(value, dict):
        return {name: item if name in HEADER else _without_text(item) for name, item in value.items()}
    return value


def marks_of(unit: str, ids: Iterable[uuid.UUID], traces: Iterable[Trace]) -> Marks:
    """Marks of a unit's decisions and their traces. Call it before any of them is removed.

    Reads every other decision of the same agents once: a text that others hold too does not identify the unit.
    """
    rows = list(Decision.objects.filter(pk__in=list(ids)).order_by())
    prompts: dict[str, set[str]] = {}
    texts: set[str] = set()
    responses: set[str] = set()
    names: set[str] = set()
    for row in rows:
        prompts.setdefault(row.agent, set()).add(row.prompt_hash)
        spoken = [message for message in row.messages if message.get("role") not in INSTRUCTIONS]
        texts.update(texts_of([spoken, row.response, row.reasoning, row.state, row.candidates, row.metadata]))
        names.add(row.policy)
        responses.add(row.response)
    ratings = Rating.objects.filter(decision__in=[row.pk for row in rows]).order_by()
    for words in ratings.values_list("correction", "notes"):
        texts.update(texts_of(list(words)))
        responses.update(filter(None, words[:1]))
    for side in ("left", "right"):
        compared = Comparison.objects.filter(**{f"{side}__in": [row.pk for row in rows]}).order_by()
        texts.update(texts_of(list(compared.values_list("notes", flat=True))))
    for trace in traces:
        texts.update(texts_of([trace.steps, trace.metadata]))
    texts -= names  # Metadata of a logged call holds the model's name.
    beginnings = {text[:BEGINNING] for text in texts if len(text) > BEGINNING}
    pks = frozenset(row.pk for row in rows)
    shared: set[str] = set()
    others = Decision.objects.filter(agent__in=list(prompts)).order_by()
    columns = ("pk", "prompt_hash", "messages", "response", "reasoning", "state", "candidates", "metadata")
    for pk, prompt, *columns_text in others.values_list(*columns).iterator(chunk_size=2000):
        if pk not in pks:
            shared.add(prompt)
            said_too = list(texts_of(columns_text))
            texts.difference_update(said_too)
            beginnings.difference_update(text[:BEGINNING] for text in said_too)
    hashes = frozenset(prompt for every in prompts.values() for prompt in every)
    return Marks(
        unit=unit,
        decisions=pks,
        prompts={agent: frozenset(every) for agent, every in prompts.items()},
        own_prompts=hashes - shared,
        responses=frozenset(responses),
        texts=tuple(sorted(texts | beginnings, key=lambda text: (-len(text), text))),
        _ids=frozenset(str(pk) for pk in pks),
    )


def texts_of(value: object) -> Iterator[str]:
    """Texts of at least SHORTEST_TEXT characters in a JSON value, including those in JSON inside a text."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if len(item.strip()) >= SHORTEST_TEXT:
                yield item.strip()
            if item[:1] in "[{":
                with contextlib.suppress(ValueError, RecursionError):
                    stack.append(json.loads(item))
        elif isinstance(item, Mapping):
            stack += item.values()
        elif isinstance(item, (list, tuple)):
            stack += item
