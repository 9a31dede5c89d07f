"""Connections that send a byte now and then, or nothing: others are answered meanwhile, and so are they in the end.

A request that has begun holds one of the web process's threads until it is there whole. More of them than threads are
the proxy's to keep away: it passes on whole requests alone (`tests/test_container.py`).
"""

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.api_client import decision_body
from tests.support.campaign_scale import scaled
from tests.support.server import Server, query

THREADS = scaled("SLOW_THREADS", 16)
FREE = 4
"""Threads that no slow request holds."""
ROUNDS = 5
PATIENCE_S = 120.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One process, so that no other answers for it. It closes idle connections later than a slow machine needs."""
    found = Server(
        f"sqlite:///{tmp_path / 'd.sqlite3'}", tmp_path, workers=1, threads=THREADS, keep_alive_s=600
    )
    found.migrate()
    with found:
        yield found


def request(method: str, path: str, key: str, body: bytes = b"") -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    )
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("stops_in", ["header", "body", "nothing"])
def test_others_are_answered(
    server: Server, stops_in: str, record_property: Callable[[str, object], None]
) -> None:
    """Slow ones in each part of a request. Those that sent nothing yet may be more than threads."""
    key = server.key("ingest")
    whole = request("POST", "/api/decisions/", key, json.dumps(decision_body()).encode())
    sent = {"header": 20, "body": whole.index(b"\r\n\r\n") + 10, "nothing": 0}[stops_in]
    count = THREADS * 3 if stops_in == "nothing" else THREADS - FREE
    slow = [socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) for _ in range(count)]
    try:
        for connection in slow:
            connection.sendall(whole[:sent])
        for number in range(ROUNDS):
            answer = httpx.post(
                f"{server.address}/api/decisions/",
                json=decision_body(),
                headers={"Authorization": f"Bearer {key}"},
                timeout=PATIENCE_S,
            )
            assert answer.status_code == 201, server.log()
            if sent:
                for connection in slow:
                    connection.sendall(whole[sent + number : sent + number + 1])
        rest = whole[sent + ROUNDS if sent else 0 :]
        for connection in slow:
            connection.sendall(rest)
        starts = [connection.makefile("rb").readline() for connection in slow]
    finally:
        for connection in slow:
            connection.close()
    assert {start.split()[1] for start in starts} == {b"201"}, server.log()
    assert query(server, "SELECT count(*) FROM feedback_decision") == [(ROUNDS + count,)]
    record_property("tried", ROUNDS + count)
