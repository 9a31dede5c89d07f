"""Answers as spans and counters as metrics, by OTLP to a real small collector, and on into another Ratchet."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from feedback.models import AgentSettings, Decision
from rl.serving import telemetry
from tests.support.api_client import ApiClient
from tests.support.serving import (  # noqa: F401
    Parrot,
    parrot_only,
    policy_made,
    support_bot_allowed,
    written_by_the_asking_thread,
)
from tests.support.stub_server import StubHandler, StubServer

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("written_at_once", "support_bot")]

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Collector(StubServer):
    def __init__(self) -> None:
        self.bodies: dict[str, list[bytes]] = {"/v1/traces": [], "/v1/metrics": []}
        super().__init__(_Handler)


class _Handler(StubHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.body()
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.bodies[self.path].append(body)
        self.answer(200)


@pytest.fixture
def collector(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    server = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.address)
    settings.OTEL_EXPORTS = True
    telemetry.providers.cache_clear()
    yield server
    for provider in telemetry.providers():
        provider.shutdown()
    telemetry.providers.cache_clear()
    server.close()


def answered(api: ApiClient | None = None, **headers: str) -> dict[str, Any]:
    policy_made("support-bot-v1", agent="support-bot")
    api = api or ApiClient("ingest")
    body = {
        "model": "support-bot",
        "messages": [{"role": "user", "content": "Where is it?"}],
        "user": "conv-1",
    }
    made: dict[str, Any] = api.post("/v1/chat/completions", body, headers=headers).json()
    return made


def span_of(collector: Collector) -> tuple[Any, dict[str, Any]]:
    for provider in telemetry.providers():
        provider.force_flush()
    (body,) = collector.bodies["/v1/traces"]
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    ((span,),) = [scope.spans for scope in resource.scope_spans]
    return span, {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


def test_an_answer_is_a_span_below_the_callers_without_its_words(
    collector: Collector, parrot: Parrot
) -> None:
    made = answered(traceparent=CALLER)
    span, attributes = span_of(collector)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (CALLER[3:35], CALLER[36:52])
    assert (attributes["gen_ai.response.id"], attributes["ratchet.agent"]) == (made["id"], "support-bot")
    assert attributes["gen_ai.response.model"] == "support-bot-v1"
    assert attributes["gen_ai.usage.input_tokens"] == made["usage"]["prompt_tokens"]
    assert not [name for name in attributes if name.endswith("messages")]
    assert span.end_time_unix_nano >= span.start_time_unix_nano


def test_metrics_are_exported_by_agent(collector: Collector, parrot: Parrot) -> None:
    answered()
    for provider in telemetry.providers():
        provider.force_flush()
    found = {
        metric.name: [point.as_double or point.as_int for point in metric.sum.data_points]
        for body in collector.bodies["/v1/metrics"]
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert sum(found["ratchet_gateway_requests_total"]) >= 1
    assert sum(found["ratchet_gateway_seconds_count"]) >= 1
    assert sum(found["ratchet_gateway_seconds_sum"]) > 0


def test_another_ratchet_takes_the_span_as_a_decision(
    collector: Collector, parrot: Parrot, settings: Any
) -> None:
    settings.OTEL_CONTENT = True
    api = ApiClient("ingest")
    answered(api)
    recorded = Decision.objects.get()
    span_of(collector)
    taken = api.client.post(
        "/v1/traces", collector.bodies["/v1/traces"][0], content_type="application/x-protobuf"
    )
    assert taken.status_code == 200
    copy = Decision.objects.exclude(pk=recorded.pk).get()
    assert (copy.messages, copy.response) == (recorded.messages, recorded.response)
    assert (copy.agent, copy.policy, copy.unit) == ("ratchet", recorded.policy, recorded.unit)
    assert copy.metadata["response_id"] == str(recorded.pk)


def test_masked_words_are_not_exported(collector: Collector, parrot: Parrot, settings: Any) -> None:
    settings.OTEL_CONTENT = True
    AgentSettings.objects.create(agent="support-bot", masks=[{"name": "what", "pattern": "Where|it"}])
    parrot.said = "Where?"
    answered()
    _, attributes = span_of(collector)
    assert "<WHAT_1> is <WHAT_2>?" in attributes["gen_ai.input.messages"]
    assert "<WHAT_1>?" in attributes["gen_ai.output.messages"]


def test_a_collector_that_is_away_costs_no_answer(collector: Collector, parrot: Parrot) -> None:
    collector.shutdown()
    collector.server_close()
    assert answered()["choices"]


def test_an_exporter_that_cannot_start_costs_no_answer(
    settings: Any, parrot: Parrot, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings.OTEL_EXPORTS = True
    monkeypatch.setattr(telemetry, "providers", lambda: [][0])
    assert answered()["choices"]
    assert "not exported" in caplog.text


def test_calls_of_tools_are_parts() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    assert telemetry._parts({"role": "assistant", "content": None, "tool_calls": [call]})["parts"] == [
        {"type": "tool_call", "id": "c1", "name": "find", "arguments": "{}"}
    ]
    told = telemetry._parts(
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Kassel"}]}
    )
    assert told["parts"] == [{"type": "tool_call_response", "id": "c1", "response": "Kassel"}]
    json.dumps(told)
