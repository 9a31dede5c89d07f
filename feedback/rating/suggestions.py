"""Ratings that a label model suggests: stored beside the decisions, resolved by a person's rating."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from django.db.models import Count, Q
from django.utils import timezone

from feedback.models import Decision, Rating, Suggestion, Thumb

AT_ONCE = 500
Outcome = Suggestion.Outcome


@dataclass(frozen=True)
class SuggestionCounts:
    """Counts of an agent's suggestions by what became of them."""

    open: int = 0
    accepted: int = 0
    agreed: int = 0
    overruled: int = 0

    @property
    def settled_count(self) -> int:
        return self.accepted + self.agreed + self.overruled


def suggestions_record(good: Mapping[uuid.UUID, float], labeller: str) -> int:
    """Store a label model's suggestions in place of its earlier ones; resolved ones stay. Returns how
    many stand."""
    keys = list(good)
    count = 0
    for start in range(0, len(keys), AT_ONCE):
        chunk = keys[start : start + AT_ONCE]
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
    """The suggestion that waits for a person, if there is one."""
    return Suggestion.objects.filter(decision=decision, outcome="").first()


def suggestion_resolve(decision: Decision, rating: Rating, *, accepted: bool) -> None:
    """Resolve the suggestion a person saw by their rating; a neutral rating resolves nothing."""
    suggested = suggestion_of(decision)
    if suggested is None:
        return
    side = _side(rating)
    if not side:
        return
    outcome = (
        Outcome.ACCEPTED if accepted else Outcome.AGREED if side == suggested.thumb else Outcome.OVERRULED
    )
    Suggestion.objects.filter(pk=suggested.pk, outcome="").update(
        outcome=outcome, rating=rating.pk, settled_at=timezone.now()
    )


def suggestion_reopen(rating: Rating) -> None:
    """Reopen the suggestion whose resolving rating was withdrawn."""
    Suggestion.objects.filter(rating=rating.pk).update(outcome="", rating=None, settled_at=None)


def _side(rating: Rating) -> str:
    if rating.score is not None:
        return "" if rating.score == 0.5 else Thumb.UP if rating.score > 0.5 else Thumb.DOWN
    if rating.stars is not None:
        return "" if rating.stars == 3 else Thumb.UP if rating.stars > 3 else Thumb.DOWN
    return str(rating.thumb)


def suggestion_counts(agent: str) -> SuggestionCounts:
    """Counts of accepted, changed and ignored suggestions for an agent's decisions."""
    found: dict[str, int] = Suggestion.objects.filter(decision__agent=agent).aggregate(
        open=Count("pk", filter=Q(outcome="")),
        **{outcome.value: Count("pk", filter=Q(outcome=outcome)) for outcome in Outcome},
    )
    return SuggestionCounts(**found)


def ratings_accepted(agent: str) -> set[uuid.UUID]:
    """Ratings that accepted a suggestion: a label model must not learn from what was suggested by one."""
    rows = Suggestion.objects.filter(decision__agent=agent, outcome=Outcome.ACCEPTED)
    return {pk for pk in rows.values_list("rating", flat=True) if pk is not None}
