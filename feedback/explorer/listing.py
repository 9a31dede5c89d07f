"""The decisions page: its search, keyset pagination (constant cost per page), and one decision's feedback."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, TypeAlias

from django.db.models import OuterRef, Q, QuerySet

from backend.rest.pages import keyset_page
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
class DecisionPage:
    """One page of decisions."""

    decisions: list[Decision]
    """Each has `standing`, its standing ratings."""
    older: str
    """Cursor of the next page; empty on the last one."""
    scan_end: datetime | None
    """Set if LOOK ended the page: older decisions were not scanned."""


def decisions_page(search: DecisionSearch, cursor: str = "") -> DecisionPage:
    """PAGE decisions that match, newest first. Raises RequestRefused for a cursor that no page wrote."""
    found, among = _search_query(search)
    page = keyset_page(found.defer("state", "candidates", "metadata"), cursor, PAGE, among=among)
    _with_ratings(page.rows)
    return DecisionPage(page.rows, page.next, page.looked_to)


def decision_ids_matching(search: DecisionSearch) -> list[uuid.UUID]:
    """Ids of the matching decisions that are not withdrawn, newest first, at most MATCHING.

    Without an index, only the newest LOOK decisions are scanned.
    """
    found, among = _search_query(search)
    rows = found.filter(withdrawal=None).only("pk", "created_at")
    return [row.pk for row in keyset_page(rows, "", MATCHING, among=among).rows]


def _search_query(search: DecisionSearch) -> tuple[QuerySet[Decision], QuerySet[Decision] | None]:
    """Matching decisions, and those that an index narrows them down to (None: it finds them)."""
    tag = search.filter.tag
    indexed = search.filter.but(tag="").decisions()
    scans = bool(search.rated or tag or search.min_reward is not None or search.q)
    found = _filter_rated(indexed & decisions_search(tag=tag, q=search.q), search.rated)
    if search.min_reward is not None:
        found = rewarded_at_least(found, search.min_reward)
    return found, indexed if scans else None


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
