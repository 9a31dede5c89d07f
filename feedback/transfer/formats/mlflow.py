"""MLflow 3 traces with their assessments, and leniently those of MLflow 2: files, and what a server answers.

The reader of OpenTelemetry's spans reads the spans. A trace without a model call is one decision: what its first span
took and gave.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from feedback.transfer.formats.base import attempt, row_format
from feedback.transfer.formats.calls import json_value, object_or_empty, text_or_empty
from feedback.transfer.formats.cells import JsonObject
from feedback.transfer.formats.declared import Call, NamedScore, Scores, at, notes_of
from feedback.transfer.formats.otlp import otlp_records
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedReference,
    ImportedTrace,
    OutcomeReference,
    Record,
    RowLeftOut,
    RowRefused,
    RowSkipped,
    list_of,
    mapping_of,
)

_whole_trace = Call(
    request="request",
    answer="response",
    own="info.trace_id || info.request_id",
    fields={
        "latency_ms": "info.execution_duration_ms || info.execution_duration",
        "created_at": "info.request_time || info.timestamp_ms",
        "unit": "unit",
    },
    left_out={"!response": "no response"},
)
_assessment = Scores(
    name="assessment_name || name",
    author="source.source_id",
    notes="rationale",
    scored_at="last_update_time || create_time",
    simulated="source.source_type != 'HUMAN'",
    binary=False,
)
CORRECTIONS = ("expected_response", "expected_output", "expected_answer")
"""Expectations of a person that are a better response; others are kept as notes."""
UNKNOWN = "an assessment of what is no decision here"


def _is_mlflow(row: JsonObject) -> bool:
    info = row.get("info")
    if isinstance(info, Mapping) and ("data" in row or "assessments" in info):
        return "trace_id" in info or "request_id" in info
    return (
        "trace_id" in row and "assessments" in row and ("trace" in row or {"request", "response"} <= set(row))
    )


def _mlflow(row: JsonObject, line: int) -> Iterator[Record]:
    whole = json_value(row.get("trace"))
    trace = whole if isinstance(whole, Mapping) and "info" in whole else row
    info, data = (json_value(trace.get(name)) for name in ("info", "data"))
    info = mapping_of(row if info is None else info, "info")
    data = mapping_of(row if data is None else data, "data")
    assessments = info.get("assessments") or row.get("assessments")
    yield from trace_records(info, data, assessments, line)


def trace_records(info: JsonObject, data: JsonObject, assessments: object, line: int) -> Iterator[Record]:
    """Decisions, agents' steps, ratings and outcomes of one trace. Raises RowError, RowLeftOut."""
    calls = list(_calls(info, data, line))
    if not any(isinstance(one, (ImportedDecision, RowRefused)) for one in calls):
        steps = next((one.id for one in calls if isinstance(one, ImportedTrace)), None)
        calls.append(replace(_whole(info, data, line), trace=steps))
    yield from calls
    yield from assessment_records(_trace_id(info), assessments, line)


def run_ids(trace: str) -> tuple[str, ...]:
    """Names under which the runs of a trace are stored: sent to `/v1/traces` it goes by the bare digits."""
    digits = trace.removeprefix("tr-")
    return (trace, digits) if len(digits) == 32 and digits != trace else (trace,)


