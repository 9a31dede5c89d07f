"""Conversion of Python values to JSON of bounded size."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from collections import deque
from collections.abc import Callable, Collection, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import PurePath
from typing import Any
from uuid import UUID

MAX_TEXT = 20_000
"""Most characters of one text in a step. The rest is cut off, and its length is stated."""
MAX_ITEMS = 200
"""Most items of one list or mapping in a step."""
MAX_DEPTH = 8
MAX_VALUE = 200_000
"""Most characters of one value in total."""

_AS_TEXT = (UUID, PurePath, date, time, Decimal)
_LISTS = (list, tuple, set, frozenset, deque)


def to_json(
    value: object,
    *,
    text: int = MAX_TEXT,
    items: int = MAX_ITEMS,
    depth: int = MAX_DEPTH,
    total: int = MAX_VALUE,
) -> Any:
    """The value as JSON data within these limits. An object that is no data becomes its repr; no iterator is consumed.

    text: most characters of a text. items: most items of a list or mapping. depth: deepest nesting. total: most
    characters of the whole value.
    """
    return _Converter(text, items, total).of(value, depth)


class _Converter:
    def __init__(self, text: int, items: int, total: int) -> None:
        self.text, self.items, self.left = text, items, total

    def of(self, value: Any, depth: int) -> Any:
        if self.left <= 0:
            return "…"
        self.left -= (
            8  # Rough size of punctuation and a number, so that many small items reach the limit too.
        )
        try:
            return self._of(value, depth)
        except Exception as error:
            # Code of the app (a property, an iterator) raised: the value shows its error.
            return f"<{type(value).__name__} that raised {type(error).__name__} when read>"

    def _of(self, value: object, depth: int) -> object:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, enum.Enum):
            return self.of(value.value, depth)
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, numbers.Integral):
            number = int(value)
            return number if abs(number) < 2**63 else f"<int of {number.bit_length()} bits>"
        if isinstance(value, numbers.Real):
            real = float(value)
            return real if math.isfinite(real) else repr(real)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return f"<{type(value).__name__} of {len(value)}>"
        if isinstance(value, datetime):
            return value.isoformat()
        if isinstance(value, _AS_TEXT):
            return self._text(str(value))
        if isinstance(value, BaseException):
            return self._text(error_text(value))
        return self._contained(value, depth)

    def _contained(self, value: object, depth: int) -> object:
        pairs: Collection[tuple[object, object]]
        if isinstance(value, Mapping):
            pairs = value.items()
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            pairs = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        elif isinstance(value, tuple) and hasattr(value, "_asdict"):
            pairs = value._asdict().items()
        elif isinstance(value, _LISTS):
            if depth <= 0:
                return f"<{type(value).__name__} of {len(value)}>"
            items = [self.of(item, depth - 1) for item, _ in zip(value, range(self.items), strict=False)]
            return items + ([f"… {len(value) - len(items)} more"] if len(value) > len(items) else [])
        else:
            return self._text(safe_repr(value))
        if depth <= 0:
            return f"<{type(value).__name__} of {len(pairs)}>"
        mapping: dict[str, object] = {}
        for (name, item), _ in zip(pairs, range(self.items), strict=False):
            mapping[self._text(name if isinstance(name, str) else safe_repr(name))] = self.of(item, depth - 1)
        if len(pairs) > self.items:
            mapping["…"] = f"{len(pairs) - self.items} more"
        return mapping

    def _text(self, value: str) -> str:
        text = truncate(sanitize(value), min(self.text, max(self.left, 0)))
        self.left -= len(text)
        return text


def sanitize(text: str) -> str:
    """The text with U+FFFD in place of NUL characters and lone surrogates, which databases refuse."""
    text = str.__str__(text)
    if "\x00" in text:
        text = text.replace("\x00", "\ufffd")
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def truncate(text: str, limit: int) -> str:
    """About `limit` characters of a text, followed by the number left out."""
    return text if len(text) <= limit else f"{text[:limit]}… [{len(text) - limit:,} more characters]"


def safe_repr(value: object) -> str:
    """The repr of a value. If that raises, the names of its type and of the error."""
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__name__} whose repr raised {type(error).__name__}>"


def error_text(error: BaseException | str) -> str:
    """Type and message of an error, such as `ValueError: no such order`, of at most 2,000 characters."""
    if isinstance(error, str):
        return truncate(sanitize(error), 2_000)
    try:
        text = str(error)
    except Exception as fault:
        text = f"<its text raised {type(fault).__name__}>"
    return truncate(sanitize(f"{type(error).__name__}: {text}" if text else type(error).__name__), 2_000)


def redact_keys(*names: str, mask: str = "[redacted]") -> Callable[[object], object]:
    """A `redact` hook that masks the values of these keys at any depth of a record. Case does not matter.

    Texts are not searched: secrets inside a text need a hook of your own.
    """
    wanted = {name.casefold() for name in names}

    def hidden(value: object) -> object:
        if isinstance(value, dict):
            return {
                name: mask if isinstance(name, str) and name.casefold() in wanted else hidden(item)
                for name, item in value.items()
            }
        return [hidden(item) for item in value] if isinstance(value, list) else value

    return hidden
