"""A model server on a real socket that speaks OpenAI's protocol and says what it is told to."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from tests.support.stub_server import Stub, StubHandler, StubServer


class ModelServer(Stub):
    """Answers `said`; `statuses` are answered first, one a request (0: the connection is cut)."""

    def __init__(self, port: int = 0) -> None:
        self.said = "hello there"
        self.delay_s = 0.0
        self.statuses: list[int] = []
        self.error: dict[str, Any] = {}
        """Error body of `statuses`, in place of the usual one."""
        self.retry_after = ""
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        """Raw body and headers, in small letters."""
        self.tool_calls: list[dict[str, Any]] = []
        self.asked: Callable[[dict[str, Any]], None] = lambda body: None
        """Called with a request's body before it is answered."""
        self.cut_stream = False
        """End a stream in its middle."""
        self.sends: tuple[str, bytes] | None = None
        """Content type and body of every answer, whatever is asked for."""
        self.headers: dict[str, str] = {}
        self.more: dict[str, Any] = {}
        """Further fields of every completion and chunk."""
        self.models = ["bundled", "support-bot", "widgets-v3"]
        """What `GET /models` lists."""
        stub = self

        class Handler(StubHandler):
            def do_GET(self) -> None:
                self._answer(200, {"object": "list", "data": [{"id": name} for name in stub.models]})

            def do_POST(self) -> None:
                raw = self.body()
                body = json.loads(raw)
                stub.requests.append(
                    (raw.decode(), {name.lower(): text for name, text in self.headers.items()})
                )
                stub.bodies.append(body)
                stub.paths.append(self.path)
                stub.asked(body)
                time.sleep(stub.delay_s)
                status = stub.statuses.pop(0) if stub.statuses else 200
                if status == 0:
                    self.cut()
                elif status != 200:
                    error = {"message": f"the stub says {status}", "type": "x", "param": "p", "code": "c"}
                    self._answer(status, {"error": stub.error or error})
                elif stub.sends is not None:
                    kind, raw = stub.sends
                    self._answer(200, raw, Content_Type=kind)
                elif body.get("stream"):
                    self._stream()
                else:
                    self._answer(200, stub.completion())

            def _answer(self, status: int, body: object, **headers: str) -> None:
                retry = {"Retry-After": stub.retry_after} if stub.retry_after else {}
                self.answer(status, body, **headers, **stub.headers, **retry)

            def _stream(self) -> None:
                self.head(200, Content_Type="text/event-stream", Transfer_Encoding="chunked")
                deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
                deltas += [{"content": word + " "} for word in stub.said.split(" ")]
                deltas += [{"tool_calls": [{"index": 0, **call}]} for call in stub.tool_calls]
                for delta in deltas:
                    self._chunk({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
                    if stub.cut_stream and "content" in delta and delta["content"]:
                        self.cut()
                        return
                reason = "tool_calls" if stub.tool_calls else "stop"
                self._chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
                self._chunk({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
                self._part(b"data: [DONE]\n\n")
                self.wfile.write(b"0\r\n\r\n")

            def _chunk(self, body: dict[str, Any]) -> None:
                self._part(f"data: {json.dumps(stub.more | body)}\n\n".encode())

            def _part(self, data: bytes) -> None:
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                self.wfile.flush()

        self.server = StubServer(Handler, port)
        self.port = self.server.server_port
        self.url = f"{self.server.address}/v1"

    def completion(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None if self.tool_calls else self.said}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        reason = "tool_calls" if self.tool_calls else "stop"
        return self.more | {
            "id": "stub",
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
        }
