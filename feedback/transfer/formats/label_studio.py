"""Label Studio exports: pairwise, rating, choices and text results; JSON_MIN; chats with a rating per message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from feedback.storage.responses import Message, value_excerpt
from feedback.transfer.formats.base import WatchedRow, has, key_of, row_format, thumb_of, verdicts_read
from feedback.transfer.formats.cells import Cell, json_of
from feedback.transfer.formats.columns import is_verdict
from feedback.transfer.formats.fields import (
    is_correction,
    is_text_answer,
    one_answer,
    prompt_field,
    prompt_messages,
    two_answers,
)
from feedback.transfer.formats.label_studio_writer import SHAPES
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    ImportedRating,
    Record,
    RowError,
    RowSkipped,
    completion_of,
    list_of,
    mapping_of,
    message_of,
    messages_of,
    text_of,
    time_of,
)

CHAT_KEYS = ("createdAt", "created_at", "timestamp", "id", "author", "user")
"""Keys of a chat's message that say when and by whom it was written."""
MIN_KEYS = ("annotator", "annotation_id", "created_at", "updated_at", "lead_time", "id")
SIDES = ("left", "right")
TASK = (
    "annotations", "total_annotations", "cancelled_annotations", "annotators", "annotations_results",
    "annotations_ids", "last_annotated_at", "reviews", "reviews_accepted", "reviews_rejected", "reviewed",
    "reviewers", "comment_count", "unresolved_comment_count", "comment_authors", "agreement",
)  # fmt: skip
"""Columns of a task of Label Studio's own that look like a verdict."""


def recognises(row: Mapping[str, Any]) -> bool:
    return (has(row, "data") and isinstance(json_of(row.get("annotations")), list)) or has(
        row, "annotation_id", "annotator"
    )


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    if "annotations" not in row:
        yield from _json_min(row, line)
        return
    verdicts_read(row, used=TASK)
    key, data = key_of(row), mapping_of(json_of(row.get("data")), "data")
    any_annotation = False
    for index, item in enumerate(list_of(json_of(row["annotations"]), "annotations")):
        annotation = mapping_of(item, f"annotations[{index}]")
        if annotation.get("was_cancelled"):
            yield RowSkipped(line, key, "a cancelled annotation")
            continue
        any_annotation = True
        results = [
            mapping_of(result, f"annotations[{index}].result")
            for result in list_of(annotation.get("result"), f"annotations[{index}].result")
        ]
        about = {
            "rater": _rater(annotation.get("completed_by")),
            "created_at": time_of(annotation.get("created_at"), "created_at"),
        }
        if any(result.get("type") == "chatmessage" for result in results):
            yield from _chat(data, results, line, key, about)
        else:
            yield from _task(data, [_answer(result) for result in results], line, key, about)
    if not any_annotation and not row["annotations"]:
        yield RowSkipped(line, key, "a task nobody annotated")


def _rater(value: Any) -> str:
    """Name of the annotator: a number, or in newer exports a person; the same from JSON and from a cell of CSV."""
    value = json_of(value)
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, Mapping):
        value = value.get("email") or value.get("id")
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return ""
    return value if isinstance(value, str) else f"annotator {value}"


Answer = tuple[str, str, Any, str]
"""One result: its question (from_name), its type, its value, and what it is about (to_name)."""


def _answer(result: Mapping[str, Any]) -> Answer:
    kind = str(result.get("type") or "")
    value = mapping_of(result.get("value") or {}, "result.value")
    inside = {"pairwise": "selected", "rating": "rating", "choices": "choices", "textarea": "text"}.get(
        kind, kind
    )
    return str(result.get("from_name") or ""), kind, value.get(inside), str(result.get("to_name") or "")


def _task(
    data: Mapping[str, Any], answers: list[Answer], line: int, key: str, about: Mapping[str, Any]
) -> Iterator[Record]:
    prompt = prompt_field(data)
    pairwise = [answer for answer in answers if answer[1] == "pairwise"]
    ratings = [answer for answer in answers if answer[1] in ("rating", "choices", "textarea")]
    if not pairwise and not ratings:
        yield RowSkipped(line, key, "an annotation without a verdict")
        return
    if not pairwise:
        response = text_of(data[one_answer(data, prompt)], "answer")
        yield ImportedDecision(
            line=line,
            key=key,
            messages=prompt_messages(data, prompt),
            response=response,
            ratings=(_rating(ratings, about),),
        )
        return
    notes = "\n".join(text for answer in ratings for text in _texts(answer) if answer[1] == "textarea")
    tags = tuple(text for answer in ratings for text in _texts(answer) if answer[1] == "choices")
    for _, _, preference, to_name in pairwise:
        if preference not in SIDES:
            raise RowError(f"pairwise: expected left or right, found {value_excerpt(preference)}")
        # left is the first text the template names; exports name it, or only the template's own tag
        left, right = two_answers(data, prompt, first=to_name.split(",")[0])
        one, other = (
            ImportedDecision(
                line=line, key=key, messages=prompt_messages(data, prompt), response=text_of(data[side], side)
            )
            for side in (left, right)
        )
        yield ImportedComparison(
            line=line, key=key, left=one, right=other, preference=preference, notes=notes, tags=tags, **about
        )


