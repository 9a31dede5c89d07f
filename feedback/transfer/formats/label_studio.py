"""Label Studio exports: pairwise, rating, choices and text results; JSON_MIN; chats with a rating per message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, groupby

from feedback.messages import Completion, Message
from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import WatchedRow, key_of, row_format, thumb_of, verdicts_read
from feedback.transfer.formats.cells import Cell, JsonObject, json_of, listed
from feedback.transfer.formats.columns import is_verdict
from feedback.transfer.formats.declared import at
from feedback.transfer.formats.labelling import (
    Answers,
    is_text_answer,
    one_answer,
    prompt_field,
    prompt_messages,
    two_answers,
)
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    ImportedRating,
    Record,
    RowError,
    RowLeftOut,
    RowSkipped,
    compared,
    completion_of,
    list_of,
    mapping_of,
    message_of,
    messages_of,
    text_of,
    time_of,
)
from feedback.transfer.formats.writers import (
    Line,
    NotSaid,
    RowShape,
    View,
    Writer,
    each_rating,
    iso,
    pair_ids,
    plain,
    prompt_fields,
    sides,
    some_words,
    stars_of,
    words,
)

CHAT_KEYS = listed("createdAt created_at timestamp id author user")
"""Keys of a chat's message that say when and by whom it was written."""
MIN_KEYS = listed("annotator annotation_id created_at updated_at lead_time id")
SIDES = ("left", "right")
VALUES = {"pairwise": "selected", "rating": "rating", "choices": "choices", "textarea": "text"}
"""Type of a result -> the key of its value."""
TASK = listed("""annotations total_annotations cancelled_annotations annotators annotations_results annotations_ids
    last_annotated_at reviews reviews_accepted reviews_rejected reviewed reviewers comment_count
    unresolved_comment_count comment_authors agreement""")
"""Columns of a task of Label Studio's own that look like a verdict."""


@dataclass(frozen=True)
class Answer:
    """One result of an annotation."""

    question: str
    kind: str
    value: object
    about: str = ""
    """What it is about: the names of the template's tags."""

    @classmethod
    def of(cls, result: JsonObject) -> Answer:
        kind = str(result.get("type") or "")
        value = mapping_of(result.get("value") or {}, "result.value").get(VALUES.get(kind, kind))
        return cls(str(result.get("from_name") or ""), kind, value, str(result.get("to_name") or ""))

    @property
    def texts(self) -> list[str]:
        texts = [self.value] if isinstance(self.value, str) else list_of(self.value, self.question)
        return [text_of(text, self.question) for text in texts]


@dataclass(frozen=True)
class Annotation:
    """Where an annotation stands, and who gave it when."""

    line: int
    key: str
    about: JsonObject

    def decision(
        self, messages: list[Message], response: Completion, answers: Iterable[Answer] = ()
    ) -> ImportedDecision:
        """A decision with the rating that these answers are."""
        ratings = (_rating_of(answers, self.about),) if answers else ()
        return ImportedDecision(
            line=self.line, key=self.key, messages=messages, response=response, ratings=ratings
        )


def _is_label_studio(row: JsonObject) -> bool:
    task = "data" in row and isinstance(json_of(row.get("annotations")), list)
    return task or ("annotation_id" in row and "annotator" in row)


def _label_studio(row: JsonObject, line: int) -> Iterator[Record]:
    if "annotations" not in row:
        yield from _json_min(row, line)
        return
    verdicts_read(row, used=TASK)
    key, data = key_of(row), mapping_of(json_of(row.get("data")), "data")
    annotations = list_of(json_of(row["annotations"]), "annotations")
    if not annotations:
        raise RowLeftOut("a task nobody annotated")
    for index, item in enumerate(annotations):
        what = f"annotations[{index}]"
        annotation = mapping_of(item, what)
        if annotation.get("was_cancelled"):
            yield RowSkipped(line, key, "a cancelled annotation")
            continue
        results = [
            mapping_of(one, f"{what}.result") for one in list_of(annotation.get("result"), f"{what}.result")
        ]
        created_at = time_of(annotation.get("created_at"), "created_at")
        about = {"rater": _rater(annotation.get("completed_by")), "created_at": created_at}
        place = Annotation(line, key, about)
        if any(result.get("type") == "chatmessage" for result in results):
            yield from _chat_records(data, results, place)
        else:
            yield from _task(data, [Answer.of(result) for result in results], place)


