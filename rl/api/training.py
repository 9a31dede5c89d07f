"""The REST endpoints of rl: an agent's policies, training one, how a run goes."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, RootModel
from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import Answer, CamelAnswer, CamelSent, Query, Time
from backend.installation import PROGRAM
from backend.rest.access import grant_of
from backend.rest.errors import RequestRefused, not_found
from backend.rest.reading import body_read, query_read
from backend.rest.schema import describe, of_path
from backend.rest.views import ApiView
from feedback.selectors import SLUG_PATTERN
from feedback.storage.fields import WHOLE, OneOf, Storable
from rl.base_models.service import addition_of, agent_base_model, base_model_resolve, base_model_set
from rl.base_models.sources import SourceRefused
from rl.datasets.gate_distance import GateDistance, gate_distance
from rl.datasets.stats import score_summaries
from rl.evaluation.candidates import CandidateScore
from rl.gates.headlines import share_of
from rl.jobs.child_process import base_model_add_dispatch
from rl.jobs.estimates import OrderEstimate, order_automatic, order_estimate, order_place
from rl.jobs.lifecycle import TrainOrder
from rl.jobs.stages import stages_of
from rl.models import Policy, TrainingRun
from rl.recipes.methods import METHODS, PLANS, dataset_kind
from rl.reward_models.service import reward_model_of
from rl.selectors import run_get, run_series, stalled_text

AGENT = of_path("agent", {"type": "string", "pattern": SLUG_PATTERN}, "Whose")
RUN = of_path("id", {"type": "integer"}, "The run")
Method = Annotated[str, OneOf(["auto", *PLANS, *METHODS])]
BaseModelName = Annotated[Storable, Field(max_length=500)]


class PolicyMetrics(CamelAnswer):
    feedback_count: int
    reward_mean: float | None
    reward_std: float | None
    score_mean: float | None
    score_std: float | None


class PolicyVersion(CamelAnswer):
    id: str
    """The policy's name."""
    agent_id: str
    kind: Literal["adapter", "linear", "hosted", "recorded"]
    version: str
    created_at: Time
    metrics: PolicyMetrics


class PolicyVersions(RootModel[list[PolicyVersion]]):
    """Newest first."""


class TrainingSent(CamelSent):
    dry_run: bool = False
    max_steps: Annotated[int, Field(ge=1, le=1_000_000), WHOLE] | None = None
    minutes: Annotated[float, Field(ge=0, le=7 * 24 * 60)] | None = None
    """Time limit of the training and its stages, in minutes; 0 sets no limit."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    method: Method = "auto"
    """A method, rlhf (a reward model, then PPO), or auto: chosen by the kinds of feedback."""
    base_model: BaseModelName = ""
    """A folder, a hub name, a GGUF file, ollama:NAME, package:NAME, smollm2 or bundled; default: the agent's."""

    @property
    def knobs(self) -> dict[str, int | float]:
        given = {name: getattr(self, name) for name in ("max_steps", "minutes", "learning_rate")}
        return {name: value for name, value in given.items() if value is not None}


class StagePlan(CamelAnswer):
    method: str
    samples: int
    estimated_steps: int
    estimated_time_minutes: float
    estimated_memory_gb: float | None


class TrainingPlan(CamelAnswer):
    status: Literal["dry_run"]
    feedback_count: int
    method: str
    """What would be trained."""
    why: str
    """Reason for the method."""
    samples: int
    """Training rows this feedback makes for it."""
    pairs: int
    """The same for methods that train on pairs, else 0."""
    estimated_steps: int
    estimated_time_minutes: float
    estimated_by: str
    estimated_memory_gb: float | None
    """At the peak, at most; null where the base model is not on this machine."""
    estimated_memory_by: str
    stages: list[StagePlan]
    reward_model: str | None
    """Registered reward model it would use, if it needs one."""
    score_mean: float | None
    """Mean of the present ratings, in [0, 1]."""
    score_std: float | None
    model_config_: dict[str, object] = Field(serialization_alias="modelConfig")
    refused: str
    """Why it cannot be trained now; empty if it can."""
    doubt: str
    """Warning that it would learn little or nothing; else empty."""
    evidence: GateDistance


class Run(Answer):
    id: int
    agent: str
    method: str
    status: Annotated[
        Literal["queued", "running", "trained", "failed", "refused", "cancelled"],
        BeforeValidator(lambda status: "trained" if status == TrainingRun.Status.SUCCEEDED else status),
    ]
    reason: str
    """Why it was refused, failed or cancelled."""
    next_step: str
    """What to do about that; empty if there is nothing to do, or nothing known."""
    why: str
    """Reason for the method, if it was chosen automatically."""
    stage_of: int | None = Field(validation_alias="stage_of_id")
    """The run that this one is a stage of."""
    reward: str | None
    """Reward functions of PPO and GRPO."""
    asked_by: str
    """A person, a key, a command or `online learner`."""
    follow_up: Literal["", "wanted", "done", "judge", "export", "failed"]
    """What follows the training: evaluate, promote, export, deploy; judge: evaluate only, a person promotes."""
    phase: str = Field(validation_alias="phase_words")
    """Present phase: `loading the model`, `training, step 12 of 58`."""
    phase_at: Time | None
    """When the phase began."""
    stalled: str
    """Such as `no step for 12 min`, once a running run stands still; empty while it goes on."""
    steps_done: int
    steps_total: int
    created_at: Time
    started_at: Time | None
    finished_at: Time | None


