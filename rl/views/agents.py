"""The page of one agent: what it is, how it is asked and answers, how it stands, what was set for it."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

from django.contrib import messages
from django.db.models import Model
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse

from backend.http import button, page, redirect_back
from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.models import AgentSettings
from feedback.rating.requests import SampleRefused, liked_by_choice, liked_in_sample, sample_draw
from rl.agents import AGENTS
from rl.agents.base import Agent
from rl.agents.inference import InferredAgent
from rl.base_models.service import addition_of, agent_base_model, base_model_choices, base_model_set
from rl.base_models.sources import SourceRefused
from rl.datasets.gate_distance import MAX_COUNT
from rl.datasets.reward_records import RewardsRefused, reward_summary, rewards_calculate
from rl.jobs.child_process import base_model_add_dispatch
from rl.models import (
    AgentDefinition,
    GateSettings,
    LearnerSettings,
    Policy,
    RewardSettings,
)
from rl.registry.checklist import gate_checklists, policy_verdict
from rl.selectors import agent_cards, agent_overview
from rl.views.runs import step_next

SETTINGS: tuple[tuple[type[Model], str, str], ...] = (
    (AgentSettings, "agent", "Collecting and rating"),
    (LearnerSettings, "agent", "Learning"),
    (GateSettings, "agent", "Gate"),
    (RewardSettings, "agent", "Rewards"),
    (AgentDefinition, "slug", "Definition without code"),
)
"""Settings per agent: model, the column its row is found by, and its name."""


@page(SCOPE_PERMISSIONS["rate"])
def agent(request: HttpRequest, slug: str) -> HttpResponse:
    """One agent. Any slug that decided something has a page, and so has every agent with a file or a definition."""
    overview = agent_overview(slug)
    if overview is None:
        raise Http404(f"no agent {slug}")
    champion, waiting = overview.champion, overview.waiting
    may_see = request.user.has_perm("rl.view_policy")
    judged = champion if champion and champion.has_files else waiting or champion
    card = next((one for one in agent_cards() if one.facts.slug == slug), None)
    schema = overview.agent.response_schema()
    context = {
        **{field.name: getattr(overview, field.name) for field in fields(overview)},
        "slug": slug,
        "checks": gate_checklists(waiting, [Policy.Stage.CHAMPION]) if waiting and may_see else [],
        "origin": _origin(overview.agent, overview.is_defined),
        "verdict": policy_verdict(judged) if judged and may_see else None,
        "policy": judged,
        "newer": policy_verdict(waiting) if waiting and waiting != judged and may_see else None,
        "card": card,
        "next": step_next(card) if card else None,
        "live": card is not None and card.works,
        "schema": json.dumps(schema, ensure_ascii=False, indent=2) if schema else "",
        "inferred": isinstance(overview.agent, InferredAgent),
        "example": _example(overview.agent),
        "rewards": reward_summary(slug),
        "settings": _settings(request, slug),
        "base": agent_base_model(slug),
        "addition": addition_of(agent_base_model(slug).name),
        "base_choices": base_model_choices(),
        "liked_sample": liked_in_sample(slug),
        "liked_by_choice": liked_by_choice(slug) if overview.counts.feedback <= MAX_COUNT else None,
        "may_set_base": request.user.has_perm(SCOPE_PERMISSIONS["operate"]),
    }
    return render(request, "rl/agent.html", context)


@button(SCOPE_PERMISSIONS["operate"])
def agent_base(request: HttpRequest, slug: str) -> HttpResponse:
    """Set the base model of an agent: `base_model` from the list, or `other`, a source typed in."""
    if agent_overview(slug) is None:
        raise Http404(f"no agent {slug}")
    text = request.POST.get("other", "").strip() or request.POST.get("base_model", "")
    try:
        found = base_model_set(slug, text)
    except SourceRefused as refusal:
        messages.error(request, f"{str(refusal)[:1].upper()}{str(refusal)[1:]}.")
        return redirect_back(request, "agent", slug)
    if not found.is_ready:
        base_model_add_dispatch(found.name)
    messages.success(
        request, f"{slug} is on {found.name}{'' if found.is_ready else ', which a worker adds now'}."
    )
    return redirect_back(request, "agent", slug)


@button(SCOPE_PERMISSIONS["operate"])
def agent_sample(request: HttpRequest, slug: str) -> HttpResponse:
    """Draw random decisions of last week for the rating queue: `count`."""
    if agent_overview(slug) is None:
        raise Http404(f"no agent {slug}")
    count = request.POST.get("count", "")
    try:
        drawn = sample_draw(slug, int(count) if re.fullmatch(r"\d{1,6}", count) else 0)
    except SampleRefused as refusal:
        messages.error(request, f"{str(refusal)[:1].upper()}{str(refusal)[1:]}.")
    else:
        messages.success(
            request, f"{drawn.drawn:,} random decisions, of {drawn.among:,}, come first in the rating queue."
        )
    return redirect_back(request, "agent", slug)


REWARDS_AT_ONCE = 2000
"""Rewards calculated by one press of the button: about a second."""


@button(SCOPE_PERMISSIONS["operate"])
def agent_rewards(request: HttpRequest, slug: str) -> HttpResponse:
    """Calculate the rewards of an agent's decisions."""
    try:
        found = rewards_calculate(slug, limit=REWARDS_AT_ONCE)
    except RewardsRefused as refusal:
        messages.error(request, f"{str(refusal)[:1].upper()}{str(refusal)[1:]}.")
    else:
        more = f" {found.pending:,} are left: press again." if found.pending else ""
        messages.success(request, f"{found.calculated:,} rewards are calculated.{more}")
    return redirect_back(request, "agent", slug)