def _rater(value: object) -> str:
    """Name of the annotator: a number, or in newer exports a person; the same from JSON and from a cell of CSV."""
    value = json_of(value)
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, Mapping):
        value = value.get("email") or value.get("id")
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return ""
    return value if isinstance(value, str) else f"annotator {value}"


def _task(data: JsonObject, answers: list[Answer], place: Annotation) -> Iterator[Record]:
    prompt = prompt_field(data)
    pairwise = [answer for answer in answers if answer.kind == "pairwise"]
    ratings = [answer for answer in answers if answer.kind in ("rating", "choices", "textarea")]
    if not pairwise and not ratings:
        yield RowSkipped(place.line, place.key, "an annotation without a verdict")
    elif not pairwise:
        response = text_of(data[one_answer(data, prompt)], "answer")
        yield place.decision(prompt_messages(data, prompt), response, ratings)
    for answer in pairwise:
        if answer.value not in SIDES:
            raise RowError(f"pairwise: expected left or right, found {value_excerpt(answer.value)}")
        # left is the first text the template names; exports name it, or only the template's own tag
        names = two_answers(data, prompt, first=answer.about.split(",")[0])
        messages = prompt_messages(data, prompt)
        left, right = (place.decision(messages, text_of(data[name], name)) for name in names)
        yield compared(
            left,
            right,
            answer.value,
            notes="\n".join(text for one in ratings if one.kind == "textarea" for text in one.texts),
            tags=tuple(text for one in ratings if one.kind == "choices" for text in one.texts),
            **place.about,
        )


def _rating_of(answers: Iterable[Answer], about: JsonObject) -> ImportedRating:
    found = Answers()
    for answer in answers:
        if answer.kind == "rating":
            found.add_stars(answer.question, answer.value)
        elif answer.kind == "choices":
            found.tags += answer.texts
            for thumb in filter(None, map(thumb_of, answer.texts)):
                found.facts["thumb"] = thumb
        else:
            found.add_text(answer.question, "\n".join(answer.texts))
    return found.rating(**about)


def _chat_records(data: JsonObject, results: list[JsonObject], place: Annotation) -> Iterator[Record]:
    """A conversation held while annotating; a verdict on a message shares its id with it."""
    opening = data.get("chat")
    history: list[Message] = messages_of(opening, "data.chat") if opening else []
    verdicts: dict[str, list[Answer]] = {}
    for result in results:
        if result.get("type") in ("rating", "choices", "textarea"):
            verdicts.setdefault(str(result.get("id")), []).append(Answer.of(result))
    any_rating = False
    for result in results:
        if result.get("type") != "chatmessage":
            continue
        said = mapping_of(at(result, "value.chatmessage"), "value.chatmessage")
        kept = {key: value for key, value in said.items() if key not in CHAT_KEYS}
        message = message_of(kept, "value.chatmessage")
        answers = verdicts.get(str(result.get("id")))
        if answers and message["role"] == "assistant" and history:
            any_rating = True
            yield place.decision(list(history), completion_of([message], "value.chatmessage"), answers)
        history.append(message)
    if not any_rating:
        yield RowSkipped(place.line, place.key, "a chat without a rated response")


def _json_min(row: JsonObject, line: int) -> Iterator[Record]:
    """Flattened: the task's fields and the answers side by side; a single choice or text stands there bare."""
    created_at = time_of(row.get("created_at"), "created_at")
    about = {"rater": _rater(row.get("annotator")), "created_at": created_at}
    answers: list[Answer] = []
    data: dict[str, object] = {}
    for name, cell in row.items():
        if name in MIN_KEYS:
            continue
        value = json_of(cell) if isinstance(cell, Cell) else cell
        if (answer := _min_answer(name, value)) is None:
            data[name] = value
        else:
            answers.append(answer)
    watched = WatchedRow(data)
    yield from _task(watched, answers, Annotation(line, key_of(row), about))
    if isinstance(row, WatchedRow):
        row.taken.update(name for name in row if name not in data or name in watched.taken)


def _min_answer(name: str, value: object) -> Answer | None:
    """The answer that a column of JSON_MIN holds; None where it is a field of the task."""
    if isinstance(value, Cell) and value.strip().isdigit() and "rating" in name:
        value = int(value)
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, Mapping) and "selected" in first:
        return Answer(name, "pairwise", first["selected"])
    if isinstance(first, Mapping) and "rating" in first:
        return Answer(name, "rating", first["rating"])
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 5 and "rating" in name:
        return Answer(name, "rating", value)
    if isinstance(value, Mapping) and isinstance(value.get("choices"), list):
        return Answer(name, "choices", value["choices"])
    if thumb_of(value) or (isinstance(value, str) and value.strip() and is_verdict(name)):
        return Answer(name, "choices", value)
    if is_text_answer(name) and value not in (None, "", []):
        return Answer(name, "textarea", value.get("text") if isinstance(value, Mapping) else value)
    return None


