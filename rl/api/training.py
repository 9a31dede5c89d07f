"""The REST endpoints of rl: an agent's policies, training one, how a run goes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from backend.installation import PROGRAM
from backend.rest.access import grant_of
from backend.rest.errors import RequestRefused
from backend.rest.reading import object_in, parameters
from backend.rest.schema import describe, list_schema, parameter, ref
from backend.rest.views import ApiView
from feedback.selectors import SLUG_PATTERN
from rl.base_models.service import base_model_resolve
from rl.base_models.sources import SourceRefused
from rl.datasets import DatasetRefused
from rl.datasets.gate_distance import gate_distance
from rl.datasets.stats import score_summaries
from rl.gates.headlines import share_of
from rl.jobs.estimates import OrderEstimate, order_automatic, order_estimate, order_place
from rl.jobs.lifecycle import TrainOrder
from rl.jobs.stages import stages_of
from rl.models import Policy, TrainingRun
from rl.recipes import RecipeError
from rl.recipes.methods import dataset_kind, method_named
from rl.reward_models.specs import reward_model_of
from rl.selectors import run_get, run_series

AGENT = parameter("agent", {"type": "string", "pattern": SLUG_PATTERN}, "Whose", where="path")


class Policies(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "List an agent's trained policies, newest first",
        {200: ("All of them", list_schema(ref("PolicyVersion")))},
        parameters=(AGENT,),
        tag="policies",
        operation="policies_of_agent",
    )
    def get(self, request: Request, agent: str) -> Response:
        parameters(request, ())
        kinds = (Policy.Kind.ADAPTER, Policy.Kind.LINEAR)
        trained = Policy.objects.filter(agent=agent_checked(agent), kind__in=kinds)
        policies = list(trained.order_by("-pk"))
        scores = score_summaries(agent, [policy.created_at for policy in policies])
        return Response(
            [
                {
                    "id": policy.name,
                    "agentId": agent,
                    "kind": str(policy.kind),
                    "version": _version(policy),
                    "createdAt": policy.created_at.isoformat(),
                    "metrics": {
                        "feedbackCount": policy.feedback_count,
                        **_reward(policy),
                        "scoreMean": score.mean,
                        "scoreStd": score.std,
                    },
                }
                for policy, score in zip(policies, scores, strict=True)
            ]
        )


class TrainPolicy(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Train a policy on an agent's feedback, or estimate it",
        {
            200: ("The estimate (dry run)", ref("TrainingPlan")),
            202: ("The queued run; its address is in `Location`", ref("Run")),
        },
        body=ref("TrainingSent"),
        parameters=(AGENT,),
        tag="policies",
        operation="policies_train",
        body_required=False,
        description=f"Runs are trained by `{PROGRAM} qcluster`, one after the other. The policy is then "
        "evaluated on held-out feedback, and promoted if it passes the gate.",
    )
    def post(self, request: Request, agent: str) -> Response:
        facts = object_in(
            request.data,
            required=(),
            optional=("dryRun", "maxSteps", "minutes", "learningRate", "search", "method", "baseModel"),
        )
        knobs, method = _knobs(facts), text(facts, "method", "auto")
        with orders_refused():
            order = order_automatic(
                agent_checked(agent),
                method,
                knobs=knobs,
                base_model=base_model_sent(facts),
                actor=grant_of(request).holder,
            )
            if flag(facts, "dryRun"):
                return Response(_plan(order, order_estimate(order)))
            return run_accepted(order, follow=method_named(order.method).policy)


class RunOne(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "Read a run's progress and result",
        {200: ("The run; once trained, with its policy", ref("RunWhole"))},
        parameters=(parameter("id", {"type": "integer"}, "The run", where="path"),),
        refusals=(404,),
        tag="policies",
        operation="runs_read",
    )
    def get(self, request: Request, pk: int) -> Response:
        parameters(request, ())
        run = run_lookup(pk)
        history = {name: [list(point) for point in points] for name, points in run_series(run).items()}
        return Response(
            {**run_represent(run), "stages": stages_of(run), **_result_figures(run), "history": history}
        )


def agent_checked(slug: str) -> str:
    if not re.fullmatch(SLUG_PATTERN, slug):
        fault = "expected a slug of 1 to 64 lower-case letters, digits, - and _"
        raise RequestRefused(f"agent: {fault}", fields={"agent": fault})
    return slug


def base_model_sent(facts: dict[str, Any]) -> str | None:
    """Name of the base model that `baseModel` names; None where it was left out."""
    given = text(facts, "baseModel")
    try:
        return base_model_resolve(given).name if given else None
    except SourceRefused as refusal:
        raise RequestRefused(f"baseModel: {refusal}", fields={"baseModel": str(refusal)}) from refusal


def flag(facts: dict[str, Any], name: str) -> bool:
    value = facts.get(name, False)
    if not isinstance(value, bool):
        raise RequestRefused(f"{name}: expected true or false", fields={name: "expected true or false"})
    return value


MOST_MINUTES = 7 * 24 * 60


def _knobs(facts: dict[str, Any]) -> dict[str, Any]:
    """Fields of a request as knobs; their ranges are checked here, where the field's name is known."""
    knobs: dict[str, Any] = {}
    faults: dict[str, str] = {}
    steps, rate, search = (facts.get(name) for name in ("maxSteps", "learningRate", "search"))
    if search is not None:
        knobs["search"] = search
        if not _number(search) or search != int(search) or not 1 <= search <= 32:
            faults["search"] = "expected a whole number from 1 to 32"
    if (minutes := facts.get("minutes")) is not None:
        knobs["minutes"] = minutes
        if not _number(minutes) or not 0 <= minutes <= MOST_MINUTES:
            faults["minutes"] = "expected a number of minutes from 0 (no limit) to 10,080"
    if steps is not None:
        knobs["max_steps"] = steps
        if not _number(steps) or steps != int(steps) or not 1 <= steps <= 1_000_000:
            faults["maxSteps"] = "expected a whole number from 1 to 1,000,000"
    if rate is not None:
        knobs["learning_rate"] = rate
        if not _number(rate) or not 0 < rate <= 1:
            faults["learningRate"] = "expected a number above 0 and up to 1"
    if faults:
        raise RequestRefused("; ".join(f"{name}: {fault}" for name, fault in faults.items()), fields=faults)
    return knobs


