"""The agents: every file and folder here that defines AGENT, and those that were made known from outside. Pure."""

from __future__ import annotations

import contextlib
import dataclasses
import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module

from rl.agents.base import DRAWINGS, Agent, AgentFacts


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
"""Built in, and those of RATCHET_AGENTS once they are registered."""

finders: list[Callable[[str], Agent | None]] = []
"""Finders called in order for a slug that has no file: agents that were defined without code."""


def agent_register(path: str) -> Agent:
    """Make known an agent of a user's own by dotted path: a module that defines AGENT, or an Agent in one.

    Raises ValueError where there is none, or where its slug is taken by another.
    """
    try:
        found = import_module(path).AGENT
    except (ImportError, AttributeError):
        module, _, name = path.rpartition(".")
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"agent {path}: cannot be imported ({error})") from error
    if not isinstance(found, Agent):
        raise ValueError(
            f"agent {path}: expected an Agent, or a module that defines AGENT; found {found!r:.80}"
        )
    known = AGENTS.get(found.slug)
    if known is not None and known != found:
        raise ValueError(f"agent {path}: the slug {found.slug!r} is taken by another agent")
    AGENTS[found.slug] = found
    return found


def get_agent(slug: str) -> Agent:
    """The agent of a slug; one that has neither a file nor a definition behaves as the assistant does."""
    if slug in AGENTS:
        return AGENTS[slug]
    for find in finders:
        if (found := find(slug)) is not None:
            return found
    return dataclasses.replace(
        AGENTS["assistant"],
        slug=slug,
        title=slug,
        description="An agent without a definition: its responses show what its answers look like.",
    )


@contextlib.contextmanager
def agent_resolve(agent: Agent) -> Iterator[Agent]:
    """Inside, `get_agent` gives this agent for its slug: one whose form was inferred, while its policy is trained."""
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
    """Facts about an agent for a page; any slug has some."""
    facts = get_agent(slug).facts()
    return dataclasses.replace(facts, draw=DRAWINGS.get(facts.preview))
