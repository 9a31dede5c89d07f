"""What follows a run: judged, moved, exported, told; and begun again where it was killed."""

import contextlib
import json
import socketserver
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
from django.core import mail

from backend import notifications
from rl.evaluation import benchmarks
from rl.evaluation.service import EvaluationRefused
from rl.evaluation.sides import HostedFailed
from rl.jobs.lifecycle import follow_up_place
from rl.models import Artifact, BenchmarkResult, GateSettings, LearnerSettings, Policy, TrainingRun
from rl.online import pipeline
from rl.recipes.benchmark_tasks import TaskRefused, task_folder
from rl.registry import service as registry
from tests.support.evaluations import judged
from tests.support.registry_rows import make_run, registered

pytestmark = pytest.mark.django_db


@pytest.fixture
def policy() -> Policy:
    home = registry.home_path("policies/widgets/widgets-v1")
    home.mkdir(parents=True)
    return registered(make_run(follow_up="wanted"), "widgets-v1", home)


class Doors:
    """Stand in for the rooms with torch: what an evaluation finds, and what was asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[str, Any] = {}
        self.evaluated: list[Any] = []
        self.exported: list[Any] = []
        monkeypatch.setattr(pipeline, "evaluate", self.evaluate)
        monkeypatch.setattr(pipeline.export_service, "export", self.export)

    def evaluate(self, order: Any, progress: Any) -> None:
        self.evaluated.append(order)
        if "refusal" in self.found:
            raise self.found["refusal"]
        judged(registry.policy_get(order.policy), order.compare or "base", **self.found)

    def export(self, order: Any, progress: Any) -> dict[str, Any]:
        self.exported.append(order)
        path = "exports/x.gguf" if order.format == "gguf" else "exports/x-LoRA.gguf"
        Artifact.objects.create(
            policy=registry.policy_get(order.policy),
            format=order.format,
            quantization=order.quantization if order.format == "gguf" else "",
            path=path,
            bytes=1,
            sha256="b" * 64,
        )
        return {"files": [{"path": path}]}


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> Doors:
    return Doors(monkeypatch)


def follow(policy: Policy) -> pipeline.PipelineResult:
    assert policy.run is not None
    # the heartbeat of a real run is written by a thread, which sees nothing of a test's transaction
    return pipeline.policy_follow(policy, pipeline.FollowUpOptions.of(pipeline.learner_settings("widgets")))


@pytest.mark.parametrize(
    ("changes", "launcher", "here"),
    [
        ({}, [], True),
        ({"base_model": "", "method": "linear"}, [], True),
        ({"base_model": "org/model-8b"}, [], False),
        ({}, ["accelerate", "launch"], False),
        ({"follow_up": ""}, [], False),
        ({"status": "refused"}, [], False),
    ],
)
def test_the_process_that_trains_a_small_policy_takes_it_to_its_end(
    policy: Policy,
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
    changes: dict[str, str],
    launcher: list[str],
    here: bool,
) -> None:
    followed: list[int] = []
    TrainingRun.objects.update(**changes)
    settings.TRAIN_LAUNCHER = launcher
    report = {"run": policy.run_id, "status": "refused", "policy": None}
    monkeypatch.setattr(pipeline.train, "train_queued", lambda run_id, progress, actor: report)
    monkeypatch.setattr(pipeline, "run_follow", lambda run_id, progress: followed.append(run_id))
    run_id = policy.run_id
    assert run_id is not None
    assert pipeline.run_train(run_id, actor="test") == report
    assert followed == ([run_id] if here else [])


def test_what_passes_is_promoted(policy: Policy, doors: Doors, ratchet_home: Path) -> None:
    outcome = follow(policy)
    expected = ("champion", True, ["exports/x.gguf", "exports/x-LoRA.gguf"])
    assert (outcome.stage, outcome.passed, outcome.exported) == expected
    assert [order.compare for order in doors.evaluated] == ["base"]
    assert "accuracy: passed" in (ratchet_home / policy.adapter_path / "README.md").read_text()


def test_what_harms_is_rejected_or_kept_for_whoever_asks_it_by_name(policy: Policy, doors: Doors) -> None:
    doors.found = {"kl": 9.0}
    kept = pipeline.policy_follow(policy, pipeline.FollowUpOptions(rejects=False))
    assert (kept.stage, kept.passed) == ("candidate", False)
    assert {"9.00", "2"} <= set(policy.events.get(kind="gated").reason.split())
    outcome = follow(policy)
    assert (outcome.stage, doors.exported) == ("rejected", [])
    assert {"9.00", "2"} <= set(policy.events.get(kind="rejected").reason.split())
    policy.refresh_from_db()
    # the registry refuses to promote what is rejected, by force too
    step = pipeline._next_step(policy, outcome)
    assert "train a new one" in step
    assert "policy promote" not in step


def test_what_lacks_evidence_stays_a_candidate(policy: Policy, doors: Doors) -> None:
    doors.found = {"both": 2, "wins": 8, "neither": 0}
    outcome = follow(policy)
    assert (outcome.stage, outcome.passed) == ("candidate", False)
    assert {"10", "30"} <= set(outcome.reason.split())


@pytest.mark.parametrize("refused", [EvaluationRefused, HostedFailed])
def test_what_cannot_be_judged_is_kept(policy: Policy, doors: Doors, refused: type[ValueError]) -> None:
    doors.found = {"refusal": refused("no held-out pairs")}
    assert follow(policy).reason == "no held-out pairs"
    assert policy.events.get(kind="gated").reason == "no held-out pairs"


SIDE = {"value": 1.0, "stderr": 0.0}
FIGURES = {"own": SIDE, "base": SIDE, "difference": {"value": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Tasks of the benchmarks that are run; each finds 200 items alike for policy and base, `billing` cannot be."""
    orders: list[tuple[str, ...]] = []

    def benchmark(order: benchmarks.BenchmarkOrder, progress: Any) -> None:
        orders.append(order.tasks)
        if any(spec.endswith("billing") for spec in order.tasks):
            raise TaskRefused("there is no billing")
        for spec in order.tasks:
            task = task_folder(spec)
            BenchmarkResult.objects.create(
                policy=registry.policy_get(order.policy),
                task=task.name,
                source=task.source,
                task_sha256=task.sha256,
                harness="h",
                metric="m",
                chat_template=True,
                n=200,
                figures=FIGURES,
                base_model_hash="",
                seconds=1.0,
                items={"hash": [], "own": [1.0] * 200, "base": [1.0] * 200},
            )

    monkeypatch.setattr(benchmarks, "benchmark_policy", benchmark)
    return orders


