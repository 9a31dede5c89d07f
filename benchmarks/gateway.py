"""What the gateway adds to a model server's answer: recording on, gunicorn and PostgreSQL on this machine.

    python benchmarks/gateway.py [--seconds 10] [--connections 50] [--workers 2] [--threads 256] [--delay-ms 50]
                                 [--rates 100,200,400] [--upstream [--burst 100] [--burst-delay-ms 3000]] [--first]
                                 [--shadow 5] [--vllm URL --base FOLDER [--adapters 1,64]]

A stub answers every request after --delay-ms. First it is asked directly, then through the gateway, by one client
process over keep-alive connections: at fixed rates (requests begin on schedule, spread over the connections, and are
timed from that schedule) and in a closed loop (every connection asks again as soon as it has its answer, which is as
fast as client, stub, gateway and database together go on the same cores). Prints one JSON object with the added
milliseconds at the median and the 99th percentile.

With --upstream the stub is the upstream of a hosted champion, with prices. Then --burst requests are sent at once to a
second upstream that takes --burst-delay-ms, while /healthz and two pages are read ten times a second.

With --shadow N a second hosted policy stands in the shadow of the champion. At the first rate the gateway is measured N
times without and N times with a worker that answers the shadows, in turns.

With --vllm a server of the model in --base is asked, which was started with room for the adapters:

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve FOLDER --enable-lora --max-loras 64 --max-cpu-loras 130

So many agents as --adapters says have a champion each, an adapter of random weights and rank 8, and the connections
take turns with them: closed loops alone, on SQLite, of answers of 64 tokens at most.

With --first client, stubs, server and PostgreSQL go before everything else on this machine (Linux, as root): what else
runs there disturbs the figures less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from tests.support.postgres import cluster  # noqa: E402
from tests.support.server import Server, free_port  # noqa: E402

TOKENS = 64
PROMPT = "You answer customers of a shop in one short paragraph, politely, and never promise a date."


async def stub(port: int, delay_s: float) -> None:
    """A model server with as little work of its own as can be."""
    said = {
        "id": "stub",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "I am sorry. Let me look into it. " * 5},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 60, "completion_tokens": 45, "total_tokens": 105},
    }
    raw = json.dumps(said).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    names = json.dumps({"data": [{"id": "bundled"}]}).encode()
    listed = head.replace(str(len(raw)).encode(), str(len(names)).encode()) + names

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
                if lines[0].startswith(b"get "):
                    writer.write(listed)
                    continue
                length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
                await reader.readexactly(length)
                await asyncio.sleep(delay_s)
                writer.write(head + raw)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port, backlog=256)
    await server.serve_forever()


class Connection:
    """One keep-alive connection to whoever speaks chat completions."""

    def __init__(self, port: int, key: str, model: str = "support-bot") -> None:
        self.port, self.model, self.tokens = port, model, 0
        self.head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"

    async def open(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**20)

    async def ask(self, number: int) -> int:
        """The status."""
        messages = [
            {"role": "system", "content": PROMPT},
            {"role": "user", "content": f"Order {number} has not arrived. What can I do about it? " * 3},
        ]
        body = json.dumps(
            {
                "model": self.model,
                "messages": messages,
                "user": f"user-{number % 5000}",
                "max_tokens": TOKENS,
            }
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\n{self.head}Content-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        lines = (await self.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        length = next(int(line[15:]) for line in lines if line.lower().startswith(b"content-length:"))
        said = json.loads(await self.reader.readexactly(length))
        self.tokens += (said.get("usage") or {}).get("completion_tokens", 0)
        return int(lines[0][9:12])


async def measured(
    port: int,
    key: str,
    connections: int,
    seconds: float,
    rate: float | None,
    models: Sequence[str] = ("support-bot",),
) -> dict[str, Any]:
    """Latencies of one way, in milliseconds. rate: requests a second; None: a closed loop.

    models: the connections take turns with them.
    """
    latencies: list[float] = []
    tokens = 0
    faults: list[int] = []
    began = time.perf_counter() + 0.2
    total = round(rate * seconds) if rate else 0

    async def one(place: int) -> None:
        nonlocal tokens
        connection = Connection(port, key, models[place % len(models)])
        await connection.open()
        await asyncio.sleep(began - time.perf_counter())
        number = place
        while time.perf_counter() - began < seconds if rate is None else number < total:
            due = began + number / rate if rate else time.perf_counter()
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
                # the client's own oversleeping is no delay of the server's
                due = max(due, time.perf_counter())
            if (status := await connection.ask(number)) != 200:
                faults.append(status)
            latencies.append(1e3 * (time.perf_counter() - due))
            number += connections
        tokens += connection.tokens
        connection.writer.close()

    await asyncio.gather(*(one(place) for place in range(connections)))
    took = time.perf_counter() - began
    cuts = statistics.quantiles(latencies, n=100)
    return {
        "requests_per_second": round(len(latencies) / took, 1),
        "tokens_per_second": round(tokens / took),
        "p50_ms": round(cuts[49], 2),
        "p99_ms": round(cuts[98], 2),
        "not_200": faults[:10],
    }


def added(direct: dict[str, Any], through: dict[str, Any]) -> dict[str, Any]:
    return {
        "direct": direct,
        "gateway": through,
        "added_p50_ms": round(through["p50_ms"] - direct["p50_ms"], 2),
        "added_p99_ms": round(through["p99_ms"] - direct["p99_ms"], 2),
    }


HOSTED = """
from rl.models import Policy, Upstream
for agent, port in (("support-bot", {port}), ("slow-bot", {slow})):
    row = Upstream.objects.create(
        name=agent, url=f"http://127.0.0.1:{{port}}/v1", model="m-1", price_in=1.0, price_out=2.0
    )
    Policy.objects.create(
        name=f"{{agent}}-hosted", agent=agent, kind="hosted", stage="champion", upstream=row, base_model="m-1"
    )
