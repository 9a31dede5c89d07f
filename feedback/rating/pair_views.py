"""Pairs: which two responses to one prompt a rater compares next, their sides, and the page that shows them."""

from __future__ import annotations

import hashlib
import itertools
import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from typing import Protocol, cast
from urllib.parse import urlencode

from django.conf import settings
from django.db.models import OuterRef
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache

from feedback.accounts.roles import page_for
from feedback.explorer.previews import preview_context
from feedback.explorer.search import DecisionFilter, filter_context, one_of
from feedback.models import SHADOW, Comparison, Decision, RaterKind
from feedback.rating.views import (
    NOTICES,
    SKIP_LIMIT,
    UNDO_LIMIT,
    ComparisonForm,
    SessionIds,
    card_response,
    last_withdrawn,
    queue_filter,
    to_page,
    wants_card,
)
from feedback.selectors import comparisons_standing, decision_get
from feedback.services import FeedbackConflict, FeedbackRefused, comparison_submit, comparison_withdraw

LOOK = 5_000
"""Decisions scanned at a time for prompts with different responses."""
LOOKS = 4
"""Scans, each further back, before the queue counts as empty."""
PROMPTS = 60
"""Newest prompts taken from one scan."""
RESPONSES = 6
"""Newest different responses to one prompt that are compared."""

Key = frozenset[uuid.UUID]


@dataclass(frozen=True)
class QueuedPair:
    """Two decisions on the same prompt, on the sides shown to the rater."""

    left: Decision
    right: Decision

    @property
    def key(self) -> str:
        """Key of the pair; sides do not matter."""
        return pair_key(self.left.pk, self.right.pk)


@dataclass(frozen=True)
class PairsWaiting:
    pair: QueuedPair | None
    count: int
    """Pairs among the scanned decisions; older ones may hold more."""


@dataclass(frozen=True)
class _Response:
    pk: uuid.UUID
    policy: str
    target: int


@dataclass(frozen=True)
class _Candidate:
    first: _Response
    second: _Response
    raters: int
    """People who compared it; this rater did not."""

    @property
    def rank(self) -> tuple[int, bool]:
        """Fewest comparisons first, then pairs of two policies: they show which policy is better."""
        return self.raters, self.first.policy == self.second.policy

    @property
    def key(self) -> str:
        return pair_key(self.first.pk, self.second.pk)


def pair_key(one: uuid.UUID, other: uuid.UUID) -> str:
    return "~".join(sorted((str(one), str(other))))


def sides_of(rater: str, one: uuid.UUID, other: uuid.UUID) -> tuple[uuid.UUID, uuid.UUID]:
    """(left, right) for this rater, by hash: no policy keeps a side, and a reload does not swap them."""
    first, second = sorted((one, other))
    swapped = _number("side", rater, pair_key(one, other)) % 2 == 1
    return (second, first) if swapped else (first, second)


def pairs_waiting(
    rater: str, within: DecisionFilter | None = None, skip: Collection[str] = ()
) -> PairsWaiting:
    """The next pair for this rater, skipping the keys in `skip`.

    Leaves out pairs that this rater compared, and pairs with as many comparisons as their decisions want ratings.
    Among pairs of equal rank, a hash of the rater chooses, so that two raters seldom get the same pair at once.
    """
    within = within or DecisionFilter()
    passed = set(skip)
    for prompts in _looks(within):
        candidates = [c for c in _candidates(rater, within, prompts) if c.key not in passed]
        if not candidates:
            continue
        foremost = min(c.rank for c in candidates)
        alike = [c for c in candidates if c.rank == foremost]
        chosen = min(alike, key=lambda c: _number("turn", rater, c.key))
        left, right = sides_of(rater, chosen.first.pk, chosen.second.pk)
        rows = Decision.objects.in_bulk([left, right])
        return PairsWaiting(QueuedPair(rows[left], rows[right]), len(candidates))
    return PairsWaiting(None, 0)


def pair_get(left: uuid.UUID, right: uuid.UUID) -> QueuedPair | None:
    """Two decisions as a pair on these sides; None unless both answer the same prompt."""
    first, second = decision_get(left), decision_get(right)
    if first is None or second is None or first.prompt_hash != second.prompt_hash or first == second:
        return None
    return QueuedPair(first, second)


def compared_today(rater: str, agent: str = "") -> int:
    """Comparisons by this rater since midnight (TIME_ZONE)."""
    midnight = timezone.localtime().replace(hour=0, minute=0, second=0, microsecond=0)
    mine = comparisons_standing(agent or None).filter(rater=rater, created_at__gte=midnight)
    return mine.order_by().count()