class RunQueued(Run, CamelAnswer):
    """A run, as the endpoints of one training write it."""


class RunStage(CamelAnswer):
    run: int
    method: str
    status: str
    reason: str
    steps_done: int
    steps_total: int
    made: str
    """The policy or reward model it made."""
    why: str


class RunWhole(RunQueued):
    stages: list[RunStage]
    """Stages trained first: the answer format, a reward model."""
    history: dict[str, list[tuple[int, float]]]
    """Figure -> its [step, value] points so far."""


class RunTrained(RunWhole):
    """A run that made a policy."""

    policy_id: str
    version: str
    model_path: str
    reward_model_path: str | None
    """null: trained without a reward model."""
    reward_model: str | None
    """Its name in the registry of reward models."""
    feedback_count: int
    training_steps: int
    candidates: list[CandidateScore]
    """Policies that a run of `auto` and its stages made; `policyId` is the one that is kept."""
    reward_mean: float | None
    """Mean reward of the policy's answers to held-out prompts; null before its evaluation."""
    reward_std: float | None
    """Sample standard deviation of the same."""
    score_mean: float | None
    """Mean of the ratings it was trained on, in [0, 1]."""
    score_std: float | None


class RunShown(RootModel[RunTrained | RunWhole]):
    """A run; once trained, with its policy."""


class Policies(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "List an agent's trained policies, newest first",
        {200: ("All of them", PolicyVersions)},
        parameters=(AGENT,),
        tag="policies",
        operation="policies_of_agent",
    )
    def get(self, request: Request, agent: str) -> Response:
        query_read(Query, request)
        kinds = (Policy.Kind.ADAPTER, Policy.Kind.LINEAR)
        trained = Policy.objects.filter(agent=agent_checked(agent), kind__in=kinds)
        policies = list(trained.order_by("-pk"))
        scores = score_summaries(agent, [policy.created_at for policy in policies])
        return Response(
            [
                PolicyVersion.of(
                    policy,
                    id=policy.name,
                    agent_id=agent,
                    version=_version(policy),
                    metrics={
                        "feedback_count": policy.feedback_count,
                        **_reward(policy),
                        "score_mean": score.mean,
                        "score_std": score.std,
                    },
                )
                for policy, score in zip(policies, scores, strict=True)
            ]
        )


class TrainPolicy(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Train a policy on an agent's feedback, or estimate it",
        {
            200: ("The estimate (dry run)", TrainingPlan),
            202: ("The queued run; its address is in `Location`", RunQueued),
        },
        body=TrainingSent,
        parameters=(AGENT,),
        tag="policies",
        operation="policies_train",
        description=f"Runs are trained by `{PROGRAM} serve`, one after the other. The policy is then "
        "evaluated on held-out feedback, and promoted if it passes the gate.",
    )
    def post(self, request: Request, agent: str) -> Response:
        sent = body_read(TrainingSent, request.data)
        order = order_automatic(
            agent_checked(agent),
            sent.method,
            knobs=sent.knobs,
            base_model=base_model_named(sent.base_model),
            actor=grant_of(request).holder,
        )
        if sent.dry_run:
            return Response(_plan(order, order_estimate(order)))
        return run_accepted(order_place(order, follow=order.definition.policy), RunQueued)


class RunOne(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "Read a run's progress and result",
        {200: ("The run; once trained, with its policy", RunShown)},
        parameters=(RUN,),
        refusals=(404,),
        tag="policies",
        operation="runs_read",
    )
    def get(self, request: Request, pk: int) -> Response:
        query_read(Query, request)
        run = run_lookup(pk)
        more = {"stages": stages_of(run), "history": run_series(run)}
        figures = _result_figures(run)
        return Response(run_represent(run, RunTrained if figures else RunWhole, **more, **figures))


def agent_checked(slug: str) -> str:
    if not re.fullmatch(SLUG_PATTERN, slug):
        fault = "expected a slug of 1 to 64 lower-case letters, digits, - and _"
        raise RequestRefused(f"agent: {fault}", fields={"agent": fault})
    return slug


def base_model_named(name: str) -> str | None:
    """The base model that a request names; None where it names none."""
    try:
        return base_model_resolve(name).name if name else None
    except SourceRefused as refusal:
        raise RequestRefused(f"baseModel: {refusal}", fields={"baseModel": str(refusal)}) from refusal