def _number(value: Any) -> bool:
    # the bounds keep out infinity, which has no whole part, and what is too long to be a float
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e9 < value < 1e9


def text(facts: dict[str, Any], name: str, default: str = "") -> str:
    """A text, or the default where none was sent. Refuses anything else."""
    value = default if facts.get(name) is None else facts[name]
    if not isinstance(value, str) or "\x00" in value:
        raise RequestRefused(f"{name}: expected text", fields={name: "expected text"})
    return value


def _plan(order: TrainOrder, estimate: OrderEstimate) -> dict[str, Any]:
    policy = estimate.policy
    return {
        "status": "dry_run",
        "feedbackCount": estimate.feedback_count,
        "method": policy.method,
        "why": order.reason,
        "samples": policy.samples,
        "pairs": policy.samples if dataset_kind(policy.method, policy.recipe) == "pairs" else 0,
        "estimatedSteps": estimate.steps,
        "estimatedTimeMinutes": round(estimate.minutes, 3),
        "estimatedBy": policy.minutes_source,
        "estimatedMemoryGb": max((stage.memory.gb or 0.0 for stage in estimate.stages), default=0.0) or None,
        "estimatedMemoryBy": policy.memory.source,
        "stages": [
            {
                "method": stage.method,
                "samples": stage.samples,
                "estimatedSteps": stage.steps,
                "estimatedTimeMinutes": round(stage.minutes, 3),
                "estimatedMemoryGb": stage.memory.gb,
            }
            for stage in estimate.stages
        ],
        "rewardModel": estimate.reward_model or None,
        "scoreMean": estimate.score_mean,
        "scoreStd": estimate.score_std,
        "modelConfig": {
            "baseModel": policy.base_model,
            "method": policy.method,
            "preset": policy.config,
            **policy.recipe,
        },
        "refused": estimate.refusal,
        "doubt": policy.warning,
        "evidence": gate_distance(order.agent).as_dict(),
    }


