"""Spans with the conventions of OpenTelemetry (GenAI, OTLP JSON) and of OpenInference (Arize Phoenix).

Spans of model calls that hold their messages are decisions. Content is off by default in most instrumentations: a span
without it is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from feedback.messages import Message
from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import (
    Format,
    attempt,
    decisions_first,
    holds,
    key_of,
    objects_in,
    rows_in_page,
)
from feedback.transfer.formats.calls import json_value, object_or_empty, text_or_empty
from feedback.transfer.formats.cells import JsonObject, listed
from feedback.transfer.formats.declared import Call, Scores, at, slug
from feedback.transfer.formats.files import DiskMultimap
from feedback.transfer.formats.records import (
    Record,
    RowError,
    RowLeftOut,
    RowSkipped,
    list_of,
    mapping_of,
    messages_of,
    number_of,
    text_of,
    with_system,
)

# --- OTLP: traces and logs, with the GenAI conventions (their status: development) ------------------------------

EVALUATION = "gen_ai.evaluation.result"
"""Name of a log record or a span event that rates its span. The conventions do not say who evaluated: such a rating
counts as simulated."""

PROMPTLESS_OPERATIONS = ("execute_tool", "embeddings", "invoke_agent", "create_agent")
"""Operations that answer no prompt of their own: an agent's answers are the spans of the model calls inside."""

_otlp_call = Call(
    own="span_id",
    own_required=False,
    fields={
        "policy": '"gen_ai.response.model" || "gen_ai.request.model"',
        "tokens_in": '"gen_ai.usage.input_tokens"',
        "tokens_out": '"gen_ai.usage.output_tokens"',
        "created_at": "started",
    },
    metadata={
        "trace_id": "trace_id",
        "response_id": '"gen_ai.response.id"',
        "conversation_id": '"gen_ai.conversation.id"',
    },
)
_evaluation = Scores(
    name='"gen_ai.evaluation.name"',
    value='"gen_ai.evaluation.score.value"',
    label='"gen_ai.evaluation.score.label"',
    notes='"gen_ai.evaluation.explanation"',
    scored_at="at",
    simulated="`true`",
)


def _read_otlp(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    return decisions_first(path, ratings_path, _otlp, verdicts=())


def _otlp(row: JsonObject, line: int) -> Iterator[Record]:
    for outer, scoped, inner, read in (
        ("resourceSpans", "scopeSpans", "spans", _otlp_span),
        ("resourceLogs", "scopeLogs", "logRecords", _otlp_log),
    ):
        for resource in _objects(row.get(outer), outer):
            attributes = _attributes(at(resource, "resource.attributes"))
            agent = text_or_empty(attributes.get("service.name"))
            for scope in _objects(resource.get(scoped), scoped):
                for item in _objects(scope.get(inner), inner):
                    key = str(item.get("spanId") or "").lower()[:200]
                    yield from attempt(line, key, partial(read, item, line, agent))


def _objects(value: object, what: str) -> Iterator[JsonObject]:
    for index, item in enumerate(list_of(value if value is not None else [], what)):
        yield mapping_of(item, f"{what}[{index}]")


def _attributes(value: object) -> dict[str, Any]:
    """Attributes as a plain object."""
    return {str(item.get("key")): _value(item.get("value")) for item in _objects(value, "attributes")}


def _value(value: object, depth: int = 0) -> Any:
    """An AnyValue as plain JSON; 64-bit numbers are texts there."""
    if not isinstance(value, Mapping) or depth > 60:
        return None
    for kind, content in value.items():
        items = at(content, "values")
        items = items if isinstance(items, list) else []
        if kind == "arrayValue":
            return [_value(item, depth + 1) for item in items]
        if kind == "kvlistValue":
            objects = [item for item in items if isinstance(item, Mapping)]
            return {str(item.get("key")): _value(item.get("value"), depth + 1) for item in objects}
        if kind == "intValue":
            return int(content) if isinstance(content, str) and content.lstrip("-").isdigit() else content
        if kind in ("stringValue", "doubleValue", "boolValue", "bytesValue"):
            return content
    return None


def _seconds(value: object, what: str) -> float | None:
    """Seconds since 1970 of a time in nanoseconds, which is a text or a number."""
    if value in (None, "", 0, "0"):
        return None
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole or (isinstance(value, str) and value.isdigit())) or len(str(value)) > 20:
        raise RowError(f"{what}: expected nanoseconds since 1970 in 64 bits, found {value_excerpt(value)}")
    return int(str(value)) / 1e9


