"""The REST endpoints of the loop: the registry, the runs, cancelling one, the online learner, rewards."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field
from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import Answer, Query, Sent, Time
from backend.rest.access import grant_of
from backend.rest.errors import RequestRefused, not_found
from backend.rest.pages import PageQuery, page_of
from backend.rest.reading import body_read, query_read
from backend.rest.schema import Page, describe, of_path
from backend.rest.views import ApiView
from feedback.selectors import agent_slugs, feedback_counts_cached
from feedback.storage.fields import Slug, Storable
from rl.api.training import (
    AGENT,
    RUN,
    BaseModelName,
    Method,
    Run,
    agent_checked,
    base_model_named,
    run_accepted,
    run_lookup,
    run_represent,
)
from rl.datasets.gate_distance import GateDistance
from rl.datasets.reward_records import RewardsCalculated, RewardsRefused, rewards_calculate
from rl.export.service import opponents, policy_job_place
from rl.gates.headlines import share_of
from rl.jobs import lifecycle
from rl.jobs.estimates import order_automatic, order_place
from rl.models import Policy as PolicyRow
from rl.models import TrainingRun
from rl.online.learner import OnlineLearner
from rl.registry import service as registry
from rl.registry.checklist import VerdictShown, policy_verdict
from rl.registry.incumbents import incumbent_sync, incumbents_sync

NAME = of_path("name", {"type": "string"}, "The policy's name, such as widgets-v480")


class AgentPageQuery(PageQuery):
    agent: Slug | None = None
    """Only this agent's."""


class Policy(Answer):
    name: str
    agent: str
    stage: Literal["candidate", "challenger", "champion", "retired", "rejected"]
    kind: Literal["adapter", "linear", "hosted", "recorded"]
    title: str
    """Name for sentences: of a recorded policy what its app calls it."""
    base_model: str
    """Empty of a linear and of a recorded policy, which have none."""
    feedback_count: int
    preference_accuracy: float | None
    """On held-out pairs, in [0, 1]; null if evaluated on other evidence."""
    liked: dict[str, Any] | None
    """Estimated share of its answers that people would like: value, low, high (95 %), n, estimator, assumes, against,
    difference, words; null if none of its answers is rated."""
    known_answer: dict[str, object] | None
    """Share of held-out prompts whose known answer it gives: value, low, high, n, against, difference, words; null if
    no right answer is known."""
    judged: dict[str, Any] | None
    """Main figure of its newest evaluation: kind of evidence, title, unit, value, low, high, n, and against."""
    general: dict[str, Any] | None
    """Answers to general prompts, outside the agent's task: kl (nats per token to the base), plain_text and
    base_plain_text (shares), n, broken (examples), words; null of the bundled base model and of linear policies."""
    against: str | None
    """Policy it was compared with."""
    baseline: dict[str, Any] | None
    """Result of a simple classifier trained on the same rows, on the same evidence: words, and headline as `judged`;
    null for a linear policy and for free-text answers."""
    clusters: dict[str, object] | None
    """Near-identical prompts of the agent at its evaluation: prompts, clusters of two or more, clustered (prompts in
    them), on_two_sides, left_out (of the holdout); null if evaluated on a file."""
    why: VerdictShown
    created_at: Time


class PromotionSent(Sent):
    to: Literal["challenger", "champion"] = "champion"
    force: bool = False
    reason: Storable = ""
    """Required with force; kept on record."""


class EvaluationSent(Sent):
    compare: Storable = ""
    """`incumbent` (what answers now), `base` or a policy of the agent; default: the opponent that the gate asks for."""


class RollbackSent(Sent):
    reason: Storable = ""


class RunSent(Sent):
    agent: Slug
    method: Method = "auto"
    """A method, rlhf (a reward model, then PPO), or auto: chosen by the kinds of feedback."""
    config: Storable = ""
    """Preset; default: chosen by the hardware."""
    knobs: dict[str, object] = {}
    base_model: BaseModelName = Field("", validation_alias="baseModel")
    """A folder, a hub name, a GGUF file, ollama:NAME, package:NAME, smollm2 or bundled; default: the agent's."""


class LearnerRun(Answer):
    id: int
    status: str
    reason: str
    created_at: Time | None
    finished_at: Time | None
    policy: str | None
    stage: str | None


class OnlineStatus(Answer):
    agent: str
    enabled: bool
    buffer_size: int
    """Ratings, comparisons, outcomes and traces that no policy was trained on."""
    new_samples: int
    """Those that no retraining has read."""
    min_samples: int
    max_buffer_size: int
    should_retrain: bool
    reason: str
    method: str
    gate: str
    champion: str | None
    evidence: GateDistance | None
    """Distance to the gate's minimum of held-out prompts; null with very much feedback."""
    last_run: LearnerRun | None
    next_check: Time | None


class Registry(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "List policies, newest first",
        {200: ("A page of them", Page[Policy])},
        query=AgentPageQuery,
        tag="policies",
        operation="policies_list",
    )
    def get(self, request: Request) -> Response:
        sent = query_read(AgentPageQuery, request)
        incumbents_sync(feedback_counts_cached())
        found = PolicyRow.objects.all()
        if sent.agent:
            found = found.filter(agent=sent.agent)
        return Response(page_of(found, request, sent, policy_represent))


