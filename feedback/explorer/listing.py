"""The decisions page: search, keyset pagination (constant cost per page), one decision's feedback and timeline."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, TypeAlias

from django.db.models import OuterRef, Q, QuerySet
from django.utils.dateparse import parse_datetime

from backend.rest.pages import keyset_page
from feedback.erasure.withdrawals import WithdrawalSelection, selection_read
from feedback.explorer.decision_facts import reward_query, rewarded_at_least
from feedback.explorer.search import (
    DecisionFilter,
    decisions_search,
    narrowed_of,
    one_of,
)
from feedback.models import Comparison, Decision, Outcome, RaterKind, Rating, Trace
from feedback.selectors import ratings_standing
from feedback.storage.fields import STEP_KINDS, Name, OneOf
from feedback.storage.validation import Check, FeedbackRefused

PAGE = 40
"""Decisions on one page."""
COUNTED = 1_000
"""Most decisions that the page counts."""
MATCHING = 10_000
"""Most decisions withdrawn at once from the page; the command has no limit."""
HISTORY = 200
"""Most ratings, comparisons and outcomes shown for one decision."""

GOOD = Q(score__gt=0.5) | Q(score=None, stars__gt=3) | Q(score=None, stars=None, thumb="up")
BAD = Q(score__lt=0.5) | Q(score=None, stars__lt=3) | Q(score=None, stars=None, thumb="down")
BY_PEOPLE = Q(rater_kind=RaterKind.HUMAN)
RATING_FILTERS: dict[str, tuple[str, Q | None]] = {
    "rated": ("rated", Q()),
    "unrated": ("not rated", None),
    "good": ("rated good", GOOD),
    "bad": ("rated bad", BAD),
    "corrected": ("corrected", Q(correction__isnull=False)),
    "noted": ("with notes", ~Q(notes="")),
    "people": ("rated by people", BY_PEOPLE),
    "liked": ("liked by people", GOOD & BY_PEOPLE),
    "disliked": ("disliked by people", BAD & BY_PEOPLE),
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


def count_text(search: DecisionSearch, page: DecisionPage, *, first: bool) -> str:
    """Number of decisions that a search finds, counted up to COUNTED; empty on later pages and where LOOK ends it."""
    count = len(page.decisions)
    if not first or page.scan_end:
        return ""
    if page.older:
        found, among = _search_query(search)
        counted = keyset_page(found.only("pk", "created_at"), "", COUNTED, among=among)
        if counted.looked_to:
            return ""
        count = len(counted.rows)
        if counted.next:
            return f"more than {count:,} decisions"
    return f"{count:,} decision{'' if count == 1 else 's'}"


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


# --- A trace as a timeline of steps: start, duration, input and output of each ---

STEPS_SHOWN = 50
"""Steps per page of a trace."""
PARTS_READ = 50
"""Most rows of one long trace that are joined; its collector sends it in pieces."""
TEXT_SHOWN = 6000
"""Most characters shown of an argument, result or thought."""
LINE = 70
"""Longest JSON, in characters, shown on one line."""
DEEPEST = 5
"""Deepest indentation of nested steps."""

_SHOWN_APART = {
    "kind",
    "name",
    "at",
    "duration_ms",
    "n",
    "span",
    "parent",
    "text",
    "arguments",
    "result",
    "error",
    "status",
}
_SHOWN_APART |= {"id", "unfinished", "forgotten"}
"""Keys of a step with a place of their own; the others are listed."""
_OF_DECISION = {
    "messages",
    "response",
    "reasoning",
    "candidates",
    "state",
    "policy",
    "unit",
    "arm",
    "propensity",
}
_OF_DECISION |= {"run_id", "tags", "metadata", "latency_ms", "tokens_in", "tokens_out"}
"""Keys that the decision's own page shows."""


@dataclass(frozen=True)
class TimelineStep:
    """One step of a trace, as its page shows it."""

    number: int
    kind: str
    name: str
    depth: int
    """Nesting level: 0 for a top-level step, at most DEEPEST."""
    after_ms: float | None
    """Milliseconds since the trace started."""
    duration_ms: float | None
    text: str
    arguments: str
    result: str
    error: str
    status: str
    """completed or failed; tasks only."""
    details: list[tuple[str, str]]
    decision: uuid.UUID | None
    """Id of the decision that this step took."""
    here: bool
    """True for the decision whose page this is."""
    unfinished: bool
    forgotten: bool

    @property
    def kind_text(self) -> str:
        return {"tool_call": "tool call"}.get(self.kind, self.kind)

    @property
    def after_text(self) -> str:
        return "" if self.after_ms is None else f"+{_time(self.after_ms)}"

    @property
    def duration_text(self) -> str:
        return "" if self.duration_ms is None else _time(self.duration_ms)


@dataclass(frozen=True)
class Timeline:
    """A page of a trace's steps."""

    steps: list[TimelineStep]
    total: int
    """Steps in the whole trace."""
    part: int
    parts: int
    errors: int
    """Failed steps in the whole trace."""
    took_ms: float | None
    run_id: str
    missing: int
    """Pieces of the trace beyond PARTS_READ, which are not shown."""

    @property
    def took_text(self) -> str:
        return "" if self.took_ms is None else _time(self.took_ms)

    @property
    def other_parts(self) -> list[int]:
        return list(range(1, self.parts + 1))