def _otlp_names(item: JsonObject) -> tuple[str, str]:
    """(id of the span, id of its trace)."""
    span_id, trace = (text_of(item.get(name) or "", name).lower() for name in ("spanId", "traceId"))
    return span_id, trace


def _otlp_span(span: JsonObject, line: int, agent: str) -> Iterator[Record]:
    attributes, (span_id, trace) = _attributes(span.get("attributes")), _otlp_names(span)
    yield from attempt(line, span_id, lambda: _otlp_decision(span, line, attributes, agent))
    for event in _objects(span.get("events"), "events"):
        if event.get("name") == EVALUATION:
            record = {"traceId": trace, "spanId": span_id, **event, "eventName": EVALUATION}
            yield from attempt(line, span_id, partial(_otlp_log, record, line, agent))


def _otlp_decision(span: JsonObject, line: int, attributes: dict[str, Any], agent: str) -> Iterator[Record]:
    (span_id, trace), operation = _otlp_names(span), attributes.get("gen_ai.operation.name")
    prompt, answers = (json_value(attributes.get(f"gen_ai.{name}.messages")) for name in ("input", "output"))
    if prompt is None and answers is None:
        prompt, answers = _older(attributes, span)
    if not operation and prompt is None and answers is None:
        raise RowLeftOut("a span of no model call")
    if operation in PROMPTLESS_OPERATIONS:
        raise RowLeftOut(f"a span of {operation}, not of a model call")
    if not isinstance(answers, list) or not isinstance(prompt, list) or not answers:
        raise RowLeftOut("its content was not recorded" if not answers else "its prompt was not recorded")
    started, ended = (_seconds(span.get(name), name) for name in ("startTimeUnixNano", "endTimeUnixNano"))
    system = json_value(attributes.get("gen_ai.system_instructions"))
    turns = with_system(system, messages_of(prompt, "gen_ai.input.messages"), "gen_ai.system_instructions")
    prefix = "gen_ai.request."
    request = {"messages": turns, "tools": json_value(attributes.get("gen_ai.tool.definitions"))}
    request |= {
        name.removeprefix(prefix): item for name, item in attributes.items() if name.startswith(prefix)
    }
    # each output message is another choice, no further turn
    choices = [{"message": turn} for turn in messages_of(answers, "gen_ai.output.messages")]
    more: dict[str, Any] = {"agent": slug(agent)}
    if started is not None and ended is not None:
        more["latency_ms"] = max(round((ended - started) * 1000, 3), 0.0)
    seen = {**attributes, "span_id": span_id, "trace_id": trace, "started": started}
    yield _otlp_call.decision(seen, line, request=request, answer={"choices": choices}, **more)


def _older(attributes: JsonObject, span: JsonObject) -> tuple[Any, Any]:
    """Messages as older instrumentations write them: attributes `gen_ai.prompt.N.content`, or an event per message."""
    prompts, answers = (_indexed(attributes, f"gen_ai.{name}") for name in ("prompt", "completion"))
    for event in _objects(span.get("events"), "events"):
        name, event_attributes = str(event.get("name")), _attributes(event.get("attributes"))
        if name == "gen_ai.choice":
            message = json_value(event_attributes.get("message"))
            said = message if isinstance(message, Mapping) else event_attributes
            answers.append({"role": "assistant", **said})
        elif name.startswith("gen_ai.") and name.endswith(".message"):
            prompts.append({"role": name.split(".")[1], **event_attributes})
    return prompts or None, answers or None


