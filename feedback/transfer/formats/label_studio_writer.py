"""Label Studio's kinds of export, written: pairwise tasks, ratings, JSON_MIN, chats with a rating of the answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count, groupby
from typing import Any

from feedback.transfer.formats.records import ImportedComparison, ImportedDecision, ImportedRating
from feedback.transfer.formats.writers import (
    Line,
    NotSaid,
    RowShape,
    View,
    Writer,
    each_rating,
    iso,
    plain,
    question,
    sides,
    some_words,
    stars_of,
    words,
)


def _tasks(records: Iterable[ImportedComparison], left_out: Counter[str]) -> Iterator[Line]:
    """A task for each pair, with an annotation for each rater who compared it."""

    def pair(record: ImportedComparison) -> tuple[Any, ...]:
        left, right = sides(record)
        return left.id, right.id

    numbers, tasks = count(1), count(1)
    for _, same in groupby(records, pair):
        members = list(same)
        left, right = sides(members[0])
        decisive = [record for record in members if record.preference in ("left", "right")]
        left_out.update(record.preference for record in members if record not in decisive)
        try:
            if left.response == right.response:
                raise NotSaid("same_response")
            data = _prompt_fields(left) | {"answer1": words(left.response), "answer2": words(right.response)}
        except NotSaid as reason:
            left_out[str(reason)] += len(decisive)
            continue
        if decisive:
            annotations = [_annotation(next(numbers), record, _pairwise(record)) for record in decisive]
            yield {"id": next(tasks), "data": data, "annotations": annotations, "predictions": []}


def _prompt_fields(record: ImportedDecision) -> Line:
    try:
        return {"prompt": question(record.messages)}
    except NotSaid:
        return {"messages": plain(record.messages)}


def _annotation(number: int, said: ImportedComparison | ImportedRating, result: list[Line]) -> Line:
    return {
        "id": number,
        "completed_by": {"email": said.rater},
        "result": [{"id": f"{number}-{n}", "origin": "manual", **one} for n, one in enumerate(result)],
        "was_cancelled": False,
        "ground_truth": False,
        "created_at": iso(said.created_at),
        "updated_at": iso(said.created_at),
        "lead_time": None,
    }


def _result(question: str, about: str, kind: str, value: Line) -> Line:
    return {"from_name": question, "to_name": about, "type": kind, "value": value}


def _pairwise(record: ImportedComparison) -> list[Line]:
    result = [_result("comparison", "answer1", "pairwise", {"selected": record.preference})]
    if record.tags:
        result.append(_result("tags", "answer1", "choices", {"choices": list(record.tags)}))
    if record.notes:
        result.append(_result("notes", "answer1", "textarea", {"text": [record.notes]}))
    return result


def _verdict(rating: ImportedRating, about: str) -> list[Line]:
    """Label Studio results of a rating; a score stands at its nearest star."""
    result: list[Line] = []
    if (stars := stars_of(rating)) is not None:
        result.append(_result("rating", about, "rating", {"rating": stars}))
    if rating.thumb:
        result.append(_result("thumb", about, "choices", {"choices": [rating.thumb]}))
    if rating.tags:
        result.append(_result("tags", about, "choices", {"choices": list(rating.tags)}))
    if rating.notes:
        result.append(_result("notes", about, "textarea", {"text": [rating.notes]}))
    if rating.correction is not None:
        result.append(_result("correction", about, "textarea", {"text": [rating.correction]}))
    return result


def _task_writer(line: Any) -> Writer:
    """A writer of one task for each rated decision; `line(number, record, left_out)` gives its rows."""

    def write(records: Iterable[ImportedDecision], left_out: Counter[str]) -> Iterator[Line]:
        for number, record in enumerate(records, start=1):
            try:
                found = list(line(number, record, left_out))
            except NotSaid as reason:
                left_out[str(reason)] += len(record.ratings)
            else:
                yield from found

    return write


def _rating_lines(number: int, record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    data = _prompt_fields(record) | {"response": words(record.response)}
    annotations = [
        _annotation(1000 * number + n, rating, _verdict(rating, "response"))
        for n, rating in enumerate(record.ratings)
    ]
    yield {"id": number, "data": data, "annotations": annotations, "predictions": []}


def _min(number: int, record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    data = _prompt_fields(record) | {"response": words(record.response)}
    numbers = count(1000 * number)

    def line(rating: ImportedRating) -> Line:
        stars = stars_of(rating)
        if stars is None and not rating.thumb:
            raise NotSaid("no_verdict")
        return {
            "id": number,
            **data,
            **({} if stars is None else {"rating": stars}),
            **({"thumb": rating.thumb} if rating.thumb else {}),
            "annotator": rating.rater,
            "annotation_id": next(numbers),
            "created_at": iso(rating.created_at),
            "updated_at": iso(rating.created_at),
            "lead_time": None,
        }

    return each_rating(record, left_out, line)


def _chat(number: int, record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    opening = plain(record.messages)
    answer = {"role": "assistant", "content": some_words(record.response)}
    for n, rating in enumerate(record.ratings):
        annotation = _annotation(1000 * number + n, rating, [])
        # a verdict on a message shares its id with it
        own = f"{annotation['id']}-answer"
        spoken = _result("chat", "chat", "chatmessage", {"chatmessage": answer})
        result = [spoken, *_verdict(rating, "chat")]
        annotation["result"] = [{"id": own, "origin": "manual", **one} for one in result]
        yield {
            "id": f"{number}-{n}" if n else number,
            "data": {"chat": opening},
            "annotations": [annotation],
            "predictions": [],
        }


SHAPES = (
    RowShape("label_studio", "pairwise tasks", (View.COMPARISONS,), _tasks, "array"),
    RowShape(
        "label_studio-rating",
        "tasks with ratings, choices and texts",
        (View.RATED,),
        _task_writer(_rating_lines),
        "array",
    ),
    RowShape(
        "label_studio-json_min", "JSON_MIN: a row for each rating", (View.RATED,), _task_writer(_min), "array"
    ),
    RowShape("label_studio-chat", "chats with a rated answer", (View.RATED,), _task_writer(_chat), "array"),
)
