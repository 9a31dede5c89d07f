"""W&B Weave calls, and the feedback on them: reactions, notes, annotations, scorers' outputs and payloads of one's own.

Of a trace the model calls are decisions, or its root where none of them answered; what is said of the root is then
said of the last one. Feedback names a call in the last part of its `weave_ref`. An annotation's scale stands in an
object that is not exported: a number outside [0, 1] becomes an outcome.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from feedback.transfer.formats.base import Format, attempt, decisions_first, has, key_of
from feedback.transfer.formats.calls import (
    call_decision,
    metadata_retained,
    object_or_empty,
    text_or_empty,
    whole_of,
)
from feedback.transfer.formats.disk_store import DiskMultimap
from feedback.transfer.formats.files import rows
from feedback.transfer.formats.records import (
    Record,
    RowError,
    RowRefused,
    RowSkipped,
    mapping_of,
    number_of,
    text_of,
    time_of,
    uuid_of,
)
from feedback.transfer.formats.verdicts import NamedScore, word_thumb

MODEL_OP = re.compile(
    r"completions?\.create|messages\.create|responses\.create|generate_content|litellm\.", re.I
)
"""In the name of an operation that calls a model."""

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
    model_traces, roots = DiskMultimap(), DiskMultimap()
    for file in filter(None, (path, ratings_path)):
        for item in rows(file):
            row = {} if isinstance(item, RowRefused) else object_or_empty(item.value)
            if "op_name" in row and row.get("parent_id") is None:
                roots.add(str(row.get("trace_id")), str(row.get("id")))
            if "op_name" in row and _is_model_call(row) and row.get("output") not in (None, ""):
                model_traces.add(str(row.get("trace_id")))

    def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
        if "weave_ref" in row:
            return _feedback(row, line)
        return _call(row, line, model_traces, roots)

    return decisions_first(path, ratings_path, records, ("feedback_type", "annotation_ref"))


def _is_model_call(row: Mapping[str, Any]) -> bool:
    kind = object_or_empty(object_or_empty(row.get("attributes")).get("weave")).get("kind")
    return kind == "llm" or MODEL_OP.search(str(row.get("op_name"))) is not None


def _call(row: Mapping[str, Any], line: int, answered: DiskMultimap, roots: DiskMultimap) -> Iterator[Record]:
    key, trace = key_of(row), str(row.get("trace_id"))
    if not _is_model_call(row) and (row.get("parent_id") is not None or trace in answered):
        yield RowSkipped(line, key, "a call inside a trace whose decisions are its model calls")
        return
    call_id = text_of(row.get("id"), "id", required=True)
    summary = object_or_empty(row.get("summary"))
    about = object_or_empty(summary.get("weave"))
    inputs, output = row.get("inputs"), row.get("output")
    if row.get("exception") or output in (None, ""):
        yield RowSkipped(line, key, f"no response{' (error)' if row.get('exception') else ''}")
    elif isinstance(output, str) and output.startswith("weave:///"):
        yield RowSkipped(line, key, "its output is a reference, not the text")
    else:
        model, usage = _usage(summary.get("usage"))
        model_name = inputs.get("model") if isinstance(inputs, Mapping) else None
        latency = about.get("latency_ms")
        yield from call_decision(
            line,
            key,
            _without_references(inputs),
            output,
            id=uuid_of(call_id),
            run_id=call_id[:200],
            policy=text_or_empty(model_name if isinstance(model_name, str) else model),
            tokens_in=whole_of(usage.get("prompt_tokens", usage.get("input_tokens"))),
            tokens_out=whole_of(usage.get("completion_tokens", usage.get("output_tokens"))),
            latency_ms=None if latency is None else number_of(latency, "latency_ms"),
            created_at=time_of(row.get("started_at"), "started_at"),
            metadata=metadata_retained(
                trace_id=row.get("trace_id"), root_id=roots.last(trace), op=row.get("op_name")
            ),
        )
    # feedback may stand inside its call, too
    inside = about.get("feedback")
    for item in inside if isinstance(inside, list) else []:
        if isinstance(item, Mapping):
            record = {"weave_ref": f"weave:///call/{call_id}", **item}
            yield from attempt(line, key_of(record), partial(_feedback, record, line))


def _without_references(inputs: Any) -> Any:
    """Inputs of which the references to objects elsewhere, which are no words, are left out."""
    if not isinstance(inputs, Mapping):
        return inputs
    words = {
        key: value
        for key, value in inputs.items()
        if not (isinstance(value, str) and value.startswith("weave:///"))
    }
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
        yield from _custom_scores(name, payload, author)


def _custom_scores(name: str, payload: Mapping[str, Any], author: str) -> Iterator[NamedScore]:
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


FORMAT = Format(
    "weave",
    "Weave calls and feedback",
    recognises,
    read,
    (),
    two_files=True,
    untested_parts="keys from the program's own types; no file that Weave wrote was seen",
)