def timeline_of(trace: Trace, decision: uuid.UUID, part: int | None = None) -> Timeline:
    """Page `part` of the trace (from 1, clamped), by default the one with the decision."""
    pieces, missing = _pieces(trace)
    steps = [
        (piece, index, step)
        for piece in pieces
        for index, step in enumerate(piece.steps)
        if isinstance(step, Mapping)
    ]
    if any("n" in step for _, _, step in steps):
        # The collector numbers steps because pieces overlap: a step still open is sent with a later piece.
        steps.sort(key=lambda row: (row[2].get("n") is None, row[2].get("n") or 0))
    elif len(pieces) > 1 and all("span" in step for _, _, step in steps):
        # Exporters send a span when it ends: a parent comes after its children.
        steps.sort(key=lambda row: str(row[2].get("at")))
    began = min((piece.started_at for piece in pieces if piece.started_at), default=None)
    end = max((piece.finished_at for piece in pieces if piece.finished_at), default=None)
    depths = _depths([step for _, _, step in steps])
    own = [_decision_id(piece, index, step) for piece, index, step in steps]
    parts = max(1, -(-len(steps) // STEPS_SHOWN))
    if part is None:
        part = own.index(decision) // STEPS_SHOWN + 1 if decision in own else 1
    part = min(max(part, 1), parts)
    start = (part - 1) * STEPS_SHOWN
    return Timeline(
        steps=[
            _timeline_step(number, step, depths[number], own[number], decision, began)
            for number, (_, _, step) in list(enumerate(steps))[start : start + STEPS_SHOWN]
        ],
        total=len(steps),
        part=part,
        parts=parts,
        errors=sum(bool(step.get("error")) or step.get("status") == "failed" for _, _, step in steps),
        took_ms=(end - began).total_seconds() * 1000 if began and end else None,
        run_id=trace.run_id,
        missing=missing,
    )


def _pieces(trace: Trace) -> tuple[list[Trace], int]:
    """The rows of one long trace, and how many were left out."""
    metadata = trace.metadata if isinstance(trace.metadata, dict) else {}
    whole = str(metadata.get("trace") or trace.pk)
    if not trace.run_id:
        return [trace], 0
    same_run = Trace.objects.filter(agent=trace.agent, run_id=trace.run_id).order_by("created_at", "id")
    rows = list(same_run[: PARTS_READ + 1])
    pieces = [row for row in rows if whole in (str(row.pk), (row.metadata or {}).get("trace"))]
    if trace not in pieces:
        pieces.append(trace)
    return pieces[:PARTS_READ], max(0, len(rows) - PARTS_READ)


def _depths(steps: list[Mapping[str, object]]) -> list[int]:
    known: dict[object, int] = {}
    depths = []
    for step in steps:
        parent = step.get("parent")
        depth = min(known[parent] + 1, DEEPEST) if parent is not None and parent in known else 0
        if (own := step.get("n", step.get("span"))) is not None:
            known[own] = depth
        depths.append(depth)
    return depths


def _decision_id(piece: Trace, index: int, step: Mapping[str, object]) -> uuid.UUID | None:
    if step.get("kind") != "decision":
        return None
    try:
        return uuid.UUID(str(step["id"])) if step.get("id") else uuid.uuid5(piece.pk, str(index))
    except ValueError:
        return None


def _timeline_step(
    number: int,
    step: Mapping[str, Any],
    depth: int,
    own: uuid.UUID | None,
    here: uuid.UUID,
    began: datetime | None,
) -> TimelineStep:
    at = parse_datetime(step["at"]) if isinstance(step.get("at"), str) else None
    after = (at - began).total_seconds() * 1000 if at and began and at.tzinfo else None
    kind = str(step.get("kind", "step"))
    hidden = _SHOWN_APART | (_OF_DECISION if kind == "decision" else set())
    return TimelineStep(
        number=number + 1,
        kind=kind if kind in STEP_KINDS else "step",
        name=str(step.get("name") or ""),
        depth=depth,
        after_ms=max(after, 0.0) if after is not None else None,
        duration_ms=step["duration_ms"] if isinstance(step.get("duration_ms"), (int, float)) else None,
        text=_text(step.get("text")),
        arguments=_text(step.get("arguments")),
        result=_text(step.get("response") if kind == "decision" else step.get("result")),
        error=_text(step.get("error")),
        status=str(step.get("status") or ""),
        details=[
            (str(key), _text(value))
            for key, value in step.items()
            if key not in hidden and value not in (None, "", [], {})
        ],
        decision=own,
        here=own == here,
        unfinished=bool(step.get("unfinished")),
        forgotten=bool(step.get("forgotten")),
    )


def _text(value: object) -> str:
    """A value for reading: text as it is, data as JSON, cut after TEXT_SHOWN characters."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str) and len(text) > LINE:
        text = json.dumps(value, ensure_ascii=False, indent=2)
    if len(text) <= TEXT_SHOWN:
        return text
    return f"{text[:TEXT_SHOWN]}\n… {len(text) - TEXT_SHOWN:,} more characters"


def _time(ms: float) -> str:
    """A duration with its unit: 8 ms, 1.2 s, 3 min 5 s."""
    if ms < 1000:
        return f"{ms:.0f} ms"
    seconds = ms / 1000
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
