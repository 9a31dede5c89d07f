"""POST /v1/traces and /v1/logs: spans and log records of OpenTelemetry as decisions and ratings."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from backend import limits
from feedback.erasure.service import unit_forget
from feedback.explorer.listing import timeline_of
from feedback.models import AgentSettings, CallSpan, Decision, Outcome, Rating, Trace
from feedback.storage.factories import decision_build
from feedback.storage.facts import DECISION
from feedback.transfer import telemetry
from feedback.transfer.telemetry import spans_expire
from tests.support.api_client import ApiClient
from tests.support.imports import file_import

pytestmark = pytest.mark.django_db

TOOLS = Path(__file__).parent / "formats" / "tools"
PROTOBUF = "application/x-protobuf"
STARTED = 1_735_787_045_000_000_000
USER = [{"role": "user", "parts": [{"type": "text", "content": "Where is it?"}]}]
SAID = [{"role": "assistant", "parts": [{"type": "text", "content": "On its way."}], "finish_reason": "stop"}]
CHAT = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "shop-a", "gen_ai.conversation.id": "conv-1"}
CHAT |= {"gen_ai.usage.input_tokens": 12, "gen_ai.input.messages": json.dumps(USER)}
CHAT |= {"gen_ai.output.messages": json.dumps(SAID)}
TRACELOOP = {
    "llm.request.type": "chat",
    "gen_ai.request.model": "shop-a",
    "gen_ai.usage.prompt_tokens": 12,
    "gen_ai.prompt.0.role": "system",
    "gen_ai.prompt.0.content": "Be brief.",
    "gen_ai.prompt.1.role": "user",
    "gen_ai.prompt.1.content": "Where is it?",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.finish_reason": "tool_calls",
    "gen_ai.completion.0.tool_calls.0.id": "call-1",
    "gen_ai.completion.0.tool_calls.0.name": "find_order",
    "gen_ai.completion.0.tool_calls.0.arguments": '{"order": 7}',
}
OPENINFERENCE = {
    "openinference.span.kind": "LLM",
    "llm.model_name": "shop-a",
    "session.id": "conv-1",
    "llm.token_count.prompt": 12,
    "llm.input_messages.0.message.role": "user",
    "llm.input_messages.0.message.content": "Where is it?",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.content": "On its way.",
    "llm.invocation_parameters": '{"temperature": 0.2}',
}


def value_of(value: Any) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=map(value_of, value)))
    if isinstance(value, dict):
        return AnyValue(kvlist_value=KeyValueList(values=pairs(value)))
    return AnyValue(string_value=value)


def pairs(attributes: dict[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=key, value=value_of(value)) for key, value in attributes.items()]


def spans(*found: dict[str, Any], service: str = "support-bot") -> ExportTraceServiceRequest:
    """An export request; each span is its attributes, and `events` among them its events."""
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.extend(pairs({"service.name": service}))
    scope = resource.scope_spans.add()
    for number, attributes in enumerate(found, 1):
        events = attributes.pop("events", []) if "events" in attributes else []
        span = scope.spans.add(
            trace_id=bytes([7] * 16),
            span_id=bytes([number] * 8),
            name="chat",
            parent_span_id=attributes.pop("parent", b""),
            status=Status(code=attributes.pop("failed", 0)),
            start_time_unix_nano=STARTED,
            end_time_unix_nano=STARTED + 1_500_000_000,
            attributes=pairs(attributes),
        )
        for name, inner in events:
            span.events.add(name=name, attributes=pairs(inner), time_unix_nano=STARTED)
    return request


def logs(*found: tuple[str, Any, dict[str, Any]], span: int = 1) -> ExportLogsServiceRequest:
    """An export request; each record is its event's name, its body and its attributes."""
    request = ExportLogsServiceRequest()
    resource = request.resource_logs.add()
    resource.resource.attributes.extend(pairs({"service.name": "support-bot"}))
    scope = resource.scope_logs.add()
    for name, body, attributes in found:
        record = scope.log_records.add(
            trace_id=bytes([7] * 16),
            span_id=bytes([span] * 8),
            event_name=name,
            time_unix_nano=STARTED,
            attributes=pairs(attributes),
        )
        if body is not None:
            record.body.CopyFrom(value_of(body))
    return request


