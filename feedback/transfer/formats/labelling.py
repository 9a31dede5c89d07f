"""Labelling tasks: which field is the prompt and which are the answers, by their names; and Argilla's records.

Argilla's nested records (`to_list(flatten=False)`) do not say whether a response was submitted: all are taken.
Flattened ones do, and only submitted responses count. Suggestions are a machine's and are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from feedback.messages import Message
from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import (
    TaughtPrompt,
    WatchedRow,
    has,
    key_of,
    row_format,
    thumb_of,
    verdicts_read,
)
from feedback.transfer.formats.cells import JsonObject, is_chat, json_of, listed
from feedback.transfer.formats.columns import NAMES, normal
from feedback.transfer.formats.records import (
    SYSTEM_COLUMNS,
    ImportedComparison,
    ImportedDecision,
    ImportedRating,
    Record,
    RowError,
    RowSkipped,
    compared,
    list_of,
    mapping_of,
    messages_of,
    system_in,
    text_of,
    with_system,
)
from feedback.transfer.formats.writers import (
    Line,
    RowShape,
    View,
    Writer,
    better_worse,
    prompt_fields,
    sides,
    some_words,
    stars_of,
    writer_by_record,
)

# --- Fields by their names ---------------------------------------------------------------------------------

PROMPTS = listed("prompt instruction question query input messages chat conversation context text")
"""Names of prompt columns, likeliest first."""

CORRECTIONS = ("correct", "rewrite", "edit", "improved", "better", "textarea")
"""In the name of a text question: it asks for a better response, not for a remark."""

NOTES = ("note", "comment", "remark")
"""In the name of a text question: whatever is written there is no verdict."""


def prompt_field(fields: JsonObject) -> str:
    """The name of the prompt. Raises RowError, naming the fields there are."""
    named = [name for name in PROMPTS if name in fields and _is_text(dict(fields)[name])]
    if not named:
        raise RowError(
            f"no field is called {', '.join(PROMPTS[:5])} or the like; found {', '.join(fields) or 'none'}"
        )
    return named[0]


def answer_fields(fields: JsonObject, prompt: str) -> list[str]:
    """The names of the texts beside the prompt, in their order: those that are called alike (answer1, answer2), where
    some are; else those with a usual name of a response."""
    texts = [
        name
        for name, value in fields.items()
        if name != prompt and name not in SYSTEM_COLUMNS and isinstance(value, str)
    ]
    alike = [name for name in texts if any(other != name and _stem(other) == _stem(name) for other in texts)]
    return alike or [name for name in texts if normal(name) in NAMES["response"]] or texts


def two_answers(fields: JsonObject, prompt: str, first: str = "") -> tuple[str, str]:
    """The names of the two answers, left one first; `first` says which that is, where anything does."""
    names = answer_fields(fields, prompt)
    if len(names) != 2:
        raise RowError(f"expected two answers beside {prompt!r}, found {', '.join(names) or 'none'}")
    if first == names[1]:
        names.reverse()
    return names[0], names[1]


def one_answer(fields: JsonObject, prompt: str) -> str:
    names = answer_fields(fields, prompt)
    if len(names) != 1:
        raise RowError(f"expected one answer beside {prompt!r}, found {', '.join(names) or 'none'}")
    return names[0]


def prompt_messages(fields: JsonObject, prompt: str) -> list[Message]:
    """The prompt, after the system prompt that stands beside it. JSON that is no chat is what the user wrote."""
    said, read = fields[prompt], json_of(fields[prompt])
    turns = said if isinstance(said, str) and not is_chat(read) else read
    return with_system(system_in(fields), messages_of(turns, prompt), prompt)


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


def _is_text(value: object) -> bool:
    return isinstance(value, (str, list)) and bool(value)


@dataclass
class Answers:
    """What one annotator answered of one response, as the rating it is."""

    facts: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_stars(self, question: str, value: object) -> None:
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


# --- Argilla -----------------------------------------------------------------------------------------------

RECORD_KEYS = ("id", "status", "_server_id", "inserted_at", "updated_at")


def recognises(row: JsonObject) -> bool:
    if isinstance(row.get("fields"), Mapping) and isinstance(row.get("responses"), Mapping):
        return True
    # a record nobody answered has no column of responses
    return has(row, "_server_id") and ("status" in row or any(name.endswith(".responses") for name in row))


def records(row: JsonObject, line: int) -> Iterator[Record]:
    nested = "fields" in row
    if nested:  # flattened, the names of columns are those of the questions
        verdicts_read(row)
    fields = WatchedRow(mapping_of(row["fields"], "fields") if nested else _flat_fields(row))
    verdicts = list(_response_values(row) if nested else _flat(row))
    prompt = prompt_field(fields)
    responses = answer_fields(fields, prompt)
    taught = TaughtPrompt(line, key_of(row), prompt_messages(fields, prompt))

    def decision(name: str, **more: Any) -> ImportedDecision:
        return taught.decision(text_of(fields[name], name), **more)

    by_rater: dict[str, list[tuple[str, object]]] = {}
    for question, value, rater in verdicts:
        ordered = _preferences(value, responses)
        for better, worse in ordered:
            yield compared(decision(better), decision(worse), "left", ordered=False, rater=rater)
        if not ordered:
            by_rater.setdefault(rater, []).append((question, value))
    for rater, answers in by_rater.items():
        if len(responses) == 1:
            yield decision(responses[0], ratings=(_rating(answers, rater),))
        else:
            names = ", ".join(question for question, _ in answers)
            reason = f"which of {len(responses)} responses is meant cannot be told: {names}"
            yield RowSkipped(line, taught.key, reason)
    if isinstance(row, WatchedRow) and not nested:
        row.taken |= fields.taken
    if not verdicts:
        yield RowSkipped(line, taught.key, "a record without submitted responses")


def _response_values(row: JsonObject) -> Iterator[tuple[str, object, str]]:
    """(question, value, rater) of every response."""
    for question, answers in mapping_of(row.get("responses"), "responses").items():
        for item in list_of(answers, f"responses.{question}"):
            answer = mapping_of(item, f"responses.{question}")
            if answer.get("status", "submitted") == "submitted" and answer.get("value") is not None:
                yield question, answer.get("value"), str(answer.get("user_id") or "")


def _flat(row: JsonObject) -> Iterator[tuple[str, object, str]]:
    for name in row:
        if not name.endswith(".responses") or row[name] is None:
            continue
        question = name.removesuffix(".responses")
        values = list_of(row[name], name)
        users = list_of(row.get(f"{name}.users") or [""] * len(values), f"{name}.users")
        states = list_of(row.get(f"{name}.status") or ["submitted"] * len(values), f"{name}.status")
        if not len(values) == len(users) == len(states):
            raise RowError(
                f"{name}: {len(values)} values, {len(users)} users, {len(states)} states: expected as many"
            )
        for value, user, state in zip(values, users, states, strict=True):
            if state == "submitted" and value is not None:
                yield question, value, str(user or "")


def _flat_fields(row: JsonObject) -> dict[str, object]:
    """The fields of a flattened record: what is neither its own nor of a question. Metadata stands among them, and
    cannot be told from fields: answers that are called alike are preferred to it."""
    return {name: value for name, value in row.items() if name not in RECORD_KEYS and "." not in name}


def _preferences(value: object, responses: list[str]) -> list[tuple[str, str]]:
    """(better, worse) of every two responses a value puts in order: a preference names the best, a ranking several."""
    if isinstance(value, str) and value in responses:
        return [(value, other) for other in responses if other != value]
    if not isinstance(value, list) or len(value) < 2:
        return []
    if all(isinstance(item, Mapping) and isinstance(item.get("rank"), int) for item in value):
        # newer records rank as [{"value", "rank"}], and two may share a rank
        ranks = [(item["rank"], item.get("value")) for item in value]
    else:
        ranks = list(enumerate(value))
    if not all(name in responses for _, name in ranks):
        return []
    return [(one, other) for rank, one in ranks for below, other in ranks if rank < below]


def _rating(answers: list[tuple[str, object]], rater: str) -> ImportedRating:
    found = Answers()
    for question, value in answers:
        if isinstance(value, bool) or (
            isinstance(value, str) and thumb_of(value) and not asks_for_text(question)
        ):
            found.facts["thumb"] = ("up" if value else "down") if isinstance(value, bool) else thumb_of(value)
        elif isinstance(value, (int, float)):
            found.add_stars(question, value)
        elif isinstance(value, list):
            found.tags += [text_of(item, question) for item in value]
        else:
            found.add_text(question, text_of(value, question))
    return found.rating(rater=rater)


# --- Writing -----------------------------------------------------------------------------------------------


def _preference(record: ImportedComparison, left_out: Counter[str]) -> Iterator[AnnotatedRecord]:
    left, right = sides(record)
    better, _ = better_worse(record)
    answers = {"response1": some_words(left.response), "response2": some_words(right.response)}
    chosen = "response1" if better is left else "response2"
    fields = {**prompt_fields(left), **answers}
    yield AnnotatedRecord(str(record.id or record.key), fields, [("preference", chosen, record.rater)])


def _rating_records(record: ImportedDecision, left_out: Counter[str]) -> Iterator[AnnotatedRecord]:
    answers: list[tuple[str, object, str]] = []
    for rating in record.ratings:
        stars = stars_of(rating)
        responses = {
            "thumb": rating.thumb or None,
            "rating": stars,
            "correction": rating.correction,
            "tags": list(rating.tags) or None,
            "notes": rating.notes.strip() or None,
        }
        given = [
            (question, value, rating.rater) for question, value in responses.items() if value is not None
        ]
        left_out["no_verdict"] += not given
        answers += given
    yield AnnotatedRecord(
        str(record.id), {**prompt_fields(record), "response": some_words(record.response)}, answers
    )


@dataclass(frozen=True)
class AnnotatedRecord:
    """A record's fields and what was answered of it: (question, value, rater)."""

    id: str
    fields: Line
    answers: list[tuple[str, Any, str]]

    def nested_row(self) -> Line:
        responses: dict[str, list[Line]] = {}
        for question, value, rater in self.answers:
            responses.setdefault(question, []).append({"value": value, "user_id": rater})
        return {
            "id": self.id,
            "fields": self.fields,
            "metadata": {},
            "suggestions": {},
            "responses": responses,
            "vectors": {},
            "status": "completed",
            "_server_id": None,
        }

    def flat(self) -> Line:
        line = {"id": self.id, "status": "completed", "_server_id": None, **self.fields}
        for question in dict.fromkeys(question for question, _, _ in self.answers):
            answers = [(value, rater) for other, value, rater in self.answers if other == question]
            line[f"{question}.responses"] = [value for value, _ in answers]
            line[f"{question}.responses.users"] = [rater for _, rater in answers]
            line[f"{question}.responses.status"] = ["submitted"] * len(answers)
        return line


def _write(flat: bool) -> Writer:
    def write(record: ImportedDecision | ImportedComparison, left_out: Counter[str]) -> Iterator[Line]:
        found = (
            _rating_records(record, left_out)
            if isinstance(record, ImportedDecision)
            else _preference(record, left_out)
        )
        for entry in found:
            yield entry.flat() if flat else entry.nested_row()

    return writer_by_record(write)


BOTH = (View.RATED, View.COMPARISONS)
SHAPES = (
    RowShape("argilla", "records, nested: ratings, then preferences", BOTH, _write(flat=False), "array"),
    RowShape("argilla-flat", "the same, flattened", BOTH, _write(flat=True), "array"),
)

ARGILLA = row_format("argilla", "Argilla records, nested and flattened", recognises, records, SHAPES)
