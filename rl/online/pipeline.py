"""After a training run: evaluate, gate, promote, export, deploy, prune, notify. Each step can be repeated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.utils import timezone

from backend import command
from backend.installation import PROGRAM
from backend.notifications import notify
from rl.bundled_models import BUNDLED
from rl.datasets import DatasetRefused
from rl.datasets.gate_distance import gate_distance
from rl.evaluation import benchmarks
from rl.evaluation.candidates import candidates_compared
from rl.evaluation.service import EvaluationOrder, EvaluationRefused, evaluate
from rl.evaluation.sides import HostedFailed
from rl.export import service as export_service
from rl.export.agreement import references_shared
from rl.export.artifact import ExportRefused
from rl.gates.report import GateReport
from rl.jobs import train
from rl.jobs.estimates import base_model_wanted, order_automatic
from rl.jobs.lifecycle import TrainOrder
from rl.jobs.method_selection import MethodChoice, TrainingPlan, training_plan
from rl.jobs.plan import train_plan
from rl.jobs.progress import PhaseRecorder, pulse
from rl.jobs.stages import SFT_SHARE, memory_release, stage_limits
from rl.models import LearnerSettings, Policy, PolicyEvent, TrainingRun
from rl.models.learning import learner_settings, retrain_knobs
from rl.models.runs import RunRefused
from rl.registry import service as registry
from rl.registry.checklist import VerdictShown, policy_verdict
from rl.registry.files import policies_prune
from rl.registry.gate_evidence import comparison_newest, rival_name
from rl.registry.incumbents import incumbent_sync
from rl.registry.model_card import card_write

logger = logging.getLogger("rl.online.pipeline")

Progress = Callable[[int, int, str], None]
FollowUp = TrainingRun.FollowUp
ACTOR = "pipeline"


@dataclass(frozen=True)
class FollowUpOptions:
    """What to do with a policy after its evaluation."""

    gate: str = "champion"
    export: bool = True
    deploy: bool = False
    serving_file: bool = False
    """Write the adapter for serving even if the gate refuses, so that a promotion on a page is instant."""
    rejects: bool = True
    """Reject a policy that the gate finds harmful; a rejected policy answers nobody."""
    quantization: str = "q4_k_m"

    @classmethod
    def of(cls, wanted: LearnerSettings) -> FollowUpOptions:
        return cls(
            gate=wanted.gate, export=wanted.auto_export or wanted.auto_deploy, deploy=wanted.auto_deploy
        )


@dataclass
class PipelineResult:
    policy: str
    stage: str = ""
    passed: bool = False
    reason: str = ""
    sheet: Mapping[str, object] = field(default_factory=dict)
    exported: list[str] = field(default_factory=list)
    deployed: str = ""
    pruned: list[str] = field(default_factory=list)
    next_step: str = ""
    """Next action for the user, a command or an address."""
    why: dict[str, Any] = field(default_factory=dict)
    """Verdict against the incumbent; empty without an evaluation."""


def run_train(run_id: int, progress: Progress | None = None, *, actor: str) -> dict[str, object]:
    """Train a queued run; returns the training report. Raises what `train_queued` and `run_follow` raise.

    Small policies (the bundled base model or none) are evaluated and exported in this process, because loading the
    libraries again would take longer. For larger ones the worker starts a second process, after this one freed its
    memory.
    """
    report = train.train_queued(run_id, progress, actor=actor)
    # With TRAIN_LAUNCHER, this process still belongs to a distributed launch whose others have ended.
    if settings.TRAIN_LAUNCHER:
        return report
    report = _with_kept(report, progress)
    run = TrainingRun.objects.get(pk=run_id)
    small = run.base_model == BUNDLED or not run.definition.adapter
    if run.kept_run.is_followed and small:
        run_follow(run.kept_run.pk, progress)
    return report


def _with_kept(report: dict[str, Any], progress: Progress | None) -> dict[str, object]:
    """The training report with the kept policy and the `candidates` of the comparison."""
    if report["status"] != "succeeded" or not report["policy"]:
        return report
    run = TrainingRun.objects.get(pk=report["run"])
    kept = candidate_kept(run, progress)
    return report | {"policy": kept.policy.name, "candidates": run.result.get("candidates", [])}


def candidate_kept(run: TrainingRun, progress: Progress | None = None) -> TrainingRun:
    """The run whose policy is kept: of a run of `auto` and its stages, the best on the eval split.

    The policies are compared once. The steps after training then belong to the kept run. Where the comparison does not
    tell, a language model is kept, as it knows words that nobody rated; the bundled one knows none, so the linear
    policy is kept beside it.
    """
    made = list(run.stages.filter(policy__isnull=False).order_by("pk"))
    if not run.method_reason or not made or "kept_run" in run.result:
        return run.kept_run
    memory_release()
    with pulse(run):
        candidates = [*made, run]
        if run.base_model == BUNDLED:
            candidates.sort(key=lambda one: one.policy.kind == Policy.Kind.LINEAR)
        compared = candidates_compared([one.policy for one in candidates], PhaseRecorder(run, progress))
    kept = next(one for one, score in zip(candidates, compared, strict=True) if score.kept)
    run.result |= {"candidates": [one.model_dump() for one in compared], "kept_run": kept.pk}
    with transaction.atomic():
        if kept != run and run.is_followed:
            TrainingRun.objects.filter(pk=kept.pk).update(
                follow_up=run.follow_up, heartbeat_at=timezone.now()
            )
            run.follow_up = FollowUp.DONE
        run.phase, run.phase_at = "", None
        run.save(update_fields=["result", "follow_up", "phase", "phase_at"])
    return run.kept_run


def run_follow(run_id: int, progress: Progress | None = None) -> PipelineResult:
    """Evaluate, gate and export a successful run's policy by its agent's settings.

    A second call continues a killed one. Raises RunRefused without a policy, and what the steps raise; the scheduler
    then starts it again.
    """
    run = TrainingRun.objects.filter(pk=run_id).first()
    if run is None or getattr(run, "policy", None) is None:
        raise RunRefused(f"run {run_id} made no policy: {run.status if run else 'there is no such run'}")
    if run.follow_up != FollowUp.EXPORT:
        run = candidate_kept(run, progress)
    policy = run.policy
    TrainingRun.objects.filter(pk=run.pk).update(follow_ups=F("follow_ups") + 1, heartbeat_at=timezone.now())
    if run.follow_up == FollowUp.EXPORT:
        return _export_only(run, policy, progress)
    options = FollowUpOptions.of(learner_settings(policy.agent))
    if run.follow_up == FollowUp.JUDGE:
        # whoever trains on a file of their own may ask the result, whatever the gate says
        options = FollowUpOptions(
            gate=LearnerSettings.Gate.NONE, export=False, serving_file=True, rejects=not run.data_file
        )
    with pulse(run):
        outcome = policy_follow(policy, options, PhaseRecorder(run, progress), compare=run.compare)
    pending = TrainingRun.objects.filter(pk=run.pk, follow_up__in=TrainingRun.FOLLOW_UP_PENDING)
    pending.update(follow_up=FollowUp.DONE)
    TrainingRun.objects.filter(pk=run.pk).update(phase="", phase_at=None)
    return outcome


def _export_only(run: TrainingRun, policy: Policy, progress: Progress | None) -> PipelineResult:
    """Export a policy on a user's request. A refusal is stored as the run's reason."""
    outcome = PipelineResult(policy.name, stage=str(policy.stage))
    follow_up, reason = FollowUp.DONE, ""
    try:
        with pulse(run):
            recorder = PhaseRecorder(run, progress)
            outcome.exported = (
                _export_as(policy, run.export_as, recorder)
                if run.export_as
                else _gguf_export(policy, FollowUpOptions(), recorder)
            )
    except ValueError as refusal:
        follow_up, reason = FollowUp.FAILED, f"not exported: {refusal}"
        outcome.reason = reason
    TrainingRun.objects.filter(pk=run.pk).update(follow_up=follow_up, reason=reason, phase="", phase_at=None)
    card_write(policy)
    return outcome


@references_shared()
def policy_follow(
    policy: Policy, options: FollowUpOptions, progress: Progress | None = None, *, compare: str = ""
) -> PipelineResult:
    """Evaluate a candidate against the policy it must beat, and act on the gate's verdict.

    compare: evaluate it against this opponent first, even if it was compared before.
    """
    outcome = PipelineResult(policy.name)
    to = options.gate if options.gate != LearnerSettings.Gate.NONE else "champion"
    if compare and not _evaluated(policy, compare, outcome, progress):
        return outcome
    report = _gate_report(policy, to, outcome, progress, evaluates=not compare)
    if report is not None:
        outcome.passed, outcome.reason, outcome.sheet = report.passed, report.reason, report.dump()
        _act(policy, report, options, outcome, progress)
    policy.refresh_from_db()
    outcome.stage = str(policy.stage)
    if outcome.passed and options.export:
        outcome.exported = _gguf_export(policy, options, progress)
    if outcome.passed and options.deploy and policy.stage == Policy.Stage.CHAMPION:
        _deploy(policy, outcome)
    if options.serving_file and policy.stage == Policy.Stage.CANDIDATE:
        _serving_file(policy, progress)
    card_write(policy)
    outcome.pruned = [gone.name for gone in policies_prune(policy.agent, actor=ACTOR)]
    outcome.next_step = _next_step(policy, outcome)
    outcome.why = VerdictShown.of(policy_verdict(policy))
    _tell(policy, outcome)
    return outcome


@dataclass
class TrainingPipeline:
    """From an agent's feedback to a deployed policy, in this process.

    `TrainingPipeline("support-bot", method="rlhf").run_full_pipeline()` trains, evaluates, gates, exports and deploys
    by the agent's learner settings. The method `auto` trains everything in `plan` and continues with the best policy.

    Raises DatasetRefused, RecipeError, RunRefused, TrainingRefused, and what the steps raise.
    """

    agent: str
    base_model: str | None = None
    method: str = "auto"
    config: str | None = None
    knobs: dict[str, Any] = field(default_factory=dict)
    actor: str = "run_pipeline"

    def run_full_pipeline(self, progress: Progress | None = None) -> PipelineResult:
        """Train and follow up. Resume a stopped run with `train_<method> --resume`."""
        trained = self.train(progress)
        if trained["status"] != "succeeded":
            raise RunRefused(
                f"run {trained['run']} was {trained['status']}; resume it: {PROGRAM} train_{trained['method']} "
                f"--resume {trained['run']}"
            )
        return self.follow(trained, progress)

    @cached_property
    def plan(self) -> TrainingPlan:
        """The planned trainings with their reasons."""
        base_model = base_model_wanted(self.agent, self.method, base_model=self.base_model)
        plan = training_plan(self.agent, self.method, base_model=base_model)
        if not plan.main.definition.policy:
            raise RunRefused(
                f"{plan.main.method} makes no policy; train it with: {PROGRAM} train_{plan.main.method}"
            )
        return plan

    def order(self, training: MethodChoice) -> TrainOrder:
        """The order of a planned training; the pipeline's options apply to the main one."""
        if training is not self.plan.main:
            config = self.config if training.definition.adapter else None
            knobs = dict(training.knobs)
            return TrainOrder(
                self.agent,
                training.method,
                config,
                self.base_model,
                knobs,
                actor=self.actor,
                reason=training.reason,
            )
        order = order_automatic(
            self.agent,
            self.method,
            knobs=self.knobs,
            rewards=False,
            chosen=training,
            config=self.config,
            base_model=self.base_model,
            actor=self.actor,
        )
        order.knobs.update({**retrain_knobs(learner_settings(self.agent), order.method), **order.knobs})
        return order

    def dry_run(self, progress: Progress | None = None) -> list[dict[str, Any]]:
        """Counts, steps, minutes and memory of each planned training, without training."""
        plans: list[dict[str, Any]] = []
        # The main run first, because its limits apply to its stage.
        for training in reversed(self.plan.trainings):
            order = self.order(training)
            if plans and training.method == "sft":
                order.knobs.update(stage_limits(plans[0]["recipe"], SFT_SHARE))
            expected = train_plan(order, _phase_progress(progress, training.method))
            plans.insert(0, {"method": training.method, "reason": training.reason, **expected})
        return plans

    def train(self, progress: Progress | None = None) -> dict[str, object]:
        """The main run's training report, as training commands print it with --json.

        `candidates` lists the policies compared on the eval split; `policy` is the best of them.
        """
        return _with_kept(train.train(self.order(self.plan.main), progress), progress)

    def follow(self, trained: Mapping[str, object], progress: Progress | None = None) -> PipelineResult:
        """Evaluate, gate, export and deploy the trained policy."""
        policy = Policy.objects.get(name=trained["policy"])
        return policy_follow(policy, FollowUpOptions.of(learner_settings(self.agent)), progress)


