"""Template context that pages of decisions share: the decision as it is shown, and the filters above a list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest

from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.explorer.previews import agent_facts, conversation_of, corrections_offered, preview_of, turns_of
from feedback.explorer.search import DecisionFilter
from feedback.models import Decision
from feedback.selectors import agent_slugs, policy_names


def preview_context(decision: Decision) -> dict[str, Any]:
    """Template context of a decision's preview."""
    facts = agent_facts(decision.agent)
    preview = preview_of(
        decision,
        facts.preview,
        (getattr(facts, "asked_key", ""), getattr(facts, "listed_key", "")),
        getattr(facts, "draw", None),
    )
    return {
        "decision": decision,
        "facts": facts,
        "preview": preview,
        "corrections": corrections_offered(decision, preview),
        "turns": turns_of(decision.messages),
        "conversation": conversation_of(decision.messages),
    }


def filter_context(
    request: HttpRequest, within: DecisionFilter, more: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Template context of the filters above a queue or a list: the agents as links, the rest as a form.

    more: what else stands in the address and is to stay there.
    """

    def query(narrowed: DecisionFilter) -> str:
        return urlencode({**narrowed.parts, **(more or {})})

    reads = request.user.has_perm(SCOPE_PERMISSIONS["read"])
    return {
        "agents": [(slug, query(within.but(agent=slug))) for slug in agent_slugs()],
        "all_agents": query(within.but(agent="")),
        "policies": policy_names() if reads else None,
        "narrowed": [
            (name, value, query(within.but(**{name: "" if name in ("policy", "tag") else None})))
            for name, value in within.parts.items()
            if name != "agent"
        ],
    }