@pytest.fixture
def app() -> ApiClient:
    return ApiClient("ingest")


def export(app: ApiClient, body: Any, *, kind: str = PROTOBUF, zipped: bool = False, path: str = "") -> Any:
    path = path or ("/v1/logs" if isinstance(body, ExportLogsServiceRequest) else "/v1/traces")
    raw = body if isinstance(body, bytes) else body.SerializeToString()
    headers = {"Content-Encoding": "gzip"} if zipped else {}
    return app.client.post(path, gzip.compress(raw) if zipped else raw, content_type=kind, headers=headers)


def taken(response: Any) -> Any:
    """The answer's partial success."""
    assert (response.status_code, response["Content-Type"]) == (200, PROTOBUF), response.content
    is_logs = response.request["PATH_INFO"] == "/v1/logs"
    answer = (ExportLogsServiceResponse if is_logs else ExportTraceServiceResponse).FromString(
        response.content
    )
    return answer.partial_success


@pytest.mark.parametrize("zipped", [False, True])
def test_a_genai_span_is_a_decision_and_a_resend_adds_nothing(app: ApiClient, zipped: bool) -> None:
    for _ in range(2):
        assert (
            taken(
                export(app, spans(dict(CHAT), {"http.request.method": "GET"}), zipped=zipped)
            ).rejected_spans
            == 0
        )
    row = Decision.objects.get()
    assert (row.agent, row.policy, row.unit, row.source) == ("support-bot", "shop-a", "conv-1", "otlp")
    assert (row.messages, row.response) == ([{"role": "user", "content": "Where is it?"}], "On its way.")
    assert (row.tokens_in, row.latency_ms, row.metadata["trace_id"]) == (12, 1500.0, "07" * 16)
    assert row.created_at.timestamp() == STARTED / 1e9


def test_the_same_spans_in_json_and_in_a_file_are_the_same_decisions(app: ApiClient) -> None:
    path = TOOLS / "otlp_genai_trace.json"
    answer = export(app, path.read_bytes(), kind="application/json")
    assert (answer.status_code, answer.json()) == (200, {})
    count = Decision.objects.count()
    assert count >= 1
    assert file_import(path).decisions == 0
    assert Decision.objects.count() == count


def test_traceloops_names_and_its_calls_of_tools(app: ApiClient) -> None:
    assert taken(export(app, spans(dict(TRACELOOP)))).rejected_spans == 0
    row = Decision.objects.get()
    assert (row.policy, row.tokens_in) == ("shop-a", 12)
    assert [turn["role"] for turn in row.messages] == ["system", "user"]
    (call,) = json.loads(row.response)[0]["tool_calls"]
    assert (call["id"], call["function"]) == ("call-1", {"name": "find_order", "arguments": '{"order": 7}'})


def test_openinference_spans_of_models_and_no_others(app: ApiClient) -> None:
    chain = {"openinference.span.kind": "CHAIN", "input.value": "q", "output.value": "a"}
    assert taken(export(app, spans(dict(OPENINFERENCE), chain))).rejected_spans == 0
    row = Decision.objects.get()
    assert (row.policy, row.unit, row.tokens_in, row.response) == ("shop-a", "conv-1", 12, "On its way.")
    assert row.metadata["request"] == {"temperature": 0.2}


def test_openinferences_answer_of_a_stream_is_a_response_as_its_output(app: ApiClient) -> None:
    """The OpenAI Agents SDK streams chat completions; its span has no output messages."""
    span = {name: value for name, value in OPENINFERENCE.items() if not name.startswith("llm.output")}
    text = {"type": "output_text", "text": "On its way.", "annotations": []}
    said = {"type": "message", "role": "assistant", "content": [text]}
    call = {"type": "function_call", "call_id": "call-1", "name": "find_order", "arguments": "{}"}
    bodies = [[{"object": "response", "model": "shop-a", "output": [item]}] for item in (said, call)]
    assert (
        taken(
            export(app, spans(*({**span, "output.value": json.dumps(body)} for body in bodies)))
        ).rejected_spans
        == 0
    )
    texts = sorted(Decision.objects.values_list("response", flat=True))
    assert texts[0] == "On its way."
    (told,) = json.loads(texts[1])
    assert told["tool_calls"][0]["function"] == {"name": "find_order", "arguments": "{}"}


