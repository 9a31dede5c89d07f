"""Phoenix (Arize): spans with OpenInference's attributes, and annotations. A model call's span is a decision."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from feedback.messages import Message
from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import (
    Format,
    decisions_first,
    holds,
    key_of,
    objects_in,
    rows_in_page,
)
from feedback.transfer.formats.calls import json_value, object_or_empty, text_or_empty
from feedback.transfer.formats.cells import JsonObject, listed
from feedback.transfer.formats.declared import Call, Scores, at
from feedback.transfer.formats.files import DiskMultimap
from feedback.transfer.formats.records import (
    Record,
    RowError,
    RowLeftOut,
    RowSkipped,
    number_of,
    text_of,
)


def indexed(attributes: JsonObject, name: str, element: str = "") -> list[dict[str, object]]:
    """The objects whose keys stand under name.0.key (or name.0.element.key), in their order; or of a list there."""
    listed = json_value(attributes.get(name))
    if isinstance(listed, list):
        objects = [_flat(item) for item in listed if isinstance(item, Mapping)]
        return [{key.removeprefix(f"{element}."): value for key, value in item.items()} for item in objects]
    place = re.compile(rf"{re.escape(name)}\.(\d+)\.{f'{element}[.]' if element else ''}(.+)")
    found: dict[int, dict[str, object]] = {}
    for key, value in attributes.items():
        if key.startswith(name) and (match := place.fullmatch(key)):
            found.setdefault(int(match[1]), {})[match[2]] = value
    return [found[number] for number in sorted(found)]


def _flat(value: JsonObject, prefix: str = "") -> dict[str, object]:
    """An object within objects as one, under dotted names."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= _flat(item, f"{prefix}{key}.") if isinstance(item, Mapping) else {f"{prefix}{key}": item}
    return found


_phoenix_call = Call(
    own="span_id",
    fields={
        "policy": '"llm.model_name"',
        "tokens_in": '"llm.token_count.prompt"',
        "tokens_out": '"llm.token_count.completion"',
        "created_at": "start_time",
        "ended_at": "end_time",
    },
    metadata={"trace_id": "trace_id", "root_id": "root_id", "name": "name", "metadata": "json(metadata)"},
)
_annotation_score = Scores(
    name="name",
    value="result.score",
    label="result.label",
    author="author",
    notes="result.explanation",
    scored_at="at",
    simulated="kind != 'HUMAN'",
)
ANNOTATION = listed(
    "annotator_kind annotation_name label score explanation result.label result.score result.explanation"
)
"""Columns of an annotation that look like a verdict and are one."""


def _is_phoenix(row: JsonObject) -> bool:
    return any(map(_is_phoenix_row, rows_in_page(row)))


_is_phoenix_row = holds(
    "annotator_kind name", "annotator_kind annotation_name", "span_kind context", "span_kind context.span_id"
)


