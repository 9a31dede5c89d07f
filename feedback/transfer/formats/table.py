"""Plain rows and tables: a prompt, a response and what was said of it; or two responses and which was preferred.

From JSON, JSON lines, CSV, TSV and Parquet alike. Which column holds what is decided once for a file, in
feedback.transfer.formats.layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from feedback.messages import Completion, Message
from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import (
    PROMPT_ALONE,
    Format,
    OpenFile,
    each_row,
    key_of,
    text_only,
)
from feedback.transfer.formats.cells import JsonObject, is_chat, json_of
from feedback.transfer.formats.columns import ABSENT, NAMES, PAIRS, REJECTED, ColumnMap, normal, value_at
from feedback.transfer.formats.declared import SAME
from feedback.transfer.formats.files import rows
from feedback.transfer.formats.layouts import METADATA_COLUMNS, TableLayout, layout_of
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedOutcome,
    ImportedRating,
    Record,
    RowError,
    RowLeftOut,
    RowSkipped,
    check_json,
    compared,
    completion_of,
    list_of,
    mapping_of,
    messages_of,
    number_of,
    reasoning_text,
    tags_of,
    text_of,
    time_of,
    uuid_of,
    with_reasoning,
    with_system,
)
from feedback.transfer.formats.training_files import preference_parts

EMPTY_CELLS = ("", "nan", "none", "null", "n/a")
"""Texts that programs write into an empty cell."""


def recognises(row: JsonObject) -> bool:
    names = {normal(str(name)) for name in row}
    prompt = bool(names & {*NAMES["prompt"], *NAMES["messages"]})
    if "messages" in names or "conversations" in names or names & REJECTED:
        return True
    if any(is_chat(value) for name, value in row.items() if normal(str(name)) in NAMES["messages"]):
        return True
    paired = any(first in names and second in names for first, second in (*PAIRS, ("model_a", "model_b")))
    return prompt and (paired or bool(names & set(NAMES["response"])))


def table_open(path: Path, columns: ColumnMap | None, name: str = "") -> OpenFile:
    """A file with its columns known. Raises FormatRefused where they cannot be told."""
    layout = layout_of(rows(path, name), name or str(path), columns)
    return OpenFile(lambda: each_row(path, partial(records, layout)), layout.notes, layout.field_lookup)


def read(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    yield from table_open(path, None).records()


def records(layout: TableLayout, row: JsonObject, line: int) -> Iterator[Record]:
    """Records of one row. Raises RowError, RowLeftOut."""
    text_only(row)
    cells = _Cells(layout, row, line)
    if layout.columns.rejected is not None:
        return _choice_records(cells)
    return _pair(cells) if layout.columns.response_a is not None else _single(cells)


class OddVerdict(RowError):
    """A value that is no verdict, in a column of which nearly all are: its row is left out, and the file is read."""


class _Cells:
    """The values of a row by what they are."""

    def __init__(self, layout: TableLayout, row: JsonObject, line: int) -> None:
        self.layout, self.row, self.line = layout, row, line
        self.key = str(self.get("id") or "")[:200] or key_of(row)

    def name(self, field: str) -> str:
        """Column of a field; the field's own name where the file has no such column."""
        return getattr(self.layout.columns, field) or field

    def get(self, field: str) -> Any:
        """The value of a field; None where the file or the row has none."""
        column = getattr(self.layout.columns, field)
        value = None if column is None else value_at(self.row, column)
        return None if value is ABSENT else value

    def text(self, field: str) -> str:
        """The text of a field in which nothing may stand: "" then, and for words such as NaN."""
        value = self.get(field)
        if value is None or (isinstance(value, str) and value.strip().lower() in EMPTY_CELLS):
            return ""
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return f"{value:.15g}" if isinstance(value, float) else str(value)
        return text_of(value, self.name(field))

    def number(self, field: str) -> float | None:
        value = self.get(field)
        return None if value is None else number_of(value, self.name(field))

    def time(self) -> datetime | None:
        return time_of(self.get("created_at"), self.name("created_at"))

    def tags(self) -> tuple[str, ...]:
        value = json_of(self.get("tags"))
        if isinstance(value, str):
            return tuple(part.strip() for part in str(value).replace(";", ",").split(",") if part.strip())
        return tags_of(value, self.name("tags"))


# --- Prompt and response ------------------------------------------------------------------------------------


