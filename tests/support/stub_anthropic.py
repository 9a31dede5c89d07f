"""Anthropic's messages on a real socket; the published schema validates what it takes and sends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from anthropic.types import Message, MessageParam, RawMessageStreamEvent, ToolParam
from anthropic.types.message_create_params import (
    MessageCreateParamsNonStreaming,
    MessageCreateParamsStreaming,
)
from pydantic import TypeAdapter

REQUEST: TypeAdapter[Any] = TypeAdapter(MessageCreateParamsStreaming | MessageCreateParamsNonStreaming)
# of an Iterable pydantic looks at nothing until it is read
MESSAGES: TypeAdapter[Any] = TypeAdapter(list[MessageParam])
TOOLS: TypeAdapter[Any] = TypeAdapter(list[ToolParam])
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USAGE = {"input_tokens": 12, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 8}
USAGE |= {"output_tokens": 5}
KEY = "sk-ant-test-0123456789"


class AnthropicServer:
    """Answers `blocks`; `statuses` are answered first, one a request. A request that breaks the schema is 400."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = [{"type": "text", "text": "hello there", "citations": None}]
        self.stop_reason = "end_turn"
        self.statuses: list[int] = []
        self.retry_after = ""
        self.delay_s = 0.0
        self.cut_stream = False
        self.bodies: list[dict[str, Any]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self._json(200, {"data": [{"type": "model", "id": "claude-test-1"}], "has_more": False})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.bodies.append(body)
                time.sleep(stub.delay_s)
                fault = stub.fault(self.path, dict(self.headers), body)
                status = stub.statuses.pop(0) if stub.statuses else 200
                if fault:
                    self._json(*fault)
                elif status != 200:
                    kind = {429: "rate_limit_error", 529: "overloaded_error"}.get(status, "api_error")
                    self._json(status, _error(kind, f"the stub says {status}"))
                elif body.get("stream"):
                    self._stream()
                else:
                    self._json(200, stub.message())

            def _json(self, status: int, body: dict[str, Any]) -> None:
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.send_header("request-id", "req_1")
                if stub.retry_after and status != 200:
                    self.send_header("Retry-After", stub.retry_after)
                self.end_headers()
                self.wfile.write(raw)

            def _stream(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream; charset=utf-8")
                self.send_header("Connection", "close")
                self.send_header("request-id", "req_1")
                self.end_headers()
                for event in stub.events():
                    if stub.cut_stream and event["type"] == "message_delta":
                        break
                    self.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
                self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:
                pass  # a client that went away

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def fault(
        self, path: str, headers: dict[str, str], body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]] | None:
        sent = {name.lower(): value for name, value in headers.items()}
        if sent.get("x-api-key") != KEY:
            # some servers repeat the key they refuse
            return 401, _error("authentication_error", f"invalid x-api-key {sent.get('x-api-key')}")
        if path != "/v1/messages" or "anthropic-version" not in sent:
            return 404, _error("not_found_error", path)
        if extra := sorted(body.keys() - MessageCreateParamsStreaming.__annotations__.keys()):
            return 400, _error("invalid_request_error", f"{extra[0]}: Extra inputs are not permitted")
        try:
            REQUEST.validate_python({**body, "messages": []})
            MESSAGES.validate_python(body["messages"])
            TOOLS.validate_python(body.get("tools", []))
        except ValueError as error:
            return 400, _error("invalid_request_error", str(error)[:500])
        return None

    def message(self) -> dict[str, Any]:
        made = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-test-1-20261101"}
        made |= {"content": self.blocks, "stop_reason": self.stop_reason, "stop_sequence": None}
        made |= {"usage": USAGE}
        Message.model_validate(made)
        return made

    def events(self) -> Iterator[dict[str, Any]]:
        for event in self._events():
            EVENT.validate_python(event)
            yield event

    def _events(self) -> Iterator[dict[str, Any]]:
        began = {**self.message(), "content": [], "stop_reason": None, "usage": {**USAGE, "output_tokens": 1}}
        yield {"type": "message_start", "message": began}
        for index, block in enumerate(self.blocks):
            empty, deltas = _block_events(block)
            yield {"type": "content_block_start", "index": index, "content_block": empty}
            for delta in deltas:
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        delta = {"stop_reason": self.stop_reason, "stop_sequence": None}
        yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": USAGE["output_tokens"]}}
        yield {"type": "message_stop"}

    def __enter__(self) -> AnthropicServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}


def _block_events(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and its deltas."""
    if block["type"] == "text":
        texts = [word if n == 0 else f" {word}" for n, word in enumerate(block["text"].split(" "))]
        return {**block, "text": ""}, [{"type": "text_delta", "text": text} for text in texts]
    if block["type"] == "tool_use":
        raw = json.dumps(block["input"])
        parts = [{"type": "input_json_delta", "partial_json": part} for part in (raw[:3], raw[3:])]
        return {**block, "input": {}}, parts
    thought = [{"type": "thinking_delta", "thinking": block["thinking"]}]
    return {**block, "thinking": "", "signature": ""}, [
        *thought,
        {"type": "signature_delta", "signature": block["signature"]},
    ]
