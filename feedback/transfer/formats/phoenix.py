"""Arize Phoenix: spans with OpenInference attributes, and annotations of spans (REST answers or data frames).

LLM spans are decisions, or the root of a trace without any; what is said of the root is said of its last decision.
Attributes are flat, with the index of a message in the key; data frames hold lists of messages under columns that
begin with `attributes.` (cell shapes of data frames are read leniently).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from feedback.storage.responses import Message, value_excerpt
from feedback.transfer.formats.base import Format, decisions_first, each_item, has, key_of
from feedback.transfer.formats.calls import (
    call_decision,
    json_value,
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
    list_of,
    mapping_of,
    number_of,
    text_of,
    time_of,
)
from feedback.transfer.formats.verdicts import NamedScore

ANNOTATION = (
    "annotator_kind", "annotation_name", "label", "score", "explanation", "result.label", "result.score",
    "result.explanation",
)  # fmt: skip
"""Columns of an annotation that look like a verdict and are one."""

PLACE = re.compile(r"(\d+)\.message\.(.+)")


def recognises(row: Mapping[str, Any]) -> bool:
    listed = row.get("data")
    return any(map(_is_ours, map(object_or_empty, listed if isinstance(listed, list) else [row])))


def _is_ours(row: Mapping[str, Any]) -> bool:
    if "annotator_kind" in row:
        return has(row, "name") or has(row, "annotation_name")
    return has(row, "span_kind") and ("context" in row or "context.span_id" in row)


def read(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    models, roots = DiskMultimap(), DiskMultimap()
    for file in filter(None, (path, ratings_path)):
        for item in rows(file):
            value = {} if isinstance(item, RowRefused) else object_or_empty(item.value)
            listed = value.get("data")
            for span in map(object_or_empty, listed if isinstance(listed, list) else [value]):
                if "annotator_kind" not in span:
                    own, trace = _names(span)
                    if not span.get("parent_id"):
                        roots.add(trace, own)
                    if _kind(span, _attributes(span)) == "LLM":
                        models.add(trace)

    def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
        if isinstance(row.get("data"), list):
            return each_item(line, row["data"], "data", records)
        if "annotator_kind" in row:
            return _annotation(row, line)
        return _span(row, line, models, roots)

    return decisions_first(path, ratings_path, records, verdicts=ANNOTATION)


def _names(span: Mapping[str, Any]) -> tuple[str, str]:
    """(id of the span, id of its trace)."""
    context = object_or_empty(span.get("context"))
    own, trace = (context.get(name) or span.get(f"context.{name}") for name in ("span_id", "trace_id"))
    return text_or_empty(own), text_or_empty(trace)


def _kind(span: Mapping[str, Any], attributes: Mapping[str, Any]) -> Any:
    return attributes.get("openinference.span.kind") or span.get("span_kind")


# --- Spans -------------------------------------------------------------------------------------------------


def _span(row: Mapping[str, Any], line: int, models: DiskMultimap, roots: DiskMultimap) -> Iterator[Record]:
    attributes = _attributes(row)
    span_id, trace = _names(row)
    if not span_id:
        raise RowError("context.span_id: expected the id of the span, found none")
    kind = _kind(row, attributes)
    if kind != "LLM" and (row.get("parent_id") or trace in models):
        yield RowSkipped(
            line,
            span_id,
            f"a span of kind {value_excerpt(kind)} in a trace whose decisions are its LLM spans",
        )
        return
    prompt = _messages(attributes, "llm.input_messages") or attributes.get("input.value")
    answered: Any = _messages(attributes, "llm.output_messages")
    start, end = (time_of(row.get(name), name) for name in ("start_time", "end_time"))
    # each output message is another choice
    answer = (
        {"choices": [{"message": turn} for turn in answered]} if answered else attributes.get("output.value")
    )
    if prompt is None or answer is None:
        yield RowSkipped(line, span_id, "no response" if answer is None else "no prompt")
        return
    parameters = object_or_empty(json_value(attributes.get("llm.invocation_parameters")))
    tools = [
        json_value(tool.get("json_schema")) for tool in _indexed_objects(attributes, "llm.tools", "tool")
    ]
    if isinstance(prompt, list):
        prompt = {"messages": prompt, "tools": tools} | {
            k: v for k, v in parameters.items() if k != "messages"
        }
    yield from call_decision(
        line,
        span_id,
        prompt,
        answer,
        run_id=span_id[:200],
        policy=text_or_empty(attributes.get("llm.model_name")),
        tokens_in=whole_of(attributes.get("llm.token_count.prompt")),
        tokens_out=whole_of(attributes.get("llm.token_count.completion")),
        latency_ms=max((end - start).total_seconds() * 1000, 0.0) if start and end else None,
        created_at=start,
        metadata=metadata_retained(
            trace_id=trace,
            root_id=roots.last(trace),
            name=row.get("name"),
            metadata=json_value(attributes.get("metadata")),
        ),
    )


def _attributes(row: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes under their dotted names, wherever they stand."""
    value = json_value(row.get("attributes"))
    found = _flat(value) if isinstance(value, Mapping) else {}
    found |= {
        key.removeprefix("attributes."): item for key, item in row.items() if key.startswith("attributes.")
    }
    # a table of spans has a column for what only some of them have
    return {name: item for name, item in found.items() if item is not None}


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            found |= _flat(item, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = item
    return found


def _messages(attributes: Mapping[str, Any], name: str) -> list[Message]:
    """Messages whose parts stand under name.0.message.role and the like, or as one list of such objects."""
    listed = json_value(attributes.get(name))
    if isinstance(listed, list):
        items: dict[int, dict[str, Any]] = {
            index: {
                key.removeprefix("message."): value for key, value in _flat(mapping_of(item, name)).items()
            }
            for index, item in enumerate(listed)
        }
    else:
        items = {}
        for key, value in attributes.items():
            if key.startswith(f"{name}.") and (place := PLACE.fullmatch(key.removeprefix(f"{name}."))):
                items.setdefault(int(place[1]), {})[place[2]] = value
    return [_message(items[index], f"{name}.{index}") for index in sorted(items)]


def _message(parts: Mapping[str, Any], what: str) -> Message:
    message: Message = {"role": parts.get("role"), "content": parts.get("content")}
    texts: list[Any] = []
    for part in _indexed_objects(parts, "contents", "message_content"):
        if part.get("type", "text") != "text":
            raise RowError(
                f"{what}: not_text: only text parts can be read, found one of type {value_excerpt(part.get('type'))}"
            )
        texts.append({"type": "text", "text": part.get("text")})
    calls = [
        {
            **({"id": part["id"]} if part.get("id") else {}),
            "type": "function",
            "function": {"name": part.get("function.name"), "arguments": part.get("function.arguments")},
        }
        for part in _indexed_objects(parts, "tool_calls", "tool_call")
    ]
    if texts:
        message["content"] = texts
    if calls:
        message["tool_calls"] = calls
    for key in ("name", "tool_call_id"):
        if parts.get(key):
            message[key] = parts[key]
    return message


def _indexed_objects(parts: Mapping[str, Any], name: str, element: str) -> list[dict[str, Any]]:
    """The elements under name.0.element.key, in their order; or of a list under the name."""
    listed = parts.get(name)
    if isinstance(listed, list):
        return [
            {key.removeprefix(f"{element}."): value for key, value in _flat(item).items()}
            for item in list_of(listed, name)
            if isinstance(item, Mapping)
        ]
    found: dict[int, dict[str, Any]] = {}
    for key, value in parts.items():
        if place := re.fullmatch(rf"{name}\.(\d+)\.{element}\.(.+)", key):
            found.setdefault(int(place[1]), {})[place[2]] = value
    return [found[index] for index in sorted(found)]


# --- Annotations -------------------------------------------------------------------------------------------


def _annotation(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    key = key_of(row)
    target = row.get("span_id") or row.get("context.span_id") or row.get("trace_id")
    if not target:
        yield RowSkipped(line, key, "an annotation of a session, not of a span or trace")
        return
    result = json_value(row.get("result"))
    if not isinstance(result, Mapping):
        result = {
            name: row.get(f"result.{name}", row.get(name)) for name in ("label", "score", "explanation")
        }
    score = result.get("score")
    if isinstance(score, str):
        score = _number(score)
    kind = row.get("annotator_kind")
    author = row.get("user_id") or row.get("identifier") or str(row.get("source") or kind or "api").lower()
    label, explanation = result.get("label"), result.get("explanation")
    if score is None and not label and not explanation:
        yield RowSkipped(line, key, "an annotation without a label, a score or an explanation")
        return
    yield from NamedScore(
        name=text_of(row.get("annotation_name") or row.get("name"), "name", required=True),
        value=score,
        label=text_of(label, "result.label") if label else None,
        author=text_or_empty(author),
        simulated=kind != "HUMAN",
        notes=text_of(explanation or "", "result.explanation")[:20_000],
        scored_at=time_of(row.get("updated_at") or row.get("created_at"), "updated_at"),
    ).references(line, key, text_of(target, "span_id"), text_or_empty(row.get("trace_id")))


def _number(text: str) -> float | None:
    """A cell's number; an empty one is none."""
    if not text.strip() or text.strip().lower() in ("nan", "none", "null"):
        return None
    try:
        return number_of(float(text), "result.score")
    except ValueError:
        raise RowError(f"result.score: expected a number, found {value_excerpt(text)}") from None


FORMAT = Format(
    "phoenix",
    "Phoenix spans and annotations",
    recognises,
    read,
    (),
    two_files=True,
    untested_parts="cells of an exported data frame were not seen",
)