def _prompt(cells: _Cells) -> list[Message]:
    """Messages of the prompt, with its system prompt. Raises RowError."""
    messages = cells.get("messages")
    if messages is not None:
        turns = messages_of(messages, cells.name("messages"))
    else:
        value = cells.get("prompt")
        if value is None:
            raise RowError(f"{cells.name('prompt')}: is empty")
        if not is_chat(value):
            value = text_of(value, cells.name("prompt"), required=True)
        turns = messages_of(value, cells.name("prompt"))
        more = [cells.row.get(column) for column in cells.layout.also]
        for text in (
            text_of(text, column) for text, column in zip(more, cells.layout.also, strict=True) if text
        ):
            turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}\n{text}"}
    return with_system(cells.get("system"), turns, cells.name("system"))


def _prompt_and_response(cells: _Cells) -> tuple[list[Message], Completion | None]:
    """The prompt and the response, which is the last turn of the conversation where no column is one."""
    messages = _prompt(cells)
    value = cells.get("response")
    if value is not None:
        response = _completion(value, cells.name("response"))
        if (
            isinstance(response, list)
            and response[: len(messages)] == messages
            and len(response) > len(messages)
        ):
            response = completion_of(response[len(messages) :], cells.name("response"), required=True)
        last = messages[-1]
        if len(messages) > 1 and last["role"] == "assistant" and last["content"] == response:
            messages = messages[:-1]
        return messages, response
    if cells.layout.columns.response is None and len(messages) > 1 and messages[-1]["role"] == "assistant":
        return messages[:-1], completion_of([messages[-1]], cells.name("messages"), required=True)
    return messages, None


def _completion(value: object, what: str) -> Completion:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = f"{value:.15g}" if isinstance(value, float) else str(value)
    return completion_of(value, what, required=True)


def _decision(
    cells: _Cells, messages: list[Message], response: Completion, policy: str | None = None
) -> ImportedDecision:
    metadata = {
        normal(name): check_json(json_of(cells.row[name]), name)
        for name, value in cells.row.items()
        if normal(str(name)) in METADATA_COLUMNS and value is not None
    }
    name, propensity = cells.text("id"), cells.number("propensity")
    candidates = cells.get("candidates")
    if candidates is None and response in cells.layout.arms:
        candidates = list(cells.layout.arms)
    return ImportedDecision(
        line=cells.line,
        key=cells.key,
        messages=messages,
        response=response,
        agent=cells.text("agent"),
        policy=cells.text("model") if policy is None else policy,
        unit=cells.text("unit"),
        run_id=cells.text("run_id") or ("" if uuid_of(name) else name[:200]),
        state=check_json(json_of(cells.get("state")), cells.name("state")),
        candidates=None if candidates is None else list(list_of(candidates, cells.name("candidates"))),
        propensity=propensity,
        metadata=metadata,
        created_at=cells.time(),
        # a log of choices without ids holds as many events as lines
        event=str(cells.line) if propensity is not None and not name else None,
    )


def _single(cells: _Cells) -> Iterator[Record]:
    messages, response = _prompt_and_response(cells)
    if response is None:
        raise RowLeftOut(PROMPT_ALONE)
    try:
        rating = _rating(cells)
    except OddVerdict as odd:
        raise RowLeftOut(f"line {cells.line}: {odd}") from odd
    decision = with_reasoning(_decision(cells, messages, response), reasoning_text(cells.get("reasoning")))
    yield replace(
        decision,
        id=uuid_of(cells.text("id")),
        ratings=() if rating is None else (rating,),
        outcomes=tuple(_outcomes(cells)),
        tags=() if rating is not None else cells.tags(),
    )


def _outcomes(cells: _Cells) -> Iterator[ImportedOutcome]:
    reward = cells.number("reward")
    if reward is not None:
        yield ImportedOutcome("reward", reward)
    if (outcomes := cells.get("outcomes")) is not None:
        for name, value in mapping_of(outcomes, cells.name("outcomes")).items():
            yield ImportedOutcome(text_of(name, "outcomes"), number_of(value, f"outcomes.{name}"))


