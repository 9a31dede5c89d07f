"""World with a row of every model that a page shows, and the addresses of the pages that show them."""

from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import Group, User
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django_q.models import OrmQ, Schedule
from django_q.signing import SignedPackage

from feedback.accounts.authentication import key_create
from feedback.accounts.feedback_tokens import token_sign
from feedback.erasure.withdrawals import WithdrawalSelection, decisions_withdraw
from feedback.models import AgentSettings, Decision, ImportBatch, shadow_id
from feedback.recording.ingest import trace_record
from feedback.services import comparison_submit, decision_record, outcome_record, rating_submit
from feedback.storage.problem_rows import RowReader
from rl.datasets.reward_records import rewards_calculate
from rl.evaluation.benchmarks import figures_paired
from rl.experiments.traffic import experiment_draft, experiment_start
from rl.models import (
    AgentDefinition,
    BenchmarkResult,
    Experiment,
    GateSettings,
    GoldenCase,
    JudgingRound,
    LearnerSettings,
    Policy,
    RewardModelVersion,
    RewardSettings,
    RunMetric,
    ServingSettings,
    Snapshot,
    TrainingRun,
    Upstream,
)
from rl.registry import service as registry
from rl.registry.judging import judgement_submit
from rl.statistics.routing import route_curve, route_threshold
from tests.support.evaluations import judged
from tests.support.experiments import expose, policy_of, running_of
from tests.support.hosted import answer_of, hosted
from tests.support.judging import preference, round_of

AGENT = "support-router"
QUEUES = ["billing", "delivery and returns", "technical problems with the device", "other"]
QUESTION = (
    "The parcel with order 20481-B was promised for Monday, arrived on Thursday, and the lamp in it is broken. I would "
    "like my money back, please, and not another voucher. Kind regards, Maximiliane Hohenlohe-Waldenburg"
)