def _phase(progress: Progress | None, name: str) -> None:
    if progress is not None:
        progress(0, 0, name)


def _phase_progress(progress: Progress | None, name: str) -> Progress | None:
    """Progress of a part, whose phases are prefixed with `name`."""
    if progress is None:
        return None

    def report(done: int, total: int, text: str = "") -> None:
        progress(done, total, text if total or not text else f"{name}, {text}")

    return report


def _next_step(policy: Policy, outcome: PipelineResult) -> str:
    stage = str(policy.stage)
    if stage == Policy.Stage.CHAMPION:
        return command.after_promotion(policy.name, policy.agent, policy.kind)
    if stage == Policy.Stage.CHALLENGER:
        return command.after_challenge(policy.name, policy.agent)
    if outcome.passed:
        return command.after_gate_opens(policy.name)
    if stage == Policy.Stage.REJECTED:
        return command.after_rejection(policy.agent, outcome.reason)
    return command.after_gate_stays_closed(policy.agent, gate_distance(policy.agent).further)


def _evaluated(policy: Policy, compare: str, outcome: PipelineResult, progress: Progress | None) -> bool:
    """Evaluate a policy against an opponent; a refusal is the outcome's reason."""
    _phase(progress, "judging")
    try:
        order = EvaluationOrder(policy=policy.name, compare=compare, actor=ACTOR)
        evaluate(order, _phase_progress(progress, "judging"))
    except (EvaluationRefused, DatasetRefused, HostedFailed) as refusal:
        outcome.reason = str(refusal)
        PolicyEvent.objects.create(
            policy=policy, kind=PolicyEvent.Kind.GATED, actor=ACTOR, reason=outcome.reason
        )
        return False
    policy.refresh_from_db()
    return True


