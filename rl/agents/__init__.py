"""The built-in agents: every file in this folder that defines AGENT. Pure: standard library only."""

from __future__ import annotations

import dataclasses
import pkgutil
from importlib import import_module

from rl.agents.base import Agent, AgentFacts


def _discovered() -> dict[str, Agent]:
    found: dict[str, Agent] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        agent = getattr(import_module(f"{__name__}.{module.name}"), "AGENT", None)
        if agent is None:
            continue
        if not isinstance(agent, Agent):
            raise TypeError(f"rl/agents/{module.name}.py: AGENT must be an Agent, found {agent!r}")
        if agent.slug in found:
            raise ValueError(f"rl/agents/{module.name}.py: another file already defines agent {agent.slug!r}")
        found[agent.slug] = agent
    return found


AGENTS: dict[str, Agent] = _discovered()


def get_agent(slug: str) -> Agent:
    """The agent of a slug; one that has no file behaves as the assistant does, under its own name."""
    if slug in AGENTS:
        return AGENTS[slug]
    return dataclasses.replace(
        AGENTS["assistant"],
        slug=slug,
        title=slug,
        description=f"{slug}: answers in free text, as the assistant does.",
    )


def agent_facts(slug: str) -> AgentFacts:
    """What a page shows of an agent; any slug has some."""
    return get_agent(slug).facts()