"""
"""What is run in the server's shell: two agents with a hosted champion each."""


SHADOW = """
from rl.experiments.traffic import experiment_draft, experiment_start
from rl.models import Policy
champion = Policy.objects.get(name="support-bot-hosted")
Policy.objects.create(
    name="support-bot-own", agent="support-bot", kind="hosted", stage="candidate", upstream=champion.upstream,
    base_model="m-1",
)
experiment_start(
    experiment_draft("try", ["support-bot-own"], agent="support-bot", actor="benchmark", shadow=100), actor="benchmark"
)
"""


ASKING = """
from rl.experiments.traffic import experiment_get
from rl.serving import shadow
shadow.LOAD = 1e9  # this benchmark keeps the machine busy itself
shadow.process_idle()
while True:
    shadow.shadow_turn(experiment_get("try"))
"""
"""What `experiment shadow` runs, for ever, on a machine that is never too busy."""


SESSION = """
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.models import User
from django.contrib.sessions.backends.db import SessionStore
user = User.objects.create_superuser("ada")
session = SessionStore()
session[SESSION_KEY] = str(user.pk)
session[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
session[HASH_SESSION_KEY] = user.get_session_auth_hash()
session.create()
print(session.session_key)
"""
"""What is run in the server's shell: the session of a signed-in person."""


