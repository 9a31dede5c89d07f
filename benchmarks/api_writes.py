"""How many writes a second the REST API takes, with how much delay: gunicorn and PostgreSQL on this machine.

    python benchmarks/api_writes.py [--seconds 10] [--connections 50] [--workers 2] [--threads 4]

Starts a throwaway PostgreSQL cluster with its default durability (every commit reaches the disk) and gunicorn, then
from one client process over keep-alive connections: pairs of a decision and a rating of it, each a request of its own;
then lists of 1,000 decisions, and OTLP exports of 512 spans, as OpenTelemetry's SDK batches them. The client takes
its share of the same cores. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest  # noqa: E402

from tests.support.postgres import cluster  # noqa: E402
from tests.support.server import Server  # noqa: E402

PROMPT = "You answer customers of a shop in one short paragraph, politely, and never promise a date."
BULK = 1000
SPANS = 512
"""Spans of one export, the SDK's default; each is a model call with its messages."""


def decision(number: int) -> dict[str, Any]:
    """A decision of a common size: about 1 kB of JSON."""
    return {
        "id": str(uuid.uuid4()),
        "agent": "support-bot",
        "messages": [
            {"role": "system", "content": PROMPT},
            {"role": "user", "content": f"Order {number} has not arrived. What can I do about it? " * 3},
        ],
        "response": f"I am sorry to hear that order {number} is late. Let me look into it for you right away. "
        * 3,
        "policy": "support-bot-v12",
        "unit": f"user-{number % 5000}",
        "latency_ms": 412.5,
        "tokens_in": 88,
        "tokens_out": 61,
        "metadata": {"channel": "web"},
    }


class Connection:
    """One keep-alive connection, with as little work of its own as can be: the server is what is measured."""

    def __init__(self, port: int, key: str) -> None:
        self.port = port
        self.head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"

    async def open(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)

    async def post(self, path: str, body: bytes, kind: str = "application/json") -> tuple[int, bytes]:
        head = (
            f"POST {path} HTTP/1.1\r\n{self.head}Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)
        lines = (await self.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        length = next(int(line[15:]) for line in lines if line.lower().startswith(b"content-length:"))
        return int(lines[0][9:12]), await self.reader.readexactly(length)


async def pairs(port: int, key: str, connections: int, seconds: float) -> dict[str, Any]:
    """Decision, rating, decision, rating: on every connection one after the other."""
    latencies: list[float] = []
    faults: list[int] = []
    done = 0

    async def one(number: int, until: float) -> None:
        nonlocal done
        connection = Connection(port, key)
        await connection.open()
        while time.perf_counter() < until:
            number += 1000
            made = decision(number)
            rating = {
                "id": str(uuid.uuid4()),
                "thumb": "up",
                "rater": f"rater-{number % 50}",
                "tags": ["polite"],
            }
            for path, body in (("/api/decisions/", made), (f"/api/decisions/{made['id']}/ratings/", rating)):
                raw = json.dumps(body).encode()
                began = time.perf_counter()
                status, _ = await connection.post(path, raw)
                latencies.append(time.perf_counter() - began)
                if status != 201:
                    faults.append(status)
            done += 1
        connection.writer.close()

    async def phase(length: float) -> float:
        nonlocal done
        latencies.clear()
        done = 0
        began = time.perf_counter()
        await asyncio.gather(*(one(number, began + length) for number in range(connections)))
        return time.perf_counter() - began

    took = await phase(seconds)
    cuts = statistics.quantiles(latencies, n=100)
    return {
        "connections": connections,
        "seconds": round(took, 2),
        "pairs_per_second": round(done / took, 1),
        "writes_per_second": round(2 * done / took, 1),
        "latency_ms": {
            "p50": round(1e3 * cuts[49], 2),
            "p95": round(1e3 * cuts[94], 2),
            "p99": round(1e3 * cuts[98], 2),
        },
        "not_201": faults[:10],
        "writes": 2 * done,
    }


async def bulk(port: int, key: str, connections: int, seconds: float) -> dict[str, Any]:
    """Lists of BULK decisions, their JSON made beforehand."""
    lists = [json.dumps([decision(n * BULK + i) for i in range(BULK)]).encode() for n in range(8)]
    done = 0
    faults: list[int] = []

    async def one(number: int, until: float) -> None:
        nonlocal done
        connection = Connection(port, key)
        await connection.open()
        while time.perf_counter() < until:
            number += connections
            raw = fresh(lists[number % len(lists)])
            status, _ = await connection.post("/api/decisions/", raw)
            done += BULK
            if status != 201:
                faults.append(status)
        connection.writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(one(number, began + seconds) for number in range(connections)))
    took = time.perf_counter() - began
    return {
        "connections": connections,
        "seconds": round(took, 2),
        "decisions_per_second": round(done / took),
        "bytes_per_decision": len(lists[0]) // BULK,
        "writes": done,
        "not_201": faults[:10],
    }


def export(first: int) -> ExportTraceServiceRequest:
    """An export of spans with the GenAI conventions, each about 1 kB."""
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.add(key="service.name").value.string_value = "support-bot"
    spans = resource.scope_spans.add().spans
    for number in range(first, first + SPANS):
        made = decision(number)
        messages = [
            {"role": one["role"], "parts": [{"type": "text", "content": one["content"]}]}
            for one in [*made["messages"], {"role": "assistant", "content": made["response"]}]
        ]
        span = spans.add(name="chat", start_time_unix_nano=10**18, end_time_unix_nano=10**18 + 412_000_000)
        texts = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "openai",
            "gen_ai.request.model": made["policy"],
            "gen_ai.response.model": made["policy"],
            "gen_ai.response.id": f"chatcmpl-{number}",
            "gen_ai.conversation.id": made["unit"],
            "gen_ai.input.messages": json.dumps(messages[:2]),
            "gen_ai.output.messages": json.dumps(messages[2:]),
        }
        for name, text in texts.items():
            span.attributes.add(key=name).value.string_value = text
        for name, count in (("input", made["tokens_in"]), ("output", made["tokens_out"])):
            span.attributes.add(key=f"gen_ai.usage.{name}_tokens").value.int_value = count
    return request