def _looks(within: DecisionFilter) -> Iterator[list[tuple[str, str]]]:
    """(agent, prompt hash) of prompts with different responses, newest first, one list per scan."""
    another = Decision.objects.filter(agent=OuterRef("agent"), prompt_hash=OuterRef("prompt_hash"))
    another = another.filter(withdrawal=None).exclude(source=SHADOW)
    another = another.exclude(response=OuterRef("response")).order_by()
    end: datetime | None = None
    for _ in range(LOOKS):
        base = (
            within.decisions().filter(withdrawal=None).exclude(source=SHADOW).order_by("-created_at", "-id")
        )
        if end is not None:
            base = base.filter(created_at__lte=end)
        start, end = end, None
        for created_at in base.values_list("created_at", flat=True)[LOOK - 1 : LOOK]:
            end = created_at
        rows = base.alias(another=one_of(another)).exclude(another=None)
        if end is not None:
            rows = rows.filter(created_at__gte=end)
        found = rows.values_list("agent", "prompt_hash")[: PROMPTS * RESPONSES]
        yield list(dict.fromkeys(found))[:PROMPTS]
        if end is None or end == start:
            return


def _candidates(rater: str, within: DecisionFilter, prompts: list[tuple[str, str]]) -> list[_Candidate]:
    if not prompts:
        return []
    responses: dict[tuple[str, str], dict[str, _Response]] = defaultdict(dict)
    rows = (
        within.decisions()
        .filter(withdrawal=None)
        .exclude(source=SHADOW)
        .filter(agent__in={agent for agent, _ in prompts}, prompt_hash__in=[hash for _, hash in prompts])
        .order_by("-created_at", "-id")
        .values_list("agent", "prompt_hash", "response", "pk", "policy", "ratings_wanted")
    )
    for agent, prompt, response, pk, policy, wanted in rows[: PROMPTS * RESPONSES * 4]:
        known = responses[agent, prompt]
        if response not in known and len(known) < RESPONSES:
            known[response] = _Response(pk, policy, wanted)
    everyone = [response for known in responses.values() for response in known.values()]
    mine, counts = _compared_pairs(rater, [response.pk for response in everyone])
    found = []
    for prompt_key in prompts:
        for first, second in itertools.combinations(responses[prompt_key].values(), 2):
            key = frozenset((first.pk, second.pk))
            if key not in mine and counts[key] < max(first.target, second.target):
                found.append(_Candidate(first, second, counts[key]))
    return found


def _compared_pairs(rater: str, ids: list[uuid.UUID]) -> tuple[set[Key], Counter[Key]]:
    """(pairs of these decisions that the rater compared, number of people per pair)."""
    mine: set[Key] = set()
    raters: set[tuple[Key, str]] = set()
    rows = Comparison.objects.filter(left__in=ids, superseded_by__isnull=True, withdrawn=False)
    for left, right, who, kind in rows.order_by().values_list("left_id", "right_id", "rater", "rater_kind"):
        if who == rater:
            mine.add(frozenset((left, right)))
        if kind == RaterKind.HUMAN:
            raters.add((frozenset((left, right)), who))
    return mine, Counter(key for key, _ in raters)


def _number(*parts: str) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:8])


class JudgingPages(Protocol):
    """Interface of the module that FEEDBACK_JUDGING names."""

    def rounds_waiting(self, rater: str, agent: str) -> Sequence[tuple[int, str, int | None]]:
        """Rounds with a pair for this rater: (number, agent, estimated answers still needed)."""

    def round_pairs(self, request: HttpRequest) -> HttpResponse:
        """The page of `/rate/pairs/?round=`."""


UNDO, SKIPPED = SessionIds("pairs_undo", UNDO_LIMIT), SessionIds("pairs_skipped", SKIP_LIMIT)
SAVED_NOTICES = {
    "left": "Saved: A is better",
    "right": "Saved: B is better",
    "tie": "Saved: equally good",
    "both_bad": "Saved: both bad",
}


@page_for("rate", "GET", "HEAD", "POST")
@never_cache
def pairs(request: HttpRequest) -> HttpResponse:
    """GET shows two responses; POST stores which one is better and shows the next pair.

    Filters: `?agent=&policy=&tag=&since=&until=`. `?pair=` shows this pair. `?after=` (script) returns the card after
    it, or 204. `?round=` shows the pairs of a judging round.
    """
    if "round" in request.GET:
        if (judging := _judging_pages()) is None:
            raise Http404("there are no judging rounds")
        return judging.round_pairs(request)
    within = queue_filter(request)
    if request.method == "POST":
        return _store(request, within)
    notice_key = request.GET.get("said", "")
    notice = SAVED_NOTICES.get(notice_key) or NOTICES.get(notice_key, "")
    if request.GET.get("pair"):
        return _card(request, within, _pair_or_404(request.GET["pair"]), said=notice)
    if after := request.GET.get("after"):
        waiting = pairs_waiting(request.user.get_username(), within, [*SKIPPED.read(request), after])
        return _card(request, within, waiting.pair) if waiting.pair else HttpResponse(status=204)
    return _card(request, within, said=notice)