def _calls(info: JsonObject, data: JsonObject, line: int) -> Iterator[Record]:
    """What the spans hold; of a span that is no model call, nothing."""
    name, unit = _trace_id(info), _unit(info)
    items = json_value(data.get("spans"))
    spans = (
        [_span(item, unit) for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []
    )
    root = next((span["spanId"] for span in spans if not span["parentSpanId"]), None)
    for record in otlp_records({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}, line):
        if isinstance(record, ImportedDecision):
            about = {**record.metadata, "trace_id": name} | ({"root_id": root} if root else {})
            yield replace(record, key=name, run_id=name[:200], metadata=about)
        elif isinstance(record, ImportedTrace):
            yield replace(record, key=name, run_id=name[:200])
        elif not (isinstance(record, RowSkipped) and "model call" in record.reason):
            yield replace(record, key=name)


def _whole(info: JsonObject, data: JsonObject, line: int) -> ImportedDecision:
    request, response = _first_and_last(info, data)
    seen = {"info": info, "request": request, "response": response, "unit": _unit(info)}
    return _whole_trace.decision(seen, line, metadata={"trace_id": _trace_id(info)})


def _first_and_last(info: JsonObject, data: JsonObject) -> tuple[object, object]:
    """What the trace took and gave: its root span, else the trace itself."""
    spans = json_value(data.get("spans"))
    for item in spans if isinstance(spans, list) else []:
        attributes = at(item, "attributes")
        if (
            isinstance(attributes, Mapping)
            and "mlflow.spanOutputs" in attributes
            and not at(item, "parent_span_id || parent_id")
        ):
            return attributes.get("mlflow.spanInputs"), attributes.get("mlflow.spanOutputs")
    if data.get("request") is not None:
        return data.get("request"), data.get("response")
    about = object_or_empty(info.get("trace_metadata", info.get("request_metadata")))
    return (
        about.get("mlflow.traceInputs") or info.get("request_preview"),
        about.get("mlflow.traceOutputs") or info.get("response_preview"),
    )


def _trace_id(info: JsonObject) -> str:
    return text_or_empty(at(info, "trace_id || request_id"))


def _unit(info: JsonObject) -> str:
    """The conversation, else the person: MLflow keeps both beside the trace."""
    about = object_or_empty(info.get("trace_metadata", info.get("request_metadata")))
    return text_or_empty(about.get("mlflow.trace.session") or about.get("mlflow.trace.user"))


def _span(item: JsonObject, unit: str) -> dict[str, Any]:
    """A span as OTLP writes it."""
    attributes = {name: _parsed(value) for name, value in object_or_empty(item.get("attributes")).items()}
    return {
        "traceId": _hex(at(item, "trace_id || context.trace_id")),
        "spanId": _hex(at(item, "span_id || context.span_id")),
        "parentSpanId": _hex(at(item, "parent_span_id || parent_id")),
        "name": item.get("name"),
        "startTimeUnixNano": at(item, "start_time_unix_nano || start_time"),
        "endTimeUnixNano": at(item, "end_time_unix_nano || end_time"),
        "status": item.get("status"),
        "attributes": ({"session.id": unit} if unit else {}) | attributes,
    }


def _parsed(value: object) -> object:
    """An attribute's value: MLflow stores each as JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _hex(value: object) -> str:
    """An id of a trace or a span in hexadecimal digits: MLflow 3 writes Base64, MLflow 2 `0x` before the digits."""
    text = text_or_empty(value)
    if text.startswith("0x"):
        return text.removeprefix("0x")
    try:
        raw = base64.b64decode(text, validate=True) if text.endswith("=") else b""
    except binascii.Error:
        raw = b""
    return raw.hex() or text


def assessment_records(trace: str, value: object, line: int) -> Iterator[Record]:
    """The assessments of a trace, as ratings and outcomes of the span they name or of the trace's last decision."""
    items = json_value(value)
    for index, item in enumerate(list_of(items if items is not None else [], "assessments")):
        yield from attempt(line, trace, partial(_assessed, item, f"assessments[{index}]", line, trace))


def _assessed(item: object, where: str, line: int, trace: str) -> Iterator[Record]:
    one = mapping_of(item, where)
    score, found = _assessment.one(one, f"{where}."), at(one, "feedback.value")
    if one.get("valid") is False:
        raise RowLeftOut("an assessment that was overridden")
    if isinstance(one.get("expectation"), Mapping):
        serialised = at(one, "expectation.serialized_value")
        expected = json_value(at(serialised, "value")) if serialised else one["expectation"].get("value")
        is_text = isinstance(expected, str) and bool(expected.strip())
        if is_text and not score.simulated and score.name in CORRECTIONS:
            score = replace(score, correction=expected)
        else:
            score = _noted(score, expected)
    elif found is None:
        raise RowLeftOut("an assessment without a value")
    elif isinstance(found, (list, Mapping)):
        score = _noted(score, found)
    else:
        score = replace(score, value=found)
    span = text_or_empty(one.get("span_id"))
    for record in score.references(line, trace, *((span,) if span else run_ids(trace))):
        if isinstance(record, (ImportedReference, OutcomeReference)):
            record = replace(record, unknown=UNKNOWN)
        yield record


def _noted(score: NamedScore, value: object) -> NamedScore:
    """The score with a value that is no verdict among its notes."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return replace(score, notes=notes_of(f"{text} {score.notes}".strip(), "notes"))


MLFLOW = row_format("mlflow", "MLflow traces with assessments", _is_mlflow, _mlflow, verdicts=())
