"""The REST endpoints of experiments: which there are, and where one stands."""

from __future__ import annotations

from typing import Annotated, Any, Literal

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
from rl.experiments.results import results_cached, results_represent
from rl.experiments.traffic import experiments_with_arms
from rl.models import Experiment as ExperimentRow
from rl.statistics.intervals import Interval


class ExperimentsQuery(AgentPageQuery):
    status: Annotated[str, OneOf(ExperimentRow.Status.values)] | None = None
    """Only those with this status."""


EXPERIMENT = of_path("id", {"type": "integer"}, "The experiment")


Verdict = Literal["collecting", "undecided", "better", "worse", "harm", "mismatch", "control"]
Status = Literal["draft", "running", "stopped"]
Goal = Literal["higher", "lower"]


class Arm(Answer):
    name: str
    policy: str = Field(validation_alias="policy_name")
    weight: float
    control: bool = Field(validation_alias="is_control")


class Experiment(Answer):
    id: int
    name: str
    agent: str
    status: Status
    ramp: int
    """Percent of units that take part."""
    allocation: Literal["fixed", "thompson"]
    group: str
    metric: str
    goal: Goal
    arms: list[Arm]
    reason: str
    """Why it was stopped."""
    created_at: Time
    started_at: Time | None
    ended_at: Time | None


class UnadjustedEffect(Answer):
    value: float
    low: float
    high: float
    variance_removed: float
    """Share of the variance that the adjustment removed."""
    covariates: list[str]


class Effect(Answer):
    value: float | None
    """Arm minus control; of latency as a share of the control's."""
    low: float | None
    high: float | None
    p: float | None
    """Anytime-valid p-value of no difference (a confidence sequence)."""
    chance: float
    """Probability of being better than the control."""
    units: int
    needed: int | None
    """Units still needed for a verdict; null: cannot be estimated."""
    state: Verdict
    unadjusted: UnadjustedEffect | None
    """null without data on the units from before their assignment."""


class Guardrail(Answer):
    metric: str
    margin: float
    loss: float | None
    low: float | None
    state: Verdict


class ArmResults(Answer):
    name: str
    policy: str
    control: bool
    weight: float
    units: int
    exposures: int
    """Decisions."""
    figures: dict[str, Interval]
    best: float
    """Probability of being the best arm."""
    effect: Effect | None
    guardrails: list[Guardrail]
    verdict: Verdict
    words: str


class Mismatch(Answer):
    """Test of units per arm against their weights (sample ratio mismatch): chi-square, and anytime-valid."""

    p: float | None
    anytime_p: float | None


class Slice(Answer):
    slice: str
    value: str
    arm: str
    effect: Effect


class ResultsShown(Answer):
    experiment: str
    status: Status
    metric: str
    goal: Goal
    confidence: float
    """Simultaneous confidence of the effects' intervals over all looks."""
    verdict: Verdict
    arms: list[ArmResults]
    mismatch: Mismatch
    slices: list[Slice]
    simulated: int
    """Ratings among them by simulated raters."""
    days_needed: float | None
    """Days at the present rate."""
    at: Time


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
        return Response(ResultsShown.of(results_represent(results_cached(found))))


def experiment_represent(experiment: ExperimentRow) -> dict[str, Any]:
    """An experiment as the API and the command answer it."""
    return Experiment.of(experiment, arms=list(experiment.arms.all()))
