"""Open WebUI feedback exports: a thumb (and a 1 to 10) on one message of a chat that comes along as a snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from feedback.storage.responses import Message, value_excerpt
from feedback.transfer.formats.base import NO_RATING, Format, decisions_first, has, key_of
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    ImportedRating,
    ImportedReference,
    Record,
    RowError,
    RowSkipped,
    completion_of,
    mapping_of,
    message_of,
    tags_of,
    text_of,
    time_of,
)
from feedback.transfer.formats.writers import (
    Line,
    NotSaid,
    RowShape,
    View,
    each_rating,
    good,
    plain,
    share_of,
    words,
    writer_by_record,
)

NO_CHAT = "a feedback without its chat, on a message that was not recorded"

THUMBS = {"1": "up", "-1": "down"}


def recognises(row: Mapping[str, Any]) -> bool:
    return has(row, "data", "meta", "type") and isinstance(row["data"], Mapping) and "rating" in row["data"]


def read(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    # what names a message of a chat that another row brings along can only be placed after that row
    return decisions_first(path, ratings_path, _records, verdicts=())


def _records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    key = key_of(row)
    if row.get("type") != "rating":
        yield RowSkipped(line, key, f"feedback of type {value_excerpt(row.get('type'))}")
        return
    data, meta = mapping_of(row.get("data"), "data"), mapping_of(row.get("meta"), "meta")
    if data.get("rating") is None:
        yield RowSkipped(line, key, NO_RATING)
        return
    rating = rating_of(row, data)
    message_id = text_of(meta.get("message_id"), "meta.message_id", required=True)
    chat = _messages(row.get("snapshot"))
    if message_id not in chat:
        # without the chat only the message's id is known: perhaps it was recorded before
        yield ImportedReference(line, key, message_id, rating, unknown=NO_CHAT)
        return
    parent = str(chat[message_id].get("parentId"))
    prompt = prompt_before(chat, parent)
    siblings = [
        name
        for name, message in chat.items()
        if name != message_id
        and str(message.get("parentId")) == parent
        and message.get("role") == "assistant"
    ]

    def decision(name: str, ratings: tuple[ImportedRating, ...] = ()) -> ImportedDecision:
        return ImportedDecision(
            line=line,
            key=key,
            messages=prompt,
            response=completion_of([chat_turn(chat[name])], "content"),
            policy=text_of(chat[name].get("model") or "", "model"),
            run_id=name,
            unit=text_of(meta.get("chat_id") or "", "meta.chat_id"),
            created_at=time_of(chat[name].get("timestamp"), "timestamp"),
            ratings=ratings,
        )

    yield decision(message_id, (rating,))
    for name in siblings:
        yield decision(name)
        # in the arena two models answered blindly side by side, and the thumb chose between them
        if meta.get("arena"):
            yield ImportedComparison(
                line=line,
                key=key,
                left=decision(message_id),
                right=decision(name),
                preference="left" if rating.thumb == "up" else "right",
                ordered=False,
                rater=rating.rater,
                created_at=rating.created_at,
            )


def rating_of(row: Mapping[str, Any], data: Mapping[str, Any]) -> ImportedRating:
    thumb = THUMBS.get(str(data.get("rating")))
    if thumb is None:
        raise RowError(f"data.rating: expected 1 or -1, found {value_excerpt(data.get('rating'))}")
    details = (data.get("details") or {}).get("rating") if isinstance(data.get("details"), Mapping) else None
    score: float | None = None
    if details is not None:
        if isinstance(details, bool) or not isinstance(details, (int, float)) or not 1 <= details <= 10:
            raise RowError(f"data.details.rating: expected 1 to 10, found {value_excerpt(details)}")
        score = (details - 1) / 9
    # the reason is the label of a button in the user's language: words to read, not a tag to count
    remarks = [text_of(data.get(name) or "", f"data.{name}") for name in ("reason", "comment")]
    return ImportedRating(
        rater=text_of(row.get("user_id") or "", "user_id"),
        thumb=thumb,
        score=score,
        tags=tags_of(data.get("tags"), "data.tags"),
        notes="\n".join(remark for remark in remarks if remark),
        created_at=time_of(row.get("updated_at") or row.get("created_at"), "created_at"),
    )


def _messages(snapshot: Any) -> dict[str, Mapping[str, Any]]:
    """The messages of the chat by id; none where the export came without."""
    value = snapshot
    for key in ("chat", "chat", "history", "messages"):
        value = value.get(key) if isinstance(value, Mapping) else None
    messages = mapping_of(value or {}, "snapshot messages")
    return {name: mapping_of(message, f"snapshot message {name}") for name, message in messages.items()}


TREE = (
    "id", "parentId", "childrenIds", "timestamp", "model", "models", "modelName", "modelIdx", "done", "annotation",
    "userContext", "lastSentence", "feedbackId", "merged", "originalContent", "info", "usage", "statusHistory",
)  # fmt: skip
"""Keys of a message that place it in its tree or say how it was made; others are kept beside the decision."""


def chat_turn(message: Mapping[str, Any]) -> Message:
    """A message of a chat's tree as a turn. Raises RowError."""
    return message_of({key: value for key, value in message.items() if key not in TREE}, "message")