def _gate_report(
    policy: Policy, to: str, outcome: PipelineResult, progress: Progress | None, *, evaluates: bool = True
) -> GateReport | None:
    """The gate's report, after the missing comparison (if `evaluates`) and benchmarks; None if it cannot be judged."""
    if policy.events.filter(kind=PolicyEvent.Kind.PROMOTED).exists():
        promoted = policy.events.filter(kind=PolicyEvent.Kind.PROMOTED).latest("pk")
        outcome.passed, outcome.sheet = True, promoted.verdicts
        return None
    incumbent_sync(policy.agent)
    if comparison_newest(policy) is None and not (
        evaluates and _evaluated(policy, rival_name(policy), outcome, progress)
    ):
        return None
    _phase(progress, "checking the gate")
    for fault in benchmarks.benchmarks_listed_run(policy, actor=ACTOR, progress=progress):
        logger.warning("%s: a benchmark required by the gate was not run: %s", policy.name, fault)
    return registry.policy_gated(policy, to, actor=ACTOR)


def _act(
    policy: Policy,
    report: GateReport,
    options: FollowUpOptions,
    outcome: PipelineResult,
    progress: Progress | None,
) -> None:
    """Promote a policy that passed, reject a harmful one; one that lacks evidence stays a candidate."""
    try:
        if report.passed and options.gate != LearnerSettings.Gate.NONE:
            _serving_file(policy, progress)
            registry.policy_promote(policy, options.gate, actor=ACTOR, reason="passed the gate")
        elif not report.passed and report.harmful and options.rejects:
            registry.policy_reject(policy, actor=ACTOR, reason=report.reason)
    except registry.RegistryRefused as refusal:
        # Somebody moved this or another policy a moment ago: their move stands.
        outcome.reason, outcome.passed = str(refusal), False


