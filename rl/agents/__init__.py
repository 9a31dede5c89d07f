"""Agents by slug: every file and folder here that defines AGENT, and those of plugins. Pure."""

from __future__ import annotations

import contextlib
import dataclasses
import pkgutil
import re
from collections.abc import Callable, Iterator
from importlib import import_module

from rl.agents.base import Agent, AgentFacts


def _discover() -> dict[str, Agent]:
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


AGENTS: dict[str, Agent] = _discover()
"""Slug -> agent: the built-in ones, and those of plugins once registered."""

SLUG = r"[a-z0-9][a-z0-9_-]{0,63}"

finders: list[Callable[[str], Agent | None]] = []
"""Called in order for a slug without a file: they find agents that were defined without code."""


def agent_register(name: str, found: object) -> None:
    """Register a plugin's agent (`backend.plugins`). Raises ValueError if it is no Agent, or its slug is taken."""
    if not isinstance(found, Agent):
        raise ValueError(f"expected an Agent (rl.agents.base), found {found!r:.80}")
    if not re.fullmatch(SLUG, found.slug):
        raise ValueError(f"expected a slug of small letters, digits, _ and -, found {found.slug!r}")
    known = AGENTS.get(found.slug)
    if known is not None and known != found:
        raise ValueError(
            f"the slug {found.slug!r} is taken by another agent, {known.title!r}: choose another slug"
        )
    AGENTS[found.slug] = found


def get_agent(slug: str) -> Agent:
    """The agent of a slug. A slug without a file or a definition, and none at all, behaves as the assistant."""
    slug = slug or "assistant"
    if slug in AGENTS:
        return AGENTS[slug]
    for find in finders:
        if (found := find(slug)) is not None:
            return found
    return dataclasses.replace(
        AGENTS["assistant"],
        slug=slug,
        title=slug,
        description="",
    )


@contextlib.contextmanager
def agent_resolve(agent: Agent) -> Iterator[Agent]:
    """Inside the block `get_agent` returns this agent for its slug, e.g. an inferred one while its policy trains."""
    before = AGENTS.get(agent.slug)
    AGENTS[agent.slug] = agent
    try:
        yield agent
    finally:
        if before is None:
            del AGENTS[agent.slug]
        else:
            AGENTS[agent.slug] = before


def agent_facts(slug: str) -> AgentFacts:
    facts = get_agent(slug).facts()
    if facts.draw is not None:
        return facts
    # a defined agent has the preview of a built-in one
    alike = (agent.drawing for agent in AGENTS.values() if agent.preview == facts.preview)
    return dataclasses.replace(facts, draw=next(filter(None, alike), None))
