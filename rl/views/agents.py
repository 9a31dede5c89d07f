"""The page of one agent: what it is, how it is asked and answers, how it stands, what was set for it."""

from __future__ import annotations

import json
import re
from typing import Any

from django.contrib.auth.decorators import login_required, permission_required
from django.db.models import Avg, Count, Model, Q
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_safe

from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.cache import CostAwareCache
from feedback.models import AgentSettings
from feedback.selectors import SLUG_PATTERN, feedback_counts_cached
from rl.agents import AGENTS
from rl.agents.base import Agent
from rl.agents.inference import InferredAgent
from rl.datasets.buffer import buffer_sizes_cached
from rl.datasets.gate_distance import gate_distances_cached
from rl.datasets.reward_records import RewardsRefused, reward_plan
from rl.gates.figures import headline_of, share_of
from rl.jobs.label import label_model_summary
from rl.models import (
    AgentDefinition,
    Experiment,
    GateSettings,
    LearnerSettings,
    Policy,
    RewardRecord,
    RewardSettings,
    TrainingRun,
)
from rl.models.agent_definitions import agent_served
from rl.models.learner_config import learner_settings
from rl.registry.checklist import gate_checklists
from rl.selectors import FIGURES, NO_FEEDBACK, policy_versions

RUNS_SHOWN = 5
CHARTS = tuple((figure, title) for figure, title, _ in FIGURES)

WAITING = (Policy.Stage.CANDIDATE, Policy.Stage.CHALLENGER)
"""Stages before which a gate stands still."""

SETTINGS: tuple[tuple[type[Model], str, str], ...] = (
    (AgentSettings, "agent", "Collecting and rating"),
    (LearnerSettings, "agent", "Learning"),
    (GateSettings, "agent", "Gate"),
    (RewardSettings, "agent", "Rewards"),
    (AgentDefinition, "slug", "Definition without code"),
)
"""Settings per agent: model, the column its row is found by, and its name."""


@login_required
@permission_required(SCOPE_PERMISSIONS["rate"], raise_exception=True)
@require_safe
def agent(request: HttpRequest, slug: str) -> HttpResponse:
    """One agent. Any slug that decided something has a page, and so has every agent with a file or a definition."""
    counts = feedback_counts_cached()
    defined = AgentDefinition.objects.filter(slug=slug).exists()
    known = slug in counts or slug in AGENTS or defined or TrainingRun.objects.filter(agent=slug).exists()
    if not re.fullmatch(SLUG_PATTERN, slug) or not known:
        raise Http404(f"no agent {slug}")
    found = agent_served(slug)
    policies = list(Policy.objects.filter(agent=slug).defer("adapter_path").order_by("pk"))
    champion = next((policy for policy in policies if policy.stage == Policy.Stage.CHAMPION), None)
    waiting = next((one for one in policies[::-1] if one.stage in WAITING), None)
    may_see = request.user.has_perm("rl.view_policy")
    context = {
        "waiting": waiting,
        "checks": gate_checklists(waiting, [Policy.Stage.CHAMPION]) if waiting and may_see else [],
        "slug": slug,
        "agent": found,
        "origin": _origin(found, defined),
        "counts": counts.get(slug, NO_FEEDBACK),
        "buffer": buffer_sizes_cached().get(slug, 0),
        "learner": learner_settings(slug),
        "distance": gate_distances_cached({slug: counts[slug]}).get(slug) if slug in counts else None,
        "champion": champion,
        "headline": headline_of(champion.metrics) if champion else None,
        "policies": policies[::-1][:RUNS_SHOWN],
        "charts": [
            c for figure, title in CHARTS if (c := policy_versions(policies, figure, title)) is not None
        ],
        "runs": TrainingRun.objects.filter(agent=slug).order_by("-pk")[:RUNS_SHOWN],
        "experiments": Experiment.objects.filter(agent=slug).order_by("-pk")[:RUNS_SHOWN],
        "schema": json.dumps(schema, ensure_ascii=False, indent=2)
        if (schema := found.response_schema())
        else "",
        "inferred": isinstance(found, InferredAgent),
        "example": _example(found),
        "rewards": reward_summary(slug),
        "labels": labels_card(slug),
        "settings": _settings(request, slug),
    }
    return render(request, "rl/agent.html", context)


def _origin(found: Agent, defined: bool) -> str:
    if found.slug in AGENTS:
        return f"{type(found).__module__}.{type(found).__qualname__}"
    if defined:
        return "defined in the admin, without code"
    if isinstance(found, InferredAgent):
        return "no definition: inferred from its recorded responses"
    return "no definition: free text"


def _example(found: Agent) -> dict[str, Any] | None:
    """The first made-up scenario: what is asked, and an answer it could give."""
    scenario = next(iter(found.scenarios()), None)
    if scenario is None or found.slug not in AGENTS:
        return None
    asked = found.render(scenario.state)[-1]["content"]
    return {"asked": asked, "answer": next(iter(found.candidates(scenario.state)), "")}


CURVE = 200
"""Side of the drawn calibration curve."""


def labels_card(slug: str) -> dict[str, Any] | None:
    """Suggested ratings with their calibration curve drawn on a square of CURVE; None where none was ever made."""
    found = label_model_summary(slug)
    if not found["figures"]:
        return None
    most = max(point["n"] for point in found["figures"]["curve"])
    dots = [
        {
            "x": round(CURVE * point["stated"], 1),
            "y": round(CURVE * (1 - point["observed"]), 1),
            "r": round(3 + 7 * (point["n"] / most) ** 0.5, 1),
            "words": f"stated {point['stated']:.2f}, observed {point['observed']:.2f}, {point['n']} ratings",
        }
        for point in found["figures"]["curve"]
    ]
    settled = found["accepted"] + found["agreed"] + found["overruled"]
    return {
        **found,
        "dots": dots,
        "side": CURVE,
        "settled": settled,
        "accepted_text": share_of(found, "accepted_share"),
        "right_text": share_of(found, "right_share"),
        "accuracy": share_of(found["figures"], "accuracy"),
    }


_means: CostAwareCache[dict[str, Any]] = CostAwareCache()


def reward_summary(slug: str) -> dict[str, Any]:
    """Mean rewards of an agent's decisions, a little old where there are many, and how they are made."""
    newest = RewardRecord.objects.filter(agent=slug, superseded_by__isnull=True)
    means = _means.get(
        slug,
        lambda: newest.order_by().aggregate(
            n=Count("raw"),
            raw=Avg("raw"),
            immediate=Avg("immediate"),
            delayed=Avg("delayed"),
            strategic=Avg("strategic"),
            simulated=Count("pk", filter=Q(simulated=True)),
        ),
    )
    try:
        facts = reward_plan(slug).facts
    except RewardsRefused as refusal:
        return {**means, "fault": str(refusal)}
    horizons = [(name, weight, means[name]) for name, weight in facts.weights.items()]
    return {**means, "horizons": horizons, "functions": facts.functions, "outcomes": facts.outcomes}


def _settings(request: HttpRequest, slug: str) -> list[dict[str, Any]]:
    """Per kind of settings: what was set otherwise than usual, and where to change it for who may."""
    shown = []
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
        shown.append({"title": title, "set": _change_counts(row, column) if row else None, "url": address})
    return shown


def _change_counts(row: Model, column: str) -> list[tuple[str, str]]:
    return [
        (str(field.verbose_name), _words(getattr(row, field.name)))
        for field in row._meta.concrete_fields
        if field.name not in ("id", column) and getattr(row, field.name) != field.get_default()
    ]


def _words(value: Any) -> str:
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