def test_messages_as_span_events(app: ApiClient) -> None:
    events = [
        ("gen_ai.user.message", {"content": "Where is it?"}),
        ("gen_ai.choice", {"index": 0, "message": json.dumps({"content": "On its way."})}),
    ]
    export(app, spans({"gen_ai.operation.name": "chat", "events": events}))
    assert Decision.objects.get().response == "On its way."


def test_messages_as_log_events_of_one_span(app: ApiClient) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "find_order", "arguments": "{}"}}
    found = logs(
        ("gen_ai.system.message", {"content": "Be brief."}, {"gen_ai.system": "openai"}),
        ("gen_ai.user.message", {"content": "Where is it?"}, {}),
        ("gen_ai.assistant.message", {"tool_calls": [call]}, {}),
        ("gen_ai.tool.message", {"id": "call-1", "content": "in Kassel"}, {}),
        ("gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": {"content": "In Kassel."}}, {}),
        ("app.started", "hello", {}),
    )
    for _ in range(2):
        assert taken(export(app, found)).rejected_log_records == 0
    row = Decision.objects.get()
    assert [turn["role"] for turn in row.messages] == ["system", "user", "assistant", "tool"]
    assert (row.messages[3]["tool_call_id"], row.response) == ("call-1", "In Kassel.")


@pytest.mark.parametrize("first", ["logs", "span"])
def test_log_events_take_the_model_from_their_span(app: ApiClient, first: str) -> None:
    silent = {name: value for name, value in CHAT.items() if not name.endswith(".messages")}
    silent |= {"gen_ai.response.model": "shop-a-2025", "gen_ai.usage.output_tokens": 3}
    requests = [
        logs(
            ("gen_ai.user.message", {"content": "Hi"}, {}),
            ("gen_ai.choice", {"message": {"content": "Yes."}}, {}),
        ),
        spans(silent),
    ]
    for request in requests if first == "logs" else reversed(requests):
        export(app, request)
    row = Decision.objects.get()
    assert (row.policy, row.tokens_in, row.tokens_out, row.response) == ("shop-a-2025", 12, 3, "Yes.")
    assert row.latency_ms is not None
    for request in requests:  # sent again, as exporters do
        export(app, request)
    assert Decision.objects.get().policy == "shop-a-2025"
    # what is exported of it is known when it comes back
    again = decision_build(id=row.pk, created_at=row.created_at, reserved=True, **DECISION.read(row))
    assert again.body_hash == row.body_hash


@pytest.mark.parametrize("cut", [1, 2])
def test_log_events_of_a_call_may_come_in_several_requests(app: ApiClient, cut: int) -> None:
    """An app exports each second, and an answer may take longer."""
    events = [
        ("gen_ai.system.message", {"content": "Be brief."}, {}),
        ("gen_ai.user.message", {"content": "Where is it?"}, {}),
        ("gen_ai.choice", {"message": {"content": "In Kassel."}}, {}),
    ]
    requests = [logs(*events[:cut]), logs(*events[cut:])]
    for request in [requests[0], *requests]:  # the first one sent again, as exporters do
        assert taken(export(app, request)).rejected_log_records == 0
    row = Decision.objects.get()
    assert ([turn["role"] for turn in row.messages], row.response) == (["system", "user"], "In Kassel.")
    assert CallSpan.objects.get().events == []
    for request in requests:
        export(app, request)
    assert Decision.objects.get().response == "In Kassel."


def test_log_events_wait_beside_their_span(app: ApiClient) -> None:
    silent = {name: value for name, value in CHAT.items() if not name.endswith(".messages")}
    export(app, logs(("gen_ai.user.message", {"content": "Hi"}, {})))
    export(app, spans(silent | {"gen_ai.response.model": "shop-a-2025"}))
    export(app, logs(("gen_ai.choice", {"message": {"content": "Yes."}}, {})))
    row = Decision.objects.get()
    assert (row.messages[0]["content"], row.response, row.policy) == ("Hi", "Yes.", "shop-a-2025")


