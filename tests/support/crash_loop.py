"""The whole program, served, fed and killed: `serve` with the learner on, and what must hold after any kill."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.support.server import ROOT, Server

AGENT = "assistant"

GATE = f"""
from rl.models import GateSettings
GateSettings.objects.create(
    agent="{AGENT}", min_evidence=2, alpha=0.49, max_kl=1000, max_length_ratio=1000, max_reward_loss=10,
    max_invalid_gain=1, max_slice_loss=1, min_slice=1000, max_rater_share=1,
)
"""
"""A gate that a few prompts can open, so that there is a champion to compare."""
IMPATIENT = """
import manage, rl.jobs.supervisor
rl.jobs.supervisor.PAUSE_S = ({pause_s},)
manage.main()
"""
"""`manage.py` with another pause before a process that died is started again."""
FIRST = 1663
"""Number in the first prompt: of the thirty from there on eight are held out, by their hashes."""

FACTS = """
import json
from collections import Counter
from feedback.models import Rating
from rl.models import Learnt, Policy, TrainingRun
from rl.registry.integrity import verify
trained = Policy.objects.exclude(kind="recorded")
sums = {p.name: p.adapter_sha256 for p in trained}
kept = trained.exclude(events__kind="pruned")
# the candidates of one training are stages of it, and learn from the same ratings
done = Learnt.objects.filter(run__status="succeeded", run__stage_of=None).values_list("feedback", flat=True)
champion = trained.filter(stage="champion").first()
def made(p):
    run = p.run
    machine = {key: run.hardware.get(key) for key in ("dtype", "matmul_precision")}
    return {"weights": p.adapter_sha256, "snapshot": run.snapshot.sha256, "recipe": run.recipe, "machine": machine}
