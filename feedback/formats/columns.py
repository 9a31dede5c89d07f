"""Which column of a table, or which path into a row of JSON, holds what."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from feedback.formats.records import FormatRefused

ABSENT = object()
"""What `value_at` answers where a row has no such column."""

_SCALE = re.compile(r"(?P<low>-?\d+(?:\.\d+)?)\.\.(?P<high>-?\d+(?:\.\d+)?)")
_WORDED = ("rating", "thumb", "preferred")


@dataclass(frozen=True)
class Scale:
    """The lowest and the highest value a number can have; the highest is the best where low < high, else the worst."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """The value within the scale, 0 (worst) to 1 (best); outside [0, 1] where it lies outside the scale."""
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class ColumnMap:
    """Columns by what they hold. A name with dots is a path into nested objects and lists: `choices.0.message.content`.

    None: the column is looked for by its usual names.
    """

    prompt: str | None = None
    messages: str | None = None
    """The conversation so far; its last turn is the response where no column is one."""
    system: str | None = None
    """A system prompt, put before the messages."""
    response: str | None = None
    response_a: str | None = None
    """The first (left) of two responses that were compared."""
    response_b: str | None = None
    preferred: str | None = None
    """Which of the two was preferred."""
    chosen: str | None = None
    """The preferred response, where each row says it by the column it stands in."""
    rejected: str | None = None
    rating: str | None = None
    """A verdict whose kind (thumb, stars, score) is decided from the values of the whole file, or by `scale`."""
    thumb: str | None = None
    stars: str | None = None
    score: str | None = None
    correction: str | None = None
    notes: str | None = None
    tags: str | None = None
    rater: str | None = None
    id: str | None = None
    created_at: str | None = None
    agent: str | None = None
    model: str | None = None
    """The policy that answered."""
    model_a: str | None = None
    model_b: str | None = None
    unit: str | None = None
    """Whom the decision was taken for: a user, a session."""
    run_id: str | None = None
    state: str | None = None
    candidates: str | None = None
    propensity: str | None = None
    reward: str | None = None
    """A measured outcome named reward."""
    scale: Scale | None = None
    """Of `rating` or `score`, where its values do not say it: `rating=points:0..100`."""
    words: tuple[str, ...] = ()
    """What good and bad are called in `rating` (`rating=verdict:ok/faulty`), or first, second and tie in `preferred`
    (`preferred=winner:0/1`)."""

    @classmethod
    def parse(cls, text: str, rater: str | None = None) -> ColumnMap:
        """A map written `prompt=question,response=answer,rating=stars`; `rating=points:0..100` says a scale,
        `rating=verdict:ok/faulty` the words for good and bad, `preferred=winner:0/1` those for first and second.

        rater: the column that names the rater, where it is said apart. Raises FormatRefused, naming the fields.
        """
        named: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, column = (side.strip() for side in part.partition("="))
            if not equals or not column:
                raise FormatRefused(f"--map: expected field=column, found {part!r}, as in {EXAMPLE}")
            if name not in FIELDS:
                raise FormatRefused(f"--map: no field {name!r}; there are {', '.join(FIELDS)}")
            if name in named:
                raise FormatRefused(f"--map: {name} stands there twice")
            column, scale, words = _column(name, column)
            named[name] = column
            named.update({"scale": scale} if scale else {}, **({"words": words} if words else {}))
        if rater:
            if named.get("rater", rater) != rater:
                raise FormatRefused(
                    f"--map says rater={named['rater']}, --rater says {rater}; say one of them"
                )
            named["rater"] = rater
        return cls(**named)

    def with_rater(self, rater: str | None) -> ColumnMap:
        """The map with this column for the rater; unchanged where None."""
        return replace(self, rater=rater) if rater else self

    def named(self) -> dict[str, str]:
        """Field -> column, of the fields that are mapped."""
        return {name: column for name in FIELDS if (column := getattr(self, name)) is not None}

    def __bool__(self) -> bool:
        return bool(self.named())


FIELDS = tuple(field.name for field in fields(ColumnMap) if field.name not in ("scale", "words"))
EXAMPLE = "--map prompt=question,response=answer,rating=stars"


def _column(name: str, text: str) -> tuple[str, Scale | None, tuple[str, ...]]:
    """Column, scale and words of the right side of one part of a map."""
    column, colon, rest = text.rpartition(":")
    if not colon or not column:
        return text, None, ()
    if name in ("rating", "score", "stars") and (found := _SCALE.fullmatch(rest)):
        low, high = float(found["low"]), float(found["high"])
        if low == high:
            raise FormatRefused(f"--map {name}={text}: expected two different ends of the scale")
        return column, Scale(low, high), ()
    if name in _WORDED and "/" in rest:
        return column, None, tuple(word.strip() for word in rest.split("/"))
    return text, None, ()


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or at the path a dotted name says; ABSENT where there is none."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return ABSENT
    return value
