"""Bulk readers for experiments and training: exposures, logged choices, and all feedback on many decisions."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from django.db.models import (
    Avg,
    Case,
    Count,
    Exists,
    F,
    FloatField,
    IntegerField,
    Model,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    Sum,
    Value,
    When,
)
from django.db.models.fields.json import KeyTextTransform, KeyTransform
from django.db.models.functions import Cast, Coalesce, TruncMonth

from feedback.messages import Message
from feedback.models import SHADOW, Comparison, Decision, Outcome, RaterKind, Rating, Trace
from feedback.selectors import (
    CHUNK,
    NOT_FROM_APPS,
    RATING_COLUMNS,
    RatingFact,
    comparisons_standing,
    decisions_of,
    ratings_standing,
)
from feedback.storage.sql import IDS, chunks


@dataclass(frozen=True)
class DecisionSet:
    """An agent's decisions under some conditions, with their feedback up to a cutoff."""

    agent: str
    conditions: Mapping[str, object]
    """Keyword arguments of a filter on decisions."""
    cutoff: datetime | None = None
    """Later ratings, outcomes and rewards do not count; None: all count."""

    def rows(self) -> QuerySet[Decision]:
        return decisions_of(self.agent).filter(**self.conditions).order_by()

    def ids(self) -> QuerySet[Decision, object]:
        """Ids, for use as a subquery."""
        return self.rows().values("pk")

    def ratings(self) -> QuerySet[Rating]:
        """Ratings that stand now, or stood at the cutoff."""
        if self.cutoff is None:
            rows = ratings_standing()
        else:
            stood = Q(superseded_by__isnull=True) | Q(superseded_by__created_at__gte=self.cutoff)
            rows = Rating.objects.filter(
                stood, withdrawn=False, created_at__lt=self.cutoff, decision__withdrawal=None
            )
        return rows.filter(decision__agent=self.agent, **self._relation_condition()).order_by()

    def outcomes(self, name: str) -> QuerySet[Outcome]:
        """Outcomes of this name, oldest first."""
        rows = Outcome.objects.filter(
            name=name, decision__agent=self.agent, decision__withdrawal=None, **self._relation_condition()
        )
        if self.cutoff is not None:
            rows = rows.filter(created_at__lt=self.cutoff)
        return rows.order_by("at", "id")

    def _relation_condition(self) -> dict[str, object]:
        return {f"decision__{column}": value for column, value in self.conditions.items()}


def arms_set(agent: str, arms: Sequence[str]) -> DecisionSet:
    return DecisionSet(agent, {"arm__in": list(arms)})


def past_set(agent: str, arms: Sequence[str], since: datetime, before: datetime) -> DecisionSet:
    """Decisions from `since` to `before` for the units of these arms, with their feedback until `before`."""
    units = arms_set(agent, arms).rows().exclude(unit="").values("unit")
    return DecisionSet(agent, {"created_at__gte": since, "created_at__lt": before, "unit__in": units}, before)


class Exposure(NamedTuple):
    """A decision in an arm, or in a unit's past."""

    id: uuid.UUID
    arm: str
    unit: str
    """The decision's own id if it has no unit."""
    exposed_at: datetime
    latency_ms: float | None
    failed: bool
    """True if the metadata holds an error, a fallback, or a response that broke off."""
    arm_propensity: float | None
    """Probability of drawing its arm, if recorded."""
    cost_usd: float | None
    """Dollars that a provider took for the answer; 0 for a local policy, None if unknown."""
    slices: tuple[object, ...]
    """Values of the requested columns."""


class RatingValue(NamedTuple):
    """A standing rating of one decision."""

    decision: uuid.UUID
    thumb: str
    stars: int | None
    score: float | None
    simulated: bool


def exposures(decisions: DecisionSet, columns: Sequence[str] = ()) -> Iterator[Exposure]:
    """Exposures of these decisions, in no particular order, with further `columns` (`tags`, `metadata__<key>`)."""
    own = ("pk", "arm", "unit", "created_at", "latency_ms", "metadata__arm_propensity", "metadata__error")
    serving = ("fallbacks", "finish_reason", "cost_usd")
    rows = decisions.rows().values_list(*own, *(f"metadata__serving__{one}" for one in serving), *columns)
    for pk, arm, unit, at, latency, propensity, error, fallbacks, ended, cost, *values in rows.iterator(
        chunk_size=CHUNK
    ):
        drawn = float(propensity) if isinstance(propensity, (int, float)) and 0 < propensity <= 1 else None
        failed = bool(error) or bool(fallbacks) or ended == "error"
        spent = float(cost) if isinstance(cost, (int, float)) and 0 <= cost < math.inf else None
        yield Exposure(pk, arm, unit or str(pk), at, latency, failed, drawn, spent, tuple(values))


