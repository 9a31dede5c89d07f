"""Names the gateway answers to: agents that exist here or are allowed, and the nearest names to one that does not."""

from __future__ import annotations

import difflib
import fnmatch

from django.conf import settings

from feedback.cache import TTLCache
from feedback.models import AgentSettings
from feedback.selectors import agent_has_decisions, agent_slugs
from rl.agents import AGENTS
from rl.models import (
    AgentDefinition,
    Experiment,
    GateSettings,
    LearnerSettings,
    Policy,
    ServingSettings,
    TrainingRun,
)

SUGGESTIONS = 3
"""Names offered in place of one that nobody knows."""

_SET_UP = (AgentSettings, ServingSettings, GateSettings, LearnerSettings, Policy, Experiment, TrainingRun)
"""Tables in which an operator, a training or an experiment names an agent."""

_agent_cache: TTLCache[bool] = TTLCache()


class AgentUnknown(LookupError):
    """No agent of this name was set up, decided anything or is allowed by GATEWAY_NEW_AGENTS."""


def agent_check(agent: str) -> None:
    """Accept an agent that is built in, defined, set up, has decisions, or is allowed by GATEWAY_NEW_AGENTS.

    A known name is cached for FEEDBACK_REMEMBER_S seconds, an unknown one never, so that an agent's first decision
    counts at once. Raises AgentUnknown.
    """
    if agent in AGENTS or any(fnmatch.fnmatchcase(agent, pattern) for pattern in settings.GATEWAY_NEW_AGENTS):
        return
    _agent_cache.get(agent, lambda: _exists(agent))


def _exists(agent: str) -> bool:
    if agent_has_decisions(agent) or AgentDefinition.objects.filter(slug=agent).exists():
        return True
    if any(table._default_manager.filter(agent=agent).exists() for table in _SET_UP):
        return True
    raise AgentUnknown(agent)


def agent_names() -> list[str]:
    """Slugs of every agent a client may name, in alphabetical order."""
    defined = AgentDefinition.objects.values_list("slug", flat=True)
    trained = Policy.objects.order_by().values_list("agent", flat=True).distinct()
    return sorted({*AGENTS, *defined, *trained, *agent_slugs()})


def nearest_names(name: str) -> list[str]:
    """Up to SUGGESTIONS names of agents and of policies that may answer, the most alike first."""
    policies = (
        Policy.objects.exclude(stage=Policy.Stage.REJECTED)
        .exclude(kind=Policy.Kind.RECORDED)
        .order_by("-pk")
        .values_list("name", flat=True)
    )
    return difflib.get_close_matches(name, [*agent_names(), *policies[:1000]], n=SUGGESTIONS)
