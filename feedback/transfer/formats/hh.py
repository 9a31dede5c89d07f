"""Anthropic hh-rlhf: `chosen` and `rejected`, each one text of turns marked Human and Assistant."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from feedback.storage.responses import Message
from feedback.transfer.formats.base import has, key_of, preference, row_format
from feedback.transfer.formats.records import (
    ImportedComparison,
    Record,
    RowError,
    system_in,
    text_of,
    with_system,
)
from feedback.transfer.formats.writers import (
    Line,
    NotSaid,
    RowShape,
    View,
    better_worse,
    some_words,
    turns_by_role,
    words,
    writer_by_record,
)

TURN = re.compile(r"\n\n(Human|Assistant):")
LAST = "\n\nAssistant:"
ROLES = {"Human": "user", "Assistant": "assistant"}


def recognises(row: Mapping[str, Any]) -> bool:
    return has(row, "chosen", "rejected") and all(
        isinstance(row[key], str) and row[key].startswith("\n\nHuman:") and LAST in row[key]
        for key in ("chosen", "rejected")
    )


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    prompt, chosen = _split(row.get("chosen"), "chosen")
    other_prompt, rejected = _split(row.get("rejected"), "rejected")
    if not chosen:
        raise RowError("chosen: is empty after the last Assistant turn")
    if prompt != other_prompt:
        raise RowError(
            "the conversations differ before the last Assistant turn: not two responses to the same prompt"
        )
    messages = with_system(system_in(row), turns_of_text(prompt), "chosen")
    yield from preference(line, key_of(row), messages, chosen, rejected)


def _split(value: Any, what: str) -> tuple[str, str]:
    """Everything up to the last Assistant turn, and what stands in it."""
    text = text_of(value, what)
    prompt, found, response = text.rpartition(LAST)
    if not found:
        raise RowError(f"{what}: expected a turn that starts with a blank line and 'Assistant:', found none")
    return prompt, response.strip()


def turns_of_text(prompt: str) -> list[Message]:
    """The turns of a text in which each starts with a blank line and Human: or Assistant:. Raises RowError."""
    before, *parts = TURN.split(prompt)
    if before.strip() or not parts:
        raise RowError("expected the conversation to start with a blank line and 'Human:'")
    turns: list[Message] = []
    for speaker, text in zip(parts[::2], parts[1::2], strict=True):
        role = ROLES[speaker]
        if turns and turns[-1]["role"] == role:
            # many chat templates refuse two turns of one speaker
            turns[-1]["content"] += "\n\n" + text.strip()
        else:
            turns.append({"role": role, "content": text.strip()})
    return turns


# --- Writing -----------------------------------------------------------------------------------------------


def _pair(record: ImportedComparison, left_out: Counter[str]) -> Iterator[Line]:
    better, worse = better_worse(record)
    chosen, rejected = some_words(better.response).strip(), words(worse.response).strip()
    if chosen == rejected:
        raise NotSaid("same_response")
    turns = turns_by_role(better.messages, {role: speaker for speaker, role in ROLES.items()})
    if not turns or turns[0][0] != "Human":
        raise NotSaid("roles")
    if any(TURN.search(f"\n\n{text}") for text in (chosen, rejected, *(text for _, text in turns))):
        raise NotSaid("marker")
    prompt = "".join(f"\n\n{speaker}: {text}" for speaker, text in turns)
    yield {"chosen": f"{prompt}{LAST} {chosen}", "rejected": f"{prompt}{LAST} {rejected}"}


SHAPES = (RowShape("hh", "chosen and rejected conversations", (View.PREFERENCES,), writer_by_record(_pair)),)

FORMAT = row_format("hh", "Anthropic hh-rlhf", recognises, records, SHAPES, verdicts=("chosen", "rejected"))
