"""Rating requests: decisions that the queue shows first, with their probability.

SAMPLE: a random sample represents all decisions; ratings that people chose to give do not.
VERDICT: prompts on which two policies answer differently and the right answer is unknown. Prompts with equal answers
cannot change the difference between the policies, so leaving them out does not bias it.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.utils import timezone

from feedback.models import Decision, Lease, RaterKind, RatingRequest
from feedback.selectors import decisions_of, ratings_standing
from feedback.storage.facts import rating_share
from feedback.storage.sql import rows_in

Purpose = RatingRequest.Purpose

MOST_DAYS = 36_500
"""More days than this mean all decisions."""

MOST_DRAWN = 2_000
"""Most decisions in one sample."""

NEARLY_ALL = 0.9
"""Share of rated decisions above which it hardly matters who chose them: the others move the liked share by 10 points
at most."""

NEUTRAL = 0.5
"""Rating value in [0, 1] that is neither for nor against an answer."""


class SampleRefused(ValueError):
    """There is nothing to draw from, or the number is out of range."""


@dataclass(frozen=True)
class SampleDrawn:
    agent: str
    drawn: int
    among: int
    """Decisions in the population."""
    since: datetime


@dataclass(frozen=True)
class LikedShare:
    """Liked answers among rated ones."""

    liked: int
    rated: int
    drawn: int
    """Size of the sample, rated or not; 0 without a sample."""
    representative: bool
    """True of a random sample, and where nearly all decisions are rated."""

    @property
    def words(self) -> str:
        share = (
            f"{100 * self.liked / self.rated:.0f} % of {self.rated:,} rated answers are liked"
            if self.rated
            else ""
        )
        if self.drawn:
            said = f"Random sample: {self.rated:,} of {self.drawn:,} decisions rated"
            return f"{said}; {share}. Representative." if share else f"{said}."
        return (
            f"{share}."
            if self.representative
            else f"{share}. Not representative: people chose what they rated."
        )


def sample_draw(agent: str, count: int, days: int = 7) -> SampleDrawn:
    """Draw `count` random decisions of the last `days`; replaces the earlier sample. Raises SampleRefused."""
    if not 1 <= count <= MOST_DRAWN or days < 1:
        raise SampleRefused(
            f"expected 1 to {MOST_DRAWN:,} decisions and at least 1 day, found {count:,} and {days:,}"
        )
    since = timezone.now() - timedelta(days=min(days, MOST_DAYS))
    found = decisions_of(agent).filter(created_at__gte=since)
    ids = list(found.order_by().values_list("pk", flat=True))
    if not ids:
        raise SampleRefused(
            f"expected decisions of {agent} in the last {days:,} days, found none; record some, or draw over more days"
        )
    drawn = random.SystemRandom().sample(ids, min(count, len(ids)))
    with transaction.atomic():
        RatingRequest.objects.filter(decision__agent=agent, purpose=Purpose.SAMPLE).delete()
        _create(Purpose.SAMPLE, drawn, len(drawn) / len(ids))
    return SampleDrawn(agent, len(drawn), len(ids), since)


def verdict_ask(agent: str, prompt_hashes: Sequence[str]) -> int:
    """Request a rating of the newest decision on each of these prompts, in random order; returns how many.

    Replaces open verdict requests. Decisions whose request was answered are not requested again. Each has
    probability 1, because all of them are requested.
    """
    newest: dict[str, uuid.UUID] = {}
    decisions = rows_in(decisions_of(agent), "prompt_hash", list(prompt_hashes))
    for pk, name in decisions.order_by("created_at", "pk").values_list("pk", "prompt_hash"):
        newest[name] = pk
    requests_open(agent).filter(purpose=Purpose.VERDICT).delete()
    answered = RatingRequest.objects.filter(decision__agent=agent, purpose=Purpose.VERDICT)
    known = set(answered.values_list("decision", flat=True))
    fresh = [pk for pk in newest.values() if pk not in known]
    with transaction.atomic():
        _create(Purpose.VERDICT, fresh, 1.0)
        # Those with enough ratings have none that shows what is right: want one more.
        rows_in(Decision.objects.order_by(), "id", fresh).filter(
            ratings_human__gte=F("ratings_wanted")
        ).update(ratings_wanted=F("ratings_human") + 1)
    return len(fresh)


def _create(purpose: str, decisions: list[uuid.UUID], probability: float) -> None:
    RatingRequest.objects.bulk_create(
        RatingRequest(decision_id=pk, purpose=purpose, probability=probability, place=random.random())
        for pk in decisions
    )


def prompts_asked(agent: str) -> set[str]:
    """Hashes of requested prompts that had no human rating at the time of the request."""
    earlier = ratings_standing().filter(
        decision__agent=agent,
        decision__prompt_hash=OuterRef("decision__prompt_hash"),
        rater_kind=RaterKind.HUMAN,
        created_at__lte=OuterRef("created_at"),
    )
    found = RatingRequest.objects.filter(decision__agent=agent).exclude(Exists(earlier.order_by()))
    return set(found.order_by().values_list("decision__prompt_hash", flat=True))


def correction_wanted(decision: Decision) -> bool:
    """True if a rated decision is shown again because its ratings do not say what is right, and a verdict needs it."""
    if not decision.ratings_human:
        return False
    return requests_open(decision.agent).filter(decision=decision, purpose=Purpose.VERDICT).exists()


def requests_open(agent: str = "") -> QuerySet[RatingRequest]:
    """Unanswered requests: SAMPLE without any human rating, VERDICT without one since the request."""
    rated = ratings_standing().filter(decision=OuterRef("decision"), rater_kind=RaterKind.HUMAN).order_by()
    found = RatingRequest.objects.filter(decision__withdrawal=None).exclude(
        Q(Exists(rated), purpose=Purpose.SAMPLE)
        | Q(Exists(rated.filter(created_at__gt=OuterRef("created_at"))), purpose=Purpose.VERDICT)
    )
    return found.filter(decision__agent=agent) if agent else found


def decision_requested(
    rater: str, decisions: QuerySet[Decision], skip: Collection[uuid.UUID | str]
) -> uuid.UUID | None:
    """The first of these decisions with an open request, unless others lease it; None without one."""
    leased = Lease.objects.filter(decision=OuterRef("decision"), until__gt=timezone.now()).exclude(
        rater=rater
    )
    found = (
        requests_open()
        .filter(decision__in=decisions.order_by().values("pk"))
        .exclude(Exists(leased))
        .exclude(decision__in=list(skip))
    )
    return found.values_list("decision", flat=True).first()


def sampled_prompts(agent: str) -> set[str]:
    """Prompt hashes of an agent's random sample."""
    drawn = RatingRequest.objects.filter(decision__agent=agent, purpose=Purpose.SAMPLE)
    return set(drawn.order_by().values_list("decision__prompt_hash", flat=True))


