"""From a thumb to a policy: `serve` with the learner on, ratings sent over REST, a timeline until it answers.

History first: decisions with simulated ratings and a short first run, as in a system that has been in use; so the
holdout is large enough for the gate. Then the server starts, and the ratings that fill the buffer arrive through the
API. Then it answers prompts that nobody rated. Prints the timeline on stderr and one JSON object on stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rl.agents.base import Scenario  # noqa: E402
from rl.agents.widgets import AGENT  # noqa: E402
from tests.support.server import Server  # noqa: E402

WAIT_S = 900.0


class Timeline:
    """What happened when, in seconds since the first rating was sent."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.events: list[dict[str, Any]] = []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def note(self, what: str) -> None:
        if not any(event["what"] == what for event in self.events):
            at = round(self.seconds, 1)
            self.events.append({"s": at, "what": what})
            print(f"{at:7.1f} s  {what}", file=sys.stderr, flush=True)


def call(server: Server, key: str, method: str, path: str, body: Any = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    text = json.loads(answer.read())
    assert answer.status < 300, (answer.status, text)
    return text


def rate(server: Server, key: str, count: int) -> None:
    """Ratings as an app sends them: four candidates of a prompt, each a thumb by the hidden taste of the simulation."""
    sent = 0
    for scenario in reversed(AGENT.scenarios()):
        messages = AGENT.render(scenario.state)
        for response in AGENT.candidates(scenario.state):
            if sent == count:
                return
            decision = call(
                server,
                key,
                "POST",
                "/api/decisions/",
                {"agent": "widgets", "messages": messages, "response": response, "state": scenario.state},
            )
            liked = AGENT.hidden_preference(scenario.state, response) >= 0.5
            body = {"thumb": "up" if liked else "down", "rater": "outside"}
            call(server, key, "POST", f"/api/decisions/{decision['id']}/ratings/", body)
            sent += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ratings", type=int, default=100, help="Sent from outside (default 100)")
    parser.add_argument("--scenarios", type=int, default=400, help="Rated before (default 400)")
    parser.add_argument(
        "--max-steps", type=int, default=0, help="Optimiser steps (default: the recipe's own)"
    )
    parser.add_argument(
        "--asked", type=int, default=100, help="New prompts that both policies answer (default 100)"
    )
    parser.add_argument("--keep", type=Path, help="Data folder to keep; a temporary one otherwise")
    options = parser.parse_args()
    home = options.keep or Path(tempfile.mkdtemp(prefix="ratchet-thumb-"))
    home.mkdir(parents=True, exist_ok=True)
    server = Server(f"sqlite:///{home / 'db.sqlite3'}", home)
    short = "".join(f"{method}: {{max_steps: {options.max_steps}}}\n" for method in ("dpo", "kto", "sft"))
    (home / "config.yaml").write_text(
        (short if options.max_steps else "")
        + f"continuous_learning: {{min_samples_to_retrain: {options.ratings}, auto_deploy: true}}\n"
    )
    server.environment |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "ENABLE_ONLINE_LEARNING": "true",
        "RATCHET_CONFIG": str(home / "config.yaml"),
    }
    if threads := os.environ.get("OMP_NUM_THREADS"):
        server.environment["OMP_NUM_THREADS"] = threads
    server.migrate()
    server.manage("simulate", "widgets", "--scenarios", str(options.scenarios), "--rate", "simulated")
    server.manage("train_dpo", "--agent", "widgets", "--max-steps", "1", "--max-samples", "60", "--json")
    key = server.key("ingest", "rate", "read", "operate", "rate_as")
    served = subprocess.Popen(
        [sys.executable, str(ROOT / "manage.py"), "serve", "--port", str(server.port), "--every", "2"],
        env=server.environment,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=(home / "serve.log").open("ab"),
    )
    try:
        while True:  # until it answers
            try:
                call(server, key, "GET", "/api/online/widgets/")
                break
            except OSError:
                assert served.poll() is None, (home / "serve.log").read_text()[-3000:]
                time.sleep(0.1)
        new = _new_scenarios(home)[: options.asked]
        outcome = _watch(server, key, options.ratings, new)
    finally:
        served.send_signal(signal.SIGINT)
        served.wait()
    print(json.dumps(outcome, indent=2))
    if options.keep is None:
        shutil.rmtree(home, ignore_errors=True)


def _new_scenarios(home: Path) -> list[Scenario]:
    """Scenarios that were neither recorded before nor are rated here."""
    with contextlib.closing(sqlite3.connect(home / "db.sqlite3")) as database:
        recorded = {
            json.dumps(json.loads(row[0]))
            for row in database.execute("select messages from feedback_decision")
        }
    return [
        scenario
        for scenario in AGENT.scenarios()[: len(AGENT.scenarios()) // 2]
        if json.dumps(AGENT.render(scenario.state)) not in recorded
    ]


def _liked_share(server: Server, key: str, scenarios: Sequence[Scenario]) -> float:
    """Share of answers to new prompts that people would like, over `/api/decide/`."""
    worths = []
    for scenario in scenarios:
        decided = call(server, key, "POST", "/api/decide/", {"agent": "widgets", "state": scenario.state})
        worths.append(AGENT.hidden_preference(scenario.state, decided["response"]))
    return sum(worth >= 0.5 for worth in worths) / len(worths)


def _watch(server: Server, key: str, ratings: int, new: Sequence[Scenario]) -> dict[str, Any]:
    line = Timeline()
    line.note(f"the first of {ratings} ratings is sent")
    rate(server, key, ratings)
    line.note("all ratings are in")
    deadline = time.monotonic() + WAIT_S
    status: dict[str, Any] = {}
    while time.monotonic() < deadline:
        status = call(server, key, "GET", "/api/online/widgets/")
        run = status["last_run"]
        if run is not None:
            line.note(f"run {run['id']} is {run['status']}")
            whole = call(server, key, "GET", f"/api/runs/{run['id']}/")
            if whole["stepsDone"]:
                line.note("the first steps are done")
            if run["policy"]:
                line.note(f"{run['policy']} is registered as candidate")
                if run["stage"] != "candidate":
                    line.note(f"the gate opened: it is {run['stage']}")
            if run["status"] in ("failed", "refused", "cancelled"):
                line.note(run["reason"])
                break
            if whole["followUp"] in ("done", "failed"):
                line.note(f"exported, deployed: {whole['follow_up']}")
                _answers(server, key, run["policy"], line)
                liked = _liked_share(server, key, new)
                print(f"{liked:.0%} of its answers to {len(new)} new prompts are liked", file=sys.stderr)
                return {
                    "seconds": line.events[-1]["s"],
                    "liked": liked,
                    "timeline": line.events,
                    "status": status,
                }
        time.sleep(0.5)
    return {"seconds": line.events[-1]["s"], "timeline": line.events, "status": status}


def _answers(server: Server, key: str, policy: str, line: Timeline) -> None:
    """Ask as an app does, until the new policy is who answers."""
    state = AGENT.scenarios()[0].state
    while line.seconds < WAIT_S:
        try:
            decided = call(server, key, "POST", "/api/decide/", {"agent": "widgets", "state": state})
        except AssertionError as refusal:  # nobody answers yet
            line.note(f"asked too early: {str(refusal)[:200]}")
            time.sleep(0.5)
            continue
        if decided["policy"] == policy:
            line.note(f"{policy} answers: {decided['response']}")
            return
        time.sleep(0.5)


if __name__ == "__main__":
    main()
