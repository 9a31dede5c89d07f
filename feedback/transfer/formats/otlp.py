"""OpenTelemetry traces and logs as OTLP JSON, with the GenAI conventions (their status: development).

Spans of model calls that hold their messages are decisions; `gen_ai.evaluation.result`, as a log record or a span
event, is a rating of its span. Who evaluated is not said by the conventions: such a rating counts as simulated.
Content is off by default in most instrumentations: a span without it is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import Format, attempt, decisions_first
from feedback.transfer.formats.calls import (
    call_decision,
    json_value,
    metadata_retained,
    object_or_empty,
    text_or_empty,
    whole_of,
)
from feedback.transfer.formats.records import (
    Record,
    RowError,
    RowSkipped,
    list_of,
    mapping_of,
    messages_of,
    text_of,
    time_of,
    with_system,
)
from feedback.transfer.formats.tensorzero import slug
from feedback.transfer.formats.verdicts import NamedScore

EVALUATION = "gen_ai.evaluation.result"
PROMPTLESS_OPERATIONS = ("execute_tool", "embeddings", "invoke_agent", "create_agent")
"""Operations that answer no prompt of their own: an agent's answers are the spans of the model calls inside."""


def recognises(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("resourceSpans"), list) or isinstance(row.get("resourceLogs"), list)