# --- Writing -----------------------------------------------------------------------------------------------


def _tasks(records: Iterable[ImportedComparison], left_out: Counter[str]) -> Iterator[Line]:
    """A task for each pair, with an annotation for each rater who compared it."""
    numbers, tasks = count(1), count(1)
    for _, same in groupby(records, pair_ids):
        members = list(same)
        left, right = sides(members[0])
        decisive = [record for record in members if record.preference in SIDES]
        left_out.update(record.preference for record in members if record not in decisive)
        try:
            if left.response == right.response:
                raise NotSaid("same_response")
            data = prompt_fields(left) | {"answer1": words(left.response), "answer2": words(right.response)}
        except NotSaid as reason:
            left_out[str(reason)] += len(decisive)
            continue
        if decisive:
            annotations = [_annotation(next(numbers), record, _pairwise(record)) for record in decisive]
            yield {"id": next(tasks), "data": data, "annotations": annotations, "predictions": []}


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


def _results(about: str, given: Iterable[tuple[str, str, object]]) -> list[Line]:
    """Results of (question, type, value), of which those that say something are written."""
    return [
        {"from_name": question, "to_name": about, "type": kind, "value": {VALUES.get(kind, kind): value}}
        for question, kind, value in given
        if value not in (None, [], [""], [None])
    ]


def _pairwise(record: ImportedComparison) -> list[Line]:
    verdict = ("comparison", "pairwise", record.preference)
    words_of = (("tags", "choices", list(record.tags)), ("notes", "textarea", [record.notes]))
    return _results("answer1", (verdict, *words_of))


def _verdict(rating: ImportedRating, about: str) -> list[Line]:
    """Label Studio results of a rating; a score stands at its nearest star."""
    given = (
        ("rating", "rating", stars_of(rating)),
        ("thumb", "choices", [rating.thumb]),
        ("tags", "choices", list(rating.tags)),
        ("notes", "textarea", [rating.notes]),
        ("correction", "textarea", [rating.correction]),
    )
    return _results(about, given)


TaskLines = Callable[[int, ImportedDecision, Counter[str]], Iterable[Line]]


def _task_writer(lines: TaskLines) -> Writer:
    """A writer of one task for each rated decision; `lines(number, record, left_out)` gives its rows."""

    def write(records: Iterable[ImportedDecision], left_out: Counter[str]) -> Iterator[Line]:
        for number, record in enumerate(records, start=1):
            try:
                found = list(lines(number, record, left_out))
            except NotSaid as reason:
                left_out[str(reason)] += len(record.ratings)
            else:
                yield from found

    return write


def _rating_lines(number: int, record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    annotations = [
        _annotation(1000 * number + n, rating, _verdict(rating, "response"))
        for n, rating in enumerate(record.ratings)
    ]
    data = prompt_fields(record) | {"response": words(record.response)}
    yield {"id": number, "data": data, "annotations": annotations, "predictions": []}


def _min(number: int, record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    data = prompt_fields(record) | {"response": words(record.response)}
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
        results = [*_results("chat", [("chat", "chatmessage", answer)]), *_verdict(rating, "chat")]
        annotation = _annotation(1000 * number + n, rating, results)
        for result in annotation["result"]:  # a verdict on a message shares its id with it
            result["id"] = f"{annotation['id']}-answer"
        own = f"{number}-{n}" if n else number
        yield {"id": own, "data": {"chat": opening}, "annotations": [annotation], "predictions": []}


_RATED = (View.RATED,)
LABEL_STUDIO = row_format(
    "label_studio",
    "Label Studio: pairwise, rating, JSON_MIN, chat",
    _is_label_studio,
    _label_studio,
    (
        RowShape("label_studio", "pairwise tasks", (View.COMPARISONS,), _tasks, "array"),
        RowShape(
            "label_studio-rating",
            "tasks with ratings, choices and texts",
            _RATED,
            _task_writer(_rating_lines),
            "array",
        ),
        RowShape(
            "label_studio-json_min", "JSON_MIN: a row for each rating", _RATED, _task_writer(_min), "array"
        ),
        RowShape("label_studio-chat", "chats with a rated answer", _RATED, _task_writer(_chat), "array"),
    ),
)
