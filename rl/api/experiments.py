"""The REST endpoints of experiments: which there are, and where one stands."""

from __future__ import annotations

from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.errors import RequestRefused
from backend.rest.pages import PARAMETERS as PAGE_PARAMETERS
from backend.rest.pages import page_of
from backend.rest.reading import parameters
from backend.rest.schema import describe, page_schema, parameter, ref
from backend.rest.views import ApiView
from rl.api.loop import OF_AGENT, PAGING
from rl.api.training import agent_checked
from rl.experiments.results import results_cached, results_represent
from rl.experiments.traffic import ExperimentRefused, experiments_with_arms
from rl.models import Experiment

STATUS = parameter(
    "status", {"type": "string", "enum": list(Experiment.Status.values)}, "Only those with this status"
)
EXPERIMENT = parameter("id", {"type": "integer"}, "The experiment", where="path")


class Experiments(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "List experiments, newest first",
        {200: ("A page of them", page_schema(ref("Experiment")))},
        parameters=(OF_AGENT, STATUS, *PAGING),
        tag="policies",
        operation="experiments_list",
    )
    def get(self, request: Request) -> Response:
        given = parameters(request, ("agent", "status", *PAGE_PARAMETERS))
        found = experiments_with_arms()
        if "agent" in given:
            found = found.filter(agent=agent_checked(given["agent"]))
        if "status" in given:
            if given["status"] not in Experiment.Status.values:
                fault = f"expected one of {', '.join(Experiment.Status.values)}"
                raise RequestRefused(f"status: {fault}", fields={"status": fault})
            found = found.filter(status=given["status"])
        return Response(page_of(found, request, experiment_represent))


class ExperimentResults(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "Read an experiment's results",
        {200: ("Arms, exposures, effects with intervals, verdict", ref("ExperimentResults"))},
        parameters=(EXPERIMENT,),
        refusals=(404, 409),
        tag="policies",
        operation="experiments_results",
        description="Intervals are valid at every look (confidence sequences), so reading them often is "
        "safe. Large experiments answer from a short-lived cache.",
    )
    def get(self, request: Request, pk: int) -> Response:
        parameters(request, ())
        found = experiments_with_arms().filter(pk=pk).first() if pk < 2**63 else None
        if found is None:
            raise RequestRefused(
                f"no experiment {pk}", code="not_found", status=404, fields={"id": "does not exist"}
            )
        try:
            return Response(results_represent(results_cached(found)))
        except ExperimentRefused as refusal:
            raise RequestRefused(str(refusal), code="conflict", status=409) from refusal


def experiment_represent(experiment: Experiment) -> dict[str, Any]:
    """An experiment as the API and the command answer it."""
    return {
        "id": experiment.pk,
        "name": experiment.name,
        "agent": experiment.agent,
        "status": str(experiment.status),
        "ramp": experiment.ramp,
        "allocation": str(experiment.allocation),
        "group": experiment.group,
        "metric": experiment.metric,
        "goal": str(experiment.goal),
        "arms": [
            {
                "name": arm.name,
                "policy": arm.policy_name,
                "weight": arm.weight,
                "control": arm.is_control,
            }
            for arm in experiment.arms.all()
        ],
        "reason": experiment.reason,
        "created_at": experiment.created_at.isoformat(),
        "started_at": experiment.started_at.isoformat() if experiment.started_at else None,
        "ended_at": experiment.ended_at.isoformat() if experiment.ended_at else None,
    }