def verdicts(decisions: DecisionSet) -> Iterator[RatingValue]:
    """Standing ratings of these decisions, in no particular order."""
    return _rating_values(decisions.ratings())


def _rating_values(ratings: QuerySet[Rating]) -> Iterator[RatingValue]:
    rows = ratings.values_list("decision_id", "thumb", "stars", "score", "rater_kind")
    for pk, thumb, stars, score, kind in rows.iterator(chunk_size=CHUNK):
        yield RatingValue(pk, thumb, stars, score, kind == RaterKind.SIMULATED)


class MonthAnswers(NamedTuple):
    """Answers of one policy in one month."""

    agent: str
    month: datetime
    policy: str
    shadow: bool
    """True of answers beside the one a user got."""
    answers: int
    priced: int
    """Answers with a known cost."""
    cost: float
    """US dollars, of the priced ones."""
    timed: int
    latency_ms: float | None
    """Mean of the timed ones."""


COST = Cast(KeyTextTransform("cost_usd", KeyTransform("serving", "metadata")), FloatField())
"""US dollars that a provider took for a decision."""


def cost_since(agent: str, since: datetime) -> float:
    """US dollars that providers took for an agent's answers since a time, shadow and withdrawn answers included;
    simulations and imports left out."""
    return _paid(Decision.objects.filter(agent=agent, created_at__gte=since))


def _paid(rows: QuerySet[Decision]) -> float:
    rows = rows.filter(import_batch=None).exclude(source="simulation")
    return float(rows.order_by().aggregate(paid=Sum(COST))["paid"] or 0.0)


def caller_cost_since(caller: str, since: datetime) -> float:
    """US dollars that providers took for one caller's requests since a time (`metadata.serving.caller`)."""
    return _paid(Decision.objects.filter(created_at__gte=since, metadata__serving__caller=caller))


def months_answered() -> Iterator[MonthAnswers]:
    """Answers that were served or recorded in use, by agent, month and policy; no simulation and no import."""
    rows = (
        Decision.objects.filter(withdrawal=None, import_batch=None)
        .exclude(source="simulation")
        .annotate(month=TruncMonth("created_at"), shadow=Q(source=SHADOW))
        .order_by()
        .values_list("agent", "month", "policy", "shadow")
        .annotate(
            answers=Count("pk"),
            priced=Count(COST),
            cost=Sum(COST),
            timed=Count("latency_ms"),
            mean_ms=Avg("latency_ms"),
        )
    )
    for agent, month, policy, shadow, count, priced, paid, timed, latency in rows.iterator(chunk_size=CHUNK):
        yield MonthAnswers(agent, month, policy, shadow, count, priced, paid or 0.0, timed, latency)


class MonthRating(NamedTuple):
    """A standing rating by a person, with the month and the policy of its decision."""

    month: datetime
    policy: str
    thumb: str
    stars: int | None
    score: float | None


def months_rated(agent: str) -> Iterator[MonthRating]:
    """Standing ratings by people of answers in use."""
    rows = ratings_standing(agent).exclude(rater_kind=RaterKind.SIMULATED).filter(decision__import_batch=None)
    rows = rows.exclude(decision__source="simulation")
    rows = rows.annotate(month=TruncMonth("decision__created_at")).order_by()
    columns = rows.values_list("month", "decision__policy", "thumb", "stars", "score")
    yield from map(MonthRating._make, columns.iterator(chunk_size=CHUNK))


def policy_verdicts(
    agent: str, policy: str, since: datetime | None = None, *, recorded: bool = False
) -> Iterator[RatingValue]:
    """Standing ratings of a policy's decisions since a time, oldest decision first.

    recorded: the policy is an app's own model; leave out decisions that Ratchet answered under its name.
    """
    rows = ratings_standing(agent).filter(decision__policy=policy)
    if recorded:
        rows = rows.exclude(decision__source__in=NOT_FROM_APPS)
    if since is not None:
        rows = rows.filter(decision__created_at__gte=since)
    return _rating_values(rows.order_by("decision__created_at", "decision_id"))


def outcomes_of(decisions: DecisionSet, name: str) -> dict[uuid.UUID, float]:
    """Decision -> newest value of this outcome, for the decisions that have one."""
    return dict(decisions.outcomes(name).values_list("decision_id", "value").iterator(chunk_size=CHUNK))


class PromptText(NamedTuple):
    """What was known of a decision before it was answered."""

    messages: list[Message]
    source: str
    tags: list[str]


