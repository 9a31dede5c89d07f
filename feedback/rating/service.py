"""Writers behind the pages of ratings and of pairs: a rating with what follows from it, and taking the last back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from feedback.models import Comparison, Decision, Rating
from feedback.rating.forms import ACCEPTING
from feedback.rating.queue import lease_release, lease_take
from feedback.rating.suggestions import suggestion_of, suggestion_reopen, suggestion_resolve
from feedback.services import (
    FeedbackConflict,
    FeedbackRefused,
    WriteResult,
    comparison_withdraw,
    rating_submit,
    rating_withdraw,
)


class SuggestionChanged(FeedbackRefused):
    """A suggestion was accepted that is settled, or was made anew, since the page was shown."""


def rating_give(rater: str, decision: Decision, verdict: str, facts: dict[str, Any]) -> WriteResult:
    """Store what a button of the rating page says, resolve the suggestion it answers and release the lease.

    facts: keyword arguments of rating_submit, without the rater. Raises FeedbackRefused, SuggestionChanged, and
    FeedbackConflict where the page was sent before with another button.
    """
    if verdict == "correct" and facts["correction"] is None:
        raise FeedbackRefused("A correction differs from the response: change it first, then save it")
    accepted = verdict in ACCEPTING
    if accepted:
        suggested = suggestion_of(decision)
        if suggested is None or suggested.thumb != ACCEPTING[verdict]:
            # nobody accepts what they did not see
            raise SuggestionChanged("The suggestion has changed: rate it here")
    written = rating_submit(rater=rater, **facts)
    lease_release(rater, decision.pk)
    if written.created:
        suggestion_resolve(decision, written.row, accepted=accepted)
    return written


def rating_undo(rater: str, ids: Sequence[str]) -> tuple[Rating | None, list[str]]:
    """Take back the last of these ratings that still stands, and lease its decision to the rater again.

    Returns it with the ids before it; None where none of them stands, or is this rater's.
    """
    earlier = list(ids)
    while earlier:
        rating = Rating.objects.filter(pk=earlier.pop(), rater=rater).select_related("decision").first()
        if rating is None:
            continue
        try:
            rating_withdraw(rating)
        except FeedbackConflict:
            # replaced or taken back in another window: the one before it is meant
            continue
        suggestion_reopen(rating)
        lease_take(rater, rating.decision_id)
        return rating, earlier
    return None, []


def comparison_undo(rater: str, ids: Sequence[str]) -> tuple[Comparison | None, list[str]]:
    """Take back the last of these comparisons that still stands; returns it with the ids before it, as rating_undo."""
    earlier = list(ids)
    while earlier:
        rows = Comparison.objects.filter(pk=earlier.pop(), rater=rater).select_related("left", "right")
        comparison = rows.first()
        if comparison is None:
            continue
        try:
            comparison_withdraw(comparison)
        except FeedbackConflict:
            continue  # as in rating_undo
        return comparison, earlier
    return None, []
