"""Requests for ratings: decisions that the queue shows before others, with the probability that each was drawn.

A random sample shows what all decisions are like, which ratings that people chose to give do not. Where two policies
answer differently and nobody knows who is right, a rating may change the verdict. Where they answer alike, both are
right or both are wrong, so such a rating changes nothing: asking only where they differ leaves the difference unbiased.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.utils import timezone

from feedback.models import Decision, Lease, RaterKind, RatingRequest
from feedback.selectors import ratings_standing
from feedback.storage.annotation_priority import rating_share
from feedback.storage.sql import rows_in

Purpose = RatingRequest.Purpose

MOST_DAYS = 36_500
"""Days that can be looked back; more is everything."""

MOST_DRAWN = 2_000
"""Decisions in one sample, at most."""

NEUTRAL = 0.5
"""Value of a rating that is neither for nor against an answer."""


class SampleRefused(ValueError):
    """Nothing to draw from, or a number that cannot be drawn; the message says what was expected."""


@dataclass(frozen=True)
class SampleDrawn:
    """A random sample of an agent's decisions."""

    agent: str
    drawn: int
    among: int
    """Decisions that could have been drawn."""
    since: datetime


@dataclass(frozen=True)
class LikedShare:
    """Liked answers among rated ones."""

    liked: int
    rated: int
    drawn: int
    """Decisions of the sample, rated or not; 0 where nothing was drawn."""
    representative: bool

    @property
    def words(self) -> str:
        """The share in a sentence, with whether it holds for all decisions."""
        share = (
            f"{100 * self.liked / self.rated:.0f} % of {self.rated:,} rated answers are liked"
            if self.rated
            else ""
        )
        if self.representative:
            said = f"Random sample: {self.rated:,} of {self.drawn:,} decisions rated"
            return f"{said}; {share}. Representative." if share else f"{said}."
        return f"{share}. Not representative: people chose what they rated."


def sample_draw(agent: str, count: int, days: int = 7) -> SampleDrawn:
    """Draw `count` random decisions of the last days in place of an earlier sample. Raises SampleRefused."""
    if not 1 <= count <= MOST_DRAWN or days < 1:
        raise SampleRefused(
            f"expected 1 to {MOST_DRAWN:,} decisions and at least 1 day, found {count:,} and {days:,}"
        )
    since = timezone.now() - timedelta(days=min(days, MOST_DAYS))
    found = Decision.objects.filter(agent=agent, withdrawal=None, created_at__gte=since)
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
    """Ask for a rating of the newest decision on each of these prompts, in random order, in place of earlier requests.

    All of them are asked, so each with probability 1; nobody is asked twice. Returns how many decisions that are.
    """
    newest: dict[str, uuid.UUID] = {}
    decisions = rows_in(
        Decision.objects.filter(agent=agent, withdrawal=None), "prompt_hash", list(prompt_hashes)
    )
    for pk, name in decisions.order_by("created_at", "pk").values_list("pk", "prompt_hash"):
        newest[name] = pk
    requests_open(agent).filter(purpose=Purpose.VERDICT).delete()
    answered = RatingRequest.objects.filter(decision__agent=agent, purpose=Purpose.VERDICT)
    known = set(answered.values_list("decision", flat=True))
    fresh = [pk for pk in newest.values() if pk not in known]
    with transaction.atomic():
        _create(Purpose.VERDICT, fresh, 1.0)
        # they have the ratings they wanted, and none that says what is right
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
    """Hashes of the prompts that nobody had rated when the queue was told to ask for them."""
    earlier = ratings_standing().filter(
        decision__agent=agent,
        decision__prompt_hash=OuterRef("decision__prompt_hash"),
        rater_kind=RaterKind.HUMAN,
        created_at__lte=OuterRef("created_at"),
    )
    found = RatingRequest.objects.filter(decision__agent=agent).exclude(Exists(earlier.order_by()))
    return set(found.order_by().values_list("decision__prompt_hash", flat=True))


def requests_open(agent: str = "") -> QuerySet[RatingRequest]:
    """Requests that nobody answered: of a sample those nobody rated, of a verdict those nobody rated since."""
    rated = ratings_standing().filter(decision=OuterRef("decision"), rater_kind=RaterKind.HUMAN).order_by()
    found = RatingRequest.objects.filter(decision__withdrawal=None).exclude(
        Q(Exists(rated), purpose=Purpose.SAMPLE)
        | Q(Exists(rated.filter(created_at__gt=OuterRef("created_at"))), purpose=Purpose.VERDICT)
    )
    return found.filter(decision__agent=agent) if agent else found


def decision_requested(
    rater: str, decisions: QuerySet[Decision], skip: Collection[uuid.UUID | str]
) -> uuid.UUID | None:
    """The decision to ask this rater for before all others, of some; None without an open request."""
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
    """Hashes of the prompts of an agent's random sample."""
    drawn = RatingRequest.objects.filter(decision__agent=agent, purpose=Purpose.SAMPLE)
    return set(drawn.order_by().values_list("decision__prompt_hash", flat=True))


def liked_in_sample(agent: str) -> LikedShare | None:
    """Liked answers in the random sample, as far as it is rated; None without one."""
    drawn = RatingRequest.objects.filter(decision__agent=agent, purpose=Purpose.SAMPLE)
    ids = list(drawn.values_list("decision", flat=True))
    return _liked(ids, len(ids), True) if ids else None


def liked_by_choice(agent: str) -> LikedShare | None:
    """Liked answers among all ratings that people gave: they chose what to rate. None without a verdict."""
    found = _liked(None, 0, False, agent)
    return found if found.rated else None


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
            value = float(correction == response)  # whoever writes another answer does not like this one
        if value is not None:
            values.setdefault(decision, []).append(value)
    means = [sum(one) / len(one) for one in values.values()]
    decided = [mean for mean in means if mean != NEUTRAL]
    return LikedShare(sum(mean > NEUTRAL for mean in decided), len(decided), drawn, representative)