class Promote(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Promote a policy, if it passes the gate",
        {200: ("The policy at its new stage", Policy)},
        body=PromotionSent,
        parameters=(NAME,),
        refusals=(404, 409),
        tag="policies",
        operation="policies_promote",
        description="409 with the reasons if it does not pass; `force` with a `reason` promotes it anyway.",
    )
    def post(self, request: Request, name: str) -> Response:
        sent = body_read(PromotionSent, request.data)
        policy = policy_lookup(name)
        incumbent_sync(policy.agent)
        moved = registry.policy_promote(
            policy, sent.to, actor=grant_of(request).holder, reason=sent.reason, force=sent.force
        )
        return Response(policy_represent(moved))


class Evaluated(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Evaluate a policy on held-out prompts",
        {202: ("The policy's run, which evaluates it next", Run)},
        body=EvaluationSent,
        parameters=(NAME,),
        refusals=(404, 409),
        tag="policies",
        operation="policies_evaluate",
    )
    def post(self, request: Request, name: str) -> Response:
        compare = body_read(EvaluationSent, request.data).compare
        policy = policy_lookup(name)
        if compare and compare not in (known := opponents(policy)):
            fault = f"expected one of {', '.join(known)}"
            raise RequestRefused(f"compare: {fault}", fields={"compare": fault})
        run = policy_job_place(policy, "judge", compare=compare)
        return run_accepted(run)


class Rollback(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Roll back to the previous champion",
        {200: ("The policy that is champion again", Policy)},
        body=RollbackSent,
        parameters=(NAME,),
        refusals=(404, 409),
        tag="policies",
        operation="policies_rollback",
    )
    def post(self, request: Request, name: str) -> Response:
        sent = body_read(RollbackSent, request.data)
        policy = policy_lookup(name)
        if policy.stage != PolicyRow.Stage.CHAMPION:
            raise RequestRefused(f"{name} is {policy.stage}; only a champion is rolled back", code="conflict")
        back = registry.policy_rollback(policy.agent, actor=grant_of(request).holder, reason=sent.reason)
        return Response(policy_represent(back))


class Runs(ApiView):
    scopes = {"GET": "read", "POST": "operate"}

    @describe(
        "List training runs, newest first",
        {200: ("A page of them", Page[Run])},
        query=AgentPageQuery,
        tag="policies",
        operation="runs_list",
    )
    def get(self, request: Request) -> Response:
        sent = query_read(AgentPageQuery, request)
        found = TrainingRun.objects.all()
        if sent.agent:
            found = found.filter(agent=sent.agent)
        return Response(page_of(found, request, sent, run_represent))

    @describe(
        "Queue a training run",
        {202: ("The queued run; its address is in `Location`", Run)},
        body=RunSent,
        tag="policies",
        operation="runs_order",
        description="`knobs` are the method's, as `--set` takes them.",
    )
    def post(self, request: Request) -> Response:
        sent = body_read(RunSent, request.data)
        order = order_automatic(
            sent.agent,
            sent.method,
            config=sent.config or None,
            knobs=sent.knobs,
            base_model=base_model_named(sent.base_model),
            actor=grant_of(request).holder,
        )
        return run_accepted(order_place(order))


class Cancel(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Cancel a run",
        {200: ("The run: cancelled, or asked to stop after its present step", Run)},
        parameters=(RUN,),
        refusals=(404, 409),
        tag="policies",
        operation="runs_cancel",
    )
    def post(self, request: Request, pk: int) -> Response:
        cancelled = lifecycle.run_cancel(run_lookup(pk), actor=grant_of(request).holder)
        return Response(run_represent(cancelled))


class Online(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "Read the state of an agent's online learning",
        {200: ("Buffer, whether it would retrain and why, last run", OnlineStatus)},
        parameters=(AGENT,),
        tag="policies",
        operation="online_status",
    )
    def get(self, request: Request, agent: str) -> Response:
        query_read(Query, request)
        return Response(OnlineStatus.of(OnlineLearner(agent_checked(agent)).get_status()))


def policy_lookup(name: str) -> PolicyRow:
    found = PolicyRow.objects.filter(name=name).first() if re.fullmatch(r"[\w.-]{1,200}", name) else None
    if found is None:
        raise not_found(f"no policy is named {name[:80]!r}", "name")
    return found


def policy_represent(policy: PolicyRow) -> dict[str, object]:
    """A policy as the API answers it."""
    accuracy = share_of(policy.metrics, "preference_accuracy")
    figures = {name: policy.metrics.get(name) for name in FIGURES}
    return Policy.of(
        policy,
        preference_accuracy=accuracy.value if accuracy else None,
        judged=policy.metrics.get("headline"),
        why=policy_verdict(policy),
        **figures,
    )


FIGURES = ("liked", "known_answer", "general", "against", "baseline", "clusters")
"""Figures of a policy's metrics that are answered as they are stored."""


MAX_REWARDS = 2000
"""Rewards calculated by one call: more would keep the caller, and a worker, waiting."""


class RewardsAsked(Sent):
    agent: Slug | None = None
    """Of this agent alone."""
    limit: Annotated[int, Field(ge=1, le=MAX_REWARDS)] = MAX_REWARDS


class CalculatePending(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Calculate pending rewards",
        {200: ("Numbers of calculated and still pending rewards", RewardsCalculated)},
        body=RewardsAsked,
        refusals=(404, 409),
        tag="rewards",
        operation="rewards_calculate",
        description=f"At most {MAX_REWARDS:,} a call: call again while `pending` is above 0.",
    )
    def post(self, request: Request) -> Response:
        sent = body_read(RewardsAsked, request.data)
        try:
            found = rewards_calculate(sent.agent, limit=sent.limit)
        except RewardsRefused as refusal:
            code = "conflict" if sent.agent in agent_slugs() else "not_found"
            raise RequestRefused(str(refusal), code=code, fields={"agent": str(refusal)}) from refusal
        return Response(RewardsCalculated.of(found))
