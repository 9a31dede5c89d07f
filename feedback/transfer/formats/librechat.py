"""LibreChat messages: conversations as trees, with thumbs on responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from feedback.storage.responses import Message, value_excerpt
from feedback.transfer.formats.base import NO_RATING, Format, attempt, has, key_of, verdicts_read
from feedback.transfer.formats.disk_store import DiskMultimap
from feedback.transfer.formats.files import rows
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedRating,
    Record,
    RowError,
    RowRefused,
    RowSkipped,
    completion_of,
    list_of,
    mapping_of,
    message_of,
    text_of,
    time_of,
)
from feedback.transfer.formats.writers import (
    Line,
    NotSaid,
    RowShape,
    View,
    good,
    iso,
    share_of,
    turns_by_role,
    words,
    writer_by_record,
)

TREE = (
    "_id", "__v", "messageId", "conversationId", "parentMessageId", "isCreatedByUser", "text", "content", "sender",
    "user", "model", "endpoint", "createdAt", "updatedAt", "feedback", "tokenCount", "unfinished", "error", "isEdited",
    "_meiliIndex", "finish_reason", "children", "siblingIndex", "depth", "expiredAt", "iconURL",
)  # fmt: skip
"""Keys of a message that place it in its tree; others are kept beside the decision."""

THUMBS = {"thumbsUp": "up", "thumbsDown": "down"}


def recognises(row: Mapping[str, Any]) -> bool:
    return has(row, "messageId", "conversationId", "isCreatedByUser")


def read(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    # a message may stand before the one it answers: all are read before the first is understood
    messages = DiskMultimap()
    for row in rows(path):
        if isinstance(row, RowRefused):
            yield row
        elif not isinstance(row.value, Mapping):
            yield RowRefused(row.line, "", f"expected an object, found {value_excerpt(row.value)}")
        else:
            messages.add(str(row.value.get("messageId")), dict(row.value))
            if not row.value.get("feedback"):
                yield from attempt(
                    row.line, key_of(row.value), partial(_unrated_records, row.value, row.line)
                )
    for row in rows(path):
        if not isinstance(row, RowRefused) and isinstance(row.value, Mapping) and row.value.get("feedback"):
            yield from attempt(
                row.line, key_of(row.value), partial(_rated_records, messages, row.value, row.line)
            )


def _unrated_records(message: Mapping[str, Any], line: int) -> Iterator[Record]:
    verdicts_read(message, used=("feedback",))
    yield RowSkipped(line, key_of(message), "a message without feedback")


def _rated_records(messages: DiskMultimap, message: Mapping[str, Any], line: int) -> Iterator[Record]:
    verdicts_read(message, used=("feedback",))
    feedback = mapping_of(message["feedback"], "feedback")
    if feedback.get("rating") is None:
        yield RowSkipped(line, key_of(message), NO_RATING)
        return
    thumb = THUMBS.get(str(feedback.get("rating")))
    if thumb is None:
        raise RowError(
            f"feedback.rating: expected thumbsUp or thumbsDown, found {value_excerpt(feedback.get('rating'))}"
        )
    tag = feedback.get("tag")
    if isinstance(tag, Mapping):  # some deployments store the whole choice
        tag = tag.get("key")
    user = message.get("user")
    yield ImportedDecision(
        line=line,
        key=key_of(message),
        messages=_thread_to(messages, message),
        response=completion_of([_turn(message)], "content"),
        policy=text_of(message.get("model") or "", "model"),
        run_id=text_of(message.get("messageId"), "messageId", required=True),
        unit=text_of(message.get("conversationId") or "", "conversationId"),
        created_at=time_of(message.get("createdAt"), "createdAt"),
        ratings=(
            ImportedRating(
                rater=user if isinstance(user, str) else "",
                thumb=thumb,
                tags=(tag,) if isinstance(tag, str) and tag else (),
                notes=text_of(feedback.get("text") or "", "feedback.text"),
                created_at=time_of(message.get("updatedAt"), "updatedAt"),
            ),
        ),
    )


def _thread_to(messages: DiskMultimap, message: Mapping[str, Any]) -> list[Message]:
    """The turns that lead to a message, first one first."""
    turns: list[Message] = []
    seen: set[str] = set()
    parent = str(message.get("parentMessageId"))
    while parent not in seen and (turn := messages.last(parent)) is not None:
        seen.add(parent)
        turns.append(_turn(turn))
        parent = str(turn.get("parentMessageId"))
    if not turns:
        raise RowError("the message it answers is not in the file")
    return turns[::-1]


def _turn(message: Mapping[str, Any]) -> Message:
    """A message as a turn: its `text`, or in newer versions the parts of `content`."""
    content = message.get("text")
    if not content and message.get("content"):
        content = list_of(message["content"], "content")
    elif not isinstance(content, str):
        text_of(content, "text")
    rest = {key: value for key, value in message.items() if key not in TREE}
    return message_of(
        {**rest, "role": "user" if message.get("isCreatedByUser") else "assistant", "content": content},
        "content",
    )


# --- Writing -----------------------------------------------------------------------------------------------


NO_PARENT = "00000000-0000-0000-0000-000000000000"


def _messages(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    """The conversation that leads to a response, and the response with its first verdict: a message carries one."""
    turns = turns_by_role(record.messages, {"user": "User", "assistant": "Assistant"})
    verdicts = [rating for rating in record.ratings if share_of(rating) not in (None, 0.5)]
    for rating in record.ratings:
        if rating not in verdicts:
            left_out["no_verdict" if share_of(rating) is None else "neutral"] += 1
    left_out["another_rater"] += len(verdicts[1:])
    if not verdicts:
        return
    rating, parent, own = verdicts[0], NO_PARENT, str(record.id)
    answer = words(record.response)
    if not turns or not answer:
        raise NotSaid("empty")
    for number, (sender, text) in enumerate([*turns, ("Assistant", answer)]):
        last = number == len(turns)
        key = own if last else f"{own}-{number}"
        yield {
            "messageId": key,
            "conversationId": record.unit or own,
            "parentMessageId": parent,
            "isCreatedByUser": sender == "User",
            "sender": sender,
            "text": text,
            "model": (record.policy or None) if sender == "Assistant" else None,
            "createdAt": iso(record.created_at),
            **(_verdict(rating) if last else {}),
        }
        parent = key


def _verdict(rating: ImportedRating) -> Line:
    return {
        "user": rating.rater,
        "updatedAt": iso(rating.created_at),
        "feedback": {
            "rating": "thumbsUp" if good(rating) else "thumbsDown",
            "tag": rating.tags[0] if rating.tags else None,
            "text": rating.notes,
        },
    }


SHAPES = (
    RowShape(
        "librechat", "conversations with a thumb each", (View.RATED,), writer_by_record(_messages), "array"
    ),
)

FORMAT = Format("librechat", "LibreChat messages with thumbs", recognises, read, SHAPES)
