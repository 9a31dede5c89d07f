"""Base class of formats, and the loop that reads one row after the other."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID

from feedback.messages import Completion, Message
from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.cells import JsonObject, listed, truth_of
from feedback.transfer.formats.columns import IMAGES, NAMES, ColumnMap, normal, verdicts_in
from feedback.transfer.formats.files import rows
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    ImportedRating,
    ImportedReference,
    OutcomeReference,
    Record,
    RowError,
    RowLeftOut,
    RowRefused,
    RowSkipped,
    check_json,
    compared,
    list_of,
    mapping_of,
    reasoning_text,
    with_reasoning,
)
from feedback.transfer.formats.writers import RowShape

RowRecords: TypeAlias = Callable[[JsonObject, int], Iterable[Record]]
"""Reads one row, given the line it starts on. Raises RowError."""


@dataclass(frozen=True)
class Format:
    """One outside format: how a row of it is recognised, and how a file of it is read."""

    name: str
    title: str
    recognises: Callable[[JsonObject], bool]
    """True if a row looks like this format; asked in the order of FORMATS."""
    read: Callable[[Path, Path | None], Iterator[Record]]
    """Reads a file and, where the format has two, the file with its ratings."""
    shapes: tuple[RowShape, ...] = ()
    """The kinds of file it is written as; the first one has the format's name. None: it is read only."""
    two_files: bool = False
    ratings_row: Callable[[JsonObject], bool] = lambda row: False
    """True if a row can only be read with a row of the other file; of formats of two files."""
    open_file: Callable[[Path, ColumnMap | None], OpenFile] | None = None
    """Looks through a whole file before it is read, with a map of its columns; of formats whose columns have no fixed
    names."""
    untested_parts: str = ""
    """Parts that were not seen in a file written by the tool itself, as a sentence for the report."""


@dataclass(frozen=True)
class OpenFile:
    """A file whose columns are known."""

    records: Callable[[], Iterator[Record]]
    notes: tuple[str, ...]
    """Decisions about the file as a whole, as sentences for the report."""
    field_lookup: Callable[[str], str | None]
    """Function from a column to the field it is read as; None where the column is ignored."""


def row_format(
    name: str,
    title: str,
    recognises: Callable[[JsonObject], bool],
    records: RowRecords,
    shapes: tuple[RowShape, ...] = (),
    untested_parts: str = "",
    verdicts: Collection[str] | None = None,
    pages: bool = False,
) -> Format:
    """A format of one file whose rows are read one by one; `verdicts` and `pages` as `each_row` takes them."""
    return Format(
        name,
        title,
        recognises,
        lambda path, ratings_path: each_row(path, records, verdicts, pages),
        shapes,
        untested_parts=untested_parts,
    )