def test_waiting_log_events_are_masked_and_erased(app: ApiClient) -> None:
    AgentSettings.objects.create(
        agent="support-bot", masks=[{"name": "email", "pattern": r"[a-z.]+@[a-z.]+"}]
    )
    words = "the parcel of Ms Harriet Vane is late"
    export(app, logs(("gen_ai.user.message", {"content": f"{words}: harriet@vane.example"}, {}), span=2))
    waiting = json.dumps(CallSpan.objects.get().events)
    assert "vane.example" not in waiting
    assert words in waiting
    said = [{"role": "user", "parts": [{"type": "text", "content": words}]}]
    export(app, spans(CHAT | {"gen_ai.input.messages": json.dumps(said)}))
    unit_forget("conv-1")
    assert words not in json.dumps(CallSpan.objects.get().events)


def test_log_events_of_a_decision_that_is_not_collected_do_not_wait(app: ApiClient) -> None:
    AgentSettings.objects.create(agent="support-bot", collection_rate=0.0)
    export(app, logs(("gen_ai.user.message", {"content": "Hi"}, {})))
    assert not CallSpan.objects.exists()


def test_a_span_waits_an_hour_for_its_log_events(app: ApiClient) -> None:
    export(app, spans({"gen_ai.operation.name": "chat", "gen_ai.request.model": "shop-a"}))
    spans_expire()
    assert CallSpan.objects.count() == 1
    CallSpan.objects.update(at=timezone.now() - telemetry.WAIT)
    spans_expire()
    assert CallSpan.objects.count() == 0


def test_spans_with_messages_or_of_tools_wait_for_nothing(app: ApiClient) -> None:
    export(app, spans(dict(CHAT), {"gen_ai.operation.name": "execute_tool"}))
    assert CallSpan.objects.count() == 0


def test_the_details_of_an_operation_and_its_span_are_one_decision(app: ApiClient) -> None:
    export(app, logs(("gen_ai.client.inference.operation.details", None, dict(CHAT))))
    assert Decision.objects.get().policy == "shop-a"
    assert taken(export(app, spans(dict(CHAT)))).rejected_spans == 0
    assert Decision.objects.count() == 1


def test_the_agents_collection_rate_counts(app: ApiClient) -> None:
    AgentSettings.objects.create(agent="support-bot", collection_rate=0.0)
    assert taken(export(app, spans(dict(CHAT)))).rejected_spans == 0
    assert not Decision.objects.exists()


ROOT = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "support", "parent": b""}
LOOKUP = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "find_order"}
LOOKUP |= {"gen_ai.tool.call.arguments": '{"order": 7}', "gen_ai.tool.call.result": "in Kassel"}
LOOKUP |= {"parent": bytes([1] * 8)}
OPENINFERENCE_TOOL = {"openinference.span.kind": "TOOL", "tool.name": "find_order"}
OPENINFERENCE_TOOL |= {"input.value": '{"order": 7}', "output.value": "in Kassel", "parent": bytes([1] * 8)}
TRACELOOP_TOOL = {"traceloop.span.kind": "tool", "traceloop.entity.name": "find_order"}
TRACELOOP_TOOL |= {"traceloop.entity.input": '{"order": 7}', "traceloop.entity.output": "in Kassel"}
TRACELOOP_TOOL |= {"parent": bytes([1] * 8)}


def agent_run(tool: dict[str, Any], *, ended: int = 1) -> ExportTraceServiceRequest:
    """An agent's span, its tool's and its model call's; the second asks before it knows, the third answers."""
    found = spans({**ROOT, "failed": ended}, dict(tool), {**CHAT, "parent": bytes([1] * 8)})
    for number, span in enumerate(found.resource_spans[0].scope_spans[0].spans):
        span.start_time_unix_nano += number * 1_000_000
    return found