def _gguf_export(policy: Policy, options: FollowUpOptions, progress: Progress | None) -> list[str]:
    """Export a policy's GGUF file and adapter if missing; for a linear policy its own file. Returns the paths."""
    if policy.kind == Policy.Kind.LINEAR:
        own = policy.artifacts.filter(format="linear")
        if not own.exists():
            order = export_service.ExportOrder(policy=policy.name, actor=ACTOR)
            export_service.export(order, _phase_progress(progress, "exporting"))
        return [artifact.path for artifact in own]
    whole = policy.artifacts.filter(format="gguf", quantization=options.quantization)
    _phase(progress, "exporting")
    if not whole.exists():
        order = export_service.ExportOrder(
            policy=policy.name, format="gguf", quantization=options.quantization, actor=ACTOR
        )
        try:
            export_service.export(order, _phase_progress(progress, "exporting"))
        except ExportRefused as refusal:
            logger.warning("%s has no whole file: %s", policy.name, refusal)
    _serving_file(policy, progress)
    adapters = policy.artifacts.filter(format="gguf-lora", quantization="")
    return [artifact.path for artifact in (*whole, *adapters)]


def _export_as(policy: Policy, form: str, progress: Progress) -> list[str]:
    """Export a policy in one of `export_service.export_forms`; returns its files or the Ollama model."""
    _phase(progress, f"exporting as {form.replace(':', ' ')}")
    if form == export_service.OLLAMA:
        # The alias that apps use stays on the champion.
        promote = policy.stage == Policy.Stage.CHAMPION
        made = export_service.policy_register(policy, promote=promote, actor=ACTOR, progress=progress)
        return [f"ollama {made['host']} as {made['name']}"]
    name, _, quantization = form.partition(":")
    order = export_service.ExportOrder(policy=policy.name, format=name, actor=ACTOR)
    if quantization:
        order = replace(order, quantization=quantization)
    return [file["path"] for file in export_service.export(order, progress)["files"]]


