"""Bulk reader of everything known about a set of decisions: standing ratings, comparisons, newest outcomes."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Case, Count, F, IntegerField, Model, OuterRef, QuerySet, Subquery, Value, When
from django.db.models.functions import Coalesce

from feedback.models import Comparison, Decision, Outcome, Rating, Trace
from feedback.selectors import RATING_COLUMNS, RatingFact, comparisons_standing, ratings_standing
from feedback.storage.sql import IDS


@dataclass
class FeedbackBundle:
    """All feedback on one decision."""

    ratings: list[RatingFact] = field(default_factory=list)
    """Standing ratings."""
    comparisons: list[tuple[str, str]] = field(default_factory=list)
    """Standing comparisons: result for the decision (preferred, not preferred, tie, both bad), kind of
    rater."""
    outcomes: dict[str, float] = field(default_factory=dict)
    """Name -> the newest value."""


def feedback_bundles(ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, FeedbackBundle]:
    """Ratings, comparisons and outcomes of each of these decisions."""
    bundles = {pk: FeedbackBundle() for pk in ids}
    for start in range(0, len(ids), IDS):
        chunk = list(ids[start : start + IDS])
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
    """Facts of the agent's run around a decision."""

    steps: list[Any] = field(default_factory=list)
    """The steps of the decision's trace, with those of its other parts."""
    status: str = ""
    """End of the trace, where its collector reports it; `failed` is a fact, anything else is not."""


def runs_of(decisions: Sequence[Decision]) -> dict[uuid.UUID, RunFacts]:
    """Steps around each of these decisions (`trace` selected beside them).

    A trace too long for one request lies in several rows; a decision sent on its own belongs to the traces with its
    agent and run_id; and a task that ended in a later trace of the same run counts for the decisions before it.
    """
    wanted = {row.run_id for row in decisions if row.run_id}
    beside: dict[tuple[str, str], list[Trace]] = {}
    names = sorted(wanted)
    for start in range(0, len(names), IDS):
        rows = Trace.objects.filter(run_id__in=names[start : start + IDS])
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


def _ends_task(step: Any) -> bool:
    return isinstance(step, dict) and step.get("kind") == "task"


def annotate_feedback_count(decisions: QuerySet[Decision]) -> QuerySet[Any]:
    """Decisions with `rows_said`: how many rows were ever written about each. It only grows: rows are never changed.

    The traces of a decision's run count too: one may arrive after the decision that was taken in it.
    """
    counts: Iterable[Any] = (
        _count(model, column)
        for model, column in (
            (Rating, "decision"),
            (Comparison, "left"),
            (Comparison, "right"),
            (Outcome, "decision"),
        )
    )
    traced = Trace.objects.filter(agent=OuterRef("agent"), run_id=OuterRef("run_id")).exclude(run_id="")
    own = Case(When(trace__isnull=False, then=Value(1)), default=Value(0))
    total: Any = own + _with_counts(traced.order_by().annotate(of=F("run_id")))
    for count in counts:
        total = total + count
    return decisions.annotate(rows_said=total)


def _count(model: type[Model], column: str) -> Any:
    return _with_counts(
        model._default_manager.filter(**{column: OuterRef("pk")}).order_by().annotate(of=F(column))
    )


def _with_counts(rows: Any) -> Any:
    counted = rows.values("of").annotate(n=Count("pk")).values("n")
    return Coalesce(Subquery(counted, output_field=IntegerField()), 0)
