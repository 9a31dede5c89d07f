"""Anthropic's messages on a real socket; the published schema validates what it takes and sends."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from anthropic.types import Message, MessageParam, RawMessageStreamEvent, ToolParam
from anthropic.types.message_create_params import (
    MessageCreateParamsNonStreaming,
    MessageCreateParamsStreaming,
)
from pydantic import TypeAdapter

from tests.support.stub_server import Stub, StubHandler, StubServer

REQUEST: TypeAdapter[Any] = TypeAdapter(MessageCreateParamsStreaming | MessageCreateParamsNonStreaming)
# of an Iterable pydantic looks at nothing until it is read
MESSAGES: TypeAdapter[Any] = TypeAdapter(list[MessageParam])
TOOLS: TypeAdapter[Any] = TypeAdapter(list[ToolParam])
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USAGE = {"input_tokens": 12, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 8}
USAGE |= {"output_tokens": 5}
KEY = "sk-ant-test-0123456789"


class AnthropicServer(Stub):
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

        class Handler(StubHandler):
            def do_GET(self) -> None:
                self._answer(200, {"data": [{"type": "model", "id": "claude-test-1"}], "has_more": False})

            def do_POST(self) -> None:
                body = json.loads(self.body())
                stub.bodies.append(body)
                time.sleep(stub.delay_s)
                fault = stub.fault(self.path, dict(self.headers), body)
                status = stub.statuses.pop(0) if stub.statuses else 200
                if fault:
                    self._answer(*fault)
                elif status != 200:
                    kind = {429: "rate_limit_error", 529: "overloaded_error"}.get(status, "api_error")
                    self._answer(status, _error(kind, f"the stub says {status}"))
                elif body.get("stream"):
                    self._stream()
                else:
                    self._answer(200, stub.message())

            def _answer(self, status: int, body: dict[str, Any]) -> None:
                retry = {"Retry_After": stub.retry_after} if stub.retry_after and status != 200 else {}
                self.answer(status, body, request_id="req_1", **retry)

            def _stream(self) -> None:
                kind = "text/event-stream; charset=utf-8"
                self.head(200, Content_Type=kind, Connection="close", request_id="req_1")
                for event in stub.events():
                    if stub.cut_stream and event["type"] == "message_delta":
                        break
                    self.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
                self.close_connection = True

        self.server = StubServer(Handler)
        self.url = f"{self.server.address}/v1"

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
