"""Values that stand in a text: cells of CSV, which has no types, and JSON that a tool put into another JSON."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from feedback.messages import ROLES

JsonObject: TypeAlias = Mapping[str, Any]
"""An object that somebody else wrote: a row, or a part of one."""


class Cell(str):
    """The text of a cell of CSV or TSV, which has no types: numbers, lists and objects may be read out of it."""

    __slots__ = ()


def listed(text: str) -> tuple[str, ...]:
    """The words of a text; for long lists of names."""
    return tuple(text.split())


def normal(name: str) -> str:
    """A column's name in lower case, with one underscore for spaces, dashes and dots, without a byte order mark."""
    return re.sub(r"[\s\-./?()\[\]:]+", "_", name.lstrip("\ufeff").strip().lower()).strip("_")


DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")


def json_of(value: object) -> object:
    """The value of a text that is JSON of a list or an object, as tools put one JSON into another; else the value."""
    if isinstance(value, str) and value[:1] + value.rstrip()[-1:] in ("[]", "{}"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def number_in(text: str) -> float | None:
    """The number a text is, `0,25` as `0.25`; None where it is none, infinite or no number (NaN)."""
    text = text.strip()
    if DECIMAL_COMMA.fullmatch(text):
        text = text.replace(",", ".")
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and "_" not in text else None


def truth_of(value: object) -> bool | None:
    """true or false, said as such, as 1 or 0, or in a cell as a word; None where it is neither."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and isinstance(value, Cell):
        return {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}.get(
            value.strip().lower()
        )
    return bool(value) if isinstance(value, (int, float)) and value in (0, 1) else None


# --- JSON in a cell ------------------------------------------------------------------------------------------

JSON_CELLS = frozenset(
    ("tools", "functions", "metadata", "meta", "feedback", "ratings", "outcomes", "candidates")
)
"""Columns whose text is always read as JSON where it is a list or an object."""

CHAT_KEYS = frozenset(("content", "parts", "tool_calls", "function_call", "value", "text", "refusal"))


def row_decoded(row: dict[str, object]) -> dict[str, object]:
    """Replace texts that are JSON of chat messages by these messages, in rows of every kind of file.

    The repr of Python objects, which pandas writes, is read as well. JSON of anything else stays a text, except in
    JSON_CELLS.
    """
    for name, value in row.items():
        text = value.strip() if isinstance(value, str) else ""
        if text[:2] in ('"[', '"{'):  # JSON written twice
            text = _inner_text(text)
        if text[:1] in ("[", "{") and text[-1:] in ("]", "}"):
            found = json_of(str(text))
            if isinstance(found, str):
                found = _literal(text)
            if is_chat(found) or (str(name).lower() in JSON_CELLS and not isinstance(found, str)):
                row[name] = found
    return row


def is_chat(value: object) -> bool:
    """True of a chat message, a list of them, or a request that holds such a list."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_message, value))
    if isinstance(value, Mapping):
        inner = value.get("messages") or value.get("contents")
        return _is_message(value) or (isinstance(inner, list) and is_chat(inner))
    return False


def _is_message(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    role = value.get("role", value.get("from"))
    return isinstance(role, str) and role.lower() in ROLES and bool(CHAT_KEYS & value.keys())


def _inner_text(text: str) -> str:
    try:
        inner = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return inner.strip() if isinstance(inner, str) else text


_UNREAD_CHAT = re.compile(r"""\s*\[\s*+(array\()?\[?\s*\{\s*["'](role|from|content|value)["']\s*:""")


def is_unread_chat(text: str) -> bool:
    """True of a text that was a list of chat messages and can no longer be read: cut off, or written by Python."""
    return _UNREAD_CHAT.match(text) is not None and ("role" in text or "from" in text)


_NEXT_ITEM = re.compile(r"\}[^\S\n]*\n\s*\{")
"""Between two items as numpy prints them; within a text Python writes a line's end as \\n."""


def _literal(text: str) -> object:
    """The value of a text that is the repr of a list or a dict; else the text."""
    if "'role'" not in text and "'from'" not in text:
        return text
    try:
        return ast.literal_eval(_NEXT_ITEM.sub("}, {", text.strip()))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
