"""Scales of ratings and preferences in a column, decided once for the whole file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import THUMB_DOWN_WORDS, THUMB_UP_WORDS
from feedback.transfer.formats.cells import listed, number_in
from feedback.transfer.formats.columns import Scale, verdicts_in
from feedback.transfer.formats.records import FormatRefused, RowError

MOST_VALUES = 200
"""Different values of a column that are remembered; more are no words for good and bad."""

ODD_SHARE = 0.1
"""Values that are no verdict, for each that is one, up to which a column is one of verdicts with mistakes in it."""

UP_WORDS = frozenset(
    (*THUMB_UP_WORDS, *listed("yes true thumbsup helpful correct 👍 +1 pass passed ok chosen"))
)
DOWN_WORDS = frozenset(
    (*THUMB_DOWN_WORDS, *listed("no false thumbsdown unhelpful incorrect wrong 👎 fail failed"))
)
NEUTRAL_WORDS = frozenset(listed("_ mixed n/a na nan neither neutral none null skip unrated"))
"""Words of somebody who did not say good or bad, and what programs write into a cell for nothing."""

FIRST, SECOND = ("a", "1", "left", "first", "one"), ("b", "2", "right", "second", "two")
TIES = ("tie", "equal", "same", "draw", "both_good", "both", "tied")
BOTH_BAD = ("both_bad", "bothbad", "neither", "tie_(bothbad)", "tie_both_bad", "none", "both_are_bad")
EMPTY_WORDS = ("", "nan", "null", "n/a", "na")

YES_AND_NO = (("true", "false"), ("yes", "no"), ("1", "0"))

_OUT_OF = re.compile(r"(\d+(?:[.,]\d+)?)\s*/\s*(\d+)")
_STARS = re.compile(r"(\d+)(?:\.0)?\s*stars?", re.IGNORECASE)
_STAR_SIGNS = re.compile(r"([★⭐]\ufe0f?)+[☆✩]*")
_TONE = re.compile("[\U0001f3fb-\U0001f3ff\ufe0f]")

Kind: TypeAlias = Literal["thumb", "stars", "score", "notes"]
JudgeOfPair: TypeAlias = Callable[[Any, Mapping[str, str]], str | None]
"""Reads which of two responses was preferred, from a value and the names of both sides in that row."""


@dataclass
class Values:
    """Summary of a column over all rows: how many values, which of them while they are few, and of what kinds."""

    non_empty: int = 0
    different: set[str] = field(default_factory=set)
    many: bool = False
    numbers: int = 0
    truths: int = 0
    neutral: int = 0
    """Words that say neither good nor bad."""
    thumbs: int = 0
    """Words for good or bad, true and false among them."""
    fractions: int = 0
    low: float = float("inf")
    high: float = float("-inf")
    containers: int = 0
    """Lists and objects."""
    verdict_keys: set[str] = field(default_factory=set)
    """Keys of objects that look like a verdict and say something."""

    def add(self, value: object) -> None:
        """Count a value; None and blank texts are none."""
        if value is None or (isinstance(value, str) and not value.strip()):
            return
        self.non_empty += 1
        if isinstance(value, (list, dict)):
            self.containers += 1
            if isinstance(value, dict) and len(self.verdict_keys) < MOST_VALUES:
                self.verdict_keys.update(
                    key for key in verdicts_in(value) if not isinstance(value[key], (list, dict))
                )
            return
        if isinstance(value, bool):
            self.truths += 1
        elif (number := number_of_value(value)) is not None:
            self.numbers += 1
            self.fractions += number != int(number)
            self.low, self.high = min(self.low, number), max(self.high, number)
        else:
            self.neutral += word_of(value) in NEUTRAL_WORDS
        self.thumbs += word_of(value) in UP_WORDS | DOWN_WORDS
        if len(self.different) < MOST_VALUES:
            self.different.add(str(value).strip()[:200])
        elif str(value).strip()[:200] not in self.different:
            self.many = True

    @property
    def all_numbers(self) -> bool:
        """True if every value is a number, but for words that say nothing."""
        return 0 < self.numbers == self.non_empty - self.neutral

    def odd(self, understood: int) -> bool:
        """True if some values are not understood, but so few that they are mistakes: their rows are left out,
        and the others are read."""
        odd = self.non_empty - self.neutral - understood
        return 0 < odd <= ODD_SHARE * understood

    @property
    def yes_and_no(self) -> tuple[str, str] | None:
        """The words for yes and for no, where every value is one of the two (true and false, yes and no, 1 and 0);
        else None."""
        words = {_plain(value) for value in self.different} - NEUTRAL_WORDS
        found = (pair for pair in YES_AND_NO if words and words <= set(pair))
        return None if self.containers else next(found, None)

    @property
    def says_good_or_bad(self) -> bool:
        """True if every value is a word for good or bad that has no other meaning."""
        words = {word_of(value) for value in self.different} - NEUTRAL_WORDS
        return bool(words) and words <= {*THUMB_UP_WORDS, *THUMB_DOWN_WORDS, "👍", "👎"}


@dataclass(frozen=True)
class Verdicts:
    """Reading of one column's values as verdicts."""

    column: str
    kind: Kind
    read: Callable[[Any], Any]
    """A value that is there -> a thumb ("up", "down" or "" for neither), stars 1 to 5, a score 0 to 1, or a text."""
    note: str
    """Decision about the scale, as a sentence for the report."""
    odd: bool = False
    """True if a few values are none of these, by mistake."""


