"""Keyset pagination of decisions, newest first, at a constant cost per page; and all feedback on one of them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import OuterRef, Q, QuerySet
from django.utils.dateparse import parse_datetime

from feedback.explorer.decision_facts import rewarded_at_least
from feedback.explorer.search import DecisionFilter, decisions_search, one_of
from feedback.explorer.text_index import text_looked_through
from feedback.models import Comparison, Decision, Outcome, RaterKind, Rating
from feedback.selectors import ratings_standing
from feedback.storage.validation import Check, FeedbackRefused

PAGE = 40
"""Decisions on one page."""
LOOK = 20_000
"""Decisions looked through for one page, where what is asked for stands in no index (text, tag, rating)."""
MATCHING = 10_000
"""Most decisions that a page withdraws at once; the command takes any number."""
HISTORY = 200
"""Ratings, comparisons and outcomes shown of one decision."""

GOOD = Q(score__gt=0.5) | Q(score=None, stars__gt=3) | Q(score=None, stars=None, thumb="up")
BAD = Q(score__lt=0.5) | Q(score=None, stars__lt=3) | Q(score=None, stars=None, thumb="down")
RATING_FILTERS: dict[str, tuple[str, Q | None]] = {
    "rated": ("rated", Q()),
    "unrated": ("not rated", None),
    "good": ("rated good", GOOD),
    "bad": ("rated bad", BAD),
    "corrected": ("corrected", Q(correction__isnull=False)),
    "noted": ("with notes", ~Q(notes="")),
    "people": ("rated by people", Q(rater_kind=RaterKind.HUMAN)),
    "disputed": ("raters differ", None),
}
"""Filters by standing ratings: name -> (words, condition that one of the ratings meets)."""


@dataclass(frozen=True)
class Place:
    """Cursor of a page: the next one starts below it."""

    created_at: datetime
    pk: uuid.UUID

    def __str__(self) -> str:
        return f"{self.created_at.isoformat()}~{self.pk}"


def place_of(text: str) -> Place | None:
    """Raises FeedbackRefused where it is none of ours."""
    if not text:
        return None
    at, _, pk = text.partition("~")
    try:
        # a + that was not encoded arrives as a space
        found = parse_datetime(at.replace(" ", "+"))
        if found is None or found.tzinfo is None:
            raise ValueError
        return Place(found, uuid.UUID(pk))
    except ValueError:
        raise FeedbackRefused("before: expected the end of another page") from None


@dataclass(frozen=True)
class DecisionPage:
    """One page of decisions."""

    decisions: list[Decision]
    """With `standing`, a list of the ratings that stand."""
    older: Place | None
    """Position of the next page; None at the end."""
    scan_end: datetime | None
    """Set where LOOK ended the page: everything recorded since then was looked through."""


def decisions_page(
    within: DecisionFilter,
    *,
    q: str = "",
    rated: str = "",
    min_reward: float | None = None,
    before: Place | None = None,
) -> DecisionPage:
    """Decisions that match, newest first, from below `before`. rated: a key of RATING_FILTERS, or empty; min_reward:
    raw."""
    found, end = _search_query(within, q=q, rated=rated, min_reward=min_reward, before=before)
    rows = list(found.defer("state", "candidates", "metadata")[: PAGE + 1])
    if len(rows) > PAGE:
        rows.pop()
        end, looked_to = Place(rows[-1].created_at, rows[-1].pk), None
    else:
        looked_to = end.created_at if end else None
    _with_ratings(rows)
    return DecisionPage(rows, end, looked_to)


def decision_ids_matching(
    within: DecisionFilter, *, q: str = "", rated: str = "", min_reward: float | None = None
) -> list[uuid.UUID]:
    """Ids of the decisions that a list would show and that are not withdrawn, newest first, MATCHING at most; where
    what is asked for stands in no index, those among the newest LOOK."""
    found, _ = _search_query(within, q=q, rated=rated, min_reward=min_reward, before=None)
    return list(found.filter(withdrawal=None).values_list("pk", flat=True)[:MATCHING])


def _search_query(
    within: DecisionFilter, *, q: str, rated: str, min_reward: float | None, before: Place | None
) -> tuple[QuerySet[Decision], Place | None]:
    """Decisions that match, newest first, and where LOOK ended the search (None where nothing did)."""
    # what an index narrows down; the rest is looked for among at most LOOK of these
    base = _filter_below(within.but(tag="").decisions(), before).order_by("-created_at", "-id")
    found = base
    end: Place | None = None
    if rated or within.tag or min_reward is not None or text_looked_through(q):
        for created_at, pk in base.values_list("created_at", "pk")[LOOK - 1 : LOOK]:
            end = Place(created_at, pk)
    if end is not None:
        found = found.filter(_not_below(end))
    found = _filter_rated(found & decisions_search(tag=within.tag, q=q).order_by("-created_at", "-id"), rated)
    if min_reward is not None:
        found = rewarded_at_least(found, min_reward)
    return found, end


def _filter_below(decisions: QuerySet[Decision], place: Place | None) -> QuerySet[Decision]:
    if place is None:
        return decisions
    # the first condition is for the index, which knows no "or"
    return decisions.filter(created_at__lte=place.created_at).filter(
        Q(created_at__lt=place.created_at) | Q(pk__lt=place.pk)
    )


def _not_below(place: Place) -> Q:
    return Q(created_at__gt=place.created_at) | Q(created_at=place.created_at, pk__gte=place.pk)


def _filter_rated(found: QuerySet[Decision], rated: str) -> QuerySet[Decision]:
    if not rated:
        return found
    standing = ratings_standing(of_withdrawn=True).filter(decision=OuterRef("pk")).order_by()
    if rated == "unrated":
        return found.alias(any=one_of(standing)).filter(any__isnull=True)
    if rated == "disputed":
        both = found.alias(good=one_of(standing.filter(GOOD)), bad=one_of(standing.filter(BAD)))
        return both.filter(good__isnull=False, bad__isnull=False)
    return found.alias(any=one_of(standing.filter(RATING_FILTERS[rated][1] or Q()))).filter(any__isnull=False)


def _with_ratings(rows: list[Decision]) -> None:
    ratings_by_decision: dict[uuid.UUID, list[Rating]] = {row.pk: [] for row in rows}
    for rating in ratings_standing(of_withdrawn=True).filter(decision__in=list(ratings_by_decision)):
        ratings_by_decision[rating.decision_id].append(rating)
    for row in rows:
        row.standing = ratings_by_decision[row.pk]  # type: ignore[attr-defined]


def rating_query(text: str) -> str:
    """A key of RATING_FILTERS. Raises FeedbackRefused for another one."""
    check = Check()
    found = check.choice("rated", text, ["", *RATING_FILTERS])
    check.raise_faults("search")
    return found


@dataclass(frozen=True)
class ComparisonView:
    """A comparison as seen from one of its two decisions."""

    comparison: Comparison
    counterpart: Decision
    outcome: str
    """preferred, not preferred, tie, both bad, or taken back."""
    stands: bool


@dataclass(frozen=True)
class History:
    """All feedback on a decision, newest first, superseded and withdrawn rows included."""

    ratings: list[tuple[Rating, bool]]
    """Each with whether it stands."""
    comparisons: list[ComparisonView]
    outcomes: list[Outcome]
    siblings: list[Decision]
    """Other responses to the same prompt, newest first."""


def history_of(decision: Decision) -> History:
    ratings = Rating.objects.filter(decision=decision).select_related("superseded_by")[:HISTORY]
    comparisons = (
        Comparison.objects.filter(Q(left=decision) | Q(right=decision))
        .select_related("superseded_by", "left", "right")
        .defer("left__messages", "right__messages")
    )
    siblings = Decision.objects.filter(agent=decision.agent, prompt_hash=decision.prompt_hash)
    return History(
        ratings=[(row, _stands(row)) for row in ratings],
        comparisons=[_comparison_view(row, decision) for row in comparisons[:HISTORY]],
        outcomes=list(Outcome.objects.filter(decision=decision)[:HISTORY]),
        siblings=list(siblings.exclude(pk=decision.pk).order_by("-created_at", "-id")[:12]),
    )


def _stands(row: Any) -> bool:
    return not row.withdrawn and getattr(row, "superseded_by", None) is None


def _comparison_view(row: Comparison, decision: Decision) -> ComparisonView:
    is_left = row.left_id == decision.pk
    if row.withdrawn:
        outcome = "taken back"
    elif row.preference in ("left", "right"):
        outcome = "preferred" if (row.preference == "left") == is_left else "not preferred"
    else:
        outcome = {"tie": "equally good", "both_bad": "both bad"}[row.preference]
    return ComparisonView(row, row.right if is_left else row.left, outcome, _stands(row))