def _serving_file(policy: Policy, progress: Progress | None) -> None:
    """Write the adapter for serving in this process, which may load torch, so that a promotion finds it."""
    if policy.kind == Policy.Kind.LINEAR or policy.artifacts.filter(format="gguf-lora").exists():
        return
    _phase(progress, "exporting")
    try:
        order = export_service.ExportOrder(policy=policy.name, format="gguf-lora", actor=ACTOR)
        export_service.export(order, _phase_progress(progress, "exporting"))
    except ValueError as refusal:
        # Without LoRA pairs or a converter, the whole file is served instead.
        logger.warning("%s has no adapter file to serve: %s", policy.name, refusal)


def _deploy(policy: Policy, outcome: PipelineResult) -> None:
    """Deploy to Ollama if OLLAMA_HOST is set, else in process. An unreachable server undoes nothing."""
    try:
        outcome.deployed = policy_deploy(policy, actor=ACTOR, to_ollama=bool(settings.OLLAMA_HOST))
    except ValueError as refusal:
        logger.warning("%s is not deployed: %s", policy.name, refusal)
        outcome.deployed = f"not deployed: {refusal}"


def policy_deploy(
    policy: Policy, *, actor: str, to_ollama: bool = False, progress: Progress | None = None
) -> str:
    """Make a policy answer; returns where.

    In process, a champion with a GGUF adapter answers by itself. In Ollama, its GGUF file becomes a model and the alias
    that apps use points to it. Raises ExportRefused if Ollama is unreachable or refuses.
    """
    where = "in process"
    if to_ollama and policy.kind != Policy.Kind.LINEAR:
        made = export_service.policy_register(policy, promote=True, actor=actor, progress=progress)
        where = f"ollama {made['host']} as {made['name']}, {made['alias']}"
    PolicyEvent.objects.create(policy=policy, kind=PolicyEvent.Kind.DEPLOYED, actor=actor, reason=where)
    return where


def _tell(policy: Policy, outcome: PipelineResult) -> None:
    message = (
        f"{policy.name} is {policy.stage}"
        if outcome.passed
        else f"{policy.name} did not pass the gate: {outcome.reason}"
    )
    logger.info("%s", message)
    notify(
        "policy_promoted" if outcome.passed else "policy_refused",
        message,
        policy=policy.name,
        agent=policy.agent,
        stage=str(policy.stage),
        reason=outcome.reason,
    )
