"""Exports of chat applications, whose chats are trees of messages: Open WebUI's feedback and chats, LibreChat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType

from feedback.messages import Message
from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import (
    NO_RATING,
    Format,
    attempt,
    decisions_first,
    each_row,
    holds,
    key_of,
    objects_in,
    row_format,
)
from feedback.transfer.formats.cells import JsonObject, listed
from feedback.transfer.formats.declared import at
from feedback.transfer.formats.files import DiskMultimap
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedRating,
    ImportedReference,
    Record,
    RowError,
    RowLeftOut,
    compared,
    completion_of,
    list_of,
    mapping_of,
    message_of,
    tags_of,
    text_of,
    time_of,
)
from feedback.transfer.formats.writers import (
    Line,
    NotSaid,
    View,
    each_rating,
    good,
    iso,
    shape,
    share_of,
    turns_by_role,
    words,
)


def _thread(
    find: Callable[[str], JsonObject | None], last: object, parent: str, turn: Callable[[JsonObject], Message]
) -> list[Message]:
    """The turns up to and with the message named `last`, first one first. parent: the key that names the one before."""
    turns: list[Message] = []
    seen: set[str] = set()
    while (name := str(last)) not in seen and (message := find(name)) is not None:
        seen.add(name)
        turns.append(turn(message))
        last = message.get(parent)
    if not turns:
        raise RowError("the message it answers is not in the file")
    return turns[::-1]


# --- Open WebUI: a thumb (and a 1 to 10) on one message of a chat that comes along as a snapshot -------------------

WEBUI_THUMBS = {"1": "up", "-1": "down"}
NO_CHAT = "a feedback without its chat, on a message that was not recorded"

WEBUI_TREE = frozenset(
    listed("""id parentId childrenIds timestamp model models modelName modelIdx done annotation userContext
    lastSentence feedbackId merged originalContent info usage statusHistory user user_id meta output""")
)
"""Keys of a message that place it in its tree or say how it was made; others are kept beside the decision."""


def _webui_turn(message: JsonObject) -> Message:
    return message_of({key: value for key, value in message.items() if key not in WEBUI_TREE}, "message")


def _webui_decision(
    chat: Mapping[str, JsonObject],
    name: str,
    line: int,
    key: str,
    unit: object,
    ratings: tuple[ImportedRating, ...] = (),
) -> ImportedDecision:
    """The message of this name as the answer to those before it. Raises RowError."""
    message = chat[name]
    return ImportedDecision(
        line=line,
        key=key,
        messages=_thread(chat.get, message.get("parentId"), "parentId", _webui_turn),
        response=completion_of([_webui_turn(message)], "content"),
        policy=text_of(message.get("model") or "", "model"),
        run_id=name[:200],
        unit=text_of(unit or "", "chat_id")[:200],
        created_at=time_of(message.get("timestamp"), "timestamp"),
        ratings=ratings,
    )


def _webui_rating(row: JsonObject, data: JsonObject) -> ImportedRating:
    thumb, details = WEBUI_THUMBS.get(str(data.get("rating"))), at(data, "details.rating")
    if thumb is None:
        raise RowError(f"data.rating: expected 1 or -1, found {value_excerpt(data.get('rating'))}")
    is_number = isinstance(details, (int, float)) and not isinstance(details, bool)
    if details is not None and not (is_number and 1 <= details <= 10):
        raise RowError(f"data.details.rating: expected 1 to 10, found {value_excerpt(details)}")
    # the reason is the label of a button in the user's language: words to read, not a tag to count
    remarks = [text_of(data.get(name) or "", f"data.{name}") for name in ("reason", "comment")]
    return ImportedRating(
        rater=text_of(row.get("user_id") or "", "user_id"),
        thumb=thumb,
        score=None if details is None else (details - 1) / 9,
        tags=tags_of(data.get("tags"), "data.tags"),
        notes="\n".join(filter(None, remarks)),
        created_at=time_of(row.get("updated_at") or row.get("created_at"), "created_at"),
    )


def _is_webui_feedback(row: JsonObject) -> bool:
    data = row.get("data")
    return "meta" in row and "type" in row and isinstance(data, Mapping) and "rating" in data


def _read_webui_feedback(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    # what names a message of a chat that another row brings along can only be placed after that row
    return decisions_first(path, ratings_path, webui_feedback, verdicts=())


def webui_feedback(
    row: JsonObject, line: int, recorded: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Record]:
    """The records of one feedback of Open WebUI's API. Raises RowError, RowLeftOut.

    recorded: id of a message -> id of the decision that the gateway recorded for it.
    """
    key = key_of(row)
    if row.get("type") != "rating":
        raise RowLeftOut(f"feedback of type {value_excerpt(row.get('type'))}")
    data, meta = mapping_of(row.get("data"), "data"), mapping_of(row.get("meta"), "meta")
    if data.get("rating") is None:
        raise RowLeftOut(NO_RATING)
    rating = _webui_rating(row, data)
    message_id = text_of(meta.get("message_id"), "meta.message_id", required=True)
    listed = mapping_of(at(row, "snapshot.chat.chat.history.messages") or {}, "snapshot messages")
    chat = {name: mapping_of(message, f"snapshot message {name}") for name, message in listed.items()}
    if message_id not in chat or (message_id in recorded and not meta.get("arena")):
        # without the chat only the message's id is known: perhaps it was recorded before
        yield ImportedReference(line, key, recorded.get(message_id, message_id), rating, unknown=NO_CHAT)
        return
    decision = partial(_webui_decision, chat, line=line, key=key, unit=meta.get("chat_id"))
    yield decision(message_id, ratings=(rating,))
    for name, message in chat.items():
        same = str(message.get("parentId")) == str(chat[message_id].get("parentId"))
        if name == message_id or not same or message.get("role") != "assistant":
            continue
        yield decision(name)
        # in the arena two models answered blindly side by side, and the thumb chose between them
        if meta.get("arena"):
            preference = "left" if rating.thumb == "up" else "right"
            yield compared(
                decision(message_id),
                decision(name),
                preference,
                ordered=False,
                rater=rating.rater,
                created_at=rating.created_at,
            )


def _webui_lines(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    """A feedback for each rating, with the chat it was given in."""
    own, unit = str(record.id), record.unit or str(record.id)
    turns = turns_by_role(record.messages, {role: role for role in ("system", "user", "assistant", "tool")})
    conversation = [*turns, ("assistant", words(record.response))]
    keys = [*(f"{own}-{number}" for number in range(len(turns))), own]
    messages: list[Line] = [
        {
            "id": key,
            "parentId": keys[number - 1] if number else None,
            "childrenIds": keys[number + 1 : number + 2],
            "role": role,
            "content": text,
        }
        for number, (key, (role, text)) in enumerate(zip(keys, conversation, strict=True))
    ]
    messages[-1] |= {"model": record.policy, "timestamp": _epoch(record.created_at)}
    history = {"messages": dict(zip(keys, messages, strict=True)), "currentId": own}
    chat = {"id": unit, "chat": {"history": history, "messages": messages}}

    def line(rating: ImportedRating) -> Line:
        share = share_of(replace(rating, thumb=""))
        return {
            "id": str(rating.id),
            "user_id": rating.rater,
            "version": 0,
            "type": "rating",
            "data": {
                "rating": 1 if good(rating) else -1,
                "model_id": record.policy,
                "sibling_model_ids": None,
                "reason": "",
                "comment": rating.notes,
                "tags": list(rating.tags),
                # 1 to 10, where the rating is finer than a thumb
                **({} if share is None else {"details": {"rating": round(1 + 9 * share)}}),
            },
            "meta": {
                "model_id": record.policy,
                "message_id": own,
                "message_index": len(turns),
                "chat_id": unit,
                "arena": False,
            },
            "snapshot": {"chat": chat},
            "created_at": _epoch(rating.created_at),
            "updated_at": _epoch(rating.created_at),
        }

    return each_rating(record, left_out, line)


def _epoch(at: datetime | None) -> int | None:
    return None if at is None else int(at.timestamp())


OPEN_WEBUI = Format(
    "open_webui",
    "Open WebUI feedback export",
    _is_webui_feedback,
    _read_webui_feedback,
    (shape("open_webui", "feedback with its chats", View.RATED, _webui_lines, "array"),),
)


def _webui_chat(row: JsonObject, line: int) -> Iterator[Record]:
    """Every answer of a chat with its annotation. Siblings are decisions of their own and not candidates of each other:
    a chat grows, and what a decision is must not depend on answers that came later. The same rating stands in the
    feedback export: both name the message and the rater, and what says the same again adds nothing."""
    messages = mapping_of(at(row, "chat.history.messages"), "chat.history.messages")
    row.get("chat")
    chat = {name: message for name, message in messages.items() if isinstance(message, Mapping)}
    answers = [name for name, message in chat.items() if message.get("role") == "assistant"]
    if not answers:
        raise RowLeftOut("a chat without an answer")
    for name in answers:
        yield from attempt(line, name, partial(_webui_answer, row, line, chat, name))


def _webui_answer(row: JsonObject, line: int, chat: Mapping[str, JsonObject], name: str) -> Iterator[Record]:
    message = chat[name]
    turn = _webui_turn(message)
    if not turn["content"].strip() and not turn.get("tool_calls"):
        raise RowLeftOut(f"no response{' (error)' if message.get('error') else ''}")
    annotation = message.get("annotation")
    ratings: tuple[ImportedRating, ...] = ()
    if isinstance(annotation, Mapping) and annotation.get("rating") is not None:
        given = {"user_id": row.get("user_id"), "created_at": message.get("timestamp")}
        ratings = (_webui_rating(given, annotation),)
    yield _webui_decision(chat, name, line, name, row.get("id"), ratings)


OPEN_WEBUI_CHATS = row_format(
    "open_webui_chats",
    "Open WebUI chats",
    lambda row: isinstance(at(row, "chat.history.messages"), Mapping),
    _webui_chat,
    verdicts=(),
)

# --- LibreChat: thumbs on responses --------------------------------------------------------------------------------

LIBRECHAT_TREE = frozenset(
    listed("""_id __v messageId conversationId parentMessageId isCreatedByUser text content sender user model endpoint
    createdAt updatedAt feedback tokenCount unfinished error isEdited _meiliIndex finish_reason children
    siblingIndex depth expiredAt iconURL""")
)
"""Keys of a message that place it in its tree; others are kept beside the decision."""

LIBRECHAT_THUMBS = {"thumbsUp": "up", "thumbsDown": "down"}
NO_PARENT = "00000000-0000-0000-0000-000000000000"


def _read_librechat(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    # a message may stand before the one it answers: all are read before the first is understood
    messages = DiskMultimap()
    for row, _ in objects_in(path):
        messages.add(str(row.get("messageId")), dict(row))
    return each_row(path, partial(_librechat, messages), verdicts=("feedback",))


def _librechat(messages: DiskMultimap, message: JsonObject, line: int) -> Iterator[Record]:
    if not message.get("feedback"):
        raise RowLeftOut("a message without feedback")
    message = {name: message[name] for name in message}  # each is used, or kept beside the decision
    feedback = mapping_of(message["feedback"], "feedback")
    if feedback.get("rating") is None:
        raise RowLeftOut(NO_RATING)
    thumb = LIBRECHAT_THUMBS.get(str(feedback.get("rating")))
    if thumb is None:
        found = value_excerpt(feedback.get("rating"))
        raise RowError(f"feedback.rating: expected thumbsUp or thumbsDown, found {found}")
    # some deployments store the whole choice as the tag
    tag, user = at(feedback, "tag.key || tag"), message.get("user")
    yield ImportedDecision(
        line=line,
        key=key_of(message),
        messages=_thread(messages.last, message.get("parentMessageId"), "parentMessageId", _librechat_turn),
        response=completion_of([_librechat_turn(message)], "content"),
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


def _librechat_turn(message: JsonObject) -> Message:
    """A message as a turn: its `text`, or in newer versions the parts of `content`."""
    content = message.get("text")
    if not content and message.get("content"):
        content = list_of(message["content"], "content")
    elif not isinstance(content, str):
        text_of(content, "text")
    rest = {key: value for key, value in message.items() if key not in LIBRECHAT_TREE}
    role = "user" if message.get("isCreatedByUser") else "assistant"
    return message_of({**rest, "role": role, "content": content}, "content")


def _librechat_lines(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
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
            **(_librechat_verdict(rating) if last else {}),
        }
        parent = key


def _librechat_verdict(rating: ImportedRating) -> Line:
    return {
        "user": rating.rater,
        "updatedAt": iso(rating.created_at),
        "feedback": {
            "rating": "thumbsUp" if good(rating) else "thumbsDown",
            "tag": rating.tags[0] if rating.tags else None,
            "text": rating.notes,
        },
    }


LIBRECHAT = Format(
    "librechat",
    "LibreChat messages with thumbs",
    holds("messageId conversationId isCreatedByUser"),
    _read_librechat,
    (shape("librechat", "conversations with a thumb each", View.RATED, _librechat_lines, "array"),),
)