class WatchedRow(dict[str, Any]):
    """A row that notes which of its columns a reader took: what nobody took is named in the report.

    `[]`, `get` and `pop` take a column; `in`, `items` and a copy of the row take none.
    """

    def __init__(self, row: JsonObject) -> None:
        super().__init__(row)
        self.taken: set[str] = set()
        self.parts: dict[str, WatchedRow] = {}

    def __getitem__(self, name: str) -> object:
        self.taken.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: object = None) -> Any:
        self.taken.add(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.taken.add(name)
        return super().pop(name, *default)

    @property
    def unread(self) -> list[str]:
        """Columns that hold something and that nobody took."""
        own = [str(name) for name, value in self.items() if name not in self.taken and value not in EMPTY]
        return [*own, *(f"{name}.{key}" for name, part in self.parts.items() for key in part.unread)]


def part_of(row: JsonObject, name: str) -> JsonObject:
    """The object in a column; its keys that nobody takes are named as `column.key`. Raises RowError."""
    part = mapping_of(row.get(name), name)
    if isinstance(row, WatchedRow):
        return row.parts.setdefault(name, WatchedRow(part))
    return part


EMPTY: tuple[object, ...] = (None, "", [], {}, ())

_unread_columns: ContextVar[Counter[str] | None] = ContextVar("unread_columns", default=None)


@contextmanager
def columns_watched() -> Iterator[Counter[str]]:
    """Within the block, columns of rows that no reader takes are counted: {column: rows}."""
    counts: Counter[str] = Counter()
    token = _unread_columns.set(counts)
    try:
        yield counts
    finally:
        _unread_columns.reset(token)


def each_row(
    path: Path,
    records: RowRecords,
    verdicts: Collection[str] | None = None,
    pages: bool = False,
    own_unit: bool = False,
) -> Iterator[Record]:
    """The records of every row; a row that cannot be read is refused and the next one read.

    verdicts: the format's own columns that look like a verdict; a row in which another one says something is refused.
    None: the names are free, or the reader looks itself. pages: a row may be a page of an API, which lists rows under
    `data`. own_unit: the column `unit` of the format is something else.
    """

    unread = _unread_columns.get()

    def records_in(row: JsonObject, line: int) -> Iterable[Record]:
        if pages and is_page(row):
            return each_item(line, row["data"], "data", with_unit)
        return with_unit(row, line)

    def with_unit(row: JsonObject, line: int) -> Iterable[Record]:
        return records(row, line) if own_unit else _of_unit(row, records(row, line))

    def records_of(row: JsonObject, line: int) -> Iterator[Record]:
        if verdicts is not None:
            verdicts_read(row, used=verdicts)
        yield from _watched(row, line, records_in, unread)

    for row in rows(path):
        if isinstance(row, RowRefused):
            yield row
        elif not isinstance(row.value, Mapping):
            yield RowRefused(row.line, "", f"expected an object, found {value_excerpt(row.value)}")
        else:
            yield from attempt(row.line, key_of(row.value), partial(records_of, row.value, row.line))


def _of_unit(row: JsonObject, found: Iterable[Record]) -> Iterator[Record]:
    """Records of a row with the unit that the row names, where its format has none: by it people are forgotten."""

    def owned(one: ImportedDecision | UUID) -> ImportedDecision | UUID:
        return replace(one, unit=named) if isinstance(one, ImportedDecision) and not one.unit else one

    for record in found:
        unit = row.get("unit")
        named = unit[:200] if isinstance(unit, str) else ""
        if isinstance(record, ImportedDecision) and named and not record.unit:
            yield replace(record, unit=named)
        elif isinstance(record, ImportedComparison) and named:
            yield replace(record, left=owned(record.left), right=owned(record.right))
        else:
            yield record


def is_page(row: JsonObject) -> bool:
    """True of a page of an API, which lists its rows under `data`."""
    return isinstance(row.get("data"), list)


def rows_in_page(row: object) -> list[JsonObject]:
    """The objects that a row is: those of a page, or itself."""
    listed = row["data"] if isinstance(row, Mapping) and is_page(row) else [row]
    return [item for item in listed if isinstance(item, Mapping)]


def objects_in(*files: Path | None) -> Iterator[tuple[JsonObject, int]]:
    """Every object of some files with its line, for a look ahead: what cannot be read is passed over."""
    for file in filter(None, files):
        for item in rows(file):
            if not isinstance(item, RowRefused):
                yield from ((row, item.line) for row in rows_in_page(item.value))


def holds(*sets: str) -> Callable[[JsonObject], bool]:
    """A test of rows: true of one that has all columns of one of the sets, each written `name name name`."""
    wanted = [one.split() for one in sets]
    return lambda row: any(all(name in row for name in names) for names in wanted)


def _watched(
    row: JsonObject, line: int, records: RowRecords, unread: Counter[str] | None, prefix: str = ""
) -> Iterator[Record]:
    """The records of a row; counts the columns that nobody took, where something of the row is kept."""
    if unread is None:
        yield from records(row, line)
        return
    watched = WatchedRow(row)
    found = list(records(watched, line))
    yield from found
    if not all(isinstance(record, (RowRefused, RowSkipped)) for record in found):
        unread.update(prefix + name for name in watched.unread)


def each_item(line: int, items: object, what: str, records: RowRecords) -> Iterator[Record]:
    """The records of every element of a list inside a row; one that cannot be read is refused and the next one read."""
    for index, item in enumerate(list_of(items, what)):
        where = f"{what}[{index}]"
        if isinstance(item, Mapping):
            one = partial(_watched, item, line, records, _unread_columns.get(), f"{what}[].")
            yield from attempt(line, key_of(item) or where, one)
        else:
            yield RowRefused(line, where, f"{where}: expected an object, found {value_excerpt(item)}")


def decisions_first(
    path: Path,
    second: Path | None,
    records: RowRecords,
    verdicts: Collection[str] | None = None,
    pages: bool = False,
) -> Iterator[Record]:
    """The records of one or two files, those that speak of decisions elsewhere after all others.

    What a row refers to may stand in the other file, or on a later line: both are read again for such rows. `verdicts`
    and `pages` as `each_row` takes them.
    """
    files = [path] if second is None else [path, second]
    referring = False
    for file in files:
        for record in each_row(file, records, verdicts, pages):
            if refers(record):
                referring = True
            elif isinstance(record, RowRefused) and file == second:
                yield _named_by(record, file)
            else:
                yield record
    if referring:
        with columns_watched():  # these rows were counted above
            for file in files:
                yield from filter(refers, each_row(file, records, verdicts, pages))


def second_file(
    path: Path, keep: Callable[[JsonObject, int], None], verdicts: Collection[str] = ()
) -> Iterator[RowRefused]:
    """Give each row of a second file to `keep`, which remembers it; yields the rows that are refused."""

    def records(row: JsonObject, line: int) -> Iterable[Record]:
        keep(row, line)
        return ()

    for record in each_row(path, records, verdicts):
        if isinstance(record, RowRefused):
            yield _named_by(record, path)


def _named_by(row: RowRefused, path: Path) -> RowRefused:
    """A refused row of a second file, whose reason names the file."""
    return replace(row, reason=f"{path}: {row.reason}")


def refers(record: Record) -> bool:
    """True if a record speaks of a decision that it does not bring."""
    if isinstance(record, ImportedComparison):
        return isinstance(record.left, UUID) or isinstance(record.right, UUID)
    return isinstance(record, (ImportedReference, OutcomeReference))


def attempt(line: int, key: str, records: Callable[[], Iterable[Record]]) -> Iterator[Record]:
    """Records as they come, until one cannot be read: then a refusal in its place."""
    try:
        yield from records()
    except RowLeftOut as reason:
        yield RowSkipped(line, key, str(reason))
    except RowError as error:
        yield RowRefused(line, key, str(error))
    except RecursionError:
        yield RowRefused(line, key, "nested too deeply")


KEYS = listed("""entry_id id _server_id message_tree_id messageId message_id EventId idx question_id post_id request_id
    span_id trace_id key""")
"""Keys under which formats name their rows, as shown in a refusal."""


def key_of(row: JsonObject) -> str:
    """Name of a row in its file, or "". Takes no column: the name is shown in refusals and not kept."""
    for name in KEYS:
        value = dict.get(row, name) if isinstance(row, dict) else row.get(name)
        if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
            return str(value)[:200]
    return ""


def text_only(row: JsonObject) -> None:
    """Raises RowError for a row with a picture, sound or film beside its texts, naming the column."""
    for name, value in row.items():
        if value and normal(str(name)) in IMAGES:
            raise RowError(f"{name}: holds an image, sound or film; only text can be read")


def verdicts_read(row: JsonObject, used: Collection[str] = ()) -> None:
    """Raises RowError for a row with a column that looks like a verdict and is not among those read, naming it."""
    if unread := verdicts_in(row, used):
        raise RowError(
            f"{', '.join(unread[:10])}: looks like what somebody said of a response, and this format does not read it. "
            "Say with --map what each column of the file holds, which reads it as a table, or leave it out with "
            f"--map ignore={'+'.join(unread)}"
        )


PROMPT_ALONE = (
    "a prompt without a response is no decision; train on the file itself: train_grpo --data-file FILE --reward "
    "code_execution (or answer), see docs/reward-reference.md"
)
"""Reason why a row with a prompt and no response is left out of an import."""

NO_RATING = "a feedback without a rating"

FACTS = listed("facts tests test_list test entry_point expected_output input_output")
"""Columns beside a prompt that say how answers to it are tested."""


def has(row: JsonObject, *keys: str) -> bool:
    return all(key in row for key in keys)


# --- What several formats say in the same way --------------------------------------------------------------


THUMB_UP_WORDS = listed("up good accept accepted like liked positive thumbs_up thumbsup thumb_up approve")
THUMB_DOWN_WORDS = listed(
    "down bad reject rejected dislike disliked negative thumbs_down thumbsdown thumb_down disapprove"
)


def thumb_of(word: object) -> str:
    """up or down, where a word says one of them in any of the usual ways; else ""."""
    normalised = word.strip().lower().replace(" ", "_").replace("-", "_") if isinstance(word, str) else ""
    return "up" if normalised in THUMB_UP_WORDS else "down" if normalised in THUMB_DOWN_WORDS else ""


DEMONSTRATION = "demonstration"
"""Tag of a response that was written to be imitated; nobody rated it."""


WEIGHTS = ("weight", "loss_weight")
LEARNT = ("loss", "train", "trainable", "train_on_turn")
"""Keys of a message by which training files say whether its words are learnt, by a number or by true and false."""

UNLEARNT = "no assistant turn of weight 1 after a prompt"


def learnt_taken(message: Message) -> bool:
    """False where a message says that it is only there to be read; takes the keys that say so."""
    names = [name for name in WEIGHTS if isinstance(message.get(name), (int, float))]
    names += [name for name in LEARNT if isinstance(message.get(name), bool)]
    found = [message.pop(name) for name in names]
    return all(found)


@dataclass(frozen=True)
class TaughtPrompt:
    """A prompt of a training file, and what the row says of answers to it; by somebody the file does not name."""

    line: int
    key: str
    messages: list[Message]
    metadata: JsonObject = field(default_factory=dict)
    reasoning: str = ""

    def decision(self, response: Completion, **more: Any) -> ImportedDecision:
        found = ImportedDecision(
            line=self.line,
            key=self.key,
            messages=self.messages,
            response=response,
            metadata=dict(self.metadata),
            **more,
        )
        return with_reasoning(found, self.reasoning)

    def preference(self, chosen: Completion, rejected: Completion) -> ImportedComparison:
        """One response preferred to another. Raises RowLeftOut where they are the same."""
        better, worse = self.decision(chosen), self.decision(rejected)
        if better.response == worse.response:
            raise RowLeftOut("chosen and rejected are the same: no preference")
        return compared(better, worse, "left", ordered=False)

    def judgement(self, response: Completion, label: object, what: str) -> ImportedDecision:
        """A response called good or bad: true is good and false bad, or 1 and 0. Raises RowError."""
        good = truth_of(label)
        if good is None:
            raise RowError(f"{what}: expected true or false (1 or 0), found {value_excerpt(label)}")
        return self.decision(response, ratings=(ImportedRating(thumb="up" if good else "down"),))

    def demonstration(self, response: Completion, policy: str = "") -> ImportedDecision:
        """A response to imitate. Raises RowLeftOut where its message says that it is not to be learnt."""
        learnt = [learnt_taken(message) for message in response] if isinstance(response, list) else [True]
        if not any(learnt):
            raise RowLeftOut(UNLEARNT)
        return self.decision(response, policy=policy, tags=(DEMONSTRATION,))


OPTIONS = listed("tool_choice parallel_tool_calls response_format temperature top_p max_tokens seed stop")
"""Options of a request that are kept beside the decision."""


def request_options(row: JsonObject) -> dict[str, object]:
    """Metadata that keeps the options of a request, where it has any."""
    found = {name: check_json(row[name], name) for name in OPTIONS if name in row and row[name] not in EMPTY}
    return {"request": found} if found else {}


def reasoning_in(row: JsonObject) -> str:
    """The model's reasoning that a column of its own holds beside the response; "" where none does."""
    named = {normal(str(name)): name for name, value in row.items() if value not in EMPTY}
    return next((reasoning_text(row[named[name]]) for name in NAMES["reasoning"] if name in named), "")


def tools_of(row: JsonObject, what: str = "tools") -> dict[str, Any]:
    """Metadata that keeps a row's tools: a list of schemas, or one JSON text of it (as datasets < 4.7 stores it)."""
    tools = row.get("tools") or row.get("functions")
    if tools is None or tools == "":
        return {}
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise RowError(
                f"{what}: expected a list of schemas as JSON, found {value_excerpt(tools)}: {error}"
            ) from None
    tools = check_json(list(list_of(tools, what)), what)
    return {"tools": tools} if tools else {}
