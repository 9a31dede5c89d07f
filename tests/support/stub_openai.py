"""A model server on a real socket that speaks OpenAI's protocol and says what it is told to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ModelServer:
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

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self._json(200, {"object": "list", "data": [{"id": name} for name in stub.models]})

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
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
                    self.close_connection = True
                    self.connection.close()
                elif status != 200:
                    error = {"message": f"the stub says {status}", "type": "x", "param": "p", "code": "c"}
                    self._json(status, {"error": stub.error or error})
                elif stub.sends is not None:
                    self._send(200, *stub.sends)
                elif body.get("stream"):
                    self._stream()
                else:
                    self._json(200, stub.completion())

            def _json(self, status: int, body: dict[str, Any]) -> None:
                self._send(status, "application/json", json.dumps(body).encode())

            def _send(self, status: int, kind: str, raw: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(raw)))
                for name, value in stub.headers.items():
                    self.send_header(name, value)
                if stub.retry_after:
                    self.send_header("Retry-After", stub.retry_after)
                self.end_headers()
                self.wfile.write(raw)

            def _stream(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
                deltas += [{"content": word + " "} for word in stub.said.split(" ")]
                deltas += [{"tool_calls": [{"index": 0, **call}]} for call in stub.tool_calls]
                for delta in deltas:
                    self._chunk({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
                    if stub.cut_stream and "content" in delta and delta["content"]:
                        self.close_connection = True
                        self.connection.close()
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

            def log_message(self, *_: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:
                pass  # a client that went away, a connection that was cut: both are on purpose

        self._server = Quiet(("127.0.0.1", port), Handler)
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

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

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> ModelServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