def test_listed_benchmarks_are_run(policy: Policy, doors: Doors, asked: list[tuple[str, ...]]) -> None:
    GateSettings.objects.create(agent="widgets", benchmarks="ratchet_format, ratchet_options=0.02")
    outcome = follow(policy)
    assert (outcome.stage, asked) == ("champion", [("ratchet_format", "ratchet_options")])
    rules = {verdict["rule"]: verdict["outcome"] for verdict in outcome.sheet["verdicts"]}
    assert rules["benchmarks"] == "passed"


def test_failed_benchmarks_wait(policy: Policy, doors: Doors, asked: list[tuple[str, ...]]) -> None:
    GateSettings.objects.create(agent="widgets", benchmarks="ratchet_format, billing")
    BenchmarkResult.objects.create(
        policy=policy,
        task="billing",
        source="/gone/billing",
        harness="h",
        metric="m",
        chat_template=True,
        n=1,
        figures=FIGURES,
        items={},
        base_model_hash="",
        seconds=1.0,
    )
    outcome = follow(policy)
    assert asked == [("ratchet_format", "/gone/billing"), ("ratchet_format",), ("/gone/billing",)]
    assert outcome.stage == "candidate"
    assert outcome.reason.endswith("--tasks /gone/billing`")
    follow(policy)
    assert asked[3:] == [("/gone/billing",)], "what was run stands"


def test_no_list_no_benchmarks(policy: Policy, doors: Doors, asked: list[tuple[str, ...]]) -> None:
    assert follow(policy).stage == "champion"
    assert asked == []


def test_an_attempt_that_was_killed_is_gone_on_with(policy: Policy, doors: Doors) -> None:
    judged(policy)  # a killed attempt had come so far
    follow(policy)
    follow(policy)
    assert (doors.evaluated, [order.format for order in doors.exported]) == ([], ["gguf-lora", "gguf"])
    assert policy.events.filter(kind="promoted").count() == 1


def test_a_person_decides_where_no_gate_is_wanted(policy: Policy, doors: Doors) -> None:
    LearnerSettings.objects.create(agent="widgets", gate="none")
    outcome = follow(policy)
    assert (outcome.stage, outcome.passed) == ("candidate", True)