async def page_s(port: int, path: str, cookie: str) -> float:
    """Seconds until a page was read whole, over a connection of its own."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = (
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nCookie: sessionid={cookie}\r\n\r\n"
    )
    writer.write(head.encode())
    raw = await reader.read(-1)
    writer.close()
    assert raw[9:12] == b"200", raw[:200]
    return time.perf_counter() - began


async def burst(port: int, key: str, cookie: str, count: int) -> dict[str, Any]:
    """Seconds of so many answers asked for at once, and of pages read meanwhile."""
    pages: dict[str, list[float]] = {"/healthz": [], "/decisions/": [], "/start/": []}
    over = asyncio.Event()

    async def look(path: str) -> None:
        while not over.is_set():
            pages[path].append(await page_s(port, path, cookie))
            await asyncio.sleep(0.1)

    async def one(number: int) -> float:
        connection = Connection(port, key, "slow-bot")
        await connection.open()
        began = time.perf_counter()
        status = await connection.ask(number)
        assert status == 200, status
        connection.writer.close()
        return time.perf_counter() - began

    looking = [asyncio.create_task(look(path)) for path in pages]
    await asyncio.sleep(1)
    seconds = sorted(await asyncio.gather(*(one(number) for number in range(count))))
    over.set()
    await asyncio.gather(*looking)
    return {
        "answers": len(seconds),
        "answer_median_s": round(statistics.median(seconds), 2),
        "answer_slowest_s": round(seconds[-1], 2),
        **{f"{path} slowest_s": round(max(found), 3) for path, found in pages.items()},
    }


def shadowed(server: Server, key: str, options: argparse.Namespace, rate: float) -> dict[str, Any]:
    """Median milliseconds through the gateway while a worker that answers shadows is held, and while it asks, in
    turns."""
    server.manage("shell", "-v", "0", "-c", SHADOW)
    worker = subprocess.Popen(
        [sys.executable, str(ROOT / "manage.py"), "shell", "-v", "0", "-c", ASKING],
        env=server.environment, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    time.sleep(10)  # it has loaded then
    p50: dict[signal.Signals, list[float]] = {signal.SIGSTOP: [], signal.SIGCONT: []}
    for turn in range(2 * options.shadow):
        told = list(p50)[turn % 2]
        worker.send_signal(told)
        found = asyncio.run(measured(server.port, key, options.connections, options.seconds, rate))
        p50[told].append(found["p50_ms"])
    worker.kill()
    worker.wait()
    answers = "from feedback.models import Decision; print(Decision.objects.filter(source='shadow').count())"
    held, asking = (statistics.median(found) for found in p50.values())
    return {
        "requests_per_second": rate,
        "p50_ms_without": round(held, 2),
        "p50_ms_with": round(asking, 2),
        "added_p50_ms": round(asking - held, 2),
        "shadow_answers": int(server.manage("shell", "-v", "0", "-c", answers).split()[-1]),
    }


PUBLISHED = """
from pathlib import Path
from django.conf import settings
from rl.checksums import file_sum
from rl.models import Policy
from rl.serving.publication import reconcile
for number in range({count}):
    name = f"bench{{number}}-v1"
    weights = Path(settings.RATCHET_HOME, "policies", name, "adapter_model.safetensors")
    Policy.objects.get_or_create(
        name=name, agent=f"bench{{number}}", stage="champion", base_model="{base}", base_model_hash="0",
        adapter_path=f"policies/{{name}}", adapter_sha256=file_sum(weights),
    )
print(len(reconcile()), "published")
"""
"""What is run in the server's shell: so many agents with an adapter as champion each, loaded into vLLM and proved."""