def _texts(answer: Answer) -> list[str]:
    value = answer[2]
    return [
        text_of(text, answer[0])
        for text in ([value] if isinstance(value, str) else list_of(value, answer[0]))
    ]


def _rating(answers: Iterable[Answer], about: Mapping[str, Any]) -> ImportedRating:
    facts: dict[str, Any] = {}
    tags: list[str] = []
    notes: list[str] = []
    for answer in answers:
        question, kind, value, _ = answer
        if kind == "rating":
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value not in (1, 2, 3, 4, 5):
                raise RowError(f"{question}: expected 1 to 5 stars, found {value_excerpt(value)}")
            facts["stars"] = int(value)
        elif kind == "choices":
            for text in _texts(answer):
                tags.append(text)
                if thumb := thumb_of(text):
                    facts["thumb"] = thumb
        elif is_correction(question):
            facts["correction"] = "\n".join(_texts(answer))
        else:
            notes += _texts(answer)
    return ImportedRating(tags=tuple(tags), notes="\n".join(notes), **facts, **about)


def _chat(
    data: Mapping[str, Any],
    results: list[Mapping[str, Any]],
    line: int,
    key: str,
    about: Mapping[str, Any],
) -> Iterator[Record]:
    """A conversation held while annotating; a verdict on a message shares its id with it."""
    opening = data.get("chat")
    history: list[Message] = messages_of(opening, "data.chat") if opening else []
    verdicts: dict[str, list[Answer]] = {}
    for result in results:
        if result.get("type") in ("rating", "choices", "textarea"):
            verdicts.setdefault(str(result.get("id")), []).append(_answer(result))
    any_rating = False
    for result in results:
        if result.get("type") != "chatmessage":
            continue
        chat_message = mapping_of(
            mapping_of(result.get("value"), "value").get("chatmessage"), "value.chatmessage"
        )
        message = message_of(
            {key: value for key, value in chat_message.items() if key not in CHAT_KEYS}, "value.chatmessage"
        )
        own = str(result.get("id"))
        if own in verdicts and message["role"] == "assistant" and history:
            any_rating = True
            yield ImportedDecision(
                line=line,
                key=key,
                messages=list(history),
                response=completion_of([message], "value.chatmessage"),
                ratings=(_rating(verdicts[own], about),),
            )
        history.append(message)
    if not any_rating:
        yield RowSkipped(line, key, "a chat without a rated response")


def _json_min(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    """Flattened: the task's fields and the answers side by side; a single choice or text stands there bare."""
    key = key_of(row)
    about = {
        "rater": _rater(row.get("annotator")),
        "created_at": time_of(row.get("created_at"), "created_at"),
    }
    answers: list[Answer] = []
    data: dict[str, Any] = {}
    for name, cell in row.items():
        value = json_of(cell) if isinstance(cell, Cell) else cell
        if name in MIN_KEYS:
            continue
        if isinstance(value, Cell) and value.strip().isdigit() and "rating" in name:
            value = int(value)
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, Mapping) and "selected" in first:
            answers.append((name, "pairwise", first["selected"], ""))
        elif isinstance(first, Mapping) and "rating" in first:
            answers.append((name, "rating", first["rating"], ""))
        elif isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 5 and "rating" in name:
            answers.append((name, "rating", value, ""))
        elif isinstance(value, Mapping) and isinstance(value.get("choices"), list):
            answers.append((name, "choices", value["choices"], ""))
        elif thumb_of(value) or (isinstance(value, str) and value.strip() and is_verdict(name)):
            answers.append((name, "choices", value, ""))
        elif is_text_answer(name) and value not in (None, "", []):
            texts = value.get("text") if isinstance(value, Mapping) else value
            answers.append((name, "textarea", texts, ""))
        else:
            data[name] = value
    watched = WatchedRow(data)
    yield from _task(watched, answers, line, key, about)
    if isinstance(row, WatchedRow):
        row.taken.update(name for name in row if name not in data or name in watched.taken)


FORMAT = row_format(
    "label_studio", "Label Studio: pairwise, rating, JSON_MIN, chat", recognises, records, SHAPES
)
