"""A server of Ratchet's on a real socket, and what a collector left behind: for the tests of the client side."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ratchet_client import TraceCollector

ROOT = Path(__file__).resolve().parent.parent


class Ratchet:
    """A server on a real socket: takes what it is sent, and answers what `answer` says (None: as the real one)."""

    def __init__(self) -> None:
        self.taken: dict[str, Any] = {}
        self.requests: list[tuple[str, str, Any]] = []
        self.answer: Callable[[str, dict[str, Any]], int | None] = lambda path, body: None
        self.text: Callable[[str, dict[str, Any]], str | None] = lambda path, body: None
        """Body of the response to a path and a body; None: the status alone."""
        self.headers: dict[str, str] = {}
        self.hang_up = False
        """Close the connection after each answer."""
        ratchet = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                ratchet.requests.append((self.path, self.headers.get("Authorization", ""), body))
                status = ratchet.answer(self.path, body)
                if status is None:
                    known = ratchet.taken.get(body["id"])
                    status = 201 if known is None else 200 if known == body else 409
                    ratchet.taken.setdefault(body["id"], body)
                text = (
                    ratchet.text(self.path, body) or json.dumps({"id": body["id"], "status": status})
                ).encode()
                self.send_response(status)
                for name, value in ratchet.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
                self.close_connection = self.close_connection or ratchet.hang_up

            def log_message(self, *_: Any) -> None:
                pass

        self.handler = Handler
        self.server: ThreadingHTTPServer | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), self.handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def stop(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    @property
    def runs(self) -> Counter[str]:
        return Counter(body["run_id"] for body in self.taken.values() if "run_id" in body)


def spooled(collector: TraceCollector) -> list[dict[str, Any]]:
    """Bodies of the records that wait in the outbox, in the order they were put."""
    return [record.body["body"] for record in collector.outbox.pending()]


def steps(collector: TraceCollector) -> list[dict[str, Any]]:
    (trace,) = spooled(collector)
    found: list[dict[str, Any]] = trace["steps"]
    return found