def adapters_made(base: Path, folder: Path, count: int) -> None:
    """Adapters of random weights, as a training leaves them."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.support.tiny_models import tiny_adapter

    first = tiny_adapter(base, folder / "bench0-v1")
    weights = load_file(first / "adapter_model.safetensors")
    for number in range(1, count):
        there = folder / f"bench{number}-v1"
        shutil.copytree(first, there)
        fresh = {name: weight.std() * torch.randn_like(weight) for name, weight in weights.items()}
        save_file(fresh, there / "adapter_model.safetensors", metadata={"format": "pt"})


def adapters_measured(options: argparse.Namespace) -> dict[str, Any]:
    """Closed loops over so many adapters of a vLLM server: asked directly, and through the gateway."""
    counts = [int(count) for count in options.adapters.split(",")]
    port = urlsplit(options.vllm).port or 80
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as home:
        server = Server(
            f"sqlite:///{home}/db.sqlite3", Path(home), workers=options.workers, threads=options.threads
        )
        server.environment["GATEWAY_NEW_AGENTS"] = ",".join(f"bench{number}" for number in range(max(counts)))
        server.environment["LOCAL_BACKENDS"] = options.vllm
        server.migrate()
        adapters_made(options.base, Path(home, "policies"), max(counts))
        key = server.key("ingest", "read")
        began = time.perf_counter()
        said = server.manage("shell", "-v", "0", "-c", PUBLISHED.format(count=max(counts), base=options.base))
        published = {"adapters": int(said.split()[-2]), "seconds": round(time.perf_counter() - began, 1)}
        with server:
            for count in counts:
                ways = {
                    "direct": (port, [f"bench{number}-v1" for number in range(count)]),
                    "gateway": (server.port, [f"bench{number}" for number in range(count)]),
                }
                rows = {}
                for way, (at, models) in ways.items():
                    for seconds in (2.0, options.seconds):  # the first warms up
                        rows[way] = asyncio.run(measured(at, key, options.connections, seconds, None, models))
                found[f"{count}_adapters"] = added(rows["direct"], rows["gateway"])
    return {"connections": options.connections, "workers": options.workers, "published": published, **found}


def cpu_seconds(process: psutil.Process) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in [process, *process.children(recursive=True)])


def favour() -> None:
    """Let the scheduler prefer this process and its children; each session of processes has a priority of its own."""
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        Path(f"/proc/{process.pid}/autogroup").write_text("-15")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--connections", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=256)
    parser.add_argument("--delay-ms", type=float, default=50.0)
    parser.add_argument("--rates", default="100,200,400")
    parser.add_argument("--upstream", action="store_true")
    parser.add_argument("--burst", type=int, default=100)
    parser.add_argument("--burst-delay-ms", type=float, default=3000.0)
    parser.add_argument("--shadow", type=int, default=0, help="turns with and without a shadow")
    parser.add_argument("--vllm", help="address of a vLLM server, with /v1")
    parser.add_argument("--base", type=Path, help="folder of its model")
    parser.add_argument("--adapters", default="1,64", help="agents with an adapter each")
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--stub", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.upstream |= bool(options.shadow)
    if options.stub:
        asyncio.run(stub(options.stub, options.delay_ms / 1e3))
        return
    if options.vllm:
        print(json.dumps({"benchmark": "gateway", "vllm": adapters_measured(options)}, indent=2))
        return
    port, slow = free_port(), free_port()
    models = [
        subprocess.Popen([sys.executable, __file__, "--stub", str(at), "--delay-ms", str(delay_ms)])
        for at, delay_ms in ((port, options.delay_ms), (slow, options.burst_delay_ms))
    ]
    found: dict[str, Any] = {}
    try:
        with cluster(settings=()) as url, tempfile.TemporaryDirectory(prefix="ratchet-bench-") as home:
            server = Server(url, Path(home), workers=options.workers, threads=options.threads)
            server.environment["GATEWAY_NEW_AGENTS"] = "support-bot"
            if not options.upstream:
                server.environment["LOCAL_BACKENDS"] = f"http://127.0.0.1:{port}/v1"
            server.migrate()
            if options.upstream:
                server.manage("shell", "-v", "0", "-c", HOSTED.format(port=port, slow=slow))
                cookie = server.manage("shell", "-v", "0", "-c", SESSION).split()[-1]
            key = server.key("ingest", "read")
            with server:
                asyncio.run(
                    measured(server.port, key, options.connections, 2.0, None)
                )  # caches are warm then
                if options.first:
                    favour()
                rates = [float(rate) for rate in options.rates.split(",") if rate]
                if options.shadow:
                    found["shadow"] = shadowed(server, key, options, rates[0])
                for rate in [] if options.shadow else [*rates, None]:
                    direct = asyncio.run(measured(port, key, options.connections, options.seconds, rate))
                    assert server._process is not None
                    gateway = psutil.Process(server._process.pid)
                    before = cpu_seconds(gateway)
                    through = asyncio.run(
                        measured(server.port, key, options.connections, options.seconds, rate)
                    )
                    spent = cpu_seconds(gateway) - before
                    requests = through["requests_per_second"] * options.seconds
                    through["cpu_ms_per_request"] = round(1e3 * spent / requests, 2)
                    found["closed_loop" if rate is None else f"{rate:g}_per_second"] = added(direct, through)
                if options.upstream and not options.shadow:
                    before = cpu_seconds(gateway)
                    found["burst"] = asyncio.run(burst(server.port, key, cookie, options.burst))
                    found["burst"]["gateway_cpu_s"] = round(cpu_seconds(gateway) - before, 2)
                time.sleep(1)
            recorded = server.manage(
                "shell",
                "-v",
                "0",
                "-c",
                "from feedback.models import Decision; print(Decision.objects.count())",
            )
    finally:
        for model in models:
            model.kill()
    print(
        json.dumps(
            {
                "benchmark": "gateway",
                "machine": {
                    "cores": len(os.sched_getaffinity(0)),
                    "load": os.getloadavg()[0],
                    "python": platform.python_version(),
                },
                "server": f"gunicorn, {options.workers} workers x {options.threads} threads",
                "database": "PostgreSQL, commits reach the disk",
                "connections": options.connections,
                "stub_ms": options.delay_ms,
                "goes_first": options.first,
                **found,
                "decisions_recorded": int(recorded.split()[-1]),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