def world_recorded(decisions: int = 24) -> Decision:
    """Record a row of every model that has a page; returns the decision with the most to show."""
    rows = [_decision(number) for number in range(decisions)]
    whole = _traced()
    comparison_submit(left=rows[0], right=rows[1], preference="left", rater="bob", notes="Names the queue.")
    for number, row in enumerate(rows[: decisions // 2]):
        rating_submit(decision=row, rater="ann", thumb="up" if number % 3 else "down", tags=["tone of voice"])
    rating_submit(
        decision=rows[0], rater="bob", stars=4, notes="Right queue, but it promises a date nobody confirmed."
    )
    rating_submit(decision=rows[0], rater="bob", correction=QUEUES[1])
    outcome_record(decision=rows[0], name="ticket_reopened", value=1)
    rewards_calculate(AGENT)
    decisions_withdraw(
        WithdrawalSelection(ids=[rows[-1].pk]), actor="ada", reason="Recorded by a load test of the checkout"
    )
    reader = RowReader(AGENT, "dataset")
    reader.skip(
        rows[-2].pk, ValueError("expected a list of candidates, found the text 'none of these four queues'")
    )
    reader.save()
    ImportBatch.objects.create(
        file="zendesk-export-2026-10-with-corrections-of-the-second-level.jsonl.gz",
        sha256="c4" * 32,
        bytes=48_213,
        format="openai",
        agent=AGENT,
        actor="ada",
        counts={"rows": 240, "decisions": 237, "ratings": 102, "refused": 3, "rows_stored": 237},
        refused=[{"line": 18, "key": "rating", "reason": "expected 'up' or 'down', found 'mostly'"}],
    )
    _settings()
    _policies()
    _experiment()
    _shadow_and_route()
    _judging()
    _people_and_tasks()
    return whole


def _decision(number: int) -> Decision:
    chosen = QUEUES[number % 3]
    return decision_record(
        agent=AGENT,
        messages=[
            {"role": "system", "content": "Pick the queue for the ticket. Answer with its name alone."},
            {"role": "user", "content": f"{QUESTION} ({number // 2})"},
        ],
        response=chosen if number % 2 else f"{chosen}, because the customer writes about it",
        candidates=[{"response": name, "score": 0.4 - 0.1 * n} for n, name in enumerate(QUEUES)],
        policy=f"{AGENT}-v{100 + number % 2}",
        unit=f"customer-{number:04d}",
        propensity=0.4,
        latency_ms=181.5,
        tokens_in=96,
        tokens_out=4,
        tags=["e-mail", "returns"],
        metadata={"channel": "e-mail", "country": "DE", "agent_version": "2026.10.3-rc1+build.48213"},
    ).row


def _traced() -> Decision:
    steps: list[dict[str, Any]] = [
        {"kind": "reasoning", "text": "Look the order up before promising anything.", "n": 0, "parent": None},
        {
            "kind": "tool_call",
            "name": "orders.find",
            "arguments": {"number": "20481-B"},
            "n": 1,
            "parent": 0,
            "result": {"state": "delivered", "carrier": "DHL"},
            "duration_ms": 184,
        },
        {
            "kind": "tool_call",
            "name": "refunds.create",
            "arguments": {"order": "20481-B", "amount": "89.90 EUR"},
            "n": 2,
            "parent": 0,
            "error": "PermissionDenied: refunds above 50 EUR need a person",
            "duration_ms": 31,
        },
        {
            "kind": "decision",
            "messages": QUESTION,
            "response": QUEUES[1],
            "policy": f"{AGENT}-v101",
            "tags": ["returns"],
            "candidates": [{"response": name} for name in QUEUES],
        },
        {"kind": "task", "name": "route the ticket", "status": "completed"},
    ]
    (first, *_) = trace_record(agent=AGENT, run_id="run-2026-10-14-7731", steps=steps).decisions
    whole = Decision.objects.get(pk=first)
    for rater, said in (
        ("ann", {"thumb": "up", "notes": "Fine."}),
        ("bob", {"stars": 1, "tags": ["wrong queue"]}),
    ):
        rating_submit(decision=whole, rater=rater, **said)
    return whole


def _settings() -> None:
    for settings_of in (AgentSettings, LearnerSettings, ServingSettings, RewardSettings):
        settings_of._default_manager.create(agent=AGENT)
    GateSettings.objects.create(agent=AGENT, benchmarks="ratchet_format, ratchet_options=0.02")
    AgentDefinition.objects.create(
        slug=AGENT,
        title="Support router",
        description="Picks the queue that a ticket of the shop goes to.",
        system_prompt="Pick the queue for the ticket. Answer with its name alone.",
        suggested_tags=["wrong queue"],
    )
    GoldenCase.objects.create(
        agent=AGENT,
        name="a refund never goes to sales",
        messages=[{"role": "user", "content": QUESTION}],
        accepted=QUEUES[:2],
        forbidden=["sales"],
    )


def _run(**facts: Any) -> TrainingRun:
    ended = timezone.now()
    known = {
        "agent": AGENT,
        "method": "dpo",
        "status": "succeeded",
        "base_model": "Qwen/Qwen3-0.6B",
        "asked_by": "ada",
        "config": "cpu",
        "recipe": {"beta": 0.1, "learning_rate": 5e-5, "lora_r": 16},
        "steps_total": 40,
        "steps_done": 40,
        "hardware": {"device": "cpu", "cores": 2},
        "libraries": {"torch": "2.8.0"},
        "worker": "trainer-1:4711",
        "started_at": ended - timedelta(minutes=4),
        "finished_at": ended,
    }
    run = TrainingRun.objects.create(**{**known, **facts})
    RunMetric.objects.bulk_create(
        RunMetric(
            run=run,
            step=step,
            values={
                "loss": 0.7 - 0.01 * step,
                "rewards/accuracies": 0.5 + 0.01 * step,
                "rewards/margins": 0.02 * step,
                "learning_rate": 5e-5,
            },
        )
        for step in range(1, run.steps_done + 1)
    )
    return run


def _policies() -> None:
    snapshot = Snapshot.objects.create(
        agent=AGENT,
        kind="pairs",
        path=f"snapshots/{AGENT}/pairs-3f9c.jsonl",
        sha256="3f9c" * 16,
        feedback_count=102,
        counts={"train": 71, "eval": 10, "holdout": 31},
        left_out={"the same response twice": 4},
        simulated_share=0.25,
    )
    parent = None
    for number, wins in ((100, 15), (101, 3)):
        run = _run(snapshot=snapshot, feedback_count=number)
        parent = registry.policy_register(
            run,
            name=f"{AGENT}-v{number}",
            adapter=registry.home_path(f"policies/{AGENT}/{AGENT}-v{number}"),
            adapter_sha256="b0" * 32,
            feedback_count=number,
            actor="train_dpo",
        )
        judged(parent, wins=wins)
        if number == 100:
            registry.policy_move(
                parent, "champion", actor="ada", reason="No complaints after a week", force=True
            )
    for file_format, quantization in (("gguf", "q4_k_m"), ("lora", "")):
        registry.artifact_register(
            parent,
            actor="ada",
            path=f"exports/{parent.name}/{parent.name}-{quantization}.{file_format}",
            format=file_format,
            quantization=quantization,
            bytes=396_212_480,
            sha256="1e" * 32,
        )
    own, base = [1.0, 1.0, 1.0, 0.0] * 10, [1.0, 0.0, 0.0, 0.0] * 10
    BenchmarkResult.objects.create(
        policy=parent,
        task="ratchet_format",
        source="bundled",
        task_sha256="",
        harness="lm-eval 0.4.9",
        metric="acc",
        chat_template=True,
        n=40,
        figures=figures_paired(own, base),
        base_model_hash="",
        seconds=31.0,
        items={"hash": [""] * 40, "own": own, "base": base},
    )
    RewardModelVersion.objects.create(
        name=f"{AGENT}-rm-v100",
        agent=AGENT,
        base_model="bundled",
        path=f"reward_models/{AGENT}/1",
        sha256="ab" * 32,
        objective="binary",
        feedback_count=102,
        run=_run(method="reward_model"),
        ranking={"value": 0.81, "low": 0.69, "high": 0.89, "n": 64, "measures": "pairs"},
    )
    _run(
        status="refused",
        steps_done=0,
        steps_total=0,
        reason="3 pairs found for agent support-router, 10 needed",
        next_step="rate more at /rate/?agent=support-router",
    )
    _run(
        status="failed",
        steps_done=11,
        reason="its worker trainer-2:812 died",
        next_step="resume with: python manage.py train_dpo --resume 9",
    )
    _run(
        status="running",
        steps_done=18,
        phase="training",
        phase_at=timezone.now(),
        finished_at=None,
        heartbeat_at=timezone.now(),
    )


def _judging() -> None:
    """A round that runs, and one that has ended."""
    running = round_of(30, agent=AGENT, policy=Policy.objects.filter(agent=AGENT).latest("pk"))
    for wanted in ("policy", "opponent", "tie"):
        pair, side = preference(running, "ada", wanted)
        judgement_submit(pair, "ada", side)
    ended = round_of(6, same=2, agent=AGENT, policy=running.policy)
    for wanted in ("policy", "policy", "opponent", "tie"):
        pair, side = preference(ended, "bob", wanted)
        judgement_submit(pair, "bob", side)


def _experiment() -> None:
    policy_of("filer-v1", "champion")
    policy_of("filer-v2")
    running_of(slices=["source"], auto_ramp=True, not_inferior=0.05)
    expose(range(120), lambda n, new: {"thumb": n % 5 < (4 if new else 2), "latency_ms": 90.0 + n % 7})


def _shadow_and_route() -> None:
    """A hosted champion beside which an own policy answers, and is asked first where it is sure."""
    agent = "assistant-of-the-shop"
    champion = hosted("http://localhost:11434/v1", f"{agent}-gpt", agent=agent)
    own = policy_of(f"{agent}-v100", "candidate", agent)
    draft = experiment_draft("answers-of-the-own-model", [own.name], agent=agent, actor="ada", shadow=10)
    Experiment.objects.filter(pk=draft.pk).update(shadow_budget_usd=5.0, shadow_busy=2)
    experiment_start(draft, actor="ada")
    for number in range(6):
        facts = {"agent": agent, "messages": f"{QUESTION} {number}", "latency_ms": 900.0 + number}
        row = answer_of(0.004, policy=champion.name, response=QUEUES[1], **facts)
        beside = answer_of(
            0.0, policy=own.name, response=QUEUES[1], id=shadow_id(row.pk), source="shadow", **facts
        )
        beside.metadata["serving"]["shadow"] = {"of": str(row.pk), "experiment": draft.name}
        beside.save(update_fields=["metadata"])
    sure, worse = [1 - number / 400 for number in range(400)], [number > 330 for number in range(400)]
    point = route_threshold(sure, worse, loss=0.02, alpha=0.05)
    assert point is not None
    routed = ServingSettings(agent=agent, route_policy=own.name, route_threshold=point.threshold)
    curve = [asdict(one) for one in route_curve(sure, worse, alpha=0.05)]
    routed.route_report = {"judged": 400, "usd_per_1000": 4.0, "point": asdict(point), "curve": curve}
    routed.save()


def _people_and_tasks() -> None:
    key_create("ticket system, staging", ["ingest", "rate", "read"])
    User.objects.get_or_create(username="maximiliane.hohenlohe@example.org")
    for name in ("rater", "operator", "admin"):
        Group.objects.get_or_create(name=name)
    now = timezone.now()
    task = {"id": "a" * 32, "name": "run-4711", "func": "rl.tasks.train", "args": (1,), "result": True}
    OrmQ.objects.create(key="training", payload=SignedPackage.dumps(task), lock=now)
    Schedule.objects.create(name="online learner", func="rl.tasks.tick", schedule_type="I", minutes=5)
    for number, success in enumerate((True, False)):
        apps.get_model("django_q.Task").objects.create(
            id=f"{number}" * 32,
            name=f"run-{number}",
            func="rl.tasks.train",
            started=now,
            stopped=now,
            success=success,
            result=None
            if success
            else "OSError: [Errno 28] No space left on device : Traceback (most recent)",
        )


def user_pages(whole: Decision) -> Iterator[str]:
    """Addresses of the pages outside the admin, each with something to show."""
    run, refused = (
        TrainingRun.objects.filter(status=status).latest("pk") for status in ("succeeded", "refused")
    )
    policy, first = Policy.objects.filter(agent=AGENT).order_by("-pk")[:2]
    batch = ImportBatch.objects.latest("pk")
    yield from ("/ /start/ /start/?agent= /glossary/ /problems/ /people/ /import/ /imports/ /export/").split()
    yield from (
        f"/start/?agent={AGENT}&step={step}" for step in ("connect", "rate", "train", "compare", "promote")
    )
    yield from (f"/rate/?agent={AGENT}", f"/rate/pairs/?agent={AGENT}", f"/agreement/?agent={AGENT}")
    yield from (f"/imports/{batch.pk}/", "/decisions/", "/decisions/?q=nothing+of+it")
    yield from (f"/decisions/?agent={AGENT}&rated=disputed", f"/decisions/{whole.pk}/")
    yield from (f"/agents/{AGENT}/", f"/agents/{AGENT}/change/", f"/agents/{AGENT}/playground/?policy=base")
    yield from (
        "/runs/",
        f"/runs/{run.pk}/",
        f"/runs/{refused.pk}/",
        f"/runs/compare/?run={run.pk}&run={run.pk - 1}",
    )
    Upstream.objects.get_or_create(name="local", url="http://localhost:11434/v1", model="qwen3:8b")
    yield from ("/upstreams/", f"/feedback/{token_sign(whole.pk)}?thumb=up")
    yield from ("/savings/", f"/agents/{AGENT}/flywheel/")
    yield from ("/policies/", f"/policies/{policy.name}/", f"/policies/{policy.name}/answers/")
    yield from (f"/policies/{first.name}/", f"/policies/compare/?left={first.name}&right={policy.name}")
    yield from ("/experiments/", "/experiments/new/")
    yield from (f"/experiments/{one.pk}/" for one in Experiment.objects.all())
    yield from (
        address
        for one in JudgingRound.objects.all()
        for address in (f"/judging/{one.pk}/", f"/rate/pairs/?round={one.pk}")
    )


def admin_pages() -> Iterator[str]:
    """Addresses of each model's pages in the admin: list, form of a new row, a row's own page, and its deletion."""
    yield reverse("admin:index")  # which registers the models
    for model in admin.site._registry:
        name = f"admin:{model._meta.app_label}_{model._meta.model_name}"
        yield reverse(f"{name}_changelist")
        yield reverse(f"{name}_add")
        row = model._default_manager.order_by("-pk").first()
        if row is None:
            continue
        for action in ("change", "delete"):
            yield reverse(f"{name}_{action}", args=[row.pk])
    for extra in ("feedback_apikey_make", "auth_user_password_change", "password_change"):
        try:
            yield reverse(f"admin:{extra}")
        except NoReverseMatch:
            if extra == "auth_user_password_change":
                yield reverse(f"admin:{extra}", args=[User.objects.latest("pk").pk])
