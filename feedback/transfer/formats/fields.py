"""Fields of a labelling task: which is the prompt and which are the answers, by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from feedback.storage.responses import Message, value_excerpt
from feedback.transfer.formats.cells import json_of, listed
from feedback.transfer.formats.columns import NAMES, normal
from feedback.transfer.formats.records import (
    SYSTEM_COLUMNS,
    ImportedRating,
    RowError,
    messages_of,
    system_in,
    with_system,
)

PROMPTS = listed("prompt instruction question query input messages chat conversation context text")
"""Names of prompt columns, likeliest first."""

CORRECTIONS = ("correct", "rewrite", "edit", "improved", "better", "textarea")
"""In the name of a text question: it asks for a better response, not for a remark."""

NOTES = ("note", "comment", "remark")
"""In the name of a text question: whatever is written there is no verdict."""


def prompt_field(fields: Mapping[str, Any]) -> str:
    """The name of the prompt. Raises RowError, naming the fields there are."""
    named = [name for name in PROMPTS if name in fields and _is_text(dict(fields)[name])]
    if not named:
        raise RowError(
            f"no field is called {', '.join(PROMPTS[:5])} or the like; found {', '.join(fields) or 'none'}"
        )
    return named[0]


def answer_fields(fields: Mapping[str, Any], prompt: str) -> list[str]:
    """The names of the texts beside the prompt, in their order: those that are called alike (answer1, answer2), where
    some are; else those with a usual name of a response."""
    texts = [
        name
        for name, value in fields.items()
        if name != prompt and name not in SYSTEM_COLUMNS and isinstance(value, str)
    ]
    alike = [name for name in texts if any(other != name and _stem(other) == _stem(name) for other in texts)]
    return alike or [name for name in texts if normal(name) in NAMES["response"]] or texts


def two_answers(fields: Mapping[str, Any], prompt: str, first: str = "") -> tuple[str, str]:
    """The names of the two answers, left one first; `first` says which that is, where anything does."""
    names = answer_fields(fields, prompt)
    if len(names) != 2:
        raise RowError(f"expected two answers beside {prompt!r}, found {', '.join(names) or 'none'}")
    if first == names[1]:
        names.reverse()
    return names[0], names[1]


def one_answer(fields: Mapping[str, Any], prompt: str) -> str:
    names = answer_fields(fields, prompt)
    if len(names) != 1:
        raise RowError(f"expected one answer beside {prompt!r}, found {', '.join(names) or 'none'}")
    return names[0]


def prompt_messages(fields: Mapping[str, Any], prompt: str) -> list[Message]:
    """The prompt, after the system prompt that stands beside it."""
    return with_system(system_in(fields), messages_of(json_of(fields[prompt]), prompt), prompt)


def is_correction(question: str) -> bool:
    return any(word in question.lower() for word in CORRECTIONS)


def asks_for_text(question: str) -> bool:
    """True of a question whose answer is a better response or a remark, whatever is written there."""
    return any(word in question.lower() for word in (*CORRECTIONS, *NOTES))


def is_text_answer(name: str) -> bool:
    """True of a column that holds what an annotator wrote: a better response, or a remark."""
    words = re.split(r"[\W_]+", name.lower())
    return any(word.startswith(CORRECTIONS) for word in words) or any(
        word.startswith(NOTES) for word in words
    )


def _stem(name: str) -> str:
    return name.lower().rstrip("0123456789ab").rstrip("_- ")


def _is_text(value: Any) -> bool:
    return isinstance(value, (str, list)) and bool(value)


@dataclass
class Answers:
    """What one annotator answered of one response, as the rating it is."""

    facts: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_stars(self, question: str, value: Any) -> None:
        """Raises RowError."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value not in (1, 2, 3, 4, 5):
            raise RowError(f"{question}: expected 1 to 5 stars, found {value_excerpt(value)}")
        self.facts["stars"] = int(value)

    def add_text(self, question: str, text: str) -> None:
        """A better response, or a remark: the question's name says which."""
        if is_correction(question):
            self.facts["correction"] = text
        else:
            self.notes.append(text)

    def rating(self, **about: Any) -> ImportedRating:
        return ImportedRating(tags=tuple(self.tags), notes="\n".join(self.notes), **self.facts, **about)
