"""The only readers of feedback: decisions, the ratings that stand, comparisons, counts."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Count, Exists, OuterRef, Q, QuerySet

from feedback.models import Comparison, Decision, RaterKind, Rating


def ratings_standing(agent: str | None = None) -> QuerySet[Rating]:
    """Ratings that were neither superseded nor withdrawn, oldest first."""
    ratings = Rating.objects.filter(superseded_by__isnull=True, withdrawn=False)
    if agent is not None:
        ratings = ratings.filter(decision__agent=agent)
    return ratings.order_by("created_at", "id")


def comparisons_standing(agent: str | None = None) -> QuerySet[Comparison]:
    """Comparisons that were neither superseded nor withdrawn, oldest first."""
    comparisons = Comparison.objects.filter(superseded_by__isnull=True, withdrawn=False)
    if agent is not None:
        comparisons = comparisons.filter(left__agent=agent)
    return comparisons.order_by("created_at", "id")


def decisions_of(agent: str) -> QuerySet[Decision]:
    return Decision.objects.filter(agent=agent)


def decisions_rated(agent: str) -> QuerySet[Decision]:
    """Decisions with at least one standing rating."""
    return decisions_of(agent).filter(Exists(ratings_standing().filter(decision=OuterRef("pk"))))


def decision_get(pk: uuid.UUID | str) -> Decision | None:
    return Decision.objects.filter(pk=pk).first()


def agents_known() -> list[str]:
    """Slugs of the agents that decided anything, in alphabetical order."""
    return list(Decision.objects.order_by("agent").values_list("agent", flat=True).distinct())


@dataclass(frozen=True)
class FeedbackCounts:
    """How much stands for an agent."""

    decisions: int
    ratings: int
    comparisons: int
    corrections: int
    simulated: int
    newest_at: datetime | None

    @property
    def feedback(self) -> int:
        """Ratings and comparisons together: the number in a policy's name."""
        return self.ratings + self.comparisons


def feedback_counts(agent: str) -> FeedbackCounts:
    ratings: dict[str, Any] = ratings_standing(agent).aggregate(
        n=Count("pk"),
        corrections=Count("pk", filter=Q(correction__isnull=False)),
        simulated=Count("pk", filter=Q(rater_kind=RaterKind.SIMULATED)),
    )
    comparisons: dict[str, Any] = comparisons_standing(agent).aggregate(
        n=Count("pk"), simulated=Count("pk", filter=Q(rater_kind=RaterKind.SIMULATED))
    )
    newest = (
        Rating.objects.filter(decision__agent=agent)
        .order_by("-created_at")
        .values_list("created_at", flat=True)
        .first()
    )
    return FeedbackCounts(
        decisions=decisions_of(agent).count(),
        ratings=ratings["n"],
        comparisons=comparisons["n"],
        corrections=ratings["corrections"],
        simulated=ratings["simulated"] + comparisons["simulated"],
        newest_at=newest,
    )
