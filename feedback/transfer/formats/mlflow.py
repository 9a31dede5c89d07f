"""MLflow 3 traces with their assessments: `Trace.to_dict()`, or a row per trace of the search_traces data frame.

The chat model's last span is the decision, else the root span. An overridden assessment, or one in error, says nothing;
an expected response by a person is a correction, other expectations are kept as metadata. MLflow 2 traces
(`info.request_id`, `data.request`) are read leniently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from feedback.transfer.formats.base import has, row_format
from feedback.transfer.formats.calls import (
    call_decision,
    json_value,
    metadata_retained,
    object_or_empty,
    text_or_empty,
)
from feedback.transfer.formats.records import (
    ImportedDecision,
    Record,
    RowSkipped,
    list_of,
    mapping_of,
    number_of,
    text_of,
    time_of,
)
from feedback.transfer.formats.verdicts import NamedScore, ratings_and_outcomes

CORRECTIONS = ("expected_response", "expected_output", "expected_answer")
MODEL_SPANS = ("CHAT_MODEL", "LLM")


def recognises(row: Mapping[str, Any]) -> bool:
    info = row.get("info")
    if isinstance(info, Mapping) and ("data" in row or "assessments" in info):
        return has(info, "trace_id") or has(info, "request_id")
    return has(row, "trace_id", "assessments") and (has(row, "trace") or has(row, "request", "response"))


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    whole = json_value(row.get("trace"))
    trace = whole if isinstance(whole, Mapping) and "info" in whole else row
    info, data = (json_value(trace.get(name)) for name in ("info", "data"))
    info = mapping_of(row if info is None else info, "info")
    data = mapping_of(row if data is None else data, "data")
    trace_id = text_of(info.get("trace_id") or info.get("request_id"), "trace_id", required=True)
    key = trace_id[:200]
    request, response = _exchange(info, data)
    scores, expectations, left_out = _assessments(info.get("assessments") or row.get("assessments"))
    ratings, outcomes = ratings_and_outcomes(scores)
    duration = info.get("execution_duration_ms", info.get("execution_duration"))
    if response in (None, ""):
        yield RowSkipped(line, key, "no response")
        return
    request_value = json_value(request)
    for record in call_decision(
        line,
        key,
        request,
        response,
        run_id=trace_id[:200],
        policy=text_or_empty(request_value.get("model")) if isinstance(request_value, Mapping) else "",
        latency_ms=None if duration is None else number_of(duration, "execution_duration_ms"),
        created_at=time_of(info.get("request_time", info.get("timestamp_ms")), "request_time"),
        ratings=ratings,
        outcomes=outcomes,
        metadata=metadata_retained(trace_id=trace_id, expectations=expectations),
    ):
        yield record
        if isinstance(record, ImportedDecision):
            yield from (RowSkipped(line, key, reason) for reason in left_out)


def _exchange(info: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[Any, Any]:
    """Prompt and response: of the chat model's last span, else the root's, else of the whole trace."""
    spans = json_value(data.get("spans"))
    chosen: Mapping[str, Any] | None = None
    root: Mapping[str, Any] | None = None
    for item in spans if isinstance(spans, list) else []:
        attributes = item.get("attributes") if isinstance(item, Mapping) else None
        if not isinstance(attributes, Mapping) or "mlflow.spanOutputs" not in attributes:
            continue
        if json_value(attributes.get("mlflow.spanType")) in MODEL_SPANS:
            chosen = attributes
        elif not item.get("parent_span_id") and not item.get("parent_id"):
            root = root or attributes
    attributes = chosen or root
    if attributes is not None:
        return attributes.get("mlflow.spanInputs"), attributes.get("mlflow.spanOutputs")
    if data.get("request") is not None:
        return data.get("request"), data.get("response")
    about = info.get("trace_metadata", info.get("request_metadata"))
    about = object_or_empty(about)
    return (
        about.get("mlflow.traceInputs") or info.get("request_preview"),
        about.get("mlflow.traceOutputs") or info.get("response_preview"),
    )


def _assessments(value: Any) -> tuple[list[NamedScore], dict[str, Any], list[str]]:
    """(scores and corrections, other expectations by name, why the rest says nothing)."""
    scores: list[NamedScore] = []
    expectations: dict[str, Any] = {}
    left_out: list[str] = []
    items = json_value(value)
    for index, item in enumerate(list_of(items if items is not None else [], "assessments")):
        where = f"assessments[{index}]"
        one = mapping_of(item, where)
        name = text_of(one.get("assessment_name", one.get("name")), f"{where}.assessment_name", required=True)
        source = object_or_empty(one.get("source"))
        human = source.get("source_type") == "HUMAN"
        facts: dict[str, Any] = {
            "name": name,
            "author": text_or_empty(source.get("source_id")),
            "simulated": not human,
            "notes": text_of(one.get("rationale") or "", f"{where}.rationale")[:20_000],
            "scored_at": time_of(one.get("create_time"), f"{where}.create_time"),
            "binary": False,
        }
        feedback, expectation = one.get("feedback"), one.get("expectation")
        if one.get("valid") is False:
            left_out.append("an assessment that was overridden")
        elif isinstance(expectation, Mapping):
            expected = _expectation_value(expectation)
            if human and name in CORRECTIONS and isinstance(expected, str) and expected.strip():
                scores.append(NamedScore(value=None, correction=expected, **facts))
            else:
                expectations[name] = expected
        elif isinstance(feedback, Mapping) and feedback.get("value") is not None:
            found = feedback["value"]
            if isinstance(found, (list, Mapping)):
                facts["notes"] = f"{json.dumps(found, ensure_ascii=False)} {facts['notes']}".strip()[:20_000]
                found = None
            scores.append(NamedScore(value=found, **facts))
        else:
            left_out.append("an assessment without a value")
    return scores, expectations, left_out


def _expectation_value(expectation: Mapping[str, Any]) -> Any:
    serialized = expectation.get("serialized_value")
    return (
        json_value(serialized.get("value")) if isinstance(serialized, Mapping) else expectation.get("value")
    )


FORMAT = row_format("mlflow", "MLflow traces with assessments", recognises, records, (), verdicts=())
