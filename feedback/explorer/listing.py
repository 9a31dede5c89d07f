"""The decisions page: its search, keyset pagination (constant cost per page), and one decision's feedback."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, TypeAlias

from django.db.models import OuterRef, Q, QuerySet
from django.utils.dateparse import parse_datetime

from feedback.erasure.withdrawals import WithdrawalSelection, selection_read
from feedback.explorer.decision_facts import reward_query, rewarded_at_least
from feedback.explorer.search import (
    DecisionFilter,
    decisions_search,
    narrowed_of,
    one_of,
)
from feedback.models import Comparison, Decision, Outcome, RaterKind, Rating
from feedback.selectors import ratings_standing
from feedback.storage.fields import Name, OneOf
from feedback.storage.validation import Check, FeedbackRefused

PAGE = 40
"""Decisions on one page."""
LOOK = 20_000
"""Decisions scanned per page when the search has no index (text, tag, rating, reward)."""
MATCHING = 10_000
"""Most decisions withdrawn at once from the page; the command has no limit."""
HISTORY = 200
"""Most ratings, comparisons and outcomes shown for one decision."""

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
"""Name -> (label, condition that at least one standing rating meets; None: handled in `_filter_rated`)."""


RatingState: TypeAlias = Annotated[str, OneOf(["", *RATING_FILTERS])]


@dataclass(frozen=True)
class DecisionSearch:
    """Search of the decisions page, as its address carries it."""

    filter: DecisionFilter
    q: str = ""
    rated: str = ""
    """A key of RATING_FILTERS; empty: rated or not."""
    min_reward: float | None = None
    """Raw, in [-2, 2]."""

    @property
    def beyond_filter(self) -> dict[str, str]:
        """The set fields other than the filter's, as the address spells them."""
        floor = "" if self.min_reward is None else f"{self.min_reward:g}"
        named = {"q": self.q, "rated": self.rated, "min_reward": floor}
        return {name: value for name, value in named.items() if value}

    @property
    def parts(self) -> dict[str, str]:
        """Every set field, as the address spells it; empty: the search finds everything."""
        return {**self.filter.parts, **self.beyond_filter}


def search_read(given: Mapping[str, Any]) -> DecisionSearch:
    """Read a search from an address or a form. Raises FeedbackRefused with a fault per field."""
    within = narrowed_of(given)
    check = Check()
    rated = check.value("rated", RatingState, given.get("rated", ""))
    q = check.value("q", Name, given.get("q", "").strip())
    check.raise_faults("search")
    return DecisionSearch(within, q, rated, reward_query(given.get("min_reward", "")))


def selection_chosen(search: DecisionSearch | None, ids: Sequence[str]) -> WithdrawalSelection:
    """Decisions to withdraw: everything `search` finds, or the ticked `ids` where it is None.

    Raises FeedbackRefused if nothing was chosen or the search has no condition.
    """
    if search is not None and not search.parts:
        raise FeedbackRefused("Narrow the list first: without a search every decision would be withdrawn")
    chosen = decision_ids_matching(search) if search is not None else selection_read({"ids": ids}).ids
    if not chosen:
        raise FeedbackRefused("Nothing was chosen: tick decisions first, or withdraw all that a search finds")
    return WithdrawalSelection(ids=chosen)


@dataclass(frozen=True)
class Place:
    """Cursor: the next page starts below this row."""

    created_at: datetime
    pk: uuid.UUID

    def __str__(self) -> str:
        return f"{self.created_at.isoformat()}~{self.pk}"


def place_of(text: str) -> Place | None:
    """Read a cursor; None if empty. Raises FeedbackRefused for a text that no page wrote."""
    if not text:
        return None
    at, _, pk = text.partition("~")
    try:
        # An unencoded + arrives as a space.
        found = parse_datetime(at.replace(" ", "+"))
        if found is None or found.tzinfo is None:
            raise ValueError
        return Place(found, uuid.UUID(pk))
    except ValueError:
        raise FeedbackRefused("before: expected the cursor of a previous page") from None


@dataclass(frozen=True)
class DecisionPage:
    """One page of decisions."""

    decisions: list[Decision]
    """Each has `standing`, its standing ratings."""
    older: Place | None
    """Start of the next page; None on the last one."""
    scan_end: datetime | None
    """Set if LOOK ended the page: older decisions were not scanned."""


def decisions_page(search: DecisionSearch, before: Place | None = None) -> DecisionPage:
    """PAGE decisions that match, newest first, from below `before`."""
    found, end = _search_query(search, before)
    rows = list(found.defer("state", "candidates", "metadata")[: PAGE + 1])
    if len(rows) > PAGE:
        rows.pop()
        end, scan_end = Place(rows[-1].created_at, rows[-1].pk), None
    else:
        scan_end = end.created_at if end else None
    _with_ratings(rows)
    return DecisionPage(rows, end, scan_end)


def decision_ids_matching(search: DecisionSearch) -> list[uuid.UUID]:
    """Ids of the matching decisions that are not withdrawn, newest first, at most MATCHING.

    Without an index, only the newest LOOK decisions are scanned.
    """
    found, _ = _search_query(search, None)
    return list(found.filter(withdrawal=None).values_list("pk", flat=True)[:MATCHING])


def _search_query(search: DecisionSearch, before: Place | None) -> tuple[QuerySet[Decision], Place | None]:
    """Matching decisions, newest first, and where LOOK ended the scan (None: it did not)."""
    tag = search.filter.tag
    indexed = _filter_below(search.filter.but(tag="").decisions(), before).order_by("-created_at", "-id")
    scans = bool(search.rated or tag or search.min_reward is not None or search.q)
    found, end = indexed, None
    if scans:
        for created_at, pk in indexed.values_list("created_at", "pk")[LOOK - 1 : LOOK]:
            end = Place(created_at, pk)
            found = indexed.filter(_not_below(end))
    found = found & decisions_search(tag=tag, q=search.q).order_by("-created_at", "-id")
    found = _filter_rated(found, search.rated)
    if search.min_reward is not None:
        found = rewarded_at_least(found, search.min_reward)
    return found, end


def _filter_below(decisions: QuerySet[Decision], place: Place | None) -> QuerySet[Decision]:
    if place is None:
        return decisions
    # The first condition is for the index, which cannot use an OR.
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


@dataclass(frozen=True)
class ComparisonView:
    """A comparison, seen from one of its two decisions."""

    comparison: Comparison
    counterpart: Decision
    outcome: str
    """preferred, not preferred, equally good, both bad, or taken back."""
    stands: bool


@dataclass(frozen=True)
class History:
    """All feedback on a decision, newest first, including superseded and withdrawn rows."""

    ratings: list[tuple[Rating, bool]]
    """Each rating, and whether it stands."""
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
