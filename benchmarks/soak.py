"""Load on every part at once: gateway, ratings, ingest, imports and undo, judging rounds, retrains. Prints JSON.

    python benchmarks/soak.py [--minutes 15] [--postgres]

`serve` runs with its learner on a tiny model; a stub answers as a hosted upstream. Each client sends one request after
the other. It notes the ids of acknowledged rows, and repeats a request that gets 503 or 429, as the client package
does. At the end each acknowledged row must be in the database once, and no row of an undone import. Latencies are in
milliseconds, from the first attempt of a request to its last response.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.crash_loop import QUICK, Loop  # noqa: E402
from tests.support.postgres import cluster  # noqa: E402
from tests.support.server import query  # noqa: E402
from tests.support.stub_openai import ModelServer  # noqa: E402
from tests.support.tiny_models import tiny_model  # noqa: E402

HOSTED = """
from rl.models import Policy, Upstream
row = Upstream.objects.create(name="stub", url="http://127.0.0.1:{port}/v1", model="m-1", price_in=1.0, price_out=2.0)
Policy.objects.create(
    name="helper-hosted", agent="helper", kind="hosted", stage="champion", upstream=row, base_model="m-1"
)
"""
RETRY = (503, 429)


class Soak:
    """Clients in threads. Counts their responses and remembers the acknowledged rows."""

    def __init__(self, loop: Loop, seconds: float) -> None:
        self.loop, self.ends = loop, time.monotonic() + seconds
        self.taken: dict[str, list[float]] = defaultdict(list)
        self.tries: Counter[str] = Counter()
        """Kind and status of every answer."""
        self.kept: dict[str, set[str]] = defaultdict(set)
        """Table -> ids that were acknowledged."""
        self.undone: set[str] = set()
        """Ids of decisions whose import was undone."""
        self.faults: list[str] = []
        self.memory: list[int] = []

    @property
    def on(self) -> bool:
        return time.monotonic() < self.ends and not self.faults

    def send(self, kind: str, path: str, body: dict[str, Any] | list[dict[str, Any]]) -> Any:
        """The answer's JSON; a 503 or 429 is sent again, anything else beyond 300 is a fault."""
        headers, began = {"Authorization": f"Bearer {self.loop.key}"}, time.monotonic()
        while True:
            try:
                answer = httpx.post(
                    f"{self.loop.server.address}{path}", json=body, headers=headers, timeout=120
                )
            except httpx.HTTPError as error:
                self.faults.append(f"{kind}: {error!r}")
                return {}
            self.tries[f"{kind} {answer.status_code}"] += 1
            if answer.status_code not in RETRY or time.monotonic() - began > 300:
                break
            time.sleep(min(float(answer.headers.get("Retry-After", "1")), 5.0))
        self.taken[kind].append(1e3 * (time.monotonic() - began))
        if answer.status_code >= 300:
            self.faults.append(f"{kind}: {answer.status_code} {answer.text[:300]}")
            return {}
        return answer.json()

    def rate(self, decision: str) -> None:
        rating = str(uuid.uuid4())
        if self.send("rating", f"/api/decisions/{decision}/ratings/", {"id": rating, "thumb": "up"}):
            self.kept["feedback_rating"].add(rating)

    def ask(self) -> None:
        """A hosted answer, rated at once."""
        turns = [{"role": "user", "content": f"Where is order {uuid.uuid4()}?"}]
        if answer := self.send("gateway", "/v1/chat/completions", {"model": "helper", "messages": turns}):
            decision = answer["id"].removeprefix("chatcmpl-")
            self.kept["feedback_decision"].add(decision)
            self.rate(decision)

    def ingest(self) -> None:
        rows = [
            {
                "id": str(uuid.uuid4()),
                "agent": "notes",
                "messages": f"note {uuid.uuid4()}",
                "response": "kept",
            }
            for _ in range(100)
        ]
        if self.send("ingest of 100", "/api/decisions/", rows):
            self.kept["feedback_decision"] |= {row["id"] for row in rows}

    def transfer(self) -> None:
        """An import of 200 rows; every second one is taken back."""
        ids = [str(uuid.uuid4()) for _ in range(200)]
        rows = [
            {
                "type": "decision",
                "id": one,
                "agent": "old",
                "messages": [{"role": "user", "content": one}],
                "response": "x",
            }
            for one in ids
        ]
        content = "\n".join(map(json.dumps, rows))
        made = self.send(
            "import of 200", "/api/imports/", {"name": "old.jsonl", "agent": "old", "content": content}
        )
        if not made:
            return
        if made["batch"] % 2:
            self.kept["feedback_decision"] |= set(ids)
        elif self.send("undo", f"/api/imports/{made['batch']}/undo/", {}):
            self.undone |= set(ids)

    def learn(self) -> None:
        """Ratings enough for a retrain, then its end; a judging round of its policy."""
        self.loop.rate(60)
        self.kept["feedback_rating"] |= set(self.loop.sent)
        while self.on and not self.loop.learnt():
            time.sleep(1)
        found = query(
            self.loop.server, "SELECT name FROM rl_policy WHERE kind <> 'recorded' AND stage = 'candidate'"
        )
        if self.on and found:
            self.judge(str(found[-1][0]))

    def judge(self, policy: str) -> None:
        headers = {"Authorization": f"Bearer {self.loop.key}"}
        begun = httpx.post(
            f"{self.loop.server.address}/api/judging-rounds/",
            json={"policy": policy},
            headers=headers,
            timeout=120,
        )
        self.tries[f"judging round {begun.status_code}"] += 1
        if begun.status_code != 202:
            return
        address = f"{self.loop.server.address}/api/judging-rounds/{begun.json()['id']}/pairs/"
        for _ in range(60):
            shown = httpx.get(address, headers=headers, timeout=120)
            self.tries[f"judging pair {shown.status_code}"] += 1
            pair = shown.json()["pair"] if shown.status_code == 200 else None
            if not self.on:
                return
            if pair is None:  # none is generated yet, or all are judged
                time.sleep(1)
                continue
            path = address.removeprefix(self.loop.server.address)
            self.send("judgement", path, {"pair": pair, "preference": "left"})

    def watch(self) -> None:
        assert self.loop.process is not None
        family = [
            psutil.Process(self.loop.process.pid),
            *psutil.Process(self.loop.process.pid).children(recursive=True),
        ]
        total = 0
        for one in family:
            try:
                total += one.memory_info().rss if "run_pipeline" not in one.cmdline() else 0
            except psutil.NoSuchProcess:
                continue
        self.memory.append(round(total / 1e6))
        time.sleep(5)

    def run(self) -> None:
        def again(work: Callable[[], None]) -> None:
            while self.on:
                try:
                    work()
                except Exception as error:
                    self.faults.append(f"{work.__name__}: {error!r}"[:500])

        works = [self.ask, self.ask, self.ask, self.ingest, self.transfer, self.learn, self.watch]
        threads = [threading.Thread(target=again, args=[work]) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def report(self) -> dict[str, Any]:
        for table, ids in self.kept.items():
            rows = Counter(
                str(uuid.UUID(str(row[0]))) for row in query(self.loop.server, f"SELECT id FROM {table}")
            )
            found = {
                "lost": ids - set(rows),
                "doubled": {one for one, count in rows.items() if count > 1},
                "undone and still there": self.undone & set(rows) if table == "feedback_decision" else set(),
            }
            self.faults += [f"{table}: {len(some)} {words}" for words, some in found.items() if some]
        runs = query(self.loop.server, "SELECT status, count(*) FROM rl_trainingrun GROUP BY status")
        return {
            "faults": self.faults[:20],
            "acknowledged": {table: len(ids) for table, ids in self.kept.items()},
            "answers": dict(sorted(self.tries.items())),
            "runs": dict(runs),
            "ms": {
                kind: {
                    "p50": round(statistics.median(found)),
                    "p99": round(sorted(found)[int(0.99 * len(found))]),
                }
                for kind, found in sorted(self.taken.items())
            },
            "memory_mb": {
                "first": round(self.memory[0]),
                "last": round(self.memory[-1]),
                "most": round(max(self.memory)),
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument(
        "--postgres", action="store_true", help="On a PostgreSQL of its own, in place of SQLite"
    )
    options = parser.parse_args()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ratchet-soak-")))
        url = stack.enter_context(cluster(settings=())) if options.postgres else ""
        model = tiny_model(home / "tiny")
        (data := home / "data").mkdir()
        loop = Loop(data, model, url, config=QUICK)
        stub = ModelServer()
        loop.server.manage("shell", "--no-imports", "-c", HOSTED.format(port=stub.port))
        with loop:
            loop.status()
            soak = Soak(loop, 60 * options.minutes)
            soak.run()
            time.sleep(10)  # the outbox empties
            found = soak.report()
    print(json.dumps({"database": "PostgreSQL" if options.postgres else "SQLite", **found}, indent=2))
    if found["faults"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