@pytest.mark.parametrize("tool", [LOOKUP, OPENINFERENCE_TOOL, TRACELOOP_TOOL])
def test_an_agents_spans_are_the_steps_of_a_trace(app: ApiClient, tool: dict[str, Any]) -> None:
    for _ in range(2):
        assert taken(export(app, agent_run(tool))).rejected_spans == 0
    trace, decision = Trace.objects.get(), Decision.objects.get()
    assert (trace.agent, trace.run_id, trace.metadata["unit"]) == ("support-bot", "07" * 16, "conv-1")
    task, call, answer = trace.steps
    assert (task["kind"], task["name"], task["status"]) == ("task", "support", "completed")
    assert (call["kind"], call["name"], call["arguments"]) == ("tool_call", "find_order", {"order": 7})
    assert (call["result"], call["duration_ms"]) == ("in Kassel", 1499.0)
    assert (answer["kind"], answer["id"]) == ("decision", str(decision.pk))
    assert (decision.trace, decision.run_id) == (trace, trace.run_id)
    shown = timeline_of(trace, decision.pk).steps
    assert [(step.depth, step.here) for step in shown] == [(0, False), (1, False), (1, True)]


def test_a_failed_run_and_its_failed_tool(app: ApiClient) -> None:
    export(app, agent_run({**LOOKUP, "failed": 2, "error.type": "Timeout"}, ended=2))
    trace = Trace.objects.get()
    assert trace.metadata["status"] == "failed"
    expected = [("failed", "failed"), (None, "Timeout"), (None, None)]
    assert [(step.get("status"), step.get("error")) for step in trace.steps] == expected


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_run_that_comes_in_several_requests_is_one_trace(app: ApiClient, order: tuple[int, ...]) -> None:
    whole = agent_run(dict(LOOKUP))
    for number in order:
        part = ExportTraceServiceRequest()
        part.CopyFrom(whole)
        kept = part.resource_spans[0].scope_spans[0].spans
        one = kept[number]
        del kept[:]
        kept.append(one)
        assert taken(export(app, part)).rejected_spans == 0
    decision = Decision.objects.get()
    assert decision.trace is not None
    shown = timeline_of(decision.trace, decision.pk)
    assert sorted(step.kind for step in shown.steps if step.kind != "decision") == ["task", "tool_call"]
    assert shown.steps[0].kind == "task"
    unit_forget("conv-1")
    assert not Trace.objects.exists()


def test_the_collection_rate_leaves_out_a_run_with_its_decision(app: ApiClient) -> None:
    AgentSettings.objects.create(agent="support-bot", collection_rate=0.0)
    export(app, agent_run(dict(LOOKUP)))
    assert not Trace.objects.exists()
    assert not Decision.objects.exists()


def test_a_run_with_too_much_in_it_is_rejected_and_its_decision_kept(app: ApiClient) -> None:
    long = {**LOOKUP, "gen_ai.tool.call.result": "x" * limits.TEXT_CHARACTERS}
    answer = taken(export(app, agent_run(long)))
    assert answer.rejected_spans == 1
    assert "1,000,000 characters" in answer.error_message
    assert (Trace.objects.count(), Decision.objects.get().trace) == (0, None)


def test_an_evaluation_of_a_trace_rates_its_last_decision(app: ApiClient) -> None:
    found = agent_run(dict(LOOKUP))
    second = found.resource_spans[0].scope_spans[0].spans.add()
    second.CopyFrom(found.resource_spans[0].scope_spans[0].spans[2])
    second.span_id, second.start_time_unix_nano = bytes([4] * 8), STARTED + 9_000_000
    export(app, found)
    about = logs(("gen_ai.evaluation.result", None, FAILED))
    about.resource_logs[0].scope_logs[0].log_records[0].span_id = b""
    assert taken(export(app, about)).rejected_log_records == 0
    assert Rating.objects.get().decision == Decision.objects.order_by("-created_at")[0]


FAILED = {
    "gen_ai.evaluation.name": "relevance",
    "gen_ai.evaluation.score.label": "fail",
    "gen_ai.evaluation.explanation": "wrong",
}


