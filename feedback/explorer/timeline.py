"""A trace as a timeline of steps: start, duration, input and output of each."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.utils.dateparse import parse_datetime

from feedback.models import Trace
from feedback.storage.fields import STEP_KINDS

STEPS_SHOWN = 50
"""Steps per page of a trace."""
PARTS_READ = 50
"""Most rows of one long trace that are joined; its collector sends it in pieces."""
TEXT_SHOWN = 6000
"""Most characters shown of an argument, result or thought."""
LINE = 70
"""Longest JSON, in characters, shown on one line."""
DEEPEST = 5
"""Deepest indentation of nested steps."""

_SHOWN_APART = {
    "kind",
    "name",
    "at",
    "duration_ms",
    "n",
    "parent",
    "text",
    "arguments",
    "result",
    "error",
    "status",
}
_SHOWN_APART |= {"id", "unfinished", "forgotten"}
"""Keys of a step with a place of their own; the others are listed."""
_OF_DECISION = {
    "messages",
    "response",
    "reasoning",
    "candidates",
    "state",
    "policy",
    "unit",
    "arm",
    "propensity",
}
_OF_DECISION |= {"run_id", "tags", "metadata", "latency_ms", "tokens_in", "tokens_out"}
"""Keys that the decision's own page shows."""


@dataclass(frozen=True)
class TimelineStep:
    """One step of a trace, as its page shows it."""

    number: int
    kind: str
    name: str
    depth: int
    """Nesting level: 0 for a top-level step, at most DEEPEST."""
    after_ms: float | None
    """Milliseconds since the trace started."""
    duration_ms: float | None
    text: str
    arguments: str
    result: str
    error: str
    status: str
    """completed or failed; tasks only."""
    details: list[tuple[str, str]]
    decision: uuid.UUID | None
    """Id of the decision that this step took."""
    here: bool
    """True for the decision whose page this is."""
    unfinished: bool
    forgotten: bool

    @property
    def kind_text(self) -> str:
        return {"tool_call": "tool call"}.get(self.kind, self.kind)

    @property
    def after_text(self) -> str:
        return "" if self.after_ms is None else f"+{_time(self.after_ms)}"

    @property
    def duration_text(self) -> str:
        return "" if self.duration_ms is None else _time(self.duration_ms)


@dataclass(frozen=True)
class Timeline:
    """A page of a trace's steps."""

    steps: list[TimelineStep]
    total: int
    """Steps in the whole trace."""
    part: int
    parts: int
    errors: int
    """Failed steps in the whole trace."""
    took_ms: float | None
    run_id: str
    missing: int
    """Pieces of the trace beyond PARTS_READ, which are not shown."""

    @property
    def took_text(self) -> str:
        return "" if self.took_ms is None else _time(self.took_ms)

    @property
    def other_parts(self) -> list[int]:
        return list(range(1, self.parts + 1))