async def otlp(port: int, key: str, connections: int, seconds: float) -> dict[str, Any]:
    """Exports of SPANS spans in protobuf; each is sent under new ids."""
    exports = [export(n * SPANS) for n in range(4)]
    done, size = 0, 0
    faults: list[int] = []

    async def one(number: int, until: float) -> None:
        nonlocal done, size
        connection = Connection(port, key)
        await connection.open()
        request = ExportTraceServiceRequest.FromString(exports[number % len(exports)].SerializeToString())
        while time.perf_counter() < until:
            trace = uuid.uuid4().bytes
            for place, span in enumerate(request.resource_spans[0].scope_spans[0].spans):
                span.trace_id, span.span_id = trace, place.to_bytes(8)
            raw = request.SerializeToString()
            status, answer = await connection.post("/v1/traces", raw, "application/x-protobuf")
            done, size = done + SPANS, len(raw)
            if status != 200 or answer:
                faults.append(status)
        connection.writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(one(number, began + seconds) for number in range(connections)))
    took = time.perf_counter() - began
    return {
        "connections": connections,
        "seconds": round(took, 2),
        "spans_per_second": round(done / took),
        "bytes_per_span": size // SPANS,
        "writes": done,
        "not_200_or_partial": faults[:10],
    }


def cpu_seconds() -> dict[str, float]:
    """CPU time so far of the client, the web server and the database, which share the cores."""
    spent = {"client": sum(psutil.Process().cpu_times()[:2]), "server": 0.0, "database": 0.0}
    for process in psutil.Process().children(recursive=True):
        who = "database" if process.name().startswith("postgres") else "server"
        spent[who] += sum(process.cpu_times()[:2])
    return spent


async def measured(work: Any) -> dict[str, Any]:
    """What `work` measures, with the CPU time spent on it: elsewhere on the machine others may be at work too."""
    before = cpu_seconds()
    figures = await work
    after = cpu_seconds()
    requests = figures.pop("writes")
    figures["cpu_ms_per_write"] = {
        who: round(1e3 * (after[who] - before[who]) / requests, 3) for who in after
    }
    figures["writes_per_second_if_alone"] = round(
        psutil.cpu_count() * requests / sum(after[who] - before[who] for who in after)
    )
    return figures


def fresh(raw: bytes) -> bytes:
    """The same list under new ids, without encoding it again."""
    parts = raw.split(b'{"id": "')
    return parts[0] + b"".join(b'{"id": "' + str(uuid.uuid4()).encode() + part[36:] for part in parts[1:])


def machine() -> dict[str, Any]:
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    import os

    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--connections", type=int, default=50)
    parser.add_argument("--bulk-connections", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=4)
    options = parser.parse_args()
    found = machine()
    with cluster(settings=()) as url, tempfile.TemporaryDirectory(prefix="ratchet-bench-") as home:
        server = Server(url, Path(home), workers=options.workers, threads=options.threads)
        server.migrate()
        key = server.key("ingest", "rate", "rate_as")
        with server:
            asyncio.run(pairs(server.port, key, options.connections, 2.0))  # caches are warm then
            single = asyncio.run(measured(pairs(server.port, key, options.connections, options.seconds)))
            many = asyncio.run(measured(bulk(server.port, key, options.bulk_connections, options.seconds)))
            spans = asyncio.run(measured(otlp(server.port, key, options.bulk_connections, options.seconds)))
    print(
        json.dumps(
            {
                "benchmark": "api_writes",
                "machine": found,
                "server": f"gunicorn, {options.workers} workers x {options.threads} threads",
                "database": "PostgreSQL, commits reach the disk",
                "decision_and_rating": single,
                "bulk_decisions": many,
                "otlp_spans": spans,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