def _read_phoenix(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    models, roots = DiskMultimap(), DiskMultimap()
    for row, _ in objects_in(path, ratings_path):
        if "annotator_kind" not in row:
            own, trace = _phoenix_names(row)
            if not row.get("parent_id"):
                roots.add(trace, own)
            if _kind(row, _phoenix_attributes(row)) == "LLM":
                models.add(trace)

    def records(row: JsonObject, line: int) -> Iterator[Record]:
        if "annotator_kind" in row:
            return _phoenix_annotation(row, line)
        return _phoenix_span(row, line, models, roots)

    return decisions_first(path, ratings_path, records, verdicts=ANNOTATION, pages=True)


def _phoenix_names(span: JsonObject) -> tuple[str, str]:
    """(id of the span, id of its trace)."""
    own = at(span, 'context.span_id || "context.span_id"')
    return text_or_empty(own), text_or_empty(at(span, 'context.trace_id || "context.trace_id"'))


def _kind(span: JsonObject, attributes: JsonObject) -> object:
    return attributes.get("openinference.span.kind") or span.get("span_kind")


def _phoenix_span(row: JsonObject, line: int, models: DiskMultimap, roots: DiskMultimap) -> Iterator[Record]:
    attributes, (span_id, trace) = _phoenix_attributes(row), _phoenix_names(row)
    if not span_id:
        raise RowError("context.span_id: expected the id of the span, found none")
    kind = _kind(row, attributes)
    if kind != "LLM" and (row.get("parent_id") or trace in models):
        reason = f"a span of kind {value_excerpt(kind)} in a trace whose decisions are its LLM spans"
        yield RowSkipped(line, span_id, reason)
        return
    prompt, answer = openinference_call(attributes)
    seen = {
        **attributes,
        **{name: row.get(name) for name in ("start_time", "end_time", "name")},
        "span_id": span_id,
        "trace_id": trace,
        "root_id": roots.last(trace),
    }
    yield _phoenix_call.decision(seen, line, request=prompt, answer=answer)


def openinference_call(attributes: JsonObject) -> tuple[object, object]:
    """(request, answer) of a model call with OpenInference's attributes. Raises RowError, RowLeftOut."""
    prompt: object = _phoenix_messages(attributes, "llm.input_messages") or attributes.get("input.value")
    answered = _phoenix_messages(attributes, "llm.output_messages")
    # each output message is another choice
    choices = {"choices": [{"message": turn} for turn in answered]}
    answer = choices if answered else attributes.get("output.value")
    if prompt is None or answer is None:
        raise RowLeftOut("no response" if answer is None else "no prompt")
    if isinstance(prompt, list):
        parameters = object_or_empty(json_value(attributes.get("llm.invocation_parameters")))
        tools = [json_value(tool.get("json_schema")) for tool in indexed(attributes, "llm.tools", "tool")]
        prompt = {"messages": prompt, "tools": tools} | {
            k: v for k, v in parameters.items() if k != "messages"
        }
    return prompt, answer


def _phoenix_attributes(row: JsonObject) -> dict[str, object]:
    """The attributes under their dotted names, wherever they stand; of a data frame those columns that hold some."""
    value = json_value(row.get("attributes"))
    found = _flat(value) if isinstance(value, Mapping) else {}
    prefix = "attributes."
    found |= {key.removeprefix(prefix): row[key] for key in row if key.startswith(prefix)}
    return {name: item for name, item in found.items() if item is not None}


def _phoenix_messages(attributes: JsonObject, name: str) -> list[Message]:
    """Messages whose parts stand under name.0.message.role and the like, or as one list of such objects."""
    parts = indexed(attributes, name, "message")
    return [_phoenix_message(item, f"{name}.{index}") for index, item in enumerate(parts)]


def _phoenix_message(parts: JsonObject, what: str) -> Message:
    message: Message = {"role": parts.get("role"), "content": parts.get("content")}
    texts: list[object] = []
    for part in indexed(parts, "contents", "message_content"):
        if part.get("type", "text") != "text":
            kind = value_excerpt(part.get("type"))
            raise RowError(f"{what}: not_text: only text parts can be read, found one of type {kind}")
        texts.append({"type": "text", "text": part.get("text")})
    calls = [
        {
            **({"id": part["id"]} if part.get("id") else {}),
            "type": "function",
            "function": {"name": part.get("function.name"), "arguments": part.get("function.arguments")},
        }
        for part in indexed(parts, "tool_calls", "tool_call")
    ]
    more = {
        "content": texts,
        "tool_calls": calls,
        **{key: parts.get(key) for key in ("name", "tool_call_id")},
    }
    return message | {key: value for key, value in more.items() if value}


def _phoenix_annotation(row: JsonObject, line: int) -> Iterator[Record]:
    target = row.get("span_id") or row.get("context.span_id") or row.get("trace_id")
    if not target:
        raise RowLeftOut("an annotation of a session, not of a span or trace")
    result = json_value(row.get("result"))
    if not isinstance(result, Mapping):
        names = ("label", "score", "explanation")
        result = {name: row.get(f"result.{name}", row.get(name)) for name in names}
    number = _cell_number(result.get("score"))
    if number is None and not result.get("label") and not result.get("explanation"):
        raise RowLeftOut("an annotation without a label, a score or an explanation")
    author = at(row, "user_id || identifier") or str(at(row, "source || annotator_kind") or "api").lower()
    seen = {
        "name": at(row, "annotation_name || name"),
        "author": author,
        "at": at(row, "updated_at || created_at"),
        "kind": row.get("annotator_kind"),
        "result": {**result, "score": number},
    }
    score = _annotation_score.one(seen)
    return score.references(line, key_of(row), text_of(target, "span_id"), text_or_empty(row.get("trace_id")))


def _cell_number(value: object) -> object:
    """A cell's number; an empty one is none."""
    if not isinstance(value, str):
        return value
    if value.strip().lower() in ("", "nan", "none", "null"):
        return None
    try:
        return number_of(float(value), "result.score")
    except ValueError:
        raise RowError(f"result.score: expected a number, found {value_excerpt(value)}") from None


PHOENIX = Format(
    "phoenix",
    "Phoenix spans and annotations",
    _is_phoenix,
    _read_phoenix,
    two_files=True,
    untested_parts="cells of an exported data frame were not seen",
)
