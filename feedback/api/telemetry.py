"""OpenTelemetry's endpoints (OTLP/HTTP): `/v1/traces` and `/v1/logs`, in protobuf or JSON, plain or gzipped."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from rest_framework.exceptions import ParseError, UnsupportedMediaType
from rest_framework.parsers import BaseParser
from rest_framework.request import Request

from backend import limits
from backend.rest.errors import BodyTooLarge, RequestRefused, exception_handler
from backend.rest.reading import StrictJSONParser
from backend.rest.views import ApiView
from feedback.transfer.formats.records import RowError
from feedback.transfer.telemetry import Exported, export_store

PROTOBUF = "application/x-protobuf"
JSON = "application/json"

STATUS = {400: 3, 401: 16, 403: 7, 404: 5, 405: 12, 411: 3, 413: 8, 415: 3, 429: 8, 503: 14}
"""HTTP status -> google.rpc.Code of the Status in the body; others are 13 (INTERNAL)."""


def unpacked(stream: Any, encoding: str) -> bytes:
    """The body, unpacked where it is gzipped. Raises BodyTooLarge, ParseError."""
    most = limits.BODY_BYTES
    raw = stream.read(most + 1)
    if encoding == "gzip":
        unzip = zlib.decompressobj(zlib.MAX_WBITS | 16)
        try:
            raw = unzip.decompress(raw, most + 1)
        except zlib.error as error:
            raise ParseError(f"expected a gzipped body, found: {error}") from None
        if len(raw) <= most and not unzip.eof:
            raise ParseError("expected a gzipped body, found one that ends too early")
    elif encoding not in ("", "identity"):
        raise UnsupportedMediaType(
            encoding, f"expected Content-Encoding gzip or none, found {encoding[:40]!r}"
        )
    if len(raw) > most:
        raise BodyTooLarge(f"expected at most {most:,} bytes, unpacked; export in smaller batches")
    return raw


class OtlpJSONParser(StrictJSONParser):
    def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> Any:
        return self.read(unpacked(stream, _encoding(parser_context)))


class ProtobufParser(BaseParser):
    media_type = PROTOBUF

    def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> Any:
        raw = unpacked(stream, _encoding(parser_context))
        try:
            message = parser_context["view"].request_type.FromString(raw)
        except DecodeError as error:
            raise ParseError(f"expected {PROTOBUF} of OTLP, found: {error}") from None
        return _Plain().request(message)


def _encoding(context: Any) -> str:
    return str(context["request"].headers.get("Content-Encoding", "")).strip().lower()


class _Plain:
    """Protobuf messages as the JSON that the reader of files takes; attributes as plain objects."""

    def __init__(self) -> None:
        self._left = limits.BODY_VALUES

    def request(self, message: Any) -> dict[str, object]:
        if isinstance(message, ExportTraceServiceRequest):
            return {"resourceSpans": [self._resource(one, "scopeSpans") for one in message.resource_spans]}
        return {"resourceLogs": [self._resource(one, "scopeLogs") for one in message.resource_logs]}

    def _resource(self, resource: Any, scopes: str) -> dict[str, object]:
        attributes = self._attributes(resource.resource.attributes)
        if scopes == "scopeSpans":
            found = [{"spans": list(map(self._span, scope.spans))} for scope in resource.scope_spans]
        else:
            found = [{"logRecords": list(map(self._log, scope.log_records))} for scope in resource.scope_logs]
        return {"resource": {"attributes": attributes}, scopes: found}

    def _span(self, span: Any) -> dict[str, object]:
        events = [
            {
                "name": event.name,
                "timeUnixNano": event.time_unix_nano,
                "attributes": self._attributes(event.attributes),
            }
            for event in span.events
        ]
        return {
            "traceId": span.trace_id.hex(),
            "spanId": span.span_id.hex(),
            "parentSpanId": span.parent_span_id.hex(),
            "name": span.name,
            "status": {"code": span.status.code, "message": span.status.message},
            "startTimeUnixNano": span.start_time_unix_nano,
            "endTimeUnixNano": span.end_time_unix_nano,
            "attributes": self._attributes(span.attributes),
            "events": events,
        }

    def _log(self, record: Any) -> dict[str, object]:
        return {
            "traceId": record.trace_id.hex(),
            "spanId": record.span_id.hex(),
            "timeUnixNano": record.time_unix_nano,
            "observedTimeUnixNano": record.observed_time_unix_nano,
            "eventName": record.event_name,
            "body": self._value(record.body),
            "attributes": self._attributes(record.attributes),
        }

    def _attributes(self, pairs: Iterable[Any]) -> dict[str, object]:
        return {pair.key: self._value(pair.value) for pair in pairs}

    def _value(self, value: Any) -> object:
        self._left -= 1
        if self._left < 0:
            raise BodyTooLarge(f"expected at most {limits.BODY_VALUES:,} values; export in smaller batches")
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [self._value(item) for item in value.array_value.values]
        if kind == "kvlist_value":
            return self._attributes(value.kvlist_value.values)
        return None if kind in (None, "bytes_value") else getattr(value, kind)


@extend_schema(exclude=True)
class Otlp(ApiView):
    """An endpoint as OTLP/HTTP describes it: its answers and refusals come in the encoding of the request."""

    scopes = {"POST": "ingest"}
    parser_classes = [ProtobufParser, OtlpJSONParser]
    request_type: Any
    response_type: Any
    rejected: tuple[str, str]
    """Name of the count of what was rejected, in protobuf and in JSON."""

    def post(self, request: Request) -> HttpResponse:
        if not isinstance(request.data, dict):
            raise ParseError(f"expected an export request of OTLP, found {type(request.data).__name__}")
        try:
            done = export_store(request.data)
        except RowError as error:
            raise RequestRefused(str(error)) from None
        return self._answer(request, done)

    def _answer(self, request: Request, done: Exported) -> HttpResponse:
        in_protobuf, in_json = self.rejected
        if is_protobuf(request):
            answer = self.response_type()
            if done.rejected:
                setattr(answer.partial_success, in_protobuf, done.rejected)
                answer.partial_success.error_message = done.message
            return HttpResponse(answer.SerializeToString(), content_type=PROTOBUF)
        body = {in_json: done.rejected, "errorMessage": done.message} if done.rejected else {}
        return HttpResponse(json.dumps({"partialSuccess": body} if body else {}), content_type=JSON)

    def get_exception_handler(self) -> Callable[..., HttpResponse]:
        return status_handler


class OtlpTraces(Otlp):
    request_type, response_type = ExportTraceServiceRequest, ExportTraceServiceResponse
    rejected = ("rejected_spans", "rejectedSpans")


class OtlpLogs(Otlp):
    request_type, response_type = ExportLogsServiceRequest, ExportLogsServiceResponse
    rejected = ("rejected_log_records", "rejectedLogRecords")


def is_protobuf(request: Request) -> bool:
    return (request.content_type or "").partition(";")[0].strip().lower() == PROTOBUF


def status_handler(error: Exception, context: dict[str, Any]) -> HttpResponse:
    """Any exception of a view as google.rpc.Status, which OTLP's clients read."""
    found = exception_handler(error, context)
    code, message = STATUS.get(found.status_code, 13), found.data["error"]["message"]
    if is_protobuf(context["request"]):
        body = status_write(code, message)
        response = HttpResponse(body, status=found.status_code, content_type=PROTOBUF)
    else:
        body = json.dumps({"code": code, "message": message}).encode()
        response = HttpResponse(body, status=found.status_code, content_type=JSON)
    for name in ("Retry-After", "WWW-Authenticate"):
        if name in found:
            response[name] = found[name]
    if getattr(found, "_has_been_logged", False):  # an outage is logged once, not with every request
        response._has_been_logged = True  # type: ignore[attr-defined]
    return response


def status_write(code: int, message: str) -> bytes:
    """google.rpc.Status in protobuf: field 1 is the code, field 2 the message."""
    text = message.encode()
    length, left = b"", len(text)
    while left > 127:
        length, left = length + bytes([left & 127 | 128]), left >> 7
    return bytes([8, code, 18]) + length + bytes([left]) + text