def test_an_evaluation_rates_its_span_in_the_span_or_later(app: ApiClient) -> None:
    tone = {"gen_ai.evaluation.name": "tone", "gen_ai.evaluation.score.value": 0.75}
    length = {"gen_ai.evaluation.name": "words", "gen_ai.evaluation.score.value": 12}
    for _ in range(2):
        export(app, spans({**CHAT, "events": [("gen_ai.evaluation.result", FAILED)]}))
        found = logs(("gen_ai.evaluation.result", None, tone), ("gen_ai.evaluation.result", None, length))
        assert taken(export(app, found)).rejected_log_records == 0
    said = {row.rater: (row.thumb, row.score, row.rater_kind) for row in Rating.objects.all()}
    assert said == {"relevance": ("down", None, "simulated"), "tone": ("", 0.75, "simulated")}
    assert Outcome.objects.get().value == 12


def test_an_evaluation_of_an_unknown_span_is_rejected_with_its_reason(app: ApiClient) -> None:
    partial = taken(export(app, logs(("gen_ai.evaluation.result", None, FAILED), span=9)))
    assert partial.rejected_log_records == 1
    assert "09090909" in partial.error_message
    assert not Rating.objects.exists()


def test_one_bad_span_holds_back_no_other(app: ApiClient) -> None:
    bad = {**CHAT, "gen_ai.input.messages": json.dumps([{"role": "alien", "parts": []}])}
    partial = taken(export(app, spans(bad, dict(CHAT))))
    assert partial.rejected_spans == 1
    assert "0101010101010101" in partial.error_message
    assert Decision.objects.count() == 1


TOO_LARGE = b" " * (limits.BODY_BYTES + 1)


@pytest.mark.parametrize(
    ("raw", "kind", "encoding", "status", "code"),
    [
        (b"\xff\xff", PROTOBUF, "", 400, 3),
        (b"{", "application/json", "", 400, 3),
        (b"[]", "application/json", "", 400, 3),
        (b'{"resourceSpans": 7}', "application/json", "", 400, 3),
        (b'{"resourceSpans": [7]}', "application/json", "", 400, 3),
        (b"no gzip", PROTOBUF, "gzip", 400, 3),
        (gzip.compress(b"{}")[:-4], "application/json", "gzip", 400, 3),
        (gzip.compress(TOO_LARGE), "application/json", "gzip", 413, 8),
        (TOO_LARGE, PROTOBUF, "", 413, 8),
        (b"{}", "application/json", "br", 415, 3),
        (b"{}", "text/plain", "", 415, 3),
    ],
    ids=["protobuf", "json", "list", "number", "numbers", "gzip", "cut", "bomb", "large", "br", "text"],
)
def test_a_request_that_cannot_be_read_gets_a_status_and_stores_nothing(
    app: ApiClient, raw: bytes, kind: str, encoding: str, status: int, code: int
) -> None:
    headers = {"Content-Encoding": encoding} if encoding else {}
    answer = app.client.post("/v1/traces", raw, content_type=kind, headers=headers)
    assert answer.status_code == status, answer.content
    if kind == PROTOBUF:
        assert (answer["Content-Type"], answer.content[:2]) == (PROTOBUF, bytes([8, code]))
    else:
        assert answer.json()["code"] == code
        assert answer.json()["message"]
    assert not Decision.objects.exists()


def test_lists_within_lists_are_read_as_deep_as_protobuf_goes(app: ApiClient) -> None:
    value: Any = "x"
    for _ in range(40):
        value = [value]
    assert taken(export(app, spans({**CHAT, "deep": value}))).rejected_spans == 0
    deeper = b'{"resourceSpans": ' + b"[" * 5_000 + b"]" * 5_000 + b"}"
    assert export(app, deeper, kind="application/json").status_code == 400


def test_a_caller_without_the_scope_gets_a_status() -> None:
    for client, status, code in ((ApiClient(), 401, 16), (ApiClient("rate"), 403, 7)):
        answer = export(client, spans(dict(CHAT)))
        assert (answer.status_code, answer.content[:2]) == (status, bytes([8, code]))
    assert not Decision.objects.exists()
