"""OpenTelemetry's traces and logs (OTLP) as decisions and ratings, in files and at the endpoints `/v1/traces` and
`/v1/logs`.

A span or a log event of a model call that holds its messages is a decision, in any of these conventions: GenAI
(attributes, span events, log events), OpenInference, Traceloop, MLflow. Content is off by default in most
instrumentations: a span without it is left out. Spans of agents and tools, with the model calls among them, are the
steps of a trace.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from backend import limits
from feedback.messages import Message
from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import Format, attempt, decisions_first
from feedback.transfer.formats.calls import ModelAnswer, json_value, text_or_empty
from feedback.transfer.formats.cells import JsonObject
from feedback.transfer.formats.declared import Call, Scores, at, facts_at, slug
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedTrace,
    Record,
    RowError,
    RowLeftOut,
    list_of,
    mapping_of,
    messages_of,
    text_of,
    with_system,
)
from feedback.transfer.formats.spans import indexed, openinference_call

EVALUATION = "gen_ai.evaluation.result"
"""Name of a log record or a span event that rates its span. The conventions do not say who evaluated: such a rating
counts as simulated."""
OPERATION_DETAILS = "gen_ai.client.inference.operation.details"
"""Name of a log record that holds the content of its span."""
CHOICE = "gen_ai.choice"

NAMESPACE = uuid.UUID("6d9c2f6e-1d0b-4a0f-9a63-5b1f3a3c9b10")
"""The id of a span's decision is a UUIDv5 of its trace and span in this namespace: sent again it is the same one."""

PROMPTLESS_OPERATIONS = ("execute_tool", "embeddings", "invoke_agent", "create_agent")
"""Operations that answer no prompt of their own: an agent's answers are the spans of the model calls inside."""

MLFLOW_CALLS = ("CHAT_MODEL", "LLM")
"""MLflow's types of spans that are model calls."""

TOOL, AGENT, PART = "tool", "agent", "part"
ROLES = {
    **{
        f"gen_ai.operation.name={name}": AGENT for name in ("invoke_agent", "invoke_workflow", "create_agent")
    },
    "gen_ai.operation.name=execute_tool": TOOL,
    **{f"openinference.span.kind={name}": AGENT for name in ("AGENT", "CHAIN")},
    **{f"openinference.span.kind={name}": PART for name in ("RETRIEVER", "RERANKER", "GUARDRAIL")},
    "openinference.span.kind=TOOL": TOOL,
    **{f"traceloop.span.kind={name}": AGENT for name in ("workflow", "agent", "task")},
    "traceloop.span.kind=tool": TOOL,
    **{f"mlflow.spanType={name}": AGENT for name in ("AGENT", "CHAIN", "WORKFLOW", "TASK")},
    **{f"mlflow.spanType={name}": PART for name in ("RETRIEVER", "RERANKER", "GUARDRAIL")},
    "mlflow.spanType=TOOL": TOOL,
}
"""attribute=value -> what a span is in the trace of an agent's run."""
ROLE_ATTRIBUTES = {key.partition("=")[0] for key in ROLES}

