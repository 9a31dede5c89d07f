"""Spans and metrics of the gateway by OTLP, where OTEL_EXPORTER_OTLP_ENDPOINT names a collector (extra `otlp`).

The SDK reads its other `OTEL_...` variables itself. A collector that is away costs no answer: the SDK logs and drops.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from django.conf import settings
from prometheus_client import Counter, Histogram

from feedback.storage.masking import masker_of
from rl.serving import metrics
from rl.serving.base import Completion
from rl.serving.chat_request import ChatRequest

if TYPE_CHECKING:
    from opentelemetry.metrics import Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger("rl.telemetry")

SUFFIXES: dict[type, tuple[str, ...]] = {Counter: ("_total",), Histogram: ("_sum", "_count")}
"""Kind of a metric of Prometheus -> its samples that are exported."""


@cache
def providers() -> tuple[TracerProvider, MeterProvider]:
    """The exporters of this process, started by the first call."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    own = {"service.name": settings.OTEL_SERVICE_NAME, "service.instance.id": str(uuid.uuid4())}
    resource = Resource.create(own)
    counts = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource)
    meter = counts.get_meter("ratchet")
    for metric in (
        metrics.REQUESTS,
        metrics.SECONDS,
        metrics.TOKENS,
        metrics.FALLBACKS,
        metrics.DECISIONS_RECORDED,
    ):
        (family,) = metric.collect()
        for suffix in SUFFIXES[type(metric)]:
            observe = partial(_observations, metric, suffix)
            meter.create_observable_counter(family.name + suffix, [observe], description=family.documentation)
    spans = TracerProvider(resource=resource)
    spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return spans, counts


def _observations(metric: Any, suffix: str, options: object) -> Iterator[Observation]:
    """What this process counted so far, by labels."""
    from opentelemetry.metrics import Observation

    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith(suffix):
                yield Observation(sample.value, sample.labels)


def span_export(chat: ChatRequest, made: Completion, began: float, headers: Mapping[str, str]) -> None:
    """A completion as a span of the GenAI conventions, below the caller's span where the request names one.

    began: `time.perf_counter()` at its start. A fault is logged: the answer stands.
    """
    if not settings.OTEL_EXPORTS:
        return
    try:
        _span_make(chat, made, began, headers)
    except Exception:  # whatever a variable of OpenTelemetry or a message may hold
        logger.exception("an answer was not exported to OpenTelemetry")


def _span_make(chat: ChatRequest, made: Completion, began: float, headers: Mapping[str, str]) -> None:
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    ended = time.time_ns()
    carrier = {name: headers[name] for name in ("traceparent", "tracestate") if headers.get(name)}
    usage = made.usage or {}
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ratchet",
        "gen_ai.request.model": chat.model,
        "gen_ai.response.model": made.policy,
        "gen_ai.response.id": str(made.id),
        "gen_ai.response.finish_reasons": [made.finish_reason] if made.finish_reason else None,
        "gen_ai.usage.input_tokens": usage.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": usage.get("completion_tokens"),
        "gen_ai.conversation.id": chat.unit,
        "ratchet.agent": made.agent,
        "ratchet.arm": made.arm,
        "ratchet.intended_policy": made.intended_policy,
    }
    if settings.OTEL_CONTENT:
        masked = masker_of(made.agent).masked
        asked, said = masked(list(chat.ask.messages)), masked({"role": "assistant", **made.message})
        attributes["gen_ai.input.messages"] = json.dumps(list(map(_parts, asked)))
        attributes["gen_ai.output.messages"] = json.dumps([_parts(said)])
    span = (
        providers()[0]
        .get_tracer("ratchet")
        .start_span(
            f"chat {made.agent}",
            TraceContextTextMapPropagator().extract(carrier),
            SpanKind.SERVER,
            {name: value for name, value in attributes.items() if value not in (None, "")},  # type: ignore[misc]
            start_time=ended - int(1e9 * (time.perf_counter() - began)),
        )
    )
    span.end(ended)


def _parts(message: Mapping[str, Any]) -> dict[str, object]:
    """A chat message in the shape of the GenAI conventions: a role and parts."""
    content = message.get("content")
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content or ())
    parts: list[dict[str, object]] = [{"type": "text", "content": text}] if text else []
    if message["role"] == "tool":
        parts = [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": text}]
    calls: Iterable[Mapping[str, Any]] = message.get("tool_calls") or ()
    parts += [{"type": "tool_call", "id": call.get("id"), **call["function"]} for call in calls]
    return {"role": message["role"], "parts": parts}