def word_of(value: object) -> str:
    """A value as it is compared with words: lower case, underscores, no tone of skin."""
    return (
        _TONE.sub("", str(value)).strip().lower().replace(" ", "_").replace("-", "_")
        if value is not None
        else ""
    )


def number_of_value(value: object) -> float | None:
    """The number a value is or its text says; None where it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        try:
            return number_in(repr(float(value)))
        except OverflowError:
            return None
    return number_in(value) if isinstance(value, str) else None


def verdicts_of(
    column: str,
    values: Values,
    *,
    kind: str = "rating",
    scale: Scale | None = None,
    words: tuple[str, ...] = (),
) -> Verdicts:
    """Meaning of a column of ratings, inferred from all its values.

    kind: rating (decided here), or thumb, stars, score where the name or the caller says it. scale: the lowest and
    highest value numbers can have. words: what good and bad are called. Raises FormatRefused where the values do not
    say it, with those found and the map that would.
    """
    if words:
        return _verdicts_by_words(column, words)
    if scale is not None:
        # the range is said, but its values may still lie outside of it: such a row is refused
        return Verdicts(
            column,
            "score",
            partial(_share, column, scale),
            f"{column}: read as scores on the scale {scale.low:g} to {scale.high:g}, as said",
        )
    found = _by_values(column, values, kind)
    if found is None:
        raise FormatRefused(_unknown(column, values, kind))
    return found


def _by_values(column: str, values: Values, kind: str) -> Verdicts | None:
    if values.containers or not values.non_empty:
        return None
    if values.all_numbers:
        return _by_numbers(column, values, kind)
    if values.odd(values.numbers):
        found = _by_numbers(column, values, kind)
        return found and replace(found, note=f"{found.note}{_odd_words(values, values.numbers)}", odd=True)
    words = {value for value in values.different if word_of(value) not in NEUTRAL_WORDS}
    if values.many or not words:
        return None
    if kind in ("rating", "thumb") and set(map(word_of, words)) <= UP_WORDS | DOWN_WORDS:
        return Verdicts(column, "thumb", partial(_thumb, column, ""), f"{column}: read as thumbs")
    if kind in ("rating", "thumb") and values.odd(values.thumbs):
        note = f"{column}: read as thumbs{_odd_words(values, values.thumbs)}"
        return Verdicts(column, "thumb", partial(_thumb, column, ""), note, odd=True)
    if kind in ("rating", "score") and all(_OUT_OF.fullmatch(v) or v.endswith("%") for v in words):
        return Verdicts(column, "score", partial(_out_of, column), f"{column}: read as shares of the most")
    if kind in ("rating", "stars") and all(_STARS.fullmatch(v) or _STAR_SIGNS.fullmatch(v) for v in words):
        return Verdicts(column, "stars", partial(_stars, column), f"{column}: read as stars, 1 to 5")
    return None


def _odd_words(values: Values, understood: int) -> str:
    count = values.non_empty - values.neutral - understood
    return f"; {count:,} other value{'' if count == 1 else 's'} left out, row by row"


def _by_numbers(column: str, values: Values, kind: str) -> Verdicts | None:
    numbers = {number for text in values.different if (number := number_in(text)) is not None}
    whole = not values.fractions and not values.many
    is_rating = kind == "rating"
    if is_rating or kind == "thumb":
        listed = " and ".join(f"{number:g}" for number in sorted(numbers, reverse=True))
        note = f"{column}: {listed} read as thumbs"
        if whole and numbers <= {-1, 0, 1} and -1 in numbers:
            return Verdicts(column, "thumb", partial(_thumb, column, ""), note)
        # a file of nothing but 1 is of thumbs up or of single stars: a name must say which
        if whole and numbers <= {0, 1} and (0 in numbers or kind == "thumb"):
            return Verdicts(column, "thumb", partial(_thumb, column, "down"), note)
    if (
        whole
        and values.low >= 1
        and values.high <= 5
        and (kind == "stars" or (is_rating and values.high > 1))
    ):
        note = f"{column}: whole numbers {values.low:g} to {values.high:g} read as stars, 1 to 5"
        return Verdicts(column, "stars", partial(_stars, column), note)
    if values.low >= 0 and values.high <= 1 and (kind == "score" or (is_rating and values.fractions)):
        note = f"{column}: numbers {values.low:g} to {values.high:g} read as scores, 0 to 1"
        return Verdicts(column, "score", partial(_share, column, Scale(0, 1)), note)
    return None


def _verdicts_by_words(column: str, words: tuple[str, ...]) -> Verdicts:
    if len(words) != 2:
        raise FormatRefused(
            f"--map {column}:{'/'.join(words)}: expected two words, for good and for bad, as in "
            f"rating={column}:ok/faulty"
        )
    good, bad = (word_of(word) for word in words)

    def read(value: object) -> str:
        word = _plain(value)
        if word not in (good, bad):
            if word in NEUTRAL_WORDS:
                return ""
            raise RowError(f"{column}: expected {words[0]} or {words[1]}, found {value_excerpt(value)}")
        return "up" if word == good else "down"

    return Verdicts(
        column, "thumb", read, f"{column}: {words[0]} read as thumbs up, {words[1]} as thumbs down, as said"
    )


def _plain(value: object) -> str:
    number = number_of_value(value)
    return f"{number:g}" if number is not None else word_of(value)


def _thumb(column: str, zero: str, value: object) -> str:
    """zero: what 0 says: down where there is no -1 for it."""
    word = _plain(value)
    if word in UP_WORDS or word == "1":
        return "up"
    if word in DOWN_WORDS or word == "-1":
        return "down"
    if word == "0":
        return zero
    if word in NEUTRAL_WORDS:
        return ""
    raise RowError(f"{column}: expected a thumb up or down, found {value_excerpt(value)}")


def _stars(column: str, value: object) -> int | None:
    if word_of(value) in NEUTRAL_WORDS:
        return None
    text = str(value).strip()
    number: float | None
    if _STAR_SIGNS.fullmatch(text):
        number = sum(text.count(star) for star in "★⭐")
    else:
        match = _STARS.fullmatch(text)
        number = float(match[1]) if match else number_of_value(value)
    if number is None or number != int(number) or not 1 <= number <= 5:
        raise RowError(f"{column}: expected 1 to 5 stars, found {value_excerpt(value)}")
    return int(number)


def _share(column: str, scale: Scale, value: object) -> float | None:
    if word_of(value) in NEUTRAL_WORDS:
        return None
    number = number_of_value(value)
    if number is None or not 0 <= (share := scale.share(number)) <= 1:
        raise RowError(
            f"{column}: expected a number from {scale.low:g} to {scale.high:g}, found {value_excerpt(value)}"
        )
    return share


def _out_of(column: str, value: object) -> float | None:
    if word_of(value) in NEUTRAL_WORDS:
        return None
    text = str(value).strip()
    number: float | None
    if text.endswith("%"):
        number, most = number_in(text[:-1]), 100.0
    else:
        match = _OUT_OF.fullmatch(text)
        number, most = (number_in(match[1]), float(match[2])) if match else (None, 0.0)
    if number is None or not most or not 0 <= number <= most:
        raise RowError(f"{column}: expected a share such as 80% or 4/5, found {value_excerpt(value)}")
    return number / most


def _unknown(column: str, values: Values, kind: str) -> str:
    examples = ", ".join(sorted(values.different)[:6]) + (", ..." if len(values.different) > 6 else "")
    if values.all_numbers and values.different <= {"1", "1.0"}:
        return (
            f"{column}: every value is 1: a thumb up or one star of five? Say --map thumb={column} or "
            f"--map stars={column}"
        )
    if values.all_numbers:
        return (
            f"{column}: scale unknown: numbers from {values.low:g} to {values.high:g}. Say the lowest and highest "
            f"value there can be, as in --map rating={column}:0..100, or --map ignore={column}"
        )
    if values.containers:
        within = next(iter(sorted(values.verdict_keys)), "PART")
        return (
            f"{column}: expected {kind if kind == 'stars' else f'{kind}s'}, found lists or objects. Say which part of "
            f"them it is, as in --map rating={column}.{within}, or --map ignore={column}"
        )
    return (
        f"{column}: expected {kind if kind == 'stars' else f'{kind}s'}, found {examples}. "
        f"Say what good and bad are called, as in --map rating={column}:GOOD/BAD, or --map ignore={column}"
    )


# --- Which of two was preferred -----------------------------------------------------------------------------


def preferences_of(
    column: str, values: Values, headers: tuple[str, str], words: tuple[str, ...] = ()
) -> JudgeOfPair:
    """Reads which of two responses was preferred: left, right, tie, both_bad, or None where nobody judged.

    headers: the names of the two columns. words: what first, second and (third, optional) a tie are called. The reader
    takes a value and, by "left" and "right", what else may stand for a side in that row (the names of the models).
    Raises FormatRefused for 0 and 1, and for true and false, which say either of two things.
    """
    if words:
        if len(words) not in (2, 3):
            raise FormatRefused(
                f"--map preferred={column}:{'/'.join(words)}: expected what first, second and a tie are called, as in "
                f"preferred={column}:0/1"
            )
        side_by_word = dict(zip((_plain(word) for word in words), ("left", "right", "tie"), strict=False))
    else:
        plain_words = {_plain(value) for value in values.different}
        if plain_words & {"0", "true", "false"} or values.truths:
            raise FormatRefused(
                f"{column}: 0 and 1 (false and true) may count the responses or say whether the first is better. "
                f"Say which, as in --map preferred={column}:0/1 (0 is the first) or preferred={column}:1/0"
            )
        side_by_word = dict.fromkeys(FIRST, "left") | dict.fromkeys(SECOND, "right")
        side_by_word |= {word_of(headers[0]): "left", word_of(headers[1]): "right"}
        for stem in ("response", "output", "answer", "model", "completion", "assistant", "option"):
            for first, second in zip(FIRST, SECOND, strict=True):
                side_by_word |= {f"{stem}_{first}": "left", f"{stem}_{second}": "right"}
                side_by_word |= {f"{stem}{first}": "left", f"{stem}{second}": "right"}
    side_by_word = dict.fromkeys(TIES, "tie") | dict.fromkeys(BOTH_BAD, "both_bad") | side_by_word

    def read(value: object, sides: Mapping[str, str]) -> str | None:
        word = _plain(value) if value is not None else ""
        if word in EMPTY_WORDS:
            return None
        if word in side_by_word:
            return side_by_word[word]
        text = str(value).strip()
        same = [side for side, name in sides.items() if name.strip() == text]
        if len(same) == 1:
            return same[0]
        raise RowError(
            f"{column}: expected a, b, tie or both_bad, found {value_excerpt(value)}; other words are said with "
            f"--map preferred={column}:FIRST/SECOND/TIE"
        )

    return read