def timeline_of(trace: Trace, decision: uuid.UUID, part: int | None = None) -> Timeline:
    """Page `part` of the trace (from 1, clamped), by default the one with the decision."""
    pieces, missing = _pieces(trace)
    steps = [
        (piece, index, step)
        for piece in pieces
        for index, step in enumerate(piece.steps)
        if isinstance(step, Mapping)
    ]
    if any("n" in step for _, _, step in steps):
        # The collector numbers steps because pieces overlap: a step still open is sent with a later piece.
        steps.sort(key=lambda row: (row[2].get("n") is None, row[2].get("n") or 0))
    began = min((piece.started_at for piece in pieces if piece.started_at), default=None)
    end = max((piece.finished_at for piece in pieces if piece.finished_at), default=None)
    depths = _depths([step for _, _, step in steps])
    own = [_decision_id(piece, index, step) for piece, index, step in steps]
    parts = max(1, -(-len(steps) // STEPS_SHOWN))
    if part is None:
        part = own.index(decision) // STEPS_SHOWN + 1 if decision in own else 1
    part = min(max(part, 1), parts)
    start = (part - 1) * STEPS_SHOWN
    return Timeline(
        steps=[
            _timeline_step(number, step, depths[number], own[number], decision, began)
            for number, (_, _, step) in list(enumerate(steps))[start : start + STEPS_SHOWN]
        ],
        total=len(steps),
        part=part,
        parts=parts,
        errors=sum(bool(step.get("error")) or step.get("status") == "failed" for _, _, step in steps),
        took_ms=(end - began).total_seconds() * 1000 if began and end else None,
        run_id=trace.run_id,
        missing=missing,
    )


def _pieces(trace: Trace) -> tuple[list[Trace], int]:
    """The rows of one long trace, and how many were left out."""
    metadata = trace.metadata if isinstance(trace.metadata, dict) else {}
    whole = str(metadata.get("trace") or trace.pk)
    if not trace.run_id:
        return [trace], 0
    same_run = Trace.objects.filter(agent=trace.agent, run_id=trace.run_id).order_by("created_at", "id")
    rows = list(same_run[: PARTS_READ + 1])
    pieces = [row for row in rows if whole in (str(row.pk), (row.metadata or {}).get("trace"))]
    if trace not in pieces:
        pieces.append(trace)
    return pieces[:PARTS_READ], max(0, len(rows) - PARTS_READ)


def _depths(steps: list[Mapping[str, Any]]) -> list[int]:
    known: dict[Any, int] = {}
    depths = []
    for step in steps:
        parent = step.get("parent")
        depth = min(known[parent] + 1, DEEPEST) if parent is not None and parent in known else 0
        if step.get("n") is not None:
            known[step["n"]] = depth
        depths.append(depth)
    return depths


def _decision_id(piece: Trace, index: int, step: Mapping[str, Any]) -> uuid.UUID | None:
    if step.get("kind") != "decision":
        return None
    try:
        return uuid.UUID(str(step["id"])) if step.get("id") else uuid.uuid5(piece.pk, str(index))
    except ValueError:
        return None


def _timeline_step(
    number: int,
    step: Mapping[str, Any],
    depth: int,
    own: uuid.UUID | None,
    here: uuid.UUID,
    began: datetime | None,
) -> TimelineStep:
    at = parse_datetime(step["at"]) if isinstance(step.get("at"), str) else None
    after = (at - began).total_seconds() * 1000 if at and began and at.tzinfo else None
    kind = str(step.get("kind", "step"))
    hidden = _SHOWN_APART | (_OF_DECISION if kind == "decision" else set())
    return TimelineStep(
        number=number + 1,
        kind=kind if kind in STEP_KINDS else "step",
        name=str(step.get("name") or ""),
        depth=depth,
        after_ms=max(after, 0.0) if after is not None else None,
        duration_ms=step["duration_ms"] if isinstance(step.get("duration_ms"), (int, float)) else None,
        text=_text(step.get("text")),
        arguments=_text(step.get("arguments")),
        result=_text(step.get("response") if kind == "decision" else step.get("result")),
        error=_text(step.get("error")),
        status=str(step.get("status") or ""),
        details=[
            (str(key), _text(value))
            for key, value in step.items()
            if key not in hidden and value not in (None, "", [], {})
        ],
        decision=own,
        here=own == here,
        unfinished=bool(step.get("unfinished")),
        forgotten=bool(step.get("forgotten")),
    )


def _text(value: Any) -> str:
    """A value for reading: text as it is, data as JSON, cut after TEXT_SHOWN characters."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str) and len(text) > LINE:
        text = json.dumps(value, ensure_ascii=False, indent=2)
    if len(text) <= TEXT_SHOWN:
        return text
    return f"{text[:TEXT_SHOWN]}\n… {len(text) - TEXT_SHOWN:,} more characters"


def _time(ms: float) -> str:
    """A duration with its unit: 8 ms, 1.2 s, 3 min 5 s."""
    if ms < 1000:
        return f"{ms:.0f} ms"
    seconds = ms / 1000
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
