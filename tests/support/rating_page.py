"""A rater before the rating page: decisions to rate, the hidden fields of its form, and its buttons."""

import re
from typing import Any

from django.test import Client

from feedback.models import Decision
from feedback.services import decision_record
from rl.agents import AGENTS


def record(agent: str = "assistant", **facts: Any) -> Decision:
    return decision_record(
        **({"agent": agent, "messages": "How do I reset it?", "response": "Open Settings."} | facts)
    ).row


def scenario(slug: str, option: int = 0) -> dict[str, Any]:
    """A built-in agent's first scenario, answered with one of its candidates."""
    agent = AGENTS[slug]
    state = agent.scenarios()[0].state
    candidates = agent.candidates(state)
    return {
        "agent": slug,
        "messages": agent.render(state),
        "state": state,
        "candidates": candidates,
        "response": candidates[option],
    }


def fields(html: str) -> dict[str, str]:
    """The hidden fields of the rating form."""
    return dict(re.findall(r'<input type="hidden" name="(id|decision|agent)" value="([^"]*)"', html))


def press(client: Client, verdict: str, html: str | None = None, **more: Any) -> Any:
    sent = fields(html or client.get("/rate/").text) | {"verdict": verdict} | more
    return client.post("/rate/", sent)


CARD = {"X-Ratchet-Card": "1"}
