"""Curriculum: the order in which training sees its rows, easy to hard (Bengio et al. 2009). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ORDERS = ("none", "margin", "length", "steps")
"""`margin`: pairs whose sides people saw furthest apart first. `length`: short prompts and responses first. `steps`:
few messages, tool calls and steps of a trace first."""


def curriculum_order(rows: Sequence[Mapping[str, Any]], by: str) -> list[int]:
    """Places of the rows, easiest first; rows alike stay in their order, and `none` is the order given.

    Raises ValueError for another name, and for `margin` where a row has none.
    """
    if by not in ORDERS:
        raise ValueError(f"an order is one of {', '.join(ORDERS)}; found {by!r}")
    if by == "none":
        return list(range(len(rows)))
    hard = [difficulty(row, by) for row in rows]
    return sorted(range(len(rows)), key=lambda i: hard[i])


def difficulty(row: Mapping[str, Any], by: str) -> float:
    """Difficulty of a row; only the order of these numbers means something."""
    if by == "margin":
        margin = row.get("margin")
        if not isinstance(margin, (int, float)):
            raise ValueError(
                "curriculum=margin needs rows with a margin, which preference pairs have; use length or steps"
            )
        return -float(margin)
    said = [row[side] for side in ("completion", "chosen", "rejected") if side in row]
    said += row.get("completions") or []
    if by == "length":
        return float(sum(_characters(part) for part in [row.get("prompt") or [], *said]))
    steps = len(row.get("prompt") or []) + sum(_calls(part) for part in said)
    state = row.get("state")
    if isinstance(state, Mapping):
        steps += len(state.get("steps") or [])
    return float(steps)


def _characters(said: Any) -> int:
    if isinstance(said, str):
        return len(said)
    return sum(len(message.get("content") or "") for message in said)


def _calls(said: Any) -> int:
    """Messages and tool calls of a response; a text is one message."""
    if isinstance(said, str):
        return 1
    return sum(1 + len(message.get("tool_calls") or []) for message in said)