_otlp_call = Call(
    own="span_id",
    own_required=False,
    fields={
        "policy": '"gen_ai.response.model" || "gen_ai.request.model" || "llm.model_name" || "mlflow.llm.model"',
        "tokens_in": '"gen_ai.usage.input_tokens" || "gen_ai.usage.prompt_tokens" || "llm.token_count.prompt" '
        '|| "mlflow.chat.tokenUsage".input_tokens',
        "tokens_out": '"gen_ai.usage.output_tokens" || "gen_ai.usage.completion_tokens" '
        '|| "llm.token_count.completion" || "mlflow.chat.tokenUsage".output_tokens',
        "unit": '"gen_ai.conversation.id" || "session.id" || "user.id"',
        "created_at": "started",
    },
    metadata={
        "trace_id": "trace_id",
        "span_id": "span_id",
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
    return decisions_first(path, ratings_path, otlp_records, verdicts=())


def otlp_records(row: JsonObject, line: int) -> Iterator[Record]:
    """The records of one export request: a row of a file, or a body sent to an endpoint."""
    spans: list[_Item] = []
    of_spans: list[Record] = []
    for agent, span in _items(row, "resourceSpans", "scopeSpans", "spans"):
        of_spans += attempt(line, _key(span), partial(_span, span, line, agent, spans))
    decisions = {record.id for record in of_spans if isinstance(record, ImportedDecision)}
    traces = list(_traces(spans, decisions, line))
    yield from traces
    own = {(one.agent, one.run_id): one.id for one in traces if isinstance(one, ImportedTrace)}
    for record in of_spans:
        if isinstance(record, ImportedDecision) and (record.agent, record.run_id) in own:
            record = replace(record, trace=own[record.agent, record.run_id])
        yield record
    turns: dict[tuple[str, str, str], list[JsonObject]] = {}
    for agent, event in _items(row, "resourceLogs", "scopeLogs", "logRecords"):
        name = _event_name(event)
        if name == CHOICE or _is_message(name):
            turns.setdefault((agent, *_ids(event)), []).append(event)
        else:
            yield from attempt(line, _key(event), partial(_log, event, line, agent))
    for (agent, _, span_id), records in turns.items():
        yield from attempt(line, span_id, partial(_turns, records, line, agent))


def _items(row: JsonObject, outer: str, scoped: str, inner: str) -> Iterator[tuple[str, JsonObject]]:
    """(agent, span or log record) of every resource and scope."""
    for resource in _objects(row.get(outer), outer):
        agent = text_or_empty(_attributes(at(resource, "resource.attributes")).get("service.name"))
        for scope in _objects(resource.get(scoped), scoped):
            yield from ((agent, item) for item in _objects(scope.get(inner), inner))


@dataclass(frozen=True, slots=True)
class _Item:
    """A span or a log record, with what is read of it once."""

    json: JsonObject
    agent: str
    """A slug."""
    trace: str
    span_id: str
    decision: uuid.UUID | None
    """Id of the decision that it is, or would be."""
    attributes: dict[str, object]


def _item(json: JsonObject, agent: str) -> _Item:
    """Raises RowError."""
    attributes, (trace, span_id) = _attributes(json.get("attributes")), _ids(json)
    return _Item(json, slug(agent), trace, span_id, _decision_id(trace, span_id), attributes)


def _objects(value: object, what: str) -> Iterator[JsonObject]:
    for index, item in enumerate(list_of(value if value is not None else [], what)):
        yield mapping_of(item, f"{what}[{index}]")


def _key(item: JsonObject) -> str:
    return str(item.get("spanId") or "").lower()[:200]


def _ids(item: JsonObject) -> tuple[str, str]:
    """(id of the trace, id of the span)."""
    trace, span_id = (text_of(item.get(name) or "", name).lower() for name in ("traceId", "spanId"))
    return trace, span_id


def _event_name(record: JsonObject) -> str:
    return text_or_empty(record.get("eventName") or _attributes(record.get("attributes")).get("event.name"))


def _is_message(name: str) -> bool:
    """True of gen_ai.user.message and its like."""
    return name.startswith("gen_ai.") and name.endswith(".message")


def _attributes(value: object) -> dict[str, object]:
    """Attributes as a plain object; the endpoint has read those of a protobuf body already. MLflow's are JSON."""
    found = (
        dict(value)
        if isinstance(value, Mapping)
        else {str(item.get("key")): _value(item.get("value")) for item in _objects(value, "attributes")}
    )
    return found | {name: json_value(item) for name, item in found.items() if name.startswith("mlflow.")}


def _value(value: object, depth: int = 0) -> object:
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


# --- Spans ------------------------------------------------------------------------------------------------------


def _span(json: JsonObject, line: int, agent: str, spans: list[_Item]) -> Iterator[Record]:
    """The records of a span, which is added to `spans`."""
    span = _item(json, agent)
    spans.append(span)
    yield from attempt(line, span.span_id, partial(_span_decision, span, line))
    for event in _objects(json.get("events"), "events"):
        if event.get("name") == EVALUATION:
            record = {"traceId": span.trace, "spanId": span.span_id, **event, "eventName": EVALUATION}
            yield from attempt(line, span.span_id, partial(_log, record, line, agent))


def _span_decision(span: _Item, line: int) -> Iterator[Record]:
    attributes, (started, latency_ms) = span.attributes, _times(span.json)
    prompt, answers = (json_value(attributes.get(f"gen_ai.{name}.messages")) for name in ("input", "output"))
    if prompt is None and answers is None:
        prompt, answers = _older(attributes, span.json)
    facts: dict[str, object] = {"latency_ms": latency_ms}
    if prompt is None and answers is None and "openinference.span.kind" in attributes:
        kind = attributes["openinference.span.kind"]
        if kind != "LLM":
            raise RowLeftOut(f"a span of kind {value_excerpt(kind)}, not of a model call")
        request, answer = openinference_call(attributes)
        yield _decision(span, line, started, request, answer, **facts)
        return
    if prompt is None and answers is None and "mlflow.spanType" in attributes:
        kind = attributes["mlflow.spanType"]
        if kind not in MLFLOW_CALLS:
            raise RowLeftOut(f"a span of type {value_excerpt(kind)}, not of a model call")
        request, answer = (attributes.get(f"mlflow.span{name}") for name in ("Inputs", "Outputs"))
        yield _decision(span, line, started, request, answer, **facts)
        return
    operation = attributes.get("gen_ai.operation.name")
    if not operation and prompt is None and answers is None:
        raise RowLeftOut("a span of no model call")
    if operation in PROMPTLESS_OPERATIONS:
        raise RowLeftOut(f"a span of {operation}, not of a model call")
    yield _decision(span, line, started, **_content(attributes, prompt, answers), **facts)


def _times(span: JsonObject) -> tuple[float | None, float | None]:
    """(start in seconds since 1970, duration in milliseconds)."""
    started, ended = (_seconds(span.get(name), name) for name in ("startTimeUnixNano", "endTimeUnixNano"))
    if started is None or ended is None:
        return started, None
    return started, max(round((ended - started) * 1000, 3), 0.0)


def silent_calls(row: JsonObject, told: Collection[tuple[str, str]]) -> dict[uuid.UUID, dict[str, object]]:
    """Of an export request the model calls whose spans hold no messages: id of the decision -> its other facts.

    The messages may come as log events, which name no model. told: trace and span of the calls whose messages are here.
    """
    found: dict[uuid.UUID, dict[str, object]] = {}
    for _, span in _items(row, "resourceSpans", "scopeSpans", "spans"):
        try:
            if (ids := _ids(span)) in told:
                continue
            attributes, decision = _attributes(span.get("attributes")), _decision_id(*ids)
            operation = attributes.get("gen_ai.operation.name")
            if decision is None or not operation or operation in PROMPTLESS_OPERATIONS:
                continue
            named = {name: _otlp_call.fields[name] for name in ("policy", "tokens_in", "tokens_out")}
            facts = {**facts_at(attributes, named), "latency_ms": _times(span)[1]}
        except (RowError, RecursionError):
            continue  # refused where its decision is read
        found[decision] = {name: value for name, value in facts.items() if value not in (None, "")}
    return found


@dataclass(frozen=True)
class CallEvents:
    """Log events of an export request that hold messages of one model call."""

    agent: str
    """As the resource names it."""
    events: Sequence[JsonObject]

    @property
    def is_whole(self) -> bool:
        """True if a prompt and an answer are among them."""
        return len({_event_name(event) == CHOICE for event in self.events}) == 2

    def as_resource(self) -> JsonObject:
        """A row of `resourceLogs`."""
        return {
            "resource": {"attributes": {"service.name": self.agent}},
            "scopeLogs": [{"logRecords": list(self.events)}],
        }


def call_events(row: JsonObject) -> dict[uuid.UUID, CallEvents]:
    """Of an export request the log events with messages, by the id of their decision."""
    found: dict[uuid.UUID, CallEvents] = {}
    for agent, event in _items(row, "resourceLogs", "scopeLogs", "logRecords"):
        try:
            name, decision = _event_name(event), _decision_id(*_ids(event))
        except (RowError, RecursionError):
            continue  # refused where its decision is read
        if decision is not None and (name == CHOICE or _is_message(name)):
            before = found.get(decision, CallEvents(agent, ()))
            found[decision] = replace(before, events=[*before.events, event])
    return found


def _content(attributes: Mapping[str, object], prompt: object, answers: object) -> dict[str, Any]:
    """What a model call with the GenAI conventions was asked and answered, as `call_decision` takes it. Raises
    RowError, RowLeftOut."""
    if not isinstance(answers, list) or not isinstance(prompt, list) or not answers:
        raise RowLeftOut("its content was not recorded" if not answers else "its prompt was not recorded")
    system = json_value(attributes.get("gen_ai.system_instructions"))
    turns = with_system(system, messages_of(prompt, "gen_ai.input.messages"), "gen_ai.system_instructions")
    prefix = "gen_ai.request."
    request = {"tools": json_value(attributes.get("gen_ai.tool.definitions"))}
    request |= {
        name.removeprefix(prefix): item for name, item in attributes.items() if name.startswith(prefix)
    }
    # each output message is another choice, no further turn
    choices = [[turn] for turn in messages_of(answers, "gen_ai.output.messages")]
    return {"turns": turns, "request": request, "answer": ModelAnswer(choices)}


def _decision(
    item: _Item, line: int, started: float | None, request: object, answer: object, **more: object
) -> Record:
    seen = {**item.attributes, "started": started, "span_id": item.span_id, "trace_id": item.trace}
    more |= {"agent": item.agent, "id": item.decision, "run_id": item.trace or item.span_id}
    return _otlp_call.decision(seen, line, request=request, answer=answer, **more)


def _decision_id(trace: str, span_id: str) -> uuid.UUID | None:
    return uuid.uuid5(NAMESPACE, f"{trace}/{span_id}") if trace and span_id else None


def _older(attributes: JsonObject, span: JsonObject) -> tuple[object, object]:
    """Messages as Traceloop and older instrumentations write them: attributes `gen_ai.prompt.N.content`, or an event
    per message."""
    prompts, answers = (
        [_with_calls(message) for message in indexed(attributes, f"gen_ai.{name}")]
        for name in ("prompt", "completion")
    )
    for event in _objects(span.get("events"), "events"):
        name = str(event.get("name"))
        if name == CHOICE or _is_message(name):
            said = _attributes(event.get("attributes"))
            (answers if name == CHOICE else prompts).append(_said(name, said))
    return prompts or None, answers or None


def _with_calls(message: dict[str, object]) -> dict[str, object]:
    """A message of dotted names with its calls, which stand under `tool_calls.0.name` and the like, as a list."""
    calls = [
        {name: call[name] for name in ("id", "name", "arguments") if name in call}
        for call in indexed(message, "tool_calls")
    ]
    kept = {name: item for name, item in message.items() if not name.startswith("tool_calls.")}
    return kept | {"tool_calls": calls} if calls else kept


def _said(name: str, said: Mapping[str, object]) -> Message:
    """The message of an event such as gen_ai.user.message or gen_ai.choice."""
    if name == CHOICE:
        message = json_value(said.get("message"))
        return {"role": "assistant", **(message if isinstance(message, Mapping) else said)}
    role = name.split(".")[1]
    more = {key: item for key, item in said.items() if key not in ("id", "gen_ai.system")}
    if role == "tool" and said.get("id"):
        more["tool_call_id"] = said["id"]
    return {"role": role, **more}


# --- Agents' runs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """A span of an agent's run."""

    span_id: str
    parent: str
    role: str
    """TOOL, AGENT or PART; empty for a decision."""
    started: float | None
    unit: str
    step: dict[str, object]


def _traces(spans: Sequence[_Item], decisions: Collection[uuid.UUID | None], line: int) -> Iterator[Record]:
    """The traces that have a span of an agent or a tool here. A trace whose spans come in several requests is stored
    in several pieces, which `run_id` and `metadata.trace` hold together."""
    with_agents = {(span.agent, span.trace) for span in spans if span.trace and _role(span)}
    runs: dict[tuple[str, str], list[_Step]] = {}
    for span in spans:
        if (span.agent, span.trace) not in with_agents:
            continue
        try:
            if (step := _step(span, decisions)) is not None:
                runs.setdefault((span.agent, span.trace), []).append(step)
        except (RowError, RecursionError):
            continue  # refused where its decision is read
    for (agent, trace), steps in runs.items():
        if any(step.role for step in steps):
            yield from attempt(line, trace, partial(_trace, agent, trace, steps, line))


def _role(span: _Item) -> str:
    """TOOL, AGENT or PART; empty for other spans."""
    named = ((name, value) for name, value in span.attributes.items() if name in ROLE_ATTRIBUTES)
    return next((ROLES[key] for name, value in named if (key := f"{name}={value}") in ROLES), "")


def _step(span: _Item, decisions: Collection[uuid.UUID | None]) -> _Step | None:
    """The step that a span is; None for a span of neither an agent nor one of the decisions."""
    role, attributes = _role(span), span.attributes
    if not role and span.decision not in decisions:
        return None
    parent = text_of(span.json.get("parentSpanId") or "", "parentSpanId").lower()
    started, duration_ms = _times(span.json)
    kind = {TOOL: "tool_call", AGENT: "step" if parent else "task", PART: "step"}.get(role, "decision")
    failed = at(span.json, "status.code") in (2, "STATUS_CODE_ERROR")
    found: dict[str, object] = {
        "kind": kind,
        "id": str(span.decision) if kind == "decision" else None,
        "name": _first(
            attributes, "gen_ai.tool.name", "tool.name", "gen_ai.agent.name", "traceloop.entity.name"
        )
        or text_or_empty(span.json.get("name")),
        "span": span.span_id,
        "parent": parent,
        "at": datetime.fromtimestamp(started, UTC).isoformat() if started is not None else None,
        "duration_ms": duration_ms,
    }
    if kind != "decision":
        found["arguments"] = _first(
            attributes,
            "gen_ai.tool.call.arguments",
            "input.value",
            "traceloop.entity.input",
            "mlflow.spanInputs",
        )
        found["result"] = _first(
            attributes,
            "gen_ai.tool.call.result",
            "output.value",
            "traceloop.entity.output",
            "mlflow.spanOutputs",
        )
        found["status"] = {"task": "failed" if failed else "completed"}.get(kind)
    if failed:
        found["error"] = (
            text_or_empty(at(span.json, "status.message")) or attributes.get("error.type") or "failed"
        )
    unit = _first(attributes, "gen_ai.conversation.id", "session.id", "user.id")
    step = {name: value for name, value in found.items() if value not in (None, "")}
    return _Step(span.span_id, parent, role, started, text_or_empty(unit), step)


def _first(attributes: Mapping[str, object], *names: str) -> object:
    """The first attribute that is there, parsed where it is JSON."""
    return next((json_value(attributes[name]) for name in names if attributes.get(name)), None)


def _trace(agent: str, trace: str, steps: list[_Step], line: int) -> Iterator[Record]:
    steps = sorted(steps, key=lambda step: step.started or 0)
    rows = [step.step for step in steps]
    if (size := len(json.dumps(rows))) > limits.TEXT_CHARACTERS:
        most = f"{limits.TEXT_CHARACTERS:,}"
        raise RowError(f"trace {trace}: expected steps of at most {most} characters of JSON, found {size:,}")
    times = [step.started for step in steps if step.started is not None]
    units = [step.unit for step in steps if step.unit]
    status = {str(row["status"]) for row in rows if "status" in row}
    key = "/".join([trace, agent, *sorted(step.span_id for step in steps)])
    yield ImportedTrace(
        line=line,
        key=trace,
        id=uuid.uuid5(NAMESPACE, key),
        agent=agent,
        run_id=trace,
        steps=rows,
        metadata={"trace": trace}
        | ({"unit": units[0][:200]} if units else {})
        | ({"status": "failed"} if "failed" in status else {}),
        started_at=datetime.fromtimestamp(times[0], UTC) if times else None,
    )


# --- Log records ------------------------------------------------------------------------------------------------


def _log(json: JsonObject, line: int, agent: str) -> Iterator[Record]:
    record = _item(json, agent)
    attributes, name, logged_at = record.attributes, _event_name(json), _logged_at(json)
    if name == OPERATION_DETAILS:
        prompt, answers = (
            json_value(attributes.get(f"gen_ai.{one}.messages")) for one in ("input", "output")
        )
        yield _decision(record, line, logged_at, **_content(attributes, prompt, answers))
        return
    if name != EVALUATION:
        raise RowLeftOut("a log record that is no evaluation and no message of a model call")
    if attributes.get("error.type"):
        raise RowLeftOut("an evaluation that failed")
    trace, span_id = record.trace, record.span_id
    target = record.decision or span_id or attributes.get("gen_ai.response.id") or trace
    score = _evaluation.one({**attributes, "at": logged_at})
    yield from score.references(line, span_id, text_or_empty(str(target)), span_id, trace)


def _logged_at(record: JsonObject) -> float | None:
    return _seconds(record.get("timeUnixNano") or record.get("observedTimeUnixNano"), "timeUnixNano")


def _turns(records: list[JsonObject], line: int, agent: str) -> Iterator[Record]:
    """The decision whose messages are log records of their own, all of one span."""
    prompts: list[Message] = []
    answers: list[Message] = []
    seen: dict[str, object] = {}
    for record in records:
        name = _event_name(record)
        body = record.get("body")
        body = _value(body) if isinstance(body, Mapping) and "kvlistValue" in body else body
        seen |= _attributes(record.get("attributes"))
        (answers if name == CHOICE else prompts).append(_said(name, mapping_of(body, "body")))
    call = replace(_item(records[0], agent), attributes=seen)
    yield _decision(call, line, _logged_at(records[0]), **_content({}, prompts, answers))


OTLP = Format(
    "otlp",
    "OTLP traces and evaluations (GenAI, OpenInference, Traceloop, MLflow)",
    lambda row: isinstance(row.get("resourceSpans"), list) or isinstance(row.get("resourceLogs"), list),
    _read_otlp,
    two_files=True,
)
