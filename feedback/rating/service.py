"""Writers behind the rating pages: store a rating and its consequences, undo the last rating or comparison."""

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
    """The accepted suggestion was resolved or replaced after the page was shown."""


def rating_give(rater: str, decision: Decision, verdict: str, facts: dict[str, Any]) -> WriteResult:
    """Store a rating, resolve the suggestion it answers, and release the lease.

    Args:
        verdict: The button of the rating page.
        facts: Keyword arguments of `rating_submit` besides the rater.

    Raises FeedbackRefused, SuggestionChanged, or FeedbackConflict if the page was sent before with another button.
    """
    if verdict == "correct" and facts["correction"] is None:
        raise FeedbackRefused("The correction equals the response: change the text, then save it")
    accepted = verdict in ACCEPTING
    if accepted:
        suggested = suggestion_of(decision)
        if suggested is None or suggested.thumb != ACCEPTING[verdict]:
            raise SuggestionChanged(
                "The suggestion changed since this page was shown: rate the decision here"
            )
    written = rating_submit(rater=rater, **facts)
    lease_release(rater, decision.pk)
    if written.created:
        suggestion_resolve(decision, written.row, accepted=accepted)
    return written


def rating_undo(rater: str, ids: Sequence[str]) -> tuple[Rating | None, list[str]]:
    """Withdraw the last of these ratings that still stands, and lease its decision to the rater again.

    Returns (rating, ids before it), or (None, []) if none of them stands and is this rater's.
    """
    earlier = list(ids)
    while earlier:
        rating = Rating.objects.filter(pk=earlier.pop(), rater=rater).select_related("decision").first()
        if rating is None:
            continue
        try:
            rating_withdraw(rating)
        except FeedbackConflict:
            continue  # Replaced or withdrawn in another window: undo the one before.
        suggestion_reopen(rating)
        lease_take(rater, rating.decision_id)
        return rating, earlier
    return None, []


def comparison_undo(rater: str, ids: Sequence[str]) -> tuple[Comparison | None, list[str]]:
    """As `rating_undo`, for comparisons."""
    earlier = list(ids)
    while earlier:
        rows = Comparison.objects.filter(pk=earlier.pop(), rater=rater).select_related("left", "right")
        comparison = rows.first()
        if comparison is None:
            continue
        try:
            comparison_withdraw(comparison)
        except FeedbackConflict:
            continue
        return comparison, earlier
    return None, []