def prompts_of(ids: Sequence[uuid.UUID]) -> Iterator[tuple[uuid.UUID, PromptText]]:
    for chunk in chunks(ids):
        rows = Decision.objects.filter(pk__in=chunk).order_by()
        for pk, messages, source, tags in rows.values_list("pk", "messages", "source", "tags"):
            yield pk, PromptText(messages, source, tags)


def outcomes_named(ids: Sequence[uuid.UUID], name: str) -> dict[uuid.UUID, float]:
    """Decision -> newest value of this outcome, for the decisions that have one."""
    found: dict[uuid.UUID, float] = {}
    for chunk in chunks(ids):
        rows = Outcome.objects.filter(name=name, decision__in=chunk)
        found |= dict(rows.order_by("at", "id").values_list("decision_id", "value"))
    return found


def prompts_named(agent: str, hashes: Sequence[str]) -> dict[str, list[Message]]:
    """Hash -> messages of these prompts of an agent, at most IDS of them; erased ones are missing."""
    rows = decisions_of(agent).filter(prompt_hash__in=list(hashes)[:IDS]).order_by()
    return dict(rows.values_list("prompt_hash", "messages"))


class ListedChoice(NamedTuple):
    """A response drawn from listed candidates with a known probability."""

    id: uuid.UUID
    prompt_hash: str
    messages: list[Message]
    response: str
    candidates: list[object]
    propensity: float
    policy: str


def _listed(agent: str) -> QuerySet[Decision]:
    return decisions_of(agent).filter(propensity__isnull=False, candidates__isnull=False)


def listed_choices(agent: str) -> Iterator[ListedChoice]:
    """The agent's decisions with candidates and a propensity, newest first."""
    rows = _listed(agent)
    columns = ("pk", "prompt_hash", "messages", "response", "candidates", "propensity", "policy")
    yield from map(
        ListedChoice._make,
        rows.order_by("-created_at", "-id").values_list(*columns).iterator(chunk_size=CHUNK),
    )


def listed_prompts(agent: str) -> set[str]:
    """Hashes of the prompts of `listed_choices`."""
    return set(_listed(agent).order_by().values_list("prompt_hash", flat=True).distinct())


def verdicts_on(ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, list[RatingValue]]:
    """Standing ratings of these decisions."""
    found: dict[uuid.UUID, list[RatingValue]] = {}
    for chunk in chunks(ids):
        rows = ratings_standing().filter(decision__in=chunk).order_by()
        for value in _rating_values(rows):
            found.setdefault(value.decision, []).append(value)
    return found


@dataclass
class FeedbackBundle:
    """All feedback on one decision."""

    ratings: list[RatingFact] = field(default_factory=list)
    """Standing ratings."""
    comparisons: list[tuple[str, str]] = field(default_factory=list)
    """Standing comparisons: (preferred | not preferred | tie | both bad, kind of rater)."""
    outcomes: dict[str, float] = field(default_factory=dict)
    """Name -> newest value."""


def feedback_bundles(ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, FeedbackBundle]:
    """Ratings, comparisons and outcomes of each of these decisions."""
    bundles = {pk: FeedbackBundle() for pk in ids}
    for chunk in chunks(ids):
        ratings = ratings_standing().order_by().filter(decision__in=chunk)
        for row in ratings.values_list(*RATING_COLUMNS):
            bundles[row[0]].ratings.append(RatingFact._make(row))
        for own, other in (("left", "right"), ("right", "left")):
            compared = comparisons_standing().order_by().filter(**{f"{own}__in": chunk})
            for pk, preference, kind in compared.values_list(f"{own}_id", "preference", "rater_kind"):
                ended = {own: "preferred", other: "not preferred", "both_bad": "both bad"}
                bundles[pk].comparisons.append((ended.get(preference, preference), kind))
        measured = Outcome.objects.filter(decision__in=chunk).order_by("at", "id")
        for pk, name, value in measured.values_list("decision_id", "name", "value"):
            bundles[pk].outcomes[name] = value
    return bundles


@dataclass(frozen=True)
class RunFacts:
    """The agent's run around a decision."""

    steps: list[Any] = field(default_factory=list)
    """Steps of the decision's trace, in all its pieces."""
    status: str = ""
    """`failed` if the trace's collector reported a failure, else empty."""


def runs_of(decisions: Sequence[Decision]) -> dict[uuid.UUID, RunFacts]:
    """The run around each of these decisions; select their `trace` beforehand.

    A long trace is stored in several rows. A decision without a trace belongs to all traces of its agent and run_id.
    A task that ends in a later trace of the run counts for the decisions before it.
    """
    wanted = {row.run_id for row in decisions if row.run_id}
    beside: dict[tuple[str, str], list[Trace]] = {}
    names = sorted(wanted)
    for chunk in chunks(names):
        rows = Trace.objects.filter(run_id__in=chunk)
        for trace in rows.order_by("started_at", "created_at", "id"):
            beside.setdefault((trace.agent, trace.run_id), []).append(trace)
    return {row.pk: _run_of(row, beside.get((row.agent, row.run_id), [])) for row in decisions}


