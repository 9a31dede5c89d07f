"""Priority of a decision for annotation: what the queue sorts by after the number of ratings."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from feedback.models import Decision, RaterKind, Rating
from feedback.storage.facts import rating_share
from feedback.storage.sql import RatingProgress


def policy_uncertainty(candidates: Sequence[Any] | None, propensity: float | None) -> float:
    """Uncertainty of the policy, 0 to 1; 0 where nothing is known of it.

    With at least two scored candidates: one minus the margin between the two best scores (margin sampling, Scheffer,
    Decomain and Wrobel 2001). Otherwise one minus the probability of the choice it made.
    """
    scores = sorted(
        (
            float(candidate["score"])
            for candidate in candidates or ()
            if isinstance(candidate, Mapping) and candidate.get("score") is not None
        ),
        reverse=True,
    )
    if len(scores) > 1:
        return 1.0 - (scores[0] - scores[1])
    return 0.0 if propensity is None else 1.0 - propensity


def raters_apart(shares: Sequence[float]) -> float:
    """Disagreement of raters, 0 to 1: the distance between the best and the worst rating."""
    return max(shares) - min(shares) if len(shares) > 1 else 0.0


def priority_update(decision: uuid.UUID, standing: RatingProgress | None) -> None:
    """Recompute the annotation priority of a decision that two people or more rated and more are to rate. Anything
    else is free: with fewer ratings nobody can disagree, with enough of them nobody is asked.
    """
    if standing is None or not 2 <= standing.ratings < standing.target:
        return
    ratings = Rating.objects.filter(
        decision=decision, superseded_by__isnull=True, withdrawn=False, rater_kind=RaterKind.HUMAN
    )
    shares = [rating_share(*row) for row in ratings.order_by().values_list("thumb", "stars", "score")]
    apart = raters_apart([share for share in shares if share is not None])
    for candidates, propensity in Decision.objects.filter(pk=decision).values_list(
        "candidates", "propensity"
    ):
        Decision.objects.filter(pk=decision).update(
            annotation_priority=policy_uncertainty(candidates, propensity) + apart
        )
