"""Layout of a JSON answer as fields, tables and lists instead of braces and quotes. No Django."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

DEEPEST = 5
"""Nesting levels that are laid out; deeper ones are shown as JSON."""
MOST_PARTS = 400
"""Most values of an answer that is laid out; a larger answer is shown as written."""
MOST_COLUMNS = 6
"""Most columns of a table; wider objects are listed below each other."""

FENCE_PATTERN = re.compile(r"\A```(?:json)?[ \t]*\n(.*)\n?```\Z", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Structure:
    """One value of an answer: an object (`fields`), list (`items`), table (`columns`, `rows`), or `text`."""

    text: str = ""
    empty: bool = False
    """True for null, '', [] and {}."""
    fields: tuple[tuple[str, Structure], ...] = ()
    items: tuple[Structure, ...] = ()
    columns: tuple[str, ...] = ()
    """Column names. A list is a table if its objects share these keys and hold no nested values."""
    rows: tuple[tuple[Structure, ...], ...] = ()


class _TooLarge(ValueError):
    pass


def structure_of(text: str) -> Structure | None:
    """Layout of a JSON object or list, fenced or not; None for any other text."""
    value = _json(text)
    if value is None:
        return None
    try:
        return _laid_out(value, [MOST_PARTS], DEEPEST)
    except _TooLarge:
        return None


def line_of(text: str) -> str:
    """A JSON answer on one line, for lists of many: `label: billing · urgent: yes`; empty for any other text."""
    found = structure_of(text)
    return _line(found) if found else ""


def _json(text: str) -> dict[str, object] | list[object] | None:
    """A non-empty JSON object or list; None for any other text."""
    stripped = text.strip()
    if fenced := FENCE_PATTERN.match(stripped):
        stripped = fenced[1].strip()
    if not stripped.startswith(("{", "[")):
        return None
    try:
        value = json.loads(stripped)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, (dict, list)) and value else None


def _laid_out(value: object, left: list[int], depth: int) -> Structure:
    left[0] -= 1
    if left[0] < 0:
        raise _TooLarge
    if isinstance(value, str):
        # Arguments of a tool call are JSON inside JSON.
        value = _json(value) or value
    if isinstance(value, (dict, list)) and value and not depth:
        return Structure(json.dumps(value, ensure_ascii=False))
    if isinstance(value, dict) and value:
        return Structure(
            fields=tuple((str(name), _laid_out(part, left, depth - 1)) for name, part in value.items())
        )
    if isinstance(value, list) and value:
        if columns := _columns(value):
            rows = (tuple(_laid_out(row[name], left, depth - 1) for name in columns) for row in value)
            return Structure(columns=columns, rows=tuple(rows))
        return Structure(items=tuple(_laid_out(part, left, depth - 1) for part in value))
    if value is None or value in ("", {}, []):
        return Structure(empty=True)
    return Structure(_word(value))


def _columns(value: list[Any]) -> tuple[str, ...]:
    """Column names if the list is a table, else ()."""
    if len(value) < 2 or not all(isinstance(row, dict) for row in value):
        return ()
    names = tuple(value[0])
    alike = all(set(row) == set(names) for row in value)
    flat = not any(isinstance(part, (dict, list)) for row in value for part in row.values())
    return names if alike and flat and 1 < len(names) <= MOST_COLUMNS else ()


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value)


def _line(found: Structure, within: bool = False) -> str:
    if found.fields:
        parts = [f"{name}: {_line(part, within=True)}" for name, part in found.fields]
        return f"({', '.join(parts)})" if within else " · ".join(parts)
    if found.rows:
        return "; ".join(", ".join(map(_line, row)) for row in found.rows)
    if found.items:
        return ", ".join(_line(part, within=True) for part in found.items)
    return "–" if found.empty else " ".join(found.text.split())
