"""The REST endpoints of the loop: the registry, the runs, cancelling one, the online learner."""

from __future__ import annotations

import re
from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.access import grant_of
from backend.rest.errors import RequestRefused
from backend.rest.pages import PARAMETERS as PAGE_PARAMETERS
from backend.rest.pages import page_of
from backend.rest.reading import object_in, parameters
from backend.rest.schema import describe, page_schema, parameter, ref
from backend.rest.views import ApiView
from feedback.selectors import SLUG_PATTERN, feedback_counts_cached
from rl.api.training import (
    AGENT,
    agent_checked,
    base_model_sent,
    flag,
    orders_refused,
    run_accepted,
    run_lookup,
    run_represent,
    text,
)
from rl.gates.headlines import share_of
from rl.jobs import lifecycle
from rl.jobs.estimates import order_automatic
from rl.models import Policy, TrainingRun
from rl.models.runs import RunRefused
from rl.online.learner import OnlineLearner
from rl.registry import service as registry
from rl.registry.checklist import policy_verdict
from rl.registry.incumbents import incumbent_sync, incumbents_sync
from rl.registry.integrity import verify

NAME = parameter("name", {"type": "string"}, "The policy's name, such as widgets-v480", where="path")
RUN = parameter("id", {"type": "integer"}, "The run", where="path")
OF_AGENT = parameter("agent", {"type": "string", "pattern": SLUG_PATTERN}, "Only this agent's")
PAGING = (
    parameter("cursor", {"type": "string"}, "Cursor, from `next` or `previous` of an answer"),
    parameter("page_size", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}, "Rows"),
)


class Registry(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "List policies, newest first",
        {200: ("A page of them", page_schema(ref("Policy")))},
        parameters=(OF_AGENT, *PAGING),
        tag="policies",
        operation="policies_list",
    )
    def get(self, request: Request) -> Response:
        given = parameters(request, ("agent", *PAGE_PARAMETERS))
        incumbents_sync(feedback_counts_cached())
        found = Policy.objects.all()
        if "agent" in given:
            found = found.filter(agent=agent_checked(given["agent"]))
        return Response(page_of(found, request, policy_represent))


class Promote(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Promote a policy, if it passes the gate",
        {200: ("The policy at its new stage", ref("Policy"))},
        body=ref("PromotionSent"),
        parameters=(NAME,),
        refusals=(404, 409),
        tag="policies",
        operation="policies_promote",
        body_required=False,
        description="409 with the reasons if it does not pass; `force` with a `reason` promotes it anyway.",
    )
    def post(self, request: Request, name: str) -> Response:
        facts = object_in(request.data, required=(), optional=("to", "force", "reason"))
        to, reason = text(facts, "to", "champion"), text(facts, "reason")
        if to not in ("challenger", "champion"):
            raise RequestRefused(
                "to: expected challenger or champion", fields={"to": "expected challenger or champion"}
            )
        policy = policy_lookup(name)
        incumbent_sync(policy.agent)
        try:
            moved = registry.policy_promote(
                policy, to, actor=grant_of(request).holder, reason=reason, force=flag(facts, "force")
            )
        except registry.RegistryRefused as refusal:
            raise RequestRefused(str(refusal), code="conflict", status=409) from refusal
        return Response(policy_represent(moved))


class Verify(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Compare a policy's files with their recorded SHA-256",
        {200: ("Files compared, damaged and missing", ref("Verification"))},
        parameters=(NAME,),
        refusals=(404,),
        tag="policies",
        operation="policies_verify",
        description="Adapter and exported files. A damaged file is reported with both hashes and the "
        "remedy, and a notification is sent.",
    )
    def post(self, request: Request, name: str) -> Response:
        object_in(request.data or {}, required=(), optional=())
        return Response(verify([policy_lookup(name)]))