print(json.dumps({
    "ratings": sorted(str(pk) for pk in Rating.objects.values_list("pk", flat=True)),
    "learnt": sorted(map(str, done)),
    "runs": dict(Counter(TrainingRun.objects.values_list("status", flat=True))),
    "follow_ups": dict(Counter(TrainingRun.objects.filter(status="succeeded").values_list("follow_up", flat=True))),
    "policies": trained.count(),
    "made": {p.name: made(p) for p in trained.select_related("run__snapshot")},
    "partial": [finding["what"] for finding in verify(kept)["findings"]],
    "champion": champion.name if champion else None,
    "reasons": sorted(set(TrainingRun.objects.exclude(reason="").values_list("reason", flat=True)))[:20],
    "attempts": sum(TrainingRun.objects.values_list("attempts", flat=True)),
}))
"""


class Loop:
    """One `serve` on a data folder and a database of its own."""

    def __init__(
        self,
        home: Path,
        base_model: Path | str,
        database_url: str = "",
        *,
        config: str = "",
        every: float = 0.5,
        pause_s: float = 0.0,
    ) -> None:
        """pause_s: before a process that died is started again; 0 for the supervisor's own, which grow to 30 s."""
        self.home = home
        self.every = every
        self.program = ["-c", IMPATIENT.format(pause_s=pause_s)] if pause_s else [str(ROOT / "manage.py")]
        self.server = Server(database_url or f"sqlite:///{home / 'db.sqlite3'}", home)
        (home / "config.yaml").write_text(config)
        self.server.environment |= {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "ENABLE_ONLINE_LEARNING": "true",
            "RATCHET_BASE_MODEL": str(base_model),
            "RATCHET_CONFIG": str(home / "config.yaml"),
        }
        self.server.migrate()
        self.server.manage("shell", "--no-imports", "-c", GATE)
        self.key = self.server.key("ingest", "rate", "rate_as", "read", "operate")
        self.sent: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Loop:
        options = ["--port", str(self.server.port), "--web-workers", "1", "--every", str(self.every)]
        self.process = subprocess.Popen(
            [sys.executable, *self.program, "serve", *options],
            env=self.server.environment,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=(self.home / "serve.log").open("ab"),
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(timeout=90)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Ask until there is an answer: a client that retries with the same ids, while the web server is killed."""
        deadline = time.monotonic() + 120
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
                headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
                connection.request(method, path, None if body is None else json.dumps(body), headers)
                answer = connection.getresponse()
                text = json.loads(answer.read())
            except (OSError, http.client.HTTPException):
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.1)
                continue
            if answer.status in (500, 502, 503) and time.monotonic() < deadline:
                time.sleep(0.1)  # the database was cut off under it
                continue
            assert answer.status < 300, (answer.status, text)
            return text

    def rate(self, count: int) -> None:
        """Two answers to each of count / 2 prompts, one up and one down."""
        for _ in range(count):
            number = len(self.sent)
            decision, rating = str(uuid.uuid4()), str(uuid.uuid4())
            body = {"prompt": f"what is {FIRST + number // 2}?", "response": ("good", "poor")[number % 2]}
            answered = {"messages": body["prompt"], "response": body["response"]}
            self.call("POST", "/api/decisions/", {"id": decision, "agent": AGENT, **answered})
            thumb = {"id": rating, "thumb": ("up", "down")[number % 2], "rater": "ada"}
            self.call("POST", f"/api/decisions/{decision}/ratings/", thumb)
            self.sent.append(rating)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.call("GET", f"/api/online/{AGENT}/")
        return found

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            self.server.manage("shell", "--no-imports", "-c", FACTS).splitlines()[-1]
        )
        return found

    def wait(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, (self.facts()["reasons"], self.status(), self.log())
            time.sleep(0.2)

    def learnt(self) -> bool:
        """Whether everything sent was learnt from, and what follows the run is done."""
        status = self.status()
        run = status["last_run"]
        if run is None or run["status"] != "succeeded" or status["new_samples"]:
            return False
        return bool(self.call("GET", f"/api/runs/{run['id']}/")["followUp"] == "done")

    def training(self) -> bool:
        """Whether a run has a checkpoint and is still at work."""
        run = self.status()["last_run"]
        return bool(
            run
            and run["status"] == "running"
            and any((self.home / "runs" / str(run["id"])).glob("checkpoints/checkpoint-*/complete.json"))
        )

    def victims(self, kind: str) -> list[psutil.Process]:
        assert self.process is not None
        words = {
            "child": ("--queued", "run_pipeline"),
            "worker": ("qcluster",),
            "web": ("gunicorn",),
            "clock": ("watch",),
        }[kind]
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                command = process.cmdline()
            except psutil.NoSuchProcess:
                continue
            if any(word in part for part in command for word in words):
                found.append(process)
        return found

    def kill(self, kind: str, choose: random.Random) -> bool:
        """SIGKILL one process of a kind, where one lives."""
        found = self.victims(kind)
        if not found:
            return False
        try:
            os.kill(choose.choice(found).pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def log(self) -> str:
        runs = "".join(
            f"\n--- {file}\n{file.read_text('utf-8', 'replace')[-1500:]}"
            for file in sorted((self.home / "runs").glob("*/worker.log"))
        )
        return (self.home / "serve.log").read_text("utf-8", "replace")[-6000:] + runs


def faults(loop: Loop, facts: dict[str, Any]) -> list[str]:
    """What must hold after any kill, and does not."""
    found = []
    if facts["ratings"] != sorted(loop.sent):
        found.append(f"{len(loop.sent)} ratings were acknowledged, {len(facts['ratings'])} are there")
    if len(set(facts["learnt"])) != len(facts["learnt"]):
        found.append("a rating was learnt for the first time in two successful runs")
    if set(facts["learnt"]) != set(loop.sent):
        found.append(f"{len(set(loop.sent) - set(facts['learnt']))} ratings were never learnt from")
    if facts["runs"].get("queued", 0) or facts["runs"].get("running", 0):
        found.append(f"a run is stuck: {facts['runs']}")
    if facts["policies"] != facts["runs"].get("succeeded", 0):
        found.append(f"{facts['policies']} policies of {facts['runs'].get('succeeded', 0)} successful runs")
    if facts["partial"]:
        found.append(f"policies without their whole files: {facts['partial']}")
    if set(facts["follow_ups"]) - {"done"}:
        found.append(f"runs that were not followed to the end: {facts['follow_ups']}")
    return found


QUICK = """
dpo:
  {max_steps: 60, batch_size: 4, lora_r: 2, lora_alpha: 4, max_length: 128, save_steps: 5, logging_steps: 3,
   warm_up_steps: 0}
continuous_learning: {min_samples_to_retrain: 60, retrain_interval_hours: 0.001, auto_export: false}
"""