def _rating(cells: _Cells) -> ImportedRating | None:
    """Rating of the row's response; None where it holds none."""
    facts: dict[str, Any] = {}
    for verdicts in cells.layout.verdicts:
        value = value_at(cells.row, verdicts.column)
        if value is ABSENT or value is None or (isinstance(value, str) and not value.strip()):
            continue
        try:
            read = verdicts.read(value)
        except RowError as error:
            raise (OddVerdict(str(error)) if verdicts.odd else error) from error
        if read is not None and read != "":
            facts[verdicts.kind] = read
    if correction := cells.text("correction"):
        facts["correction"] = correction
    notes = cells.text("notes")
    if not facts and not notes:
        return None
    return ImportedRating(
        rater=cells.text("rater"),
        rater_kind=_rater_kind(cells),
        notes=notes,
        tags=cells.tags(),
        created_at=cells.time(),
        **facts,
    )


def _rater_kind(cells: _Cells) -> str:
    kind = cells.text("rater_kind").lower() or "human"
    if kind not in ("human", "simulated"):
        raise RowError(
            f"{cells.name('rater_kind')}: expected human or simulated, found {value_excerpt(kind)}"
        )
    return kind


# --- Two responses ------------------------------------------------------------------------------------------


def _pair(cells: _Cells) -> Iterator[Record]:
    judge = cells.layout.preferred
    assert judge is not None  # layout_of refuses two responses without it
    models = {"left": cells.text("model_a"), "right": cells.text("model_b")}
    preference = judge(cells.get("preferred"), {side: model for side, model in models.items() if model})
    if preference is None:
        raise RowLeftOut("nobody said which response is better")
    yield _comparison(cells, _prompt(cells), [cells.get("response_a"), cells.get("response_b")], preference)


def _comparison(
    cells: _Cells,
    messages: list[Message],
    responses: Sequence[object],
    preference: str,
    *,
    ordered: bool = True,
) -> Record:
    left, right = (
        _decision(cells, messages, completion_of("" if value is None else value, f"response_{side}"), policy)
        for value, side, policy in zip(
            responses, "ab", (cells.text("model_a"), cells.text("model_b")), strict=True
        )
    )
    if left.response == right.response:
        return RowSkipped(cells.line, cells.key, SAME)
    return compared(
        left,
        right,
        preference,
        ordered=ordered,
        rater=cells.text("rater"),
        rater_kind=_rater_kind(cells),
        notes=cells.text("notes"),
        tags=cells.tags(),
        created_at=cells.time(),
    )


def _choice_records(cells: _Cells) -> Iterator[Record]:
    """The preference of a row: chosen (or the last turn of its conversation) over rejected."""
    rejected = cells.get("rejected")
    if rejected is None:
        raise RowLeftOut(f"{cells.name('rejected')}: is empty, so there is nothing to compare")
    stated = any(cells.get(name) is not None for name in ("prompt", "messages"))
    row: dict[str, Any] = {"rejected": rejected} | ({"prompt": _prompt(cells)} if stated else {})
    if cells.layout.columns.chosen is None:
        *row["prompt"], last = row["prompt"]
        if not row["prompt"] or last["role"] != "assistant":
            raise RowError(
                f"{cells.name('messages')}: expected an assistant's turn at the end, the better of the two responses"
            )
        row["chosen"] = [last]
    elif (chosen := cells.get("chosen")) is None:
        raise RowError(f"{cells.name('chosen')}: is empty")
    else:
        row["chosen"] = chosen
    sides = (_answers(row[name], cells.name(name)) for name in ("chosen", "rejected"))
    for chosen, rejected in product(*sides):
        messages, *responses = preference_parts({**row, "chosen": chosen, "rejected": rejected})
        if not stated:
            messages = with_system(cells.get("system"), messages, cells.name("system"))
        yield _comparison(cells, messages, responses, "left", ordered=False)


def _answers(value: object, column: str) -> list[object]:
    """The responses in a cell: several where it holds a list of texts, or its name says that its messages are
    responses of their own."""
    if not isinstance(value, list) or not value:
        return [value]
    if all(isinstance(item, str) for item in value):
        return value
    each = all(isinstance(item, Mapping) and item.get("role") == "assistant" for item in value)
    return value if each and normal(column).rpartition("_")[2] in SEVERAL else [value]


SEVERAL = ("responses", "answers", "outputs", "completions", "generations")
"""Last words of columns that hold several responses to one prompt."""


TABLE = Format(
    "table",
    "Plain rows and tables: prompt, response and what was said of it",
    recognises,
    read,
    (),
    open_file=table_open,
)
