"""What rl adds to every page: the navigation, the work in the background, a decision's reward and policy."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from django.db.models import Case, Q, When
from django.http import HttpRequest
from django.urls import reverse

from feedback.cache import TTLCache
from feedback.explorer.decision_facts import Link, LinkedFacts, RewardComponent
from feedback.storage.problem_rows import problems
from rl.models import Policy, RewardRecord, TrainingRun
from rl.selectors import Work, work_of

_works_cache: TTLCache[list[Work]] = TTLCache()
_problems_cache: TTLCache[int] = TTLCache()
WORKS_SHOWN = 3
"""Most runs in the strip below the bar."""


@dataclass(frozen=True)
class Section:
    """An entry of the bar on top: its page, who sees it, and the other pages below it."""

    title: str
    page: str
    permission: str
    below: str = ""


SECTIONS = (
    Section(
        "Start", "start", "feedback.change_agentsettings", "start-connect start-key start-bring start-take"
    ),
    Section("Rate", "rate", "feedback.add_rating", "pairs"),
    Section(
        "Decisions",
        "decisions",
        "feedback.view_decision",
        "decision import imports import-one import-undo export decisions-withdraw",
    ),
    Section("Runs", "runs", "rl.view_trainingrun", "run runs-compared"),
    Section(
        "Policies",
        "policies",
        "rl.view_policy",
        "policy policies-compared policy-answers upstreams savings",
    ),
    Section("Experiments", "experiments", "rl.view_experiment", "experiment experiment-new"),
    Section("Agreement", "agreement", "feedback.view_decision"),
    Section("Problems", "problems", "feedback.view_decision"),
)


@dataclass(frozen=True)
class NavigationItem:
    """An entry of the bar as one person sees it on one page."""

    title: str
    url: str
    current: bool = False
    count: int = 0


def frame(request: HttpRequest) -> dict[str, object]:
    """What the frame of every page reads: its navigation and the work in the background. Asked of the database only
    where a template reads it."""
    return {"navigation": lambda: navigation(request), "at_work": lambda: at_work(request)}


def navigation(request: HttpRequest) -> list[NavigationItem]:
    """The bar on top. Problems are an entry only where there are any."""
    match, user = request.resolver_match, request.user
    here = match.url_name if match and not match.namespace else ""
    items = [
        NavigationItem(
            one.title, reverse(one.page), here in (one.page, *one.below.split()), _count_of(one.page)
        )
        for one in SECTIONS
        if user.has_perm(one.permission)
    ]
    shown = [one for one in items if one.title != "Problems" or one.count or one.current]
    if user.is_authenticated and user.is_staff:
        in_admin = match is not None and match.namespace == "admin"
        shown.append(NavigationItem("Admin", reverse("admin:index"), in_admin))
    return shown


def _count_of(page: str) -> int:
    return _problems_cache.get("all", lambda: problems().count()) if page == "problems" else 0


def at_work(request: HttpRequest) -> list[Work]:
    """Runs in the background, for those who may see why they are there. A run's own page says more."""
    match = request.resolver_match
    shown = match.kwargs.get("pk") if match and match.url_name == "run" else None
    may_see = request.user.has_perm("rl.view_trainingrun")
    return [one for one in _works_cache.get("all", _works) if one.run.pk != shown] if may_see else []


def _works() -> list[Work]:
    status = TrainingRun.Status
    followed = Q(status=status.SUCCEEDED, follow_up__in=TrainingRun.FOLLOW_UP_PENDING)
    found = TrainingRun.objects.filter(
        Q(status__in=[status.QUEUED, status.RUNNING], stage_of=None) | followed
    )
    order = Case(When(status=status.RUNNING, then=0), When(status=status.QUEUED, then=2), default=1)
    rows = found.defer("recipe", "libraries", "hardware").order_by(order, "-pk")[:WORKS_SHOWN]
    return [work_of(run) for run in rows]


def facts_of(decision: uuid.UUID, policy: str) -> LinkedFacts:
    """FEEDBACK_DECISION_FACTS: asked by the page of a decision."""
    golden = Link(
        words="Make it a golden case",
        url=f"{reverse('admin:rl_goldencase_add')}?decision={decision}",
        permission="rl.add_goldencase",
    )
    facts: LinkedFacts = {"policy_url": "", "reward": None, "links": [golden]}
    if policy and Policy.objects.filter(name=policy).exists():
        facts["policy_url"] = reverse("policy", args=[policy])
    record = RewardRecord.objects.filter(decision=decision).order_by("-id").first()
    if record is not None and record.raw is not None and record.value is not None:
        facts["reward"] = {
            "value": record.value,
            "raw": record.raw,
            "components": [_component(name, found) for name, found in record.components.items()],
            "calculated_at": record.created_at,
        }
    return facts


def _component(name: str, found: dict[str, Any]) -> RewardComponent:
    return {
        "name": name,
        "raw": found["raw"],
        "weight": found["weight"],
        "detail": {part: _words(detail) for part, detail in found["parts"].items()},
    }


def _words(part: dict[str, Any]) -> str:
    text = part["detail"].get("fault") or part["detail"].get("n") or ""
    return f"{part['raw']:+.2f}{f' ({text})' if text else ''}"
