"""The REST endpoints of experiments: which there are, and where one stands."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import Answer, Query, Time
from backend.rest.errors import not_found
from backend.rest.pages import page_of
from backend.rest.reading import query_read
from backend.rest.schema import Page, describe, of_path
from backend.rest.views import ApiView
from feedback.storage.fields import OneOf
from rl.api.loop import AgentPageQuery
from rl.experiments.results import ResultsShown, results_cached
from rl.experiments.traffic import experiments_with_arms
from rl.models import Experiment as ExperimentRow


class ExperimentsQuery(AgentPageQuery):
    status: Annotated[str, OneOf(ExperimentRow.Status.values)] | None = None
    """Only those with this status."""


EXPERIMENT = of_path("id", {"type": "integer"}, "The experiment")


class Arm(Answer):
    name: str
    policy: str = Field(validation_alias="policy_name")
    weight: float
    control: bool = Field(validation_alias="is_control")


class Experiment(Answer):
    id: int
    name: str
    agent: str
    status: Literal["draft", "running", "stopped"]
    ramp: int
    """Percent of units that take part."""
    shadow: int
    """Percent of decisions that the challenger answers beside the answer users get; 0: users are split."""
    shadow_budget_usd: float | None
    """US dollars for all shadow answers; null: no limit."""
    auto_ramp: bool
    """Whether the scheduler takes it to 1, 5, 25 and 100 %."""
    not_inferior: float
    """Loss of the metric that must be ruled out; 0: a gain is asked for."""
    allocation: Literal["fixed", "thompson"]
    group: str
    metric: str
    goal: Literal["higher", "lower"]
    arms: list[Arm]
    reason: str
    """Why it was stopped."""
    created_at: Time
    started_at: Time | None
    ended_at: Time | None


class Experiments(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "List experiments, newest first",
        {200: ("A page of them", Page[Experiment])},
        query=ExperimentsQuery,
        tag="policies",
        operation="experiments_list",
    )
    def get(self, request: Request) -> Response:
        sent = query_read(ExperimentsQuery, request)
        found = experiments_with_arms()
        for name in ("agent", "status"):
            if value := getattr(sent, name):
                found = found.filter(**{name: value})
        return Response(page_of(found, request, sent, experiment_represent))


class ExperimentResults(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "Read an experiment's results",
        {200: ("Arms, exposures, effects with intervals, verdict", ResultsShown)},
        parameters=(EXPERIMENT,),
        refusals=(404, 409),
        tag="policies",
        operation="experiments_results",
        description="Intervals are valid at every look (confidence sequences), so reading them often is "
        "safe. Large experiments answer from a short-lived cache.",
    )
    def get(self, request: Request, pk: int) -> Response:
        query_read(Query, request)
        found = experiments_with_arms().filter(pk=pk).first() if pk < 2**63 else None
        if found is None:
            raise not_found(f"no experiment {pk}", "id")
        return Response(ResultsShown.of(results_cached(found)))


def experiment_represent(experiment: ExperimentRow) -> dict[str, object]:
    """An experiment as the API and the command answer it."""
    return Experiment.of(experiment, arms=list(experiment.arms.all()))
