"""Values that stand in a text: cells of CSV, which has no types, and JSON that a tool put into another JSON."""

from __future__ import annotations

import json
import math
import re
from typing import Any


class Cell(str):
    """The text of a cell of CSV or TSV, which has no types: numbers, lists and objects may be read out of it."""

    __slots__ = ()


DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")


def json_of(value: Any) -> Any:
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


def truth_of(value: Any) -> bool | None:
    """true or false, said as such, as 1 or 0, or in a cell as a word; None where it is neither."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and isinstance(value, Cell):
        return {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}.get(
            value.strip().lower()
        )
    return bool(value) if isinstance(value, (int, float)) and value in (0, 1) else None