@page_for("rate", "POST")
def pairs_undo(request: HttpRequest) -> HttpResponse:
    """Withdraw this session's last comparison and show its pair again."""
    within = queue_filter(request)
    rows = Comparison.objects.filter(rater=request.user.get_username()).select_related("left", "right")
    comparison, earlier = last_withdrawn(rows, comparison_withdraw, UNDO.read(request))
    UNDO.write(request, earlier)
    if comparison is None:
        return _next_response(request, within, "nothing")
    if wants_card(request):
        pair = QueuedPair(comparison.left, comparison.right)
        return _card(request, within, pair, said=NOTICES["undone"], notes=comparison.notes)
    return to_page(
        request, "pairs", within, pair=f"{comparison.left_id}~{comparison.right_id}", said="undone"
    )


@page_for("rate", "POST")
def pairs_skip(request: HttpRequest) -> HttpResponse:
    """Skip a pair for this session; `all=1` brings back every skipped pair."""
    within = queue_filter(request)
    if request.POST.get("all"):
        SKIPPED.write(request, [])
        return _next_response(request, within, "")
    pair = _pair_or_404(f"{request.POST.get('left', '')}~{request.POST.get('right', '')}")
    SKIPPED.append(request, pair.key)
    return _next_response(request, within, "skipped")


def _store(request: HttpRequest, within: DecisionFilter) -> HttpResponse:
    pair = _pair_or_404(f"{request.POST.get('left', '')}~{request.POST.get('right', '')}")
    form = ComparisonForm(request.POST)
    notes = request.POST.get("notes", "")
    if not form.is_valid():
        return _card(request, within, pair, fault=form.fault(), notes=notes, status=400)
    try:
        written = comparison_submit(
            left=pair.left, right=pair.right, rater=request.user.get_username(), **form.facts()
        )
    except FeedbackConflict:
        fault = "You compared these already. Compare them again here to replace your answer"
        return _card(request, within, pair, fault=fault, status=409)
    except FeedbackRefused as refusal:
        return _card(request, within, pair, fault=str(refusal), notes=notes, status=400)
    if written.created:
        UNDO.append(request, str(written.row.pk))
    return _next_response(request, within, form.cleaned_data["preference"])


def _judging_pages() -> JudgingPages | None:
    path: str = settings.FEEDBACK_JUDGING
    return cast(JudgingPages, import_module(path)) if path else None


def _pair_or_404(text: str) -> QueuedPair:
    """The pair of `<left id>~<right id>`."""
    left, _, right = text.partition("~")
    try:
        pair = pair_get(uuid.UUID(left), uuid.UUID(right))
    except ValueError:
        pair = None
    if pair is None:
        raise Http404("no such pair of decisions")
    return pair


def _next_response(request: HttpRequest, within: DecisionFilter, said: str) -> HttpResponse:
    if not wants_card(request):
        return to_page(request, "pairs", within, said=said)
    pair = None
    if shown := request.headers.get("X-Ratchet-Shown"):
        # The script preloaded the next pair and shows it already.
        pair = _pair_or_404(shown)
    return _card(request, within, pair, said=SAVED_NOTICES.get(said) or NOTICES.get(said, ""))


def _card(
    request: HttpRequest,
    within: DecisionFilter,
    pair: QueuedPair | None = None,
    *,
    said: str = "",
    fault: str = "",
    notes: str = "",
    status: int = 200,
) -> HttpResponse:
    """The page, or only its card for the script; without `pair`, the next one waiting."""
    rater = request.user.get_username()
    waiting = pairs_waiting(rater, within, SKIPPED.read(request))
    pair = pair or waiting.pair
    today = compared_today(rater, within.agent)
    context: dict[str, object] = {
        "within": within,
        "action": f"{reverse('pairs')}?{within.query}".removesuffix("?"),
        "rounds": judging.rounds_waiting(rater, within.agent) if (judging := _judging_pages()) else [],
        "pair": pair,
        "today": today,
        "waiting": waiting.count,
        "total": max(1, today + waiting.count),
        "skipped": len(SKIPPED.read(request)),
        "undo": len(UNDO.read(request)),
        "said": said,
        "fault": fault,
        "notes": notes,
        **filter_context(request, within),
    }
    if pair is not None:
        sides = [preview_context(pair.left), preview_context(pair.right)]
        context |= {
            "hidden": [("id", uuid.uuid4()), ("left", pair.left.pk), ("right", pair.right.pk)],
            "shown": f"{pair.left.pk}~{pair.right.pk}",
            "next_card": f"{reverse('pairs')}?{urlencode({'after': pair.key, **within.parts})}",
            "sides": [("A", "left", sides[0]), ("B", "right", sides[1])],
            "top": sides[0],
            "brief": all(side["preview"].brief for side in sides),
            "as_text": sides[0]["preview"].template.endswith("/text.html"),
        }
    return card_response(request, ("feedback/_pair.html", "feedback/pairs.html"), context, status)
