"""W&B Weave calls, and the feedback on them: reactions, notes, annotations, scorers' outputs and payloads of one's own.

Feedback names a call in the last part of its `weave_ref`. An annotation's scale stands in an object that is not
exported: a number outside [0, 1] becomes an outcome.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from feedback.formats.base import Format, attempt, decisions_first, has, key_of
from feedback.formats.calls import call_decision, kept_metadata, object_or_empty, text_or_empty, whole_of
from feedback.formats.records import (
    Record,
    RowError,
    RowSkipped,
    mapping_of,
    number_of,
    text_of,
    time_of,
    uuid_of,
)
from feedback.formats.verdicts import NamedScore, word_thumb

EMOJI = {
    "+1": "up",
    "thumbsup": "up",
    "thumbs_up": "up",
    "-1": "down",
    "thumbsdown": "down",
    "thumbs_down": "down",
}
"""Alias of an emoji, without colons -> the thumb it is."""


def recognises(row: Mapping[str, Any]) -> bool:
    return has(row, "weave_ref", "feedback_type") or has(row, "op_name", "project_id", "inputs")


def read(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    return decisions_first(path, ratings_path, records)


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    if "weave_ref" in row:
        yield from _feedback(row, line)
        return
    key = key_of(row)
    own = text_of(row.get("id"), "id", required=True)
    summary = object_or_empty(row.get("summary"))
    about = object_or_empty(summary.get("weave"))
    inputs, output = row.get("inputs"), row.get("output")
    if row.get("exception") or output in (None, ""):
        yield RowSkipped(line, key, f"no response{' (error)' if row.get('exception') else ''}")
    elif isinstance(output, str) and output.startswith("weave:///"):
        yield RowSkipped(line, key, "its output is a reference, not the text")
    else:
        model, usage = _usage(summary.get("usage"))
        asked = inputs.get("model") if isinstance(inputs, Mapping) else None
        latency = about.get("latency_ms")
        yield from call_decision(
            line,
            key,
            _without_references(inputs),
            output,
            id=uuid_of(own),
            run_id=own[:200],
            policy=text_or_empty(asked if isinstance(asked, str) else model),
            tokens_in=whole_of(usage.get("prompt_tokens", usage.get("input_tokens"))),
            tokens_out=whole_of(usage.get("completion_tokens", usage.get("output_tokens"))),
            latency_ms=None if latency is None else number_of(latency, "latency_ms"),
            created_at=time_of(row.get("started_at"), "started_at"),
            metadata=kept_metadata(trace_id=row.get("trace_id"), op=row.get("op_name")),
        )
    # feedback may stand inside its call, too
    inside = about.get("feedback")
    for item in inside if isinstance(inside, list) else []:
        if isinstance(item, Mapping):
            said = {"weave_ref": f"weave:///call/{own}", **item}
            yield from attempt(line, key_of(said), partial(_feedback, said, line))


def _without_references(inputs: Any) -> Any:
    """Inputs of which the references to objects elsewhere, which are no words, are left out."""
    if not isinstance(inputs, Mapping):
        return inputs
    words = {
        key: value
        for key, value in inputs.items()
        if not (isinstance(value, str) and value.startswith("weave:///"))
    }
    if not words:
        raise RowError("inputs: expected a prompt, found references to other objects alone")
    model = words.get("model")
    others = [value for key, value in words.items() if key != "model" and isinstance(value, str)]
    return (
        {key: value for key, value in words.items() if key != "model"}
        if others and isinstance(model, str)
        else words
    )


def _usage(value: Any) -> tuple[str, Mapping[str, Any]]:
    """(model, its tokens) of a usage by model, where there is one model."""
    if isinstance(value, Mapping) and len(value) == 1:
        for model, usage in value.items():
            if isinstance(usage, Mapping):
                return str(model), usage
    return "", {}


# --- Feedback ----------------------------------------------------------------------------------------------


def _feedback(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    key, kind = key_of(row), text_of(row.get("feedback_type"), "feedback_type", required=True)
    reference = text_of(row.get("weave_ref"), "weave_ref", required=True)
    if "/call/" not in reference:
        yield RowSkipped(line, key, "feedback on an object, not on a call")
        return
    payload = mapping_of(row.get("payload"), "payload")
    author = text_or_empty(row.get("creator")) or text_or_empty(row.get("wb_user_id")) or "weave"
    at = time_of(row.get("created_at"), "created_at")
    for score in _scores(kind, payload, author):
        yield from score.at_time(at).references(line, key, reference.rsplit("/", 1)[1])


def _scores(kind: str, payload: Mapping[str, Any], author: str) -> Iterator[NamedScore]:
    name = kind.rsplit(".", 1)[-1]
    if kind.startswith("wandb.reaction."):
        alias = text_of(payload.get("detoned_alias") or payload.get("alias") or "", "alias").strip(":")
        emoji = text_of(payload.get("detoned") or payload.get("emoji") or alias, "emoji", required=True)
        thumb = EMOJI.get(alias) or word_thumb(emoji)
        yield NamedScore("reaction", {"up": True, "down": False}[thumb] if thumb else alias or emoji, author)
    elif kind.startswith("wandb.note."):
        yield NamedScore("note", None, author, notes=text_of(payload.get("note"), "note", required=True))
    elif kind.startswith("wandb.annotation."):
        value = payload.get("value")
        listed = isinstance(value, (list, Mapping))
        yield NamedScore(
            name, json.dumps(value, ensure_ascii=False) if listed else value, author, binary=False
        )
    elif kind.startswith("wandb.runnable."):
        output = payload.get("output")
        if isinstance(output, Mapping):
            for part, value in output.items():
                if isinstance(value, (bool, int, float)):
                    yield NamedScore(f"{name}.{part}", value, simulated=True, binary=False)
        else:
            yield NamedScore(name, output, simulated=True, binary=False)
    else:
        yield from _own(name, payload, author)


def _own(name: str, payload: Mapping[str, Any], author: str) -> Iterator[NamedScore]:
    """A payload of one's own: a key called correction is one, other plain values are named scores."""
    for part, value in payload.items():
        if part == "correction" and isinstance(value, str):
            yield NamedScore(f"{name}.{part}", None, author, correction=value)
        elif part in ("note", "comment") and isinstance(value, str) and value.strip():
            yield NamedScore(f"{name}.{part}", None, author, notes=value)
        elif isinstance(value, (bool, int, float, str)):
            yield NamedScore(f"{name}.{part}", value, author, binary=False)
    if not payload:
        raise RowError("payload: expected a value, found none")


FORMAT = Format("weave", "Weave calls and feedback", recognises, read, (), two_files=True)
