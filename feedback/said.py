"""All that was said and measured of some decisions at once, and how many rows that is: what rewards are made from."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Count, F, IntegerField, Model, OuterRef, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce

from feedback.models import Comparison, Decision, Outcome, Rating
from feedback.selectors import IDS, RatingFact, comparisons_standing, ratings_standing


@dataclass
class Said:
    """What is known of one decision."""

    ratings: list[RatingFact] = field(default_factory=list)
    """Those that stand."""
    comparisons: list[tuple[str, str]] = field(default_factory=list)
    """Those that stand: how it ended for the decision (preferred, not preferred, tie, both bad), kind of rater."""
    outcomes: dict[str, float] = field(default_factory=dict)
    """Name -> the newest value."""


def said_of(ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, Said]:
    """What was said and measured of each of these decisions."""
    found = {pk: Said() for pk in ids}
    for start in range(0, len(ids), IDS):
        chunk = list(ids[start : start + IDS])
        ratings = ratings_standing().order_by().filter(decision__in=chunk)
        for row in ratings.values_list(
            "decision_id", "rater", "rater_kind", "thumb", "stars", "score", "correction", "tags"
        ):
            found[row[0]].ratings.append(RatingFact._make(row))
        for own, other in (("left", "right"), ("right", "left")):
            compared = comparisons_standing().order_by().filter(**{f"{own}__in": chunk})
            for pk, preference, kind in compared.values_list(f"{own}_id", "preference", "rater_kind"):
                ended = {own: "preferred", other: "not preferred", "both_bad": "both bad"}
                found[pk].comparisons.append((ended.get(preference, preference), kind))
        measured = Outcome.objects.filter(decision__in=chunk).order_by("at", "id")
        for pk, name, value in measured.values_list("decision_id", "name", "value"):
            found[pk].outcomes[name] = value
    return found


def with_rows_said(decisions: QuerySet[Decision]) -> QuerySet[Any]:
    """Decisions with `rows_said`: how many rows were ever written about each. It only grows: rows are never changed."""
    counts: Iterable[Any] = (
        _count(model, column)
        for model, column in (
            (Rating, "decision"),
            (Comparison, "left"),
            (Comparison, "right"),
            (Outcome, "decision"),
        )
    )
    total: Any = Value(0)
    for count in counts:
        total = total + count
    return decisions.annotate(rows_said=total)


def _count(model: type[Model], column: str) -> Any:
    rows = model._default_manager.filter(**{column: OuterRef("pk")}).order_by().annotate(of=F(column))
    counted = rows.values("of").annotate(n=Count("pk")).values("n")
    return Coalesce(Subquery(counted, output_field=IntegerField()), 0)