@contextmanager
def orders_refused() -> Iterator[None]:
    """Inside, an order that cannot be carried out is answered in its own words."""
    try:
        yield
    except (DatasetRefused, RecipeError) as refusal:
        raise RequestRefused(str(refusal)) from refusal


def run_accepted(order: TrainOrder, *, follow: bool = False) -> Response:
    """202 with the run that was queued, and where it is. follow: its policy is judged when it is trained."""
    run = order_place(order, follow=follow)
    return Response(run_represent(run), status=202, headers={"Location": f"/api/runs/{run.pk}/"})


def run_lookup(pk: int) -> TrainingRun:
    """The run, or 404."""
    run = run_get(pk) if pk < 2**63 else None  # SQLite and PostgreSQL have no larger keys
    if run is None:
        raise RequestRefused(f"no run {pk}", code="not_found", status=404, fields={"id": "does not exist"})
    return run


def run_represent(run: TrainingRun) -> dict[str, Any]:
    done = run.status == TrainingRun.Status.SUCCEEDED
    return {
        "id": run.pk,
        "agent": run.agent,
        "method": run.method,
        "status": "trained" if done else str(run.status),
        "reason": run.reason,
        "why": run.result.get("why", ""),
        "stage_of": run.stage_of_id,
        "reward": run.recipe.get("reward"),
        "asked_by": run.asked_by,
        "follow_up": run.kept_run.follow_up,
        "phase": run.phase_words,
        "phase_at": run.phase_at.isoformat() if run.phase_at else None,
        "steps_done": run.steps_done,
        "steps_total": run.steps_total,
        "created_at": run.created_at.isoformat(),
        "started_at": run.started_at.isoformat() if run.started_at else None,
        "finished_at": run.finished_at.isoformat() if run.finished_at else None,
    }


def _result_figures(run: TrainingRun) -> dict[str, Any]:
    """Figures of a finished run by the policy that is kept; none for one that has no policy."""
    policy: Policy | None = getattr(run.kept_run, "policy", None)
    if policy is None:
        return {}
    learnt_from = run.snapshot.created_at if run.snapshot else policy.created_at
    score = score_summaries(run.agent, [max(learnt_from, run.created_at)])[0]
    judge = reward_model_of(run)
    return {
        "policyId": policy.name,
        "version": _version(policy),
        "modelPath": policy.adapter_path,
        "rewardModelPath": judge.path if judge else None,
        "rewardModel": judge.name if judge else None,
        "feedbackCount": policy.feedback_count,
        "trainingSteps": run.steps_done,
        "search": run.result.get("search"),
        "candidates": run.result.get("candidates", []),
        **_reward(policy),
        "scoreMean": score.mean,
        "scoreStd": score.std,
    }


def _reward(policy: Policy) -> dict[str, float | None]:
    """The policy's own held-out reward, mean and sample standard deviation over the prompts it answered; null until it
    was judged, and where none of its answers is one that anybody judged."""
    if policy.metrics.get("rewards_known") == 0:
        return {"rewardMean": None, "rewardStd": None}
    reward, std = share_of(policy.metrics, "average_reward"), policy.metrics.get("reward_std")
    return {"rewardMean": reward.value if reward else None, "rewardStd": std}


def _version(policy: Policy) -> str:
    return policy.name.removeprefix(f"{policy.agent}-")
