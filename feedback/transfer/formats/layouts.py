"""Layout of a table: each column's role, by a map, or by usual names decided from every row of the file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from backend import limits
from feedback.transfer.formats.columns import (
    ABSENT,
    FIELDS,
    NAMES,
    PAIRS,
    ColumnMap,
    Scale,
    alias,
    is_adverse,
    is_verdict,
    normal,
    range_in,
    value_at,
)
from feedback.transfer.formats.records import FormatRefused, Row, RowRefused
from feedback.transfer.formats.scales import (
    NEUTRAL_WORDS,
    JudgeOfPair,
    Values,
    Verdicts,
    number_of_value,
    preferences_of,
    verdicts_of,
    word_of,
)

RATINGS = ("thumb", "stars", "score", "rating")
"""Fields that hold a verdict on one response."""

METADATA_COLUMNS = ("facts", "tests", "expected_output", "entry_point", "tools")
"""Columns that go to a decision's metadata under their own names: what rewards can be verified with, and its tools."""


@dataclass(frozen=True)
class TableLayout:
    """Roles of one file's columns."""

    columns: ColumnMap
    """The columns that are read, under the names they have in the file."""
    verdicts: tuple[Verdicts, ...] = ()
    preferred: JudgeOfPair | None = None
    also: tuple[str, ...] = ()
    """Columns that belong to the prompt (the `input` of an instruction)."""
    notes: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    """The different responses of a log of choices whose rows list none: the candidates of each choice."""

    def field_lookup(self, column: str) -> str | None:
        """Field a column is read as; None where it is left out."""
        if any(one.column == column for one in self.verdicts):
            return next(one.kind for one in self.verdicts if one.column == column)
        if column in self.also:
            return "prompt"
        fields = [name for name, mapped in self.columns.columns_by_field().items() if mapped == column]
        return fields[0] if fields else column if normal(column) in METADATA_COLUMNS else None


@dataclass
class _Survey:
    """The columns of all rows, with what stands in them."""

    columns: dict[str, Values] = field(default_factory=dict)
    rows: int = 0


def layout_of(rows: Iterable[Row | RowRefused], name: str, columns: ColumnMap | None = None) -> TableLayout:
    """Meaning of a file's columns. rows: all of them. Raises FormatRefused where that cannot be told.

    A column that looks like a verdict is read, or the file is refused and the column named.
    """
    columns = columns or ColumnMap()
    survey = _survey(rows, name, columns)
    try:
        return _Finder(survey, columns).layout()
    except FormatRefused as error:
        raise FormatRefused(f"{name}: {error}") from None


def _survey(rows: Iterable[Row | RowRefused], name: str, columns: ColumnMap) -> _Survey:
    survey = _Survey()
    paths = set(columns.columns_by_field().values())
    for row in rows:
        if isinstance(row, RowRefused) or not isinstance(row.value, Mapping):
            continue
        survey.rows += 1
        names = [*row.value, *(path for path in paths if path not in row.value)]
        for column in names:
            value = value_at(row.value, column)
            if value is not ABSENT:
                survey.columns.setdefault(column, Values()).add(value)
        if len(survey.columns) > limits.COLUMNS:
            raise FormatRefused(f"{name}: expected at most {limits.COLUMNS} different columns, found more")
    return survey


