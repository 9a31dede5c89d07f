"""Open WebUI chats: trees of messages. Every answer is a decision with its annotation; siblings answer the same prompt.

Siblings are decisions of their own and not candidates of each other: a chat grows, and what a decision is must not
depend on answers that came later. The same rating stands in the feedback export: both name the message and the rater,
and what says the same again adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from feedback.transfer.formats.base import attempt, key_of, row_format
from feedback.transfer.formats.open_webui import chat_turn, prompt_before, rating_of
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedRating,
    Record,
    RowSkipped,
    completion_of,
    mapping_of,
    text_of,
    time_of,
)


def recognises(row: Mapping[str, Any]) -> bool:
    chat = row.get("chat")
    history = chat.get("history") if isinstance(chat, Mapping) else None
    return isinstance(history, Mapping) and isinstance(history.get("messages"), Mapping)


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    history = mapping_of(mapping_of(row.get("chat"), "chat").get("history"), "chat.history")
    messages = mapping_of(history.get("messages"), "chat.history.messages")
    chat = {name: message for name, message in messages.items() if isinstance(message, Mapping)}
    for name, message in chat.items():
        if message.get("role") == "assistant":
            yield from attempt(line, name, partial(_answer, row, line, chat, name))
    if not any(message.get("role") == "assistant" for message in chat.values()):
        yield RowSkipped(line, key_of(row), "a chat without an answer")


def _answer(
    row: Mapping[str, Any], line: int, chat: Mapping[str, Mapping[str, Any]], name: str
) -> Iterator[Record]:
    message = chat[name]
    turn = chat_turn(message)
    if not turn["content"].strip() and not turn.get("tool_calls"):
        yield RowSkipped(line, name, f"no response{' (error)' if message.get('error') else ''}")
        return
    parent = str(message.get("parentId"))
    annotation = message.get("annotation")
    ratings: tuple[ImportedRating, ...] = ()
    if isinstance(annotation, Mapping) and annotation.get("rating") is not None:
        facts = {"user_id": row.get("user_id"), "created_at": message.get("timestamp")}
        ratings = (rating_of(facts, annotation),)
    yield ImportedDecision(
        line=line,
        key=name,
        messages=prompt_before(chat, parent),
        response=completion_of([turn], "content"),
        policy=text_of(message.get("model") or "", "model"),
        run_id=name[:200],
        unit=text_of(row.get("id") or "", "id")[:200],
        created_at=time_of(message.get("timestamp"), "timestamp"),
        ratings=ratings,
    )


FORMAT = row_format("open_webui_chats", "Open WebUI chats", recognises, records, (), verdicts=())