def _plan(order: TrainOrder, estimate: OrderEstimate) -> dict[str, object]:
    policy = estimate.policy
    return TrainingPlan.of(
        estimate,
        status="dry_run",
        method=policy.method,
        why=order.reason,
        samples=policy.samples,
        pairs=policy.samples if dataset_kind(policy.method, policy.recipe) == "pairs" else 0,
        estimated_steps=estimate.steps,
        estimated_time_minutes=round(estimate.minutes, 3),
        estimated_by=policy.minutes_source,
        estimated_memory_gb=max((stage.memory.gb or 0.0 for stage in estimate.stages), default=0.0) or None,
        estimated_memory_by=policy.memory.source,
        stages=[
            {
                "method": stage.method,
                "samples": stage.samples,
                "estimated_steps": stage.steps,
                "estimated_time_minutes": round(stage.minutes, 3),
                "estimated_memory_gb": stage.memory.gb,
            }
            for stage in estimate.stages
        ],
        reward_model=estimate.reward_model or None,
        model_config_={
            "baseModel": policy.base_model,
            "method": policy.method,
            "preset": policy.config,
            **policy.recipe,
        },
        refused=estimate.refusal,
        doubt=policy.warning,
        evidence=gate_distance(order.agent),
    )


def run_accepted(run: TrainingRun, kind: type[Run] = Run) -> Response:
    """202 with the run that was queued, and where it is."""
    return Response(run_represent(run, kind), status=202, headers={"Location": f"/api/runs/{run.pk}/"})


def run_lookup(pk: int) -> TrainingRun:
    """The run, or 404."""
    run = run_get(pk) if pk < 2**63 else None  # SQLite and PostgreSQL have no larger keys
    if run is None:
        raise not_found(f"no run {pk}", "id")
    return run


def run_represent(run: TrainingRun, kind: type[Run] = Run, **more: object) -> dict[str, object]:
    return kind.of(
        run,
        why=run.result.get("why", ""),
        reward=run.recipe.get("reward"),
        follow_up=run.kept_run.follow_up,
        stalled=stalled_text(run),
        **more,
    )


def _result_figures(run: TrainingRun) -> dict[str, object]:
    """Figures of a finished run by the policy that is kept; none for one that has no policy."""
    policy: Policy | None = getattr(run.kept_run, "policy", None)
    if policy is None:
        return {}
    learnt_from = run.snapshot.created_at if run.snapshot else policy.created_at
    score = score_summaries(run.agent, [max(learnt_from, run.created_at)])[0]
    judge = reward_model_of(run)
    return {
        "policy_id": policy.name,
        "version": _version(policy),
        "model_path": policy.adapter_path,
        "reward_model_path": judge.path if judge else None,
        "reward_model": judge.name if judge else None,
        "feedback_count": policy.feedback_count,
        "training_steps": run.steps_done,
        "candidates": run.result.get("candidates", []),
        **_reward(policy),
        "score_mean": score.mean,
        "score_std": score.std,
    }


def _reward(policy: Policy) -> dict[str, float | None]:
    """The policy's own held-out reward, mean and sample standard deviation over the prompts it answered; null until it
    was judged, and where none of its answers is one that anybody judged."""
    if policy.metrics.get("rewards_known") == 0:
        return {"reward_mean": None, "reward_std": None}
    reward, std = share_of(policy.metrics, "average_reward"), policy.metrics.get("reward_std")
    return {"reward_mean": reward.value if reward else None, "reward_std": std}


def _version(policy: Policy) -> str:
    return policy.name.removeprefix(f"{policy.agent}-")


# --- Base model of an agent ------------------------------------------------------------------------------------


class AgentBaseSent(CamelSent):
    base_model: BaseModelName
    """A folder, a hub name, a GGUF file, ollama:NAME, package:NAME, smollm2 or bundled; empty removes the setting."""


class AgentBaseShown(CamelAnswer):
    agent: str
    base_model: str
    """As `--model` takes it."""
    path: str
    """Folder or hub name; empty while it is not added yet."""
    origin: str
    """Who named it."""
    adding: str
    """What the worker that adds it does now; empty where none does."""


class AgentBaseModel(ApiView):
    scopes = {"GET": "read", "POST": "operate"}

    @describe(
        "Read an agent's base model",
        {200: ("The base model that is trained next, and who named it", AgentBaseShown)},
        parameters=(AGENT,),
        tag="policies",
        operation="agent_base_read",
    )
    def get(self, request: Request, agent: str) -> Response:
        query_read(Query, request)
        return Response(_represent(agent_checked(agent)))

    @describe(
        "Set an agent's base model",
        {200: ("The base model; one that was not added yet is added by a worker", AgentBaseShown)},
        body=AgentBaseSent,
        parameters=(AGENT,),
        tag="policies",
        operation="agent_base_set",
    )
    def post(self, request: Request, agent: str) -> Response:
        sent = body_read(AgentBaseSent, request.data)
        slug = agent_checked(agent)
        try:
            found = base_model_set(slug, sent.base_model)
        except SourceRefused as refusal:
            raise RequestRefused(f"baseModel: {refusal}", fields={"baseModel": str(refusal)}) from refusal
        if not found.is_ready:
            base_model_add_dispatch(found.name)
        return Response(_represent(slug))


def _represent(agent: str) -> dict[str, object]:
    found = agent_base_model(agent)
    addition = addition_of(found.name)
    return AgentBaseShown.of(
        found, agent=agent, base_model=found.name, adding=addition.words if addition else ""
    )
