"""The admin as a site: its navigation, with what each list is for, and Unfold without styles written into pages."""

from __future__ import annotations

import json
from typing import Any

from django.http import HttpRequest
from django.urls import reverse_lazy
from django.utils.safestring import SafeString, mark_safe


def page_context(request: HttpRequest) -> dict[str, Any]:
    """Context of every admin page, laid over Unfold's: no colours, which it would write into the page as a style.

    The Content-Security-Policy refuses styles in pages; the colours lie in static/rl/admin_colors.css.
    """
    return {"colors": {}}


def index_context(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """Context of the admin's first page: the groups of its navigation, with the lists that this person may see."""
    groups = [
        {**group, "items": [item for item in group["items"] if item["has_permission"]]}
        for group in context["sidebar_navigation"]
    ]
    return {**context, "title": "Admin", "groups": [group for group in groups if group["items"]]}


def json_html(value: Any, encoder: type[json.JSONEncoder] | None) -> SafeString:
    """JSON as HTML whose colours come from classes, in place of Unfold's, which has a style at every word."""
    from pygments import highlight
    from pygments.formatters.html import HtmlFormatter
    from pygments.lexers.data import JsonLexer

    text = json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, cls=encoder)
    # pygments escapes what it is given
    return mark_safe(highlight(text, JsonLexer(), HtmlFormatter(cssclass="ratchet-json")))  # noqa: S308


def _item(name: str, title: str, icon: str, about: str) -> dict[str, Any]:
    """A list of the admin, shown to those who may see its model; `about` stands on the first page."""
    app, _, model = name.rpartition("_")
    return {
        "title": title,
        "icon": icon,
        "about": about,
        "link": reverse_lazy(f"admin:{name}_changelist"),
        "permission": lambda request: request.user.has_perm(f"{app}.view_{model}"),
    }


def _page(name: str, title: str, icon: str, about: str, *, of: str) -> dict[str, Any]:
    """A page of the site, shown to those who may see the model it is about."""
    return {
        "title": title,
        "icon": icon,
        "about": about,
        "link": reverse_lazy(name),
        "permission": lambda request: request.user.has_perm(of),
    }


NAVIGATION: list[dict[str, Any]] = [
    {
        "title": "Pages",
        "about": "What happens every day stands on pages of its own.",
        "items": [
            _page(
                "decisions",
                "Decisions",
                "alt_route",
                "Prompts, responses, ratings, outcomes, withdrawals",
                of="feedback.view_decision",
            ),
            _page(
                "runs",
                "Training runs",
                "model_training",
                "Every job with recipe, data, machine and log",
                of="rl.view_trainingrun",
            ),
            _page(
                "policies",
                "Policies and moves",
                "trending_up",
                "Promote, roll back, retire; judging rounds",
                of="rl.view_policy",
            ),
            _page(
                "reward-models",
                "Reward models",
                "grade",
                "Models that score answers as people would",
                of="rl.view_rewardmodelversion",
            ),
            _page(
                "experiments",
                "Experiments and results",
                "monitoring",
                "Start, ramp and stop; effects",
                of="rl.view_experiment",
            ),
        ],
    },
    {
        "title": "Registry",
        "about": "What was made of the feedback, as it is on record. It can be looked up here, not changed.",
        "items": [
            _item(
                "rl_policy",
                "Policies",
                "verified",
                "Every version of every agent, its files and their hashes",
            ),
            _item(
                "rl_snapshot", "Snapshots", "dataset", "The files a run was trained on, which never change"
            ),
            _item("rl_evaluation", "Evaluations", "balance", "Measurements of a policy on held-out prompts"),
            _item("rl_artifact", "Artifacts", "inventory_2", "Exported files, with size and SHA-256"),
            _item(
                "rl_benchmarkresult",
                "Benchmark results",
                "speed",
                "Scores on public tasks, beside the base's",
            ),
            _item("rl_labelrun", "Label runs", "label", "Models that suggest ratings to people"),
        ],
    },
    {
        "title": "Settings",
        "about": "What an operator sets for an agent.",
        "items": [
            _item(
                "feedback_agentsettings", "Agent settings", "tune", "Ratings a decision waits for, share kept"
            ),
            _item(
                "rl_learnersettings",
                "Learner settings",
                "autorenew",
                "When an agent is trained anew by itself",
            ),
            _item(
                "rl_gatesettings",
                "Gate settings",
                "rule",
                "What a policy of an agent has to show to be promoted",
            ),
            _item(
                "rl_goldencase",
                "Golden cases",
                "star",
                "Prompts that a policy must answer rightly to be promoted",
            ),
            _item(
                "rl_servingsettings", "Serving settings", "forum", "How an agent's policies answer: limits"
            ),
            _item(
                "rl_rewardsettings",
                "Reward settings",
                "payments",
                "Which outcomes and checks count, and how much",
            ),
            _item(
                "rl_agentbase", "Base models", "deployed_code", "The model an agent's training begins with"
            ),
            _item(
                "rl_agentdefinition",
                "Agents without code",
                "smart_toy",
                "Agents defined here by prompt and answer",
            ),
            _item("rl_experiment", "Experiments", "science", "Arms, metric and guardrails of a draft"),
            _item(
                "rl_upstream",
                "Upstreams",
                "cloud",
                "Endpoints of providers: address, API key, timeouts, prices",
            ),
        ],
    },
    {
        "title": "People and keys",
        "about": "Who may sign in, what each may do, and the keys that apps send.",
        "items": [
            _item("auth_user", "Users", "person", "People, and the group that says what they may do"),
            _item("auth_group", "Groups", "group", "Rater, operator, admin: the permissions of each"),
            _item("feedback_apikey", "API keys", "key", "Keys of apps and scripts, by what they may do"),
        ],
    },
    {
        "title": "Background work",
        "about": "The queue that workers take jobs from: what waits, what is due, what went wrong.",
        "items": [
            _item("django_q_ormq", "Queued tasks", "hourglass_top", "Jobs that wait for a worker"),
            _item(
                "django_q_schedule", "Scheduled tasks", "schedule", "What runs by the clock, and when next"
            ),
            _item("django_q_success", "Successful tasks", "check_circle", "Jobs that went through"),
            _item("django_q_failure", "Failed tasks", "error", "Jobs that broke off, with the error"),
        ],
    },
]