def prompt_before(chat: Mapping[str, Mapping[str, Any]], last: str) -> list[Message]:
    """The turns up to and with the one named, first one first."""
    turns: list[Message] = []
    seen: set[str] = set()
    while last in chat and last not in seen:
        seen.add(last)
        message = chat[last]
        turns.append(chat_turn(message))
        last = str(message.get("parentId"))
    if not turns:
        raise RowError("the message it answers is not in the snapshot")
    return turns[::-1]


# --- Writing -----------------------------------------------------------------------------------------------


def _feedback(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    """A feedback for each rating, with the chat it was given in."""
    turns, answer = plain(record.messages), words(record.response)
    if any(set(turn) - {"role", "content", "name"} for turn in turns):
        raise NotSaid("not_text")
    decision_id = str(record.id)
    conversation = [*((turn["role"], turn["content"]) for turn in turns), ("assistant", answer)]
    keys = [*(f"{decision_id}-{number}" for number in range(len(turns))), decision_id]
    messages = [
        {
            "id": key,
            "parentId": keys[number - 1] if number else None,
            "childrenIds": keys[number + 1 : number + 2],
            "role": role,
            "content": text,
            **(
                {"model": record.policy, "timestamp": _epoch(record.created_at)} if key == decision_id else {}
            ),
        }
        for number, (key, (role, text)) in enumerate(zip(keys, conversation, strict=True))
    ]
    history = {"messages": dict(zip(keys, messages, strict=True)), "currentId": decision_id}
    chat = {"id": record.unit or decision_id, "chat": {"history": history, "messages": messages}}

    def line(rating: ImportedRating) -> Line:
        up = good(rating)
        return {
            "id": str(rating.id),
            "user_id": rating.rater,
            "version": 0,
            "type": "rating",
            "data": {
                "rating": 1 if up else -1,
                "model_id": record.policy,
                "sibling_model_ids": None,
                "reason": "",
                "comment": rating.notes,
                "tags": list(rating.tags),
                **_details(rating),
            },
            "meta": {
                "model_id": record.policy,
                "message_id": decision_id,
                "message_index": len(turns),
                "chat_id": record.unit or decision_id,
                "arena": False,
            },
            "snapshot": {"chat": chat},
            "created_at": _epoch(rating.created_at),
            "updated_at": _epoch(rating.created_at),
        }

    return each_rating(record, left_out, line)


def _details(rating: ImportedRating) -> Line:
    """1 to 10, where the rating is finer than a thumb."""
    share = share_of(replace(rating, thumb=""))
    return {} if share is None else {"details": {"rating": round(1 + 9 * share)}}


def _epoch(at: datetime | None) -> int | None:
    return None if at is None else int(at.timestamp())


SHAPES = (
    RowShape("open_webui", "feedback with its chats", (View.RATED,), writer_by_record(_feedback), "array"),
)

FORMAT = Format("open_webui", "Open WebUI feedback export", recognises, read, SHAPES)
