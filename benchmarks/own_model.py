"""From a hosted model to an own one, end to end: is it as good, how much does it take over, is the ledger right?

    python benchmarks/own_model.py [--model smollm2] [--tasks shop,groups,replies] [--recorded 2000] [--rated 150]
                                   [--judged 150] [--explored 350] [--traffic 300] [--minutes 20] [--wrong 0.05]
                                   [--loss 0.05] [--incumbent FILE.gguf] [--data DIR] [--home DIR] [--seed 0] [--json]

Each task of `real_tasks.py` is an agent of an empty installation. A provider on a port of its own answers it, wrong in
--wrong of the prompts, and counts its tokens; with --incumbent, llama-cpp-python's own server answers with that model.
The walk uses the product's commands and REST alone: answers are recorded through the gateway, some are rated, `distil`
trains, the gate asks whether a loss of --loss is ruled out. If it stays closed, both models answer --explored new
prompts, people judge pairs, and the own model answers where it is sure. Then the users' --traffic comes.

Prints per task the share answered locally, then the true quality in % of what the users got, of the own model's answers
among them, and of the provider for the same prompts. Beside stand what the ledger says was paid and what the provider
counted, in US dollars.
A walk in --home is taken up where it was left.
"""

from __future__ import annotations

import argparse
import csv
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from real_models import added  # noqa: E402
from real_tasks import TASKS, Item, Task  # noqa: E402

from tests.support.server import Server, free_port  # noqa: E402

PRICE_IN, PRICE_OUT = 2.5, 10.0
"""US dollars per million tokens."""
RATERS = ("ada", "ben", "carla")
TAUGHT = 0.5
"""Share of the wrong answers that people correct; the others get a thumb down."""


class Provider:
    """An endpoint that counts what it takes for its answers: the rows of `answers`, or those of another server."""

    def __init__(self, answers: dict[str, str], count: dict[str, int], port: int, behind: str) -> None:
        self.answers, self.count, self.behind = answers, count, behind
        lock = threading.Lock()
        provider = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                body = json.loads(raw)
                found = provider.completion(body)
                with lock:
                    for name in ("prompt_tokens", "completion_tokens"):
                        count[name] = count.get(name, 0) + found["usage"][name]
                data = json.dumps(found).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{port}/v1"
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        """A chat completion; of an answer by rule, about four characters are a token."""
        if self.behind:
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(
                f"{self.behind}/chat/completions", json.dumps(body).encode(), headers
            )
            with urllib.request.urlopen(request, timeout=300) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        said = self.answers[body["messages"][-1]["content"]]
        prompt_tokens, tokens = len(str(body["messages"])) // 4, max(1, len(said) // 4)
        message = {"role": "assistant", "content": said}
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "model": "incumbent",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": tokens,
                "total_tokens": prompt_tokens + tokens,
            },
        }

    def answer(self, prompt: Sequence[dict[str, str]]) -> str:
        """What it would say, uncounted."""
        found = self.completion({"model": "incumbent", "messages": prompt})
        return str(found["choices"][0]["message"]["content"])

    @property
    def bill(self) -> float:
        """US dollars for everything that was asked."""
        return (self.count["prompt_tokens"] * PRICE_IN + self.count["completion_tokens"] * PRICE_OUT) / 1e6


@contextmanager
def model_server(model: str) -> Iterator[str]:
    """The address of llama-cpp-python's own server with a GGUF file; empty without one."""
    if not model:
        yield ""
        return
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "llama_cpp.server",
        "--model",
        model,
        "--n_ctx",
        "1024",
        "--n_threads",
        "1",
    ]
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while process.poll() is None:
            try:
                http.client.HTTPConnection("127.0.0.1", port).connect()
                break
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


