"""Agents that an operator defined without code, as `rl.agents` asks for them."""

from __future__ import annotations

from feedback.remembered import Remembered
from rl.agents.base import Agent
from rl.models import AgentDefinition

_known: Remembered[dict[str, Agent]] = Remembered(size=1)


def agent_defined(slug: str) -> Agent | None:
    """The agent of that slug, if one was defined; a process may go by what it read for FEEDBACK_REMEMBER_S seconds."""
    return _known.get("all", _defined).get(slug)


def _defined() -> dict[str, Agent]:
    return {row.slug: row.agent for row in AgentDefinition.objects.all()}
