"""Validation of a write: every fault of every field is collected, then all are refused at once."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from backend import limits
from feedback.messages import ROLES, MessageError, messages_read
from feedback.models import SLUG_PATTERN

MAX_TEXT = limits.TEXT_CHARACTERS
"""Longest response, correction or prompt accepted, in characters."""
MAX_TAGS = limits.TAGS
MAX_TAG = limits.TAG_CHARACTERS
"""Longest tag, in characters."""
MAX_DEPTH = limits.JSON_DEPTH
"""Deepest nesting of lists and objects accepted; SQLite and Python's own reader give up at about a thousand."""
TIMES = (datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC))
"""Earliest and latest time accepted: a time outside is mostly one in the wrong unit."""

PROBABILITY_TOLERANCE = 0.01
"""By how much probabilities may miss their sum of 1, and two statements of one probability each other (relative)."""

# an escaped NUL, after an even number of backslashes: \\u0000 is six characters somebody typed
_ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
# bounded in length and depth: what is shown may be a megabyte, or a thousand lists deep
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def value_excerpt(value: Any) -> str:
    """A value as an error shows it: at most a line."""
    text = _short.repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


class FeedbackRefused(ValueError):
    """A write that cannot be accepted; `fields` says per field what was expected and what was found."""

    code = "invalid"

    def __init__(self, message: str, fields: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.fields = dict(fields or {})


class FeedbackConflict(FeedbackRefused):
    """The same id was sent before with a different body."""

    code = "conflict"


class DecisionUnknown(FeedbackRefused):
    """The decision that was named does not exist."""

    code = "not_found"


@dataclass
class Check:
    """Collects what is wrong with a write, so that a caller sees every fault at once."""

    fields: dict[str, str] = field(default_factory=dict)

    def text(self, name: str, value: Any, *, limit: int = MAX_TEXT, required: bool = False) -> str:
        if not isinstance(value, str):
            self.fields[name] = f"expected text, found {type(value).__name__}"
            return ""
        if fault := _unstorable(value):
            self.fields[name] = fault
        elif len(value) > limit:
            self.fields[name] = f"expected at most {limit:,} characters, found {len(value):,}"
        elif required and not value.strip():
            self.fields[name] = "expected text, found nothing"
        return value

    def number(
        self, name: str, value: Any, low: float, high: float, *, open_low: bool = False
    ) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
            self.fields[name] = f"expected a number, found {value_excerpt(value)}"
            return None
        if value < low or value > high or (open_low and value == low):
            self.fields[name] = (
                f"expected a number in {'(' if open_low else '['}{low:g}, {high:g}], found {value_excerpt(value)}"
            )
        return float(value)

    def integer(self, name: str, value: Any, low: int, high: int) -> int | None:
        number = self.number(name, value, low, high)
        if number is not None and number != int(number):
            self.fields[name] = f"expected a whole number, found {value_excerpt(value)}"
        return None if number is None else int(number)

    def names(self, name: str, value: Any) -> list[str]:
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            self.fields[name] = f"expected a list of texts, found {value_excerpt(value)}"
            return []
        if len(value) > MAX_TAGS or any(len(v) > MAX_TAG for v in value):
            self.fields[name] = f"expected at most {MAX_TAGS} tags of at most {MAX_TAG} characters"
            return []
        if fault := next(filter(None, map(_unstorable, value)), ""):
            self.fields[name] = fault
        return list(dict.fromkeys(v.strip() for v in value if v.strip()))

    def json(self, name: str, value: Any) -> Any:
        try:
            text = _encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            self.fields[name] = f"expected JSON, found {error}"
            return None
        if len(text) > MAX_TEXT:
            self.fields[name] = f"expected at most {MAX_TEXT:,} characters of JSON, found {len(text):,}"
        elif text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
            self.fields[name] = f"expected JSON at most {MAX_DEPTH} levels deep"
        elif "\\u0000" in text and _ESCAPED_NUL.search(text):
            self.fields[name] = "expected text without NUL characters"
        elif fault := _unstorable(text):
            self.fields[name] = fault
        return value

    def mapping(self, name: str, value: Any) -> dict[str, Any]:
        """A JSON object; None is an empty one."""
        if value is not None and not isinstance(value, Mapping):
            self.fields[name] = f"expected an object, found {type(value).__name__}"
            return {}
        found: dict[str, Any] = self.json(name, dict(value or {}))
        return found

    def time(self, name: str, value: Any) -> datetime | None:
        """A time: ISO 8601, UTC where no zone is given; None stays None."""
        moment: datetime | None = None
        if isinstance(value, datetime):
            moment = value
        elif isinstance(value, str):
            try:
                moment = datetime.fromisoformat(value)
            except ValueError:
                moment = None
        if moment is not None and moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        if value is not None and (moment is None or not TIMES[0] <= moment < TIMES[1]):
            self.fields[name] = (
                f"expected a time such as 2026-03-02T10:30:00Z, from {TIMES[0].year} on and before "
                f"{TIMES[1].year}, found {value_excerpt(value)}"
            )
            return None
        return None if moment is None else moment.astimezone(UTC)

    def slug(self, name: str, value: Any, example: str) -> str:
        if not isinstance(value, str) or not re.fullmatch(SLUG_PATTERN, value):
            self.fields[name] = (
                f"expected a slug such as {example}: 1 to 64 lower-case letters, digits, - and _; "
                f"found {value_excerpt(value)}"
            )
            return ""
        return value

    def agent(self, value: Any) -> str:
        return self.slug("agent", value, "support-bot")

    def choice(self, name: str, value: Any, allowed: Sequence[str]) -> str:
        if not isinstance(value, str) or value not in allowed:
            self.fields[name] = (
                f"expected one of {', '.join(a for a in allowed if a)}; found {value_excerpt(value)}"
            )
            return ""
        return str(value)

    def messages(self, value: Any) -> list[dict[str, Any]]:
        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        if not isinstance(value, list) or not value:
            self.fields["messages"] = "expected a list of at least one {role, content}"
            return []
        for index, message in enumerate(value):
            if (
                not isinstance(message, Mapping)
                or not isinstance(message.get("role"), str)
                or not isinstance(message.get("content"), (str, list, type(None)))
            ):
                self.fields["messages"] = (
                    f"message {index}: expected {{role, content}}, found {value_excerpt(message)}"
                )
                return []
        self.json("messages", value)
        if "messages" not in self.fields:
            self._messages_readable(value)
        return [dict(m) for m in value]

    def _messages_readable(self, value: Sequence[Mapping[str, Any]]) -> None:
        """Refuse parts and calls that nobody could read back; a role of the app's own is its own affair."""
        for index, message in enumerate(value):
            is_plain = isinstance(message.get("content"), str) and message.keys() <= {
                "role",
                "content",
                "name",
            }
            if is_plain or message["role"].lower() not in ROLES:
                continue
            try:
                messages_read([message])
            except MessageError as error:
                self.fields["messages"] = f"message {index}: {str(error).removeprefix('messages[0].')}"
                return

    def candidates(self, value: Any) -> Any:
        """Listed responses: texts, or {response, score} with a score in [0, 1]."""
        if not isinstance(value, (list, tuple)):
            self.fields["candidates"] = f"expected a list, found {type(value).__name__}"
            return None
        if len(value) > limits.CANDIDATES:
            self.fields["candidates"] = (
                f"expected at most {limits.CANDIDATES:,} candidates, found {len(value):,}"
            )
            return None
        for index, candidate in enumerate(value):
            if len(self.fields) >= limits.FAULTS_NAMED:
                break
            if isinstance(candidate, str):
                self.text(f"candidates[{index}]", candidate)
            elif isinstance(candidate, Mapping) and isinstance(candidate.get("response"), str):
                self.number(f"candidates[{index}].score", candidate.get("score"), 0.0, 1.0)
            else:
                self.fields["candidates"] = f"candidate {index}: expected a text or {{response, score}}"
        return self.json("candidates", list(value))

    def propensity_of_choice(self, candidates: Any, response: Any, propensity: float | None) -> None:
        """Refuse a propensity that contradicts the probabilities of the candidates: an estimate from it would be wrong.

        Asked only where the propensity and every candidate's `probability` are there: they must sum to 1, and the
        response, where it is one candidate, must have the propensity as its probability, each to within 1 %.
        """
        if propensity is None or not isinstance(candidates, list) or not candidates:
            return
        shares = [one.get("probability") if isinstance(one, Mapping) else None for one in candidates]
        numbers = [float(s) for s in shares if isinstance(s, (int, float)) and not isinstance(s, bool)]
        if len(numbers) != len(candidates):
            return
        total = math.fsum(numbers)
        if min(numbers) < 0 or abs(total - 1) > PROBABILITY_TOLERANCE:
            self.fields["candidates"] = (
                f"expected probabilities that sum to 1 beside a propensity, found a sum of {total:.4g}"
            )
            return
        own = [n for one, n in zip(candidates, numbers, strict=True) if one.get("response") == response]
        if len(own) == 1 and abs(own[0] - propensity) > PROBABILITY_TOLERANCE * max(own[0], propensity):
            self.fields["propensity"] = (
                f"expected {own[0]:.4g}, the probability of the candidate that was the response, found {propensity:.4g}"
            )

    def raise_faults(self, what: str) -> None:
        """Raises FeedbackRefused where anything was wrong."""
        if self.fields:
            raise FeedbackRefused(
                f"{what} refused: " + "; ".join(f"{name}: {fault}" for name, fault in self.fields.items()),
                self.fields,
            )


def _unstorable(text: str) -> str:
    """Reason why a database could not store a text, or "". PostgreSQL has no NUL, and SQLite would cut the
    text there."""
    if "\x00" in text:
        return "expected text without NUL characters"
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return f"expected valid Unicode, found a lone surrogate at character {error.start}"
    return ""


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of more than 308 digits
        return False


def _depth(value: Any) -> int:
    """Levels of lists and objects, level by level, so that no nesting can exhaust the stack; stops past MAX_DEPTH."""
    level, depth = [value], 0
    while depth <= MAX_DEPTH:
        level = [v for v in level if isinstance(v, (dict, list, tuple))]
        if not level:
            break
        depth += 1
        level = [i for v in level for i in (v.values() if isinstance(v, dict) else v)]
    return depth