def _indexed(attributes: JsonObject, name: str, element: str = "") -> list[dict[str, Any]]:
    """The objects whose keys stand under name.0.key (or name.0.element.key), in their order; or of a list there."""
    listed = json_value(attributes.get(name))
    if isinstance(listed, list):
        objects = [_flat(item) for item in listed if isinstance(item, Mapping)]
        return [{key.removeprefix(f"{element}."): value for key, value in item.items()} for item in objects]
    place = re.compile(rf"{re.escape(name)}\.(\d+)\.{f'{element}[.]' if element else ''}(.+)")
    found: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        if key.startswith(name) and (match := place.fullmatch(key)):
            found.setdefault(int(match[1]), {})[match[2]] = value
    return [found[number] for number in sorted(found)]


def _flat(value: JsonObject, prefix: str = "") -> dict[str, Any]:
    """An object within objects as one, under dotted names."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= _flat(item, f"{prefix}{key}.") if isinstance(item, Mapping) else {f"{prefix}{key}": item}
    return found


def _otlp_log(record: JsonObject, line: int, agent: str) -> Iterator[Record]:
    attributes, (span_id, trace) = _attributes(record.get("attributes")), _otlp_names(record)
    if (record.get("eventName") or attributes.get("event.name")) != EVALUATION:
        raise RowLeftOut("a log record that is no evaluation")
    if attributes.get("error.type"):
        raise RowLeftOut("an evaluation that failed")
    scored_at = _seconds(record.get("timeUnixNano") or record.get("observedTimeUnixNano"), "timeUnixNano")
    target = span_id or text_or_empty(attributes.get("gen_ai.response.id")) or trace
    score = _evaluation.one({**attributes, "at": scored_at})
    return score.references(line, span_id, text_of(target, "spanId", required=True), trace)


OTLP = Format(
    "otlp",
    "OTLP traces and evaluations (GenAI)",
    lambda row: isinstance(row.get("resourceSpans"), list) or isinstance(row.get("resourceLogs"), list),
    _read_otlp,
    two_files=True,
)

# --- Phoenix: spans with OpenInference attributes, and annotations of spans --------------------------------------

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


def _kind(span: JsonObject, attributes: JsonObject) -> Any:
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
    prompt: Any = _phoenix_messages(attributes, "llm.input_messages") or attributes.get("input.value")
    answered = _phoenix_messages(attributes, "llm.output_messages")
    # each output message is another choice
    choices = {"choices": [{"message": turn} for turn in answered]}
    answer = choices if answered else attributes.get("output.value")
    if prompt is None or answer is None:
        raise RowLeftOut("no response" if answer is None else "no prompt")
    if isinstance(prompt, list):
        parameters = object_or_empty(json_value(attributes.get("llm.invocation_parameters")))
        tools = [json_value(tool.get("json_schema")) for tool in _indexed(attributes, "llm.tools", "tool")]
        prompt = {"messages": prompt, "tools": tools} | {
            k: v for k, v in parameters.items() if k != "messages"
        }
    seen = {
        **attributes,
        **{name: row.get(name) for name in ("start_time", "end_time", "name")},
        "span_id": span_id,
        "trace_id": trace,
        "root_id": roots.last(trace),
    }
    yield _phoenix_call.decision(seen, line, request=prompt, answer=answer)


def _phoenix_attributes(row: JsonObject) -> dict[str, Any]:
    """The attributes under their dotted names, wherever they stand; of a data frame those columns that hold some."""
    value = json_value(row.get("attributes"))
    found = _flat(value) if isinstance(value, Mapping) else {}
    prefix = "attributes."
    found |= {key.removeprefix(prefix): row[key] for key in row if key.startswith(prefix)}
    return {name: item for name, item in found.items() if item is not None}


def _phoenix_messages(attributes: JsonObject, name: str) -> list[Message]:
    """Messages whose parts stand under name.0.message.role and the like, or as one list of such objects."""
    parts = _indexed(attributes, name, "message")
    return [_phoenix_message(item, f"{name}.{index}") for index, item in enumerate(parts)]


def _phoenix_message(parts: JsonObject, what: str) -> Message:
    message: Message = {"role": parts.get("role"), "content": parts.get("content")}
    texts: list[Any] = []
    for part in _indexed(parts, "contents", "message_content"):
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
        for part in _indexed(parts, "tool_calls", "tool_call")
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


def _cell_number(value: object) -> Any:
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