def liked_in_sample(agent: str) -> LikedShare | None:
    """Liked answers in the random sample; None without a sample."""
    drawn = RatingRequest.objects.filter(decision__agent=agent, purpose=Purpose.SAMPLE)
    ids = list(drawn.values_list("decision", flat=True))
    return _liked(ids, len(ids), True) if ids else None


def liked_by_choice(agent: str) -> LikedShare | None:
    """Liked answers among all human ratings, a self-selected set; None without ratings."""
    found = _liked(None, 0, False, agent)
    if not found.rated:
        return None
    return replace(found, representative=found.rated >= NEARLY_ALL * decisions_of(agent).count())


def _liked(ids: list[uuid.UUID] | None, drawn: int, representative: bool, agent: str = "") -> LikedShare:
    ratings = ratings_standing(agent or None).filter(rater_kind=RaterKind.HUMAN)
    if ids is not None:
        ratings = rows_in(ratings, "decision_id", ids)
    values: dict[uuid.UUID, list[float]] = {}
    rows = ratings.order_by().values_list(
        "decision", "thumb", "stars", "score", "correction", "decision__response"
    )
    for decision, thumb, stars, score, correction, response in rows:
        value = rating_share(thumb, stars, score)
        if value is None and correction is not None:
            value = float(correction == response)  # A different correction means: not liked.
        if value is not None:
            values.setdefault(decision, []).append(value)
    means = [sum(one) / len(one) for one in values.values()]
    decided = [mean for mean in means if mean != NEUTRAL]
    return LikedShare(sum(mean > NEUTRAL for mean in decided), len(decided), drawn, representative)
