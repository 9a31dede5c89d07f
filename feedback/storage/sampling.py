"""Sampling of an agent's decisions, the ratings each should get, and the order in which they are rated."""

from __future__ import annotations

import hashlib
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence

from django.conf import settings

from feedback.cache import TTLCache
from feedback.models import SHADOW, AgentSettings, Decision, RaterKind, Rating
from feedback.storage.facts import rating_share
from feedback.storage.sql import RatingProgress, rows_in

BATCH = 5_000
"""Decisions that are given their new numbers together."""

_settings: TTLCache[AgentSettings] = TTLCache()


def agent_settings(agent: str) -> AgentSettings:
    """An agent's settings, or the defaults where it has no row; a change is seen within FEEDBACK_REMEMBER_S seconds."""
    return _settings.get(
        agent,
        lambda: (
            AgentSettings.objects.filter(agent=agent).first()
            or AgentSettings(agent=agent, **settings.FEEDBACK_AGENT_DEFAULTS)
        ),
    )


def is_collected(agent: str, id: uuid.UUID) -> bool:
    """True if a decision is kept under the agent's `collection_rate`.

    A function of the id alone, so that a retry, another server and another day agree; and of a rate, so that what is
    kept at 10 % is kept at 20 % too.
    """
    rate = agent_settings(agent).collection_rate
    return rate >= 1.0 or _fraction("collect", id) < rate


def rating_target(agent: str, id: uuid.UUID) -> int:
    """Ratings by people a decision waits for: more for the share that is to show how far raters agree."""
    return _target_count(agent_settings(agent), id)


def _target_count(wanted: AgentSettings, id: uuid.UUID) -> int:
    if wanted.overlap_share > 0 and _fraction("overlap", id) < wanted.overlap_share:
        return max(wanted.ratings_wanted, wanted.overlap_ratings)
    return wanted.ratings_wanted


def ratings_wanted_refresh(agent: str) -> int:
    """Give an agent's decisions recorded before the number of ratings that its settings ask for now, some thousand at a
    time: those that have enough of them leave the queue, those that lack some come back. Returns how many it changed.

    What another process records meanwhile may still get the number from before, for FEEDBACK_REMEMBER_S seconds.
    """
    _settings.clear()
    settings = agent_settings(agent)
    rows = (
        Decision.objects.filter(agent=agent, withdrawal=None)
        .exclude(source=SHADOW)
        .order_by("pk")
        .values_list("pk", "ratings_wanted")
    )
    changed, some = 0, list(rows[:BATCH])
    while some:
        apart: dict[int, list[uuid.UUID]] = defaultdict(list)
        for pk, before in some:
            if (wanted := _target_count(settings, pk)) != before:
                apart[wanted].append(pk)
        for wanted, ids in apart.items():
            changed += rows_in(Decision.objects.order_by(), "id", ids).update(ratings_wanted=wanted)
        some = list(rows.filter(pk__gt=some[-1][0])[:BATCH])
    return changed


def _fraction(purpose: str, id: uuid.UUID) -> float:
    """A number in [0, 1), uniform over ids; the purpose keeps the two shares independent of each other."""
    digest = hashlib.sha256(purpose.encode() + id.bytes).digest()
    return int.from_bytes(digest[:7]) / 2**56


def policy_uncertainty(candidates: Sequence[object] | None, propensity: float | None) -> float:
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