def test_people_told(policy: Policy, doors: Doors, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(notifications, "webhook_fault", lambda: "")
    monkeypatch.setattr(
        notifications, "_post", lambda record: sent.append(json.loads(record.body["body"])) or ""
    )
    settings.NOTIFY_WEBHOOK, settings.NOTIFY_EMAIL = "https://hooks.example/1", ["olga@example.com"]
    follow(policy)
    assert (sent[0]["type"], sent[0]["data"]["policy"]) == ("policy_promoted", "widgets-v1")
    assert mail.outbox[0].subject == "Ratchet: widgets-v1 is champion"


class MailServer(socketserver.StreamRequestHandler):
    """What RFC 5321 asks of a server that takes one mail."""

    taken: ClassVar[list[str]] = []

    def handle(self) -> None:
        self.wfile.write(b"220 here\r\n")
        while line := self.rfile.readline().strip():
            word = line.split(b" ")[0].upper()
            if word == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                lines = iter(lambda: self.rfile.readline().rstrip(b"\r\n"), b".")
                self.taken.append(b"\n".join(lines).decode())
            self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 fine\r\n")


def test_the_mail_goes_to_the_server_and_port_that_are_set(settings: Any) -> None:
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.NOTIFY_EMAIL = ["olga@example.com"]
    with socketserver.TCPServer(("127.0.0.1", 0), MailServer) as server:
        settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", server.server_address[1]
        taking = threading.Thread(target=server.handle_request)
        taking.start()
        assert notifications.notify("run_failed", "run 7 of widgets failed: no memory") == ["e-mail"]
        taking.join()
    (mail_taken,) = MailServer.taken
    assert "To: olga@example.com" in mail_taken
    assert mail_taken.endswith("run 7 of widgets failed: no memory")
    assert notifications.notify("run_failed", "nobody listens there any more") == []


def test_a_webhook_that_fails_stops_nothing(policy: Policy, doors: Doors, settings: Any) -> None:
    settings.NOTIFY_WEBHOOK, settings.NOTIFY_PRIVATE = "http://127.0.0.1:1/", True
    assert follow(policy).stage == "champion"
    assert notifications.webhook_outbox().pending_count() == 1


def follow_asked(
    policy: Policy, wanted: str, monkeypatch: pytest.MonkeyPatch, export_as: str = ""
) -> pipeline.PipelineResult:
    """What a person asked for on a page, without the thread of the heartbeat."""
    monkeypatch.setattr(pipeline, "pulse", lambda run: contextlib.nullcontext())
    assert policy.run_id is not None
    TrainingRun.objects.update(follow_up=wanted, export_as=export_as)
    return pipeline.run_follow(policy.run_id)


def test_judged_for_a_person_it_stays_a_candidate_with_the_file_it_would_be_served_from(
    policy: Policy, doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = follow_asked(policy, "judge", monkeypatch)
    assert (outcome.stage, outcome.passed) == ("candidate", True)
    assert policy.events.get(kind="gated").verdicts["passed"]
    assert [order.format for order in doors.exported] == ["gguf-lora"]
    assert TrainingRun.objects.get().follow_up == "done"


def test_opponents_can_be_chosen(policy: Policy, doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    assert policy.run is not None
    TrainingRun.objects.update(status="succeeded", follow_up="")
    monkeypatch.setattr(pipeline, "pulse", lambda run: contextlib.nullcontext())
    for _ in range(2):  # asked for, it is made again
        follow_up_place(policy.run, "judge", compare="base")
        pipeline.run_follow(policy.run.pk)
    assert [order.compare for order in doors.evaluated] == ["base", "base"]


def test_an_export_judges_nothing(policy: Policy, doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = follow_asked(policy, "export", monkeypatch)
    assert (doors.evaluated, outcome.exported) == ([], ["exports/x.gguf", "exports/x-LoRA.gguf"])
    assert TrainingRun.objects.get().follow_up == "done"


@pytest.mark.parametrize(
    ("form", "name", "quantization"),
    [("gguf:q8_0", "gguf", "q8_0"), ("onnx", "onnx", "q4_k_m"), ("merged", "merged", "q4_k_m")],
)
def test_an_export_is_made_in_the_form_that_was_asked_for(
    policy: Policy, doors: Doors, monkeypatch: pytest.MonkeyPatch, form: str, name: str, quantization: str
) -> None:
    follow_asked(policy, "export", monkeypatch, form)
    (order,) = doors.exported
    assert (order.policy, order.format, order.quantization) == (policy.name, name, quantization)
    assert TrainingRun.objects.get().follow_up == "done"


@pytest.mark.parametrize(("stage", "promotes"), [("candidate", False), ("champion", True)])
def test_the_apps_name(policy: Policy, monkeypatch: pytest.MonkeyPatch, stage: str, promotes: bool) -> None:
    asked = []

    def register(policy: Policy, *, promote: bool, **_: Any) -> dict[str, str]:
        asked.append(promote)
        return {"host": "http://there:11434", "name": policy.name}

    monkeypatch.setattr(pipeline.export_service, "policy_register", register)
    Policy.objects.filter(pk=policy.pk).update(stage=stage)
    outcome = follow_asked(policy, "export", monkeypatch, "ollama")
    assert (asked, outcome.exported) == ([promotes], [f"ollama http://there:11434 as {policy.name}"])


def test_a_refused_export_is_the_runs_reason(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(order: Any, progress: Any) -> None:
        raise ValueError("no converter for this family")

    monkeypatch.setattr(pipeline.export_service, "export", refuse)
    follow_asked(policy, "export", monkeypatch)
    run = TrainingRun.objects.get()
    assert run.follow_up == "failed"
    assert run.reason.endswith("no converter for this family")
