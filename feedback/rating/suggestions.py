"""Ratings suggested by a label model, until a person's rating resolves them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from django.db.models import Count, Q
from django.utils import timezone

from feedback.models import Decision, Rating, Suggestion, Thumb
from feedback.storage.facts import rating_share
from feedback.storage.sql import chunks

Outcome = Suggestion.Outcome


@dataclass(frozen=True)
class SuggestionCounts:
    """An agent's suggestions by outcome."""

    open: int = 0
    accepted: int = 0
    agreed: int = 0
    overruled: int = 0

    @property
    def settled_count(self) -> int:
        return self.accepted + self.agreed + self.overruled


def suggestions_record(good: Mapping[uuid.UUID, float], labeller: str) -> int:
    """Store suggestions (decision -> probability of a good answer), replacing unresolved ones; returns how many."""
    keys = list(good)
    count = 0
    for chunk in chunks(keys):
        settled = set(
            Suggestion.objects.filter(decision__in=chunk)
            .exclude(outcome="")
            .values_list("decision_id", flat=True)
        )
        there = Decision.objects.filter(pk__in=chunk).values_list("pk", flat=True)
        rows = [
            Suggestion(decision_id=pk, labeller=labeller, good=good[pk], created_at=timezone.now())
            for pk in there
            if pk not in settled
        ]
        Suggestion.objects.bulk_create(
            rows,
            update_conflicts=True,
            unique_fields=["decision"],
            update_fields=["labeller", "good", "created_at"],
        )
        count += len(rows)
    return count


def suggestion_of(decision: Decision) -> Suggestion | None:
    """The unresolved suggestion on a decision."""
    return Suggestion.objects.filter(decision=decision, outcome="").first()


def suggestion_resolve(decision: Decision, rating: Rating, *, accepted: bool) -> None:
    """Resolve a decision's suggestion by a person's rating; a neutral rating leaves it open."""
    suggested, side = suggestion_of(decision), _side(rating)
    if suggested is None or not side:
        return
    same = Outcome.ACCEPTED if accepted else Outcome.AGREED
    outcome = same if side == suggested.thumb else Outcome.OVERRULED
    Suggestion.objects.filter(pk=suggested.pk, outcome="").update(
        outcome=outcome, rating=rating.pk, settled_at=timezone.now()
    )


def suggestion_reopen(rating: Rating) -> None:
    """Reopen the suggestion that a withdrawn rating resolved."""
    Suggestion.objects.filter(rating=rating.pk).update(outcome="", rating=None, settled_at=None)


def _side(rating: Rating) -> str:
    """up, down, or empty for a neutral rating."""
    value = rating_share(rating.thumb, rating.stars, rating.score)
    if value is None or value == 0.5:
        return ""
    return Thumb.UP if value > 0.5 else Thumb.DOWN


def suggestion_counts(agent: str) -> SuggestionCounts:
    found: dict[str, int] = Suggestion.objects.filter(decision__agent=agent).aggregate(
        open=Count("pk", filter=Q(outcome="")),
        **{outcome.value: Count("pk", filter=Q(outcome=outcome)) for outcome in Outcome},
    )
    return SuggestionCounts(**found)


def ratings_accepted(agent: str) -> set[uuid.UUID]:
    """Ratings that accepted a suggestion; a label model must not train on its own suggestions."""
    rows = Suggestion.objects.filter(decision__agent=agent, outcome=Outcome.ACCEPTED)
    return {pk for pk in rows.values_list("rating", flat=True) if pk is not None}