def _origin(found: Agent, defined: bool) -> str:
    if found.slug in AGENTS:
        return f"{type(found).__module__}.{type(found).__qualname__}"
    if defined:
        return "defined in the admin, without code"
    if isinstance(found, InferredAgent):
        return "no definition: inferred from its recorded responses"
    return "no definition: free text"


def _example(found: Agent) -> dict[str, object] | None:
    """The first made-up scenario: what is asked, and an answer it could give."""
    scenario = next(iter(found.scenarios()), None)
    if scenario is None or found.slug not in AGENTS:
        return None
    question = found.render(scenario.state)[-1]["content"]
    return {"asked": question, "answer": next(iter(found.candidates(scenario.state)), "")}


def _settings(request: HttpRequest, slug: str) -> list[dict[str, Any]]:
    """Per kind of settings: what was set otherwise than usual, and where to change it for who may."""
    rows = []
    for model, column, title in SETTINGS:
        row = model._default_manager.filter(**{column: slug}).first()
        name = model._meta.model_name
        may = request.user.is_staff and request.user.has_perm(f"{model._meta.app_label}.change_{name}")
        base = f"admin:{model._meta.app_label}_{name}"
        address = (
            ""
            if not may
            else reverse(f"{base}_change", args=[row.pk])
            if row
            else f"{reverse(f'{base}_add')}?{column}={slug}"
        )
        rows.append({"title": title, "set": _change_counts(row, column) if row else None, "url": address})
    return rows


def _change_counts(row: Model, column: str) -> list[tuple[str, str]]:
    return [
        (str(field.verbose_name), _words(getattr(row, field.name)))
        for field in row._meta.concrete_fields
        if field.name not in ("id", column) and getattr(row, field.name) != field.get_default()
    ]


def _words(value: object) -> str:
    """A setting's value as words: `solved (good 1, bad 0), minutes (good 5, bad 60)`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(
            f"{name} ({_words(one)})" if isinstance(one, (dict, list)) else f"{name} {_words(one)}"
            for name, one in value.items()
        )
    if isinstance(value, list):
        return ", ".join(_words(one) for one in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
