"""The admin as a site: its navigation, with what each list is for, and Unfold without styles written into pages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django.http import HttpRequest
from django.urls import reverse_lazy
from django.utils.safestring import SafeString, mark_safe


def page_context(request: HttpRequest) -> dict[str, object]:
    """Context of every admin page, laid over Unfold's: no colours, which it would write into the page as a style.

    The Content-Security-Policy refuses styles in pages; the colours lie in static/rl/admin_colors.css.
    """
    return {"colors": {}}


def index_context(request: HttpRequest, context: dict[str, Any]) -> dict[str, object]:
    """Context of the admin's first page: the groups of its navigation, with the lists that this person may see."""
    groups = [
        {**group, "items": [item for item in group["items"] if item["has_permission"]]}
        for group in context["sidebar_navigation"]
    ]
    return {**context, "title": "Admin", "groups": [group for group in groups if group["items"]]}


def json_html(value: object, encoder: type[json.JSONEncoder] | None) -> SafeString:
    """JSON as HTML whose colours come from classes, in place of Unfold's, which has a style at every word."""
    from pygments import highlight
    from pygments.formatters.html import HtmlFormatter
    from pygments.lexers.data import JsonLexer

    text = json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, cls=encoder)
    # pygments escapes what it is given
    return mark_safe(highlight(text, JsonLexer(), HtmlFormatter(cssclass="ratchet-json")))  # noqa: S308


def _link(address: str, title: str, icon: str, about: str, permission: str) -> dict[str, object]:
    """An entry, shown to those with a permission; `about` stands on the first page."""
    return {
        "title": title,
        "icon": icon,
        "about": about,
        "link": reverse_lazy(address),
        "permission": lambda request: request.user.has_perm(permission),
    }


def _lists(*rows: tuple[str, str, str, str]) -> list[dict[str, object]]:
    """Lists of the admin: app_model, title, icon and what it is for."""
    return [
        _link(f"admin:{name}_changelist", title, icon, about, f"{app}.view_{model}")
        for name, title, icon, about in rows
        for app, _, model in [name.rpartition("_")]
    ]


NAVIGATION: list[Mapping[str, object]] = [
    {
        "title": "Registry",
        "about": "What was made of the feedback, as it is on record. It can be looked up here, not changed.",
        "items": _lists(
            ("rl_policy", "Policies", "verified", "Every version of every agent, its files and their hashes"),
            ("rl_snapshot", "Snapshots", "dataset", "The files a run was trained on, which never change"),
            ("rl_evaluation", "Evaluations", "balance", "Measurements of a policy on held-out prompts"),
            ("rl_artifact", "Artifacts", "inventory_2", "Exported files, with size and SHA-256"),
            ("rl_benchmarkresult", "Benchmark results", "speed", "Scores on public tasks, beside the base's"),
        ),
    },
    {
        "title": "Settings",
        "about": "What an operator sets for an agent.",
        "items": _lists(
            ("feedback_agentsettings", "Agent settings", "tune", "Ratings a decision waits for, share kept"),
            (
                "rl_learnersettings",
                "Learner settings",
                "autorenew",
                "When an agent is trained anew by itself",
            ),
            ("rl_gatesettings", "Gate settings", "rule", "What a policy has to show to be promoted"),
            ("rl_goldencase", "Golden cases", "star", "Prompts that a policy must answer rightly"),
            ("rl_servingsettings", "Serving settings", "forum", "How an agent's policies answer: limits"),
            (
                "rl_rewardsettings",
                "Reward settings",
                "payments",
                "Which outcomes and checks count, and how much",
            ),
            ("rl_agentbase", "Base models", "deployed_code", "The model an agent's training begins with"),
            ("rl_agentdefinition", "Agents without code", "smart_toy", "Agents defined by prompt and answer"),
            ("rl_experiment", "Experiments", "science", "Arms, metric and guardrails of a draft"),
            ("rl_upstream", "Upstreams", "cloud", "Endpoints of providers: address, API key, prices"),
        ),
    },
    {
        "title": "People and keys",
        "about": "Who may sign in, what each may do, and the keys that apps send.",
        "items": _lists(
            ("auth_user", "Users", "person", "People, and the group that says what they may do"),
            ("auth_group", "Groups", "group", "Rater, operator, admin: the permissions of each"),
            ("feedback_apikey", "API keys", "key", "Keys of apps and scripts, by what they may do"),
        ),
    },
    {
        "title": "Background work",
        "about": "The queue that workers take jobs from: what waits, what is due, what went wrong.",
        "items": _lists(
            ("django_q_ormq", "Queued tasks", "hourglass_top", "Jobs that wait for a worker"),
            ("django_q_schedule", "Scheduled tasks", "schedule", "What runs by the clock, and when next"),
            ("django_q_success", "Successful tasks", "check_circle", "Jobs that went through"),
            ("django_q_failure", "Failed tasks", "error", "Jobs that broke off, with the error"),
        ),
    },
]