class Rollback(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Roll back to the previous champion",
        {200: ("The policy that is champion again", ref("Policy"))},
        body=ref("RollbackSent"),
        parameters=(NAME,),
        refusals=(404, 409),
        tag="policies",
        operation="policies_rollback",
        body_required=False,
    )
    def post(self, request: Request, name: str) -> Response:
        reason = text(object_in(request.data, required=(), optional=("reason",)), "reason")
        policy = policy_lookup(name)
        if policy.stage != Policy.Stage.CHAMPION:
            raise RequestRefused(
                f"{name} is {policy.stage}; only a champion is rolled back", code="conflict", status=409
            )
        try:
            back = registry.policy_rollback(policy.agent, actor=grant_of(request).holder, reason=reason)
        except registry.RegistryRefused as refusal:
            raise RequestRefused(str(refusal), code="conflict", status=409) from refusal
        return Response(policy_represent(back))


class Runs(ApiView):
    scopes = {"GET": "read", "POST": "operate"}

    @describe(
        "List training runs, newest first",
        {200: ("A page of them", page_schema(ref("Run")))},
        parameters=(OF_AGENT, *PAGING),
        tag="policies",
        operation="runs_list",
    )
    def get(self, request: Request) -> Response:
        given = parameters(request, ("agent", *PAGE_PARAMETERS))
        found = TrainingRun.objects.all()
        if "agent" in given:
            found = found.filter(agent=agent_checked(given["agent"]))
        return Response(page_of(found, request, run_represent))

    @describe(
        "Queue a training run",
        {202: ("The queued run; its address is in `Location`", ref("Run"))},
        body=ref("RunSent"),
        tag="policies",
        operation="runs_order",
        description="`knobs` are the method's, as `--set` takes them.",
    )
    def post(self, request: Request) -> Response:
        facts = object_in(
            request.data, required=("agent",), optional=("method", "config", "knobs", "baseModel")
        )
        knobs = {} if facts.get("knobs") is None else facts["knobs"]
        if not isinstance(knobs, dict):
            raise RequestRefused("knobs: expected an object", fields={"knobs": "expected an object"})
        agent = agent_checked(text(facts, "agent"))
        with orders_refused():
            order = order_automatic(
                agent,
                text(facts, "method", "auto"),
                config=text(facts, "config") or None,
                knobs=knobs,
                base_model=base_model_sent(facts),
                actor=grant_of(request).holder,
            )
            return run_accepted(order)


class Cancel(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Cancel a run",
        {200: ("The run: cancelled, or asked to stop after its present step", ref("Run"))},
        parameters=(RUN,),
        refusals=(404, 409),
        tag="policies",
        operation="runs_cancel",
    )
    def post(self, request: Request, pk: int) -> Response:
        run = run_lookup(pk)
        try:
            return Response(run_represent(lifecycle.run_cancel(run, actor=grant_of(request).holder)))
        except RunRefused as refusal:
            raise RequestRefused(str(refusal), code="conflict", status=409) from refusal


class Online(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "Read the state of an agent's online learning",
        {200: ("Buffer, whether it would retrain and why, last run", ref("OnlineStatus"))},
        parameters=(AGENT,),
        tag="policies",
        operation="online_status",
    )
    def get(self, request: Request, agent: str) -> Response:
        parameters(request, ())
        return Response(OnlineLearner(agent_checked(agent)).get_status())


def policy_lookup(name: str) -> Policy:
    found = Policy.objects.filter(name=name).first() if re.fullmatch(r"[\w.-]{1,200}", name) else None
    if found is None:
        raise RequestRefused(
            f"no policy is named {name[:80]!r}",
            code="not_found",
            status=404,
            fields={"name": "does not exist"},
        )
    return found


def policy_represent(policy: Policy) -> dict[str, Any]:
    """A policy as the API answers it."""
    accuracy = share_of(policy.metrics, "preference_accuracy")
    return {
        "name": policy.name,
        "agent": policy.agent,
        "stage": str(policy.stage),
        "kind": str(policy.kind),
        "title": policy.title,
        "base_model": policy.base_model,
        "feedback_count": policy.feedback_count,
        "preference_accuracy": accuracy.value if accuracy else None,
        "liked": policy.metrics.get("liked"),
        "known_answer": policy.metrics.get("known_answer"),
        "judged": policy.metrics.get("headline"),
        "general": policy.metrics.get("general"),
        "against": policy.metrics.get("against"),
        "baseline": policy.metrics.get("baseline"),
        "clusters": policy.metrics.get("clusters"),
        "why": policy_verdict(policy).as_dict(),
        "created_at": policy.created_at.isoformat(),
    }