class Walk:
    """One agent's way. What is done is kept in a file, so that it is not done again."""

    def __init__(self, task: Task, given: argparse.Namespace, home: Path, base: str, behind: str) -> None:
        self.task, self.given, self.base, self.agent = task, given, base, task.name
        self.random = Random(given.seed + 1)
        self.items = {item.prompt[-1]["content"]: item for item in task.known}
        wrong = {text for text in self.items if self.random.random() < given.wrong}
        answers = {text: item.wrong if text in wrong else item.right for text, item in self.items.items()}
        self._file = home / "walk.json"
        self.done: dict[str, Any] = {"count": {}, "port": free_port()}
        if self._file.exists():
            self.done = json.loads(self._file.read_text())
        self.provider = Provider(answers, self.done["count"], self.done["port"], behind)
        self.server = Server(f"sqlite:///{home / 'db.sqlite3'}", home, workers=1)
        self.server.environment |= {"HF_HUB_OFFLINE": "1", "PROVIDER_KEY": "x"}
        if threads := os.environ.get("OMP_NUM_THREADS"):
            self.server.environment["OMP_NUM_THREADS"] = threads

    def once(self, name: str, step: Callable[[], Any]) -> Any:
        """What a step gave, now or in an earlier walk."""
        if name not in self.done:
            began = time.monotonic()
            self.done[name] = step()
            self._file.write_text(json.dumps(self.done))
            print(f"{self.agent}: {name} took {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return self.done[name]

    # --- The product's own interfaces -------------------------------------------------------------------------

    def manage(self, *words: str) -> Any:
        """What a command prints with --json."""
        return json.loads(self.server.manage(*words, "--json"))

    def settings(self, model: str, **values: object) -> None:
        """Change an agent's settings as the admin does, and wait until they count."""
        lines = (
            f"from rl.models import {model}",
            f"row = {model}.objects.get_or_create(agent={self.agent!r})[0]",
            f"vars(row).update({values!r})",
            "row.full_clean()",
            "row.save()",
        )
        self.server.manage("shell", "--no-imports", "-c", "\n".join(lines))
        time.sleep(6)

    def status(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=300)
        headers = {"Authorization": f"Bearer {self.done['key']}", "Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """A request's answer, asked for again while the server is busy, as OpenAI's clients do."""
        status, found = self.status(method, path, body)
        while status == 503:
            time.sleep(2)
            status, found = self.status(method, path, body)
        assert status < 300, (path, status, found)
        return found

    def asked(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        """Users ask; per item the decision, the policy that answered, and its answer."""

        def one(place: int) -> dict[str, Any]:
            prompt = items[place].prompt
            customer = f"customer-{zlib.crc32(prompt[-1]['content'].encode())}"
            body = {"model": self.agent, "messages": prompt, "user": customer}
            found = self.call("POST", "/v1/chat/completions", body)
            assert found["ratchet"]["recorded"], found
            text = found["choices"][0]["message"]["content"]
            return {"id": found["id"], "policy": found["ratchet"]["policy"], "text": text}

        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(one, range(len(items))))

    # --- The stations -----------------------------------------------------------------------------------------

    def walk(self) -> dict[str, Any]:
        given, known = self.given, self.task.known
        ends = (
            given.recorded,
            given.recorded + given.explored,
            given.recorded + given.explored + given.traffic,
        )
        recorded, explored, traffic = known[: ends[0]], known[ends[0] : ends[1]], known[ends[1] : ends[2]]
        assert len(traffic) == given.traffic, f"{self.agent} has {len(known):,} items alone"
        self.server.migrate()
        self.once("key", lambda: self.server.key("ingest", "rate", "rate_as", "read", "operate"))
        with self.server:
            self.once("upstream", self._connect)
            found = self.once("recorded", lambda: self.asked(recorded))
            self.once("rated", lambda: self._rate(recorded, found))
            report = self.once("distil", self._distil)
            if report["stage"] != "champion":
                self.once("explored", lambda: self._explore(report["policy"], explored))
                self.once("judged", lambda: self._judge(report["policy"]))
                self.once("promoted", lambda: self._promoted(report["policy"]))
                self.once("route", self._route)
            got = self.once("traffic", lambda: self.asked(traffic))
            ledger = self.once("ledger", self._ledger)
        provider = [self.provider.answer(item.prompt) for item in traffic]
        own = [
            (item, one["text"])
            for item, one in zip(traffic, got, strict=True)
            if one["policy"] == report["policy"]
        ]
        return {
            "stage": "champion" if self.done.get("promoted") else report["stage"],
            "minutes": report["minutes"],
            "gate": report["why"]["words"],
            "route": self.done.get("route", ""),
            "local": len(own) / len(got),
            "users": self._quality(traffic, [one["text"] for one in got]),
            "own": self._quality(*zip(*own, strict=True)) if own else None,
            "provider": self._quality(traffic, provider),
            "ledger": ledger,
            "bill": self.provider.bill,
        }

    def _connect(self) -> Any:
        prices = ("--price-in", f"{PRICE_IN:g}", "--price-out", f"{PRICE_OUT:g}")
        address = ("--url", self.provider.url, "--model", "incumbent", "--key-env", "PROVIDER_KEY")
        self.manage("agent", "set", self.agent, "--base-model", self.base)
        self.settings("GateSettings", not_inferior=self.given.loss)
        return self.manage("upstream", "add", "provider", *address, *prices, "--agent", self.agent)

    def _rate(self, items: Sequence[Item], found: Sequence[dict[str, Any]]) -> int:
        """People look at some answers: a thumb, or what a wrong one should have been."""
        for number, place in enumerate(self.random.sample(range(len(items)), self.given.rated)):
            item, one = items[place], found[place]
            body = {"thumb": "up" if self.task.is_right(item, one["text"]) else "down"}
            if body["thumb"] == "down" and self.random.random() < TAUGHT:
                body["correction"] = item.right
            body["rater"] = RATERS[number % len(RATERS)]
            self.call("POST", f"/api/decisions/{one['id']}/ratings/", body)
        return self.given.rated

    def _distil(self) -> Any:
        began = time.monotonic()
        words = ("--agent", self.agent, "--method", "distil", "--minutes", f"{self.given.minutes:g}")
        report = self.manage("run_pipeline", *words)
        return report | {"minutes": (time.monotonic() - began) / 60}

    def _explore(self, policy: str, items: Sequence[Item]) -> int:
        """Both models answer; users get the provider's answers. The own model's file is made at the first question."""
        while (
            self.status("POST", "/v1/chat/completions", {"model": policy, "messages": items[0].prompt})[0]
            == 503
        ):
            time.sleep(5)
        self.settings("ServingSettings", route_policy=policy, route_loss=self.given.loss, route_explore=1.0)
        return len(self.asked(items))

    def _judge(self, policy: str) -> Any:
        """People compare answers of both until they have judged enough, or the round has its verdict."""
        words = ("--policy", policy, "--prompts", str(min(self.given.explored, 800)))
        number = self.once("round", lambda: self.manage("judging_round", "create", *words)["id"])
        for _ in range(self.given.judged):
            pair = self.call("GET", f"/api/judging-rounds/{number}/pairs/")
            if pair["pair"] is None:
                break
            item = self.items[pair["messages"][-1]["content"]]
            left, right = (self.task.is_right(item, pair[side]) for side in ("left", "right"))
            preference = ("left" if left else "right") if left != right else "tie" if left else "both_bad"
            body = {"pair": pair["pair"], "preference": preference}
            self.call("POST", f"/api/judging-rounds/{number}/pairs/", body)
        found = self.manage("judging_round", "show", str(number))
        if found["status"] == "running":
            found = self.manage("judging_round", "stop", str(number), "--reason", "enough")
        return found

    def _promoted(self, policy: str) -> bool:
        """The gate opens where people found it not worse."""
        try:
            self.manage("policy", "promote", policy, "--to", "champion")
        except AssertionError as refusal:
            print(f"{self.agent}: {str(refusal).strip()[:300]}", file=sys.stderr, flush=True)
            return False
        return True

    def _route(self) -> str:
        """The scheduler sets the threshold from the judgements."""
        self.settings("ServingSettings", route_explore=0.02)
        done = self.manage("online_learner", "tick")["done"]
        time.sleep(6)
        return "; ".join(line for line in done if self.agent in line)

    def _ledger(self) -> dict[str, str]:
        """The ledger's only month."""
        text = self.server.manage("shell", "--no-imports", "-c", LEDGER)
        (row,) = csv.DictReader(text.splitlines())
        return row

    def _quality(self, items: Sequence[Item], texts: Sequence[str]) -> float:
        right = [self.task.is_right(item, text) for item, text in zip(items, texts, strict=True)]
        return statistics.fmean(right)


LEDGER = "from rl.savings import ledger, ledger_csv; print(ledger_csv(ledger()))"
"""Script that prints the ledger as /savings/ gives it for download."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="As `model add` takes it")
    parser.add_argument("--tasks", default="shop,groups,replies")
    parser.add_argument("--recorded", type=int, default=2_000, help="Answers of the provider to learn from")
    parser.add_argument("--rated", type=int, default=150, help="Of these, answers that people rate")
    parser.add_argument("--judged", type=int, default=150, help="Pairs that people judge")
    parser.add_argument("--explored", type=int, default=350, help="New prompts that both models answer")
    parser.add_argument("--traffic", type=int, default=300, help="New prompts to measure by")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--wrong", type=float, default=0.05, help="Share of the provider's answers")
    parser.add_argument("--loss", type=float, default=0.05, help="Share of answers that may become worse")
    parser.add_argument("--incumbent", default="", help="GGUF file that answers in the provider's place")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "ratchet-data")
    parser.add_argument("--home", type=Path, help="Folder of the installations, which are kept")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    tables: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, model_server(given.incumbent) as behind:
        home = given.home or Path(folder)
        base = added(given.model, home)
        for name in given.tasks.split(","):
            needed = given.recorded + given.explored + given.traffic
            task = TASKS[name](given.data, Random(given.seed), needed)
            (home / name).mkdir(parents=True, exist_ok=True)
            tables[name] = Walk(task, given, home / name, base, behind).walk()
            print(json.dumps({name: tables[name]}), file=sys.stderr, flush=True)
    if given.json:
        print(json.dumps(tables))
        return
    print("| agent | minutes | stage | local | right: users got | own | provider | paid, USD | its count |")
    print("| --- | --: | --- | --: | --: | --: | --: | --: | --: |")
    for name, row in tables.items():
        shares = " | ".join(f"{100 * (row[one] or 0):.1f}" for one in ("local", "users", "own", "provider"))
        money = f"{float(row['ledger']['paid_usd']):.6f} | {row['bill']:.6f}"
        print(f"| {name} | {row['minutes']:.0f} | {row['stage']} | {shares} | {money} |")


if __name__ == "__main__":
    main()
