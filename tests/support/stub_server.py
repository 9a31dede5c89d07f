"""Small HTTP servers of tests: a handler says what each method answers, the server runs while its block lasts."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class StubHandler(BaseHTTPRequestHandler):
    """Answers with a length, and writes no log."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def head(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def answer(self, status: int, body: object = b"", **headers: str) -> None:
        """Bytes and texts as they are; anything else as JSON."""
        raw = body.encode() if isinstance(body, str) else body
        if not isinstance(raw, bytes):
            raw, headers = json.dumps(raw).encode(), {"Content_Type": "application/json", **headers}
        self.head(status, Content_Length=str(len(raw)), **headers)
        if self.command != "HEAD":
            self.wfile.write(raw)

    def cut(self) -> None:
        """Close the connection without an answer, or in the middle of one."""
        self.close_connection = True
        self.connection.close()

    def log_message(self, *_: Any) -> None:
        pass


class StubServer(ThreadingHTTPServer):
    """Listens from the start; `with` closes it."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, handler: type[StubHandler], port: int = 0, host: str = "127.0.0.1") -> None:
        super().__init__((host, port), handler)
        self.address = f"http://{host}:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *_: Any) -> None:
        pass  # a client that went away, a connection that was cut: both are on purpose

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Stub:
    """A fake program with a server of its own, closed at the end of its block."""

    server: StubServer

    def close(self) -> None:
        self.server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