def _run_of(row: Decision, same_run: Sequence[Trace]) -> RunFacts:
    own = row.trace
    if own is None:
        traces = list(same_run)
    else:
        whole = own.metadata.get("trace")
        parts = [trace for trace in same_run if whole and trace.metadata.get("trace") == whole]
        traces = parts or [own]
    steps = [step for trace in traces for step in trace.steps]
    if own is not None and not any(_ends_task(step) for step in steps):
        others = [trace for trace in same_run if trace not in traces]
        steps += [step for trace in others for step in trace.steps if _ends_task(step)]
    failed = any(trace.metadata.get("status") == "failed" for trace in traces)
    return RunFacts(steps, "failed" if failed else "")


def _ends_task(step: object) -> bool:
    return isinstance(step, dict) and step.get("kind") == "task"


def annotate_feedback_count(decisions: QuerySet[Decision]) -> QuerySet[Any]:
    """Decisions with `rows_said`, the number of rows ever written about each, including traces of its run.

    Rows are append-only, so the number only grows: a new value means new feedback.
    """
    sources = ((Rating, "decision"), (Comparison, "left"), (Comparison, "right"), (Outcome, "decision"))
    traced = Trace.objects.filter(agent=OuterRef("agent"), run_id=OuterRef("run_id")).exclude(run_id="")
    own = Case(When(trace__isnull=False, then=Value(1)), default=Value(0))
    total: object = own + _with_counts(traced.order_by().annotate(of=F("run_id")))
    for model, column in sources:
        total = total + _count(model, column)
    return decisions.annotate(rows_said=total)


def _count(model: type[Model], column: str) -> Any:
    return _with_counts(
        model._default_manager.filter(**{column: OuterRef("pk")}).order_by().annotate(of=F(column))
    )


def _with_counts(rows: Any) -> Any:
    counted = rows.values("of").annotate(n=Count("pk")).values("n")
    return Coalesce(Subquery(counted, output_field=IntegerField()), 0)


def outcomes_standing(agent: str | None = None) -> QuerySet[Outcome]:
    """The newest outcome of each name on each decision, without withdrawn decisions."""
    newer = Outcome.objects.filter(
        Q(at__gt=OuterRef("at")) | Q(at=OuterRef("at"), pk__gt=OuterRef("pk")),
        decision=OuterRef("decision"),
        name=OuterRef("name"),
    ).order_by()
    found = Outcome.objects.filter(~Exists(newer), decision__withdrawal=None)
    if agent is not None:
        found = found.filter(decision__agent=agent)
    return found.order_by("at", "id")


class OutcomeFact(NamedTuple):
    """A standing outcome, without its decision."""

    id: uuid.UUID
    decision: uuid.UUID
    name: str
    value: float


def outcome_facts(agent: str) -> Iterator[OutcomeFact]:
    """Standing outcomes of an agent's decisions, in no particular order."""
    rows = outcomes_standing(agent).order_by().values_list("id", "decision_id", "name", "value")
    yield from map(OutcomeFact._make, rows.iterator(chunk_size=CHUNK))


NOT_TEXT = "messages"
"""`metadata.response_is` of a response that is a list of chat messages, such as tool calls."""


def responses_recorded(agent: str, newest: int, *, not_by: str = "") -> list[tuple[str, str]]:
    """(prompt, response) texts of the `newest` decisions and the `newest` corrections.

    Leaves out responses that are not text and those of the serving backend `not_by`.
    """
    facts = ("messages", "response", "metadata__response_is", "metadata__serving__backend")
    decisions = decisions_of(agent).order_by("-created_at").values_list(*facts)[:newest]
    rows = [
        (messages, response)
        for messages, response, form, backend in decisions
        if form != NOT_TEXT and not (not_by and backend == not_by)
    ]
    return [(_prompt_text(messages), response) for messages, response in rows] + corrections_recorded(
        agent, newest
    )


def corrections_recorded(agent: str, newest: int) -> list[tuple[str, str]]:
    """(prompt, correction) texts of the `newest` corrections."""
    corrections = ratings_standing(agent).filter(correction__isnull=False).order_by("-created_at")
    rows = corrections.values_list("decision__messages", "correction")[:newest]
    return [(_prompt_text(messages), str(response)) for messages, response in rows]


def _prompt_text(messages: Iterable[Mapping[str, object]]) -> str:
    return "\n".join(str(turn.get("content") or "") for turn in messages)