class _Finder:
    """Finds the columns of a file. Explicit ones first, then pairs, then the usual names."""

    def __init__(self, survey: _Survey, columns: ColumnMap) -> None:
        self.survey, self.said = survey, columns
        self.ignored = set(columns.ignored_columns)
        self.filled = {name for name, values in survey.columns.items() if values.non_empty}
        self.found = {name: column for name, column in columns.columns_by_field().items() if name != "ignore"}
        self.taken = set(self.found.values()) | self.ignored
        self.by_name: dict[str, str] = {}
        for column in sorted(survey.columns, key=lambda column: column not in self.filled):
            self.by_name.setdefault(normal(column), column)
        for name in list(self.by_name):
            self.by_name.setdefault(alias(name), self.by_name[name])

    def layout(self) -> TableLayout:
        self._check_map()
        self._find_responses()
        also = self._find_prompt()
        pair = "response_a" in self.found or "rejected" in self.found
        for name in ("correction", "notes", "tags"):
            self._take(name)
        verdicts = [] if pair else self._verdicts()
        preferred = self._preference_value() if "response_a" in self.found else None
        if "response_b" not in self.found:
            for name in ("model_a", "model_b", "preferred"):
                self._drop(name)
        for name in FIELDS:
            if name not in ("ignore", "preferred", "model_a", "model_b", *RATINGS, *_SHAPES):
                self._take(name)
        if pair:
            self._take("model_a")
            self._take("model_b")
        self._refuse_unused(pair or bool(verdicts))
        return self._build_layout(verdicts, preferred, also)

    def _build_layout(
        self, verdicts: list[Verdicts], preferred: JudgeOfPair | None, also: tuple[str, ...]
    ) -> TableLayout:
        found: dict[str, Any] = {name: column for name, column in self.found.items() if name not in RATINGS}
        columns = replace(ColumnMap(**found), ignore=self.said.ignore)
        notes = [one.note for one in verdicts]
        arms = self._arms(columns)
        if arms:
            notes.append(
                f"candidates: the {len(arms)} different values of {columns.response}, as no column lists them; where a "
                "row could choose among others, say --map candidates=COLUMN"
            )
        return TableLayout(columns, tuple(verdicts), preferred, also, tuple(notes), arms)

    def _arms(self, columns: ColumnMap) -> tuple[str, ...]:
        """The responses of a log that says with what probability each was chosen, while they are few; else none."""
        if columns.propensity is None or columns.response is None or columns.candidates is not None:
            return ()
        values = self.survey.columns[columns.response]
        if values.many or values.containers or len(values.different) < 2:
            return ()
        numbers = {text: number for text in values.different if (number := number_of_value(text)) is not None}
        if len(numbers) == len(values.different):
            return tuple(sorted(numbers, key=numbers.__getitem__))
        return tuple(sorted(values.different))

    @property
    def _there(self) -> str:
        """The columns there are, for a refusal."""
        return ", ".join(list(self.survey.columns)[:30]) or "none"

    # --- Looking for columns ---------------------------------------------------------------------------------

    def _check_map(self) -> None:
        for name, column in [*self.found.items(), *(("ignore", column) for column in self.ignored)]:
            if column not in self.survey.columns:
                raise FormatRefused(
                    f"--map {name}={column}: no row has a column {column!r}; there are {self._there}"
                )

    def _free(self, name: str, *, filled: bool = True) -> str | None:
        """The column of this usual name, where nothing else is read from it."""
        column = self.by_name.get(name)
        return (
            column
            if column is not None
            and column not in self.taken
            # a map that names a part of an object reads all of it that is wanted
            and not any(path.startswith(f"{column}.") for path in self.taken)
            and (not filled or column in self.filled)
            else None
        )

    def _take(self, name: str, names: Iterable[str] | None = None) -> str | None:
        """The column of a field: as said, else the first of its usual names that holds something."""
        if name in self.found:
            return self.found[name]
        for usual in NAMES.get(name, ()) if names is None else names:
            if (column := self._free(usual)) is not None:
                self._put(name, column)
                return column
        return None

    def _put(self, name: str, column: str) -> None:
        self.found[name] = column
        self.taken.add(column)

    def _drop(self, name: str) -> None:
        if column := self.found.pop(name, None):
            self.taken.discard(column)

    def _find_responses(self) -> None:
        found = self.found
        if any(name in found for name in ("response_a", "response_b")):
            if not {"response_a", "response_b"} <= set(found):
                raise FormatRefused("--map: response_a and response_b belong together; say both")
            return
        if "response" in found:
            return
        if "chosen" in found or "rejected" in found:
            if self._take("rejected") is None:
                raise FormatRefused("--map: chosen and rejected belong together; say both")
            self._take("chosen")
            return
        if self._take("rejected"):
            if self._take("chosen") is None and self._take("response") is not None:
                self._put("chosen", self.found.pop("response"))
            return  # without a column of its own the better response is the last turn of the conversation
        pairs = [(a, b) for a, b in PAIRS if (self._free(a, filled=False) and self._free(b, filled=False))]
        if pairs and not (len(pairs[0][0]) == 1 and self._free("response")):
            self._put("response_a", self.by_name[pairs[0][0]])
            self._put("response_b", self.by_name[pairs[0][1]])
            return
        if self._take("response") is None and self._free("model_a") and self._free("model_b"):
            # beside no other answers these columns are no names of models but what the models said
            self._put("response_a", self.by_name["model_a"])
            self._put("response_b", self.by_name["model_b"])

    def _find_prompt(self) -> tuple[str, ...]:
        self._take("messages")
        names = NAMES["prompt"]
        if "messages" in self.found:
            # a conversation is the whole prompt; beside it only what is called a prompt is one
            names = tuple(name for name in names if name in ("prompt", "instruction", "question"))
        self._take("prompt", (*names, "text") if "rejected" in self.found else names)
        if "rejected" in self.found and not {"chosen", "messages"} & set(self.found):
            raise FormatRefused(
                f"{self.found['rejected']}: a rejected response, and no column that holds the better one; there are "
                f"{self._there}. Say which it is, as in --map chosen=COLUMN,rejected={self.found['rejected']}"
            )
        if not {"prompt", "messages", "chosen"} & set(self.found):
            raise FormatRefused(
                f"no column is called prompt, question, messages or the like; there are {self._there}. Say which it "
                "is, as in --map prompt=COLUMN,response=COLUMN"
            )
        instruction = self.found.get("prompt")
        if instruction and normal(instruction) == "instruction" and (more := self._free("input")):
            self.taken.add(more)
            return (more,)
        return ()

    # --- What was said of the responses ----------------------------------------------------------------------

    def _verdicts(self) -> list[Verdicts]:
        """Every column of ratings, each of another kind: two of one kind would be two answers to one question."""
        verdicts: list[Verdicts] = []
        columns = [(kind, self.found[kind]) for kind in RATINGS if kind in self.found]
        verdicts += [self._verdict(kind, column, said=True) for kind, column in columns]
        for kind in RATINGS:
            for usual in NAMES[kind] + (("preference",) if kind == "rating" else ()):
                free = self._free(usual)
                if free is None:
                    continue
                column = free
                if self._is_prose(column) and "notes" not in self.found:
                    self._put("notes", column)
                    continue
                found = self._verdict("rating" if kind == "score" else kind, column, said=False)
                if any(one.kind == found.kind for one in verdicts):
                    continue
                verdicts.append(found)
                self.taken.add(column)
        return verdicts

    def _verdict(self, kind: str, column: str, *, said: bool) -> Verdicts:
        scale = self.said.scale if said and kind in ("rating", "score", "stars") else None
        if scale is None and kind != "thumb" and self.survey.columns[column].all_numbers:
            scale = range_in(column)
            scale = None if scale == Scale(1, 5) and not self.survey.columns[column].fractions else scale
        words = (
            self.said.words if said and kind in ("rating", "thumb") and "preferred" not in self.found else ()
        )
        values = self.survey.columns[column]
        if not words and kind in ("rating", "thumb") and is_adverse(column) and values.yes_and_no:
            # yes to "thumbs down?" is a thumb down
            yes, no = values.yes_and_no
            note = f"{column}: {yes} read as thumbs down, {no} as thumbs up"
            return replace(verdicts_of(column, values, words=(no, yes)), note=note)
        return verdicts_of(column, values, kind=kind, scale=scale, words=words)

    def _is_prose(self, column: str) -> bool:
        """True if a column that may be ratings holds remarks: mostly several words, and no two rows agree
        much."""
        values = self.survey.columns[column]
        if alias(normal(column)) not in ("feedback", "verdict") or values.numbers or values.truths:
            return False
        texts = [text for text in values.different if word_of(text) not in NEUTRAL_WORDS]
        return sum(len(text.split()) >= 3 for text in texts) * 2 > len(texts)

    def _preference_value(self) -> JudgeOfPair:
        column = self._take("preferred")
        if column is None:
            raise FormatRefused(
                f"two responses ({self.found['response_a']}, {self.found['response_b']}) and no column that says which "
                "was preferred; say it with --map preferred=COLUMN"
            )
        headers = self.found["response_a"], self.found["response_b"]
        words = self.said.words if "preferred" in self.said.columns_by_field() else ()
        return preferences_of(column, self.survey.columns[column], headers, words)

    def _refuse_unused(self, read: bool) -> None:
        """Raises FormatRefused for columns that look like a verdict and are not read."""
        # where no verdict is read, a column of nothing but up and down is one, whatever it is called
        alone = not read
        unread_columns = [
            column
            for column, values in self.survey.columns.items()
            if column in self.filled
            and column not in self.taken
            and (
                is_verdict(column, True if values.yes_and_no else None) or (alone and values.says_good_or_bad)
            )
            and not any(path.startswith(f"{column}.") for path in self.taken)
        ]
        unread_paths = [
            f"{column}.{key}"
            for column, values in self.survey.columns.items()
            if column not in (*self.taken, *unread_columns) and normal(column) not in METADATA_COLUMNS
            for key in sorted(values.verdict_keys)
            if f"{column}.{key}" not in self.taken
        ]
        if unread := unread_columns or unread_paths:
            columns = dict.fromkeys(path.partition(".")[0] for path in unread_paths)
            raise FormatRefused(
                f"{', '.join(unread[:10])}: looks like what somebody said of a response, and is not read. "
                f"Say what it is, as in --map rating={unread[0]}, "
                f"or leave it out with --map ignore={'+'.join(unread_columns or columns)}"
            )


_SHAPES = ("prompt", "messages", "response", "response_a", "response_b", "chosen", "rejected")