def read(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    return decisions_first(path, ratings_path, records, verdicts=())


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    for outer, scoped, inner, one in (
        ("resourceSpans", "scopeSpans", "spans", _span),
        ("resourceLogs", "scopeLogs", "logRecords", _log),
    ):
        for resource in _objects(row.get(outer), outer):
            about = object_or_empty(resource.get("resource"))
            agent = slug(text_or_empty(_attributes(about.get("attributes")).get("service.name")))
            for scope in _objects(resource.get(scoped), scoped):
                for item in _objects(scope.get(inner), inner):
                    key = str(item.get("spanId") or "").lower()[:200]
                    yield from attempt(line, key, partial(one, item, line, agent))


def _objects(value: Any, what: str) -> Iterator[Mapping[str, Any]]:
    for index, item in enumerate(list_of(value if value is not None else [], what)):
        yield mapping_of(item, f"{what}[{index}]")


# --- Values ------------------------------------------------------------------------------------------------


def _attributes(value: Any) -> dict[str, Any]:
    """Attributes as a plain object."""
    return {str(item.get("key")): _value(item.get("value")) for item in _objects(value, "attributes")}


def _value(value: Any, depth: int = 0) -> Any:
    """An AnyValue as plain JSON; 64-bit numbers are texts there."""
    if not isinstance(value, Mapping) or depth > 60:
        return None
    for kind, content in value.items():
        if kind == "arrayValue":
            items = content.get("values") if isinstance(content, Mapping) else None
            return [_value(item, depth + 1) for item in items] if isinstance(items, list) else []
        if kind == "kvlistValue":
            items = content.get("values") if isinstance(content, Mapping) else None
            return {
                str(item.get("key")): _value(item.get("value"), depth + 1)
                for item in (items if isinstance(items, list) else [])
                if isinstance(item, Mapping)
            }
        if kind == "intValue":
            return int(content) if isinstance(content, str) and content.lstrip("-").isdigit() else content
        if kind in ("stringValue", "doubleValue", "boolValue", "bytesValue"):
            return content
    return None


def _nanoseconds(value: Any, what: str) -> float | None:
    """Seconds since 1970 of a time in nanoseconds, which is a text or a number."""
    if value in (None, "", 0, "0"):
        return None
    if isinstance(value, bool) or not (
        isinstance(value, int) or (isinstance(value, str) and value.isdigit())
    ):
        raise RowError(f"{what}: expected nanoseconds since 1970, found {value_excerpt(value)}")
    if len(str(value)) > 20:
        raise RowError(f"{what}: expected nanoseconds since 1970 in 64 bits, found {value_excerpt(value)}")
    return int(value) / 1e9


# --- Spans -------------------------------------------------------------------------------------------------


def _span(span: Mapping[str, Any], line: int, agent: str) -> Iterator[Record]:
    attributes = _attributes(span.get("attributes"))
    span_id, trace = (text_of(span.get(name) or "", name).lower() for name in ("spanId", "traceId"))
    operation = attributes.get("gen_ai.operation.name")
    answers = json_value(attributes.get("gen_ai.output.messages"))
    prompt = json_value(attributes.get("gen_ai.input.messages"))
    if prompt is None and answers is None:
        prompt, answers = _older(attributes, span)
    if not operation and prompt is None and answers is None:
        yield RowSkipped(line, span_id, "a span of no model call")
    elif operation in PROMPTLESS_OPERATIONS:
        yield RowSkipped(line, span_id, f"a span of {operation}, not of a model call")
    elif not isinstance(answers, list) or not isinstance(prompt, list) or not answers:
        yield RowSkipped(
            line, span_id, "its content was not recorded" if not answers else "its prompt was not recorded"
        )
    else:
        start, end = (_nanoseconds(span.get(name), name) for name in ("startTimeUnixNano", "endTimeUnixNano"))
        system = json_value(attributes.get("gen_ai.system_instructions"))
        turns = with_system(
            system, messages_of(prompt, "gen_ai.input.messages"), "gen_ai.system_instructions"
        )
        # each output message is another choice, no further turn
        choices = [{"message": turn} for turn in messages_of(answers, "gen_ai.output.messages")]
        yield from call_decision(
            line,
            span_id,
            {"messages": turns, "tools": json_value(attributes.get("gen_ai.tool.definitions"))}
            | _parameters(attributes),
            {"choices": choices},
            agent=agent,
            run_id=span_id[:200],
            policy=text_or_empty(
                attributes.get("gen_ai.response.model") or attributes.get("gen_ai.request.model")
            ),
            tokens_in=whole_of(attributes.get("gen_ai.usage.input_tokens")),
            tokens_out=whole_of(attributes.get("gen_ai.usage.output_tokens")),
            latency_ms=None if start is None or end is None else max(round((end - start) * 1000, 3), 0.0),
            created_at=time_of(start, "startTimeUnixNano"),
            metadata=metadata_retained(
                trace_id=trace,
                response_id=attributes.get("gen_ai.response.id"),
                conversation_id=attributes.get("gen_ai.conversation.id"),
            ),
        )
    for event in _objects(span.get("events"), "events"):
        if event.get("name") == EVALUATION:
            record = {"traceId": trace, "spanId": span_id, **event, "eventName": EVALUATION}
            yield from attempt(line, span_id, partial(_log, record, line, agent))


def _parameters(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the request, such as the temperature."""
    prefix = "gen_ai.request."
    return {name.removeprefix(prefix): item for name, item in attributes.items() if name.startswith(prefix)}


def _older(attributes: Mapping[str, Any], span: Mapping[str, Any]) -> tuple[Any, Any]:
    """Messages as older instrumentations write them: attributes `gen_ai.prompt.N.content`, or an event per message."""
    prompts, answers = (_indexed_objects(attributes, f"gen_ai.{name}.") for name in ("prompt", "completion"))
    for event in _objects(span.get("events"), "events"):
        name, event_attributes = str(event.get("name")), _attributes(event.get("attributes"))
        if name == "gen_ai.choice":
            message = json_value(event_attributes.get("message"))
            answers.append(
                {"role": "assistant", **(message if isinstance(message, Mapping) else event_attributes)}
            )
        elif name.startswith("gen_ai.") and name.endswith(".message"):
            prompts.append({"role": name.split(".")[1], **event_attributes})
    return prompts or None, answers or None


def _indexed_objects(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """Objects whose keys stand under prefix.0.key."""
    found: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        number, _, name = key.removeprefix(prefix).partition(".")
        if key.startswith(prefix) and number.isdigit() and name:
            found.setdefault(int(number), {})[name] = value
    return [found[number] for number in sorted(found)]


# --- Evaluations -------------------------------------------------------------------------------------------


def _log(record: Mapping[str, Any], line: int, agent: str) -> Iterator[Record]:
    attributes = _attributes(record.get("attributes"))
    span_id, trace = (text_of(record.get(name) or "", name).lower() for name in ("spanId", "traceId"))
    if (record.get("eventName") or attributes.get("event.name")) != EVALUATION:
        yield RowSkipped(line, span_id, "a log record that is no evaluation")
        return
    if attributes.get("error.type"):
        yield RowSkipped(line, span_id, "an evaluation that failed")
        return
    label, notes = (attributes.get(f"gen_ai.evaluation.{name}") for name in ("score.label", "explanation"))
    at = _nanoseconds(record.get("timeUnixNano") or record.get("observedTimeUnixNano"), "timeUnixNano")
    target = span_id or text_or_empty(attributes.get("gen_ai.response.id")) or trace
    yield from NamedScore(
        name=text_of(attributes.get("gen_ai.evaluation.name"), "gen_ai.evaluation.name", required=True),
        value=attributes.get("gen_ai.evaluation.score.value"),
        label=text_of(label, "gen_ai.evaluation.score.label") if label else None,
        simulated=True,
        notes=text_of(notes or "", "gen_ai.evaluation.explanation")[:20_000],
        scored_at=time_of(at, "timeUnixNano"),
    ).references(line, span_id, text_of(target, "spanId", required=True), trace)


FORMAT = Format("otlp", "OTLP traces and evaluations (GenAI)", recognises, read, (), two_files=True)
