"""Routing of a request: from the name it asks for to the policy, its arm, and the fallbacks."""

from __future__ import annotations

import difflib
import fnmatch
import re
import secrets
from dataclasses import dataclass

from django.conf import settings

from feedback.cache import TTLCache
from feedback.models import AgentSettings
from feedback.selectors import SLUG_PATTERN, agent_has_decisions, agent_slugs
from rl.agents import AGENTS
from rl.base_models.service import agent_base_model
from rl.experiments.traffic import plan_of
from rl.models import (
    AgentDefinition,
    Experiment,
    GateSettings,
    LearnerSettings,
    Policy,
    ServingSettings,
    TrainingRun,
)
from rl.registry.service import champion_of, champions_before
from rl.serving.base import BASE, BackendUnable, Model, ServingRefused
from rl.serving.files import model_of, unaskable_words
from rl.statistics.assignment import AssignmentPlan

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


Stage, RECORDED = Policy.Stage, Policy.Kind.RECORDED

STANDBY = 3
"""Earlier champions that may step in for one whose file is damaged."""


class PolicyUnaskable(ServingRefused):
    """A recorded policy, which is known by its recorded answers alone, was asked by name."""


class ModelUnknown(ServingRefused):
    """No agent and no policy goes by the name that was asked for; the message names the nearest ones."""

    def __init__(self, message: str, name: str = "") -> None:
        nearest = nearest_names(name) if name else []
        if nearest:
            message = f"{message}; did you mean {' or '.join(nearest)}?"
        super().__init__(message, param="model", code="model_not_found")


@dataclass(frozen=True)
class Target:
    """Policy meant to answer for an agent, and those that step in."""

    agent: str
    models: tuple[Model, ...]
    """The one that is meant; of an agent then its champion, then its fallbacks, else the base: each once. A policy
    asked for by name stands alone: it answers or refuses."""
    arm: str = ""
    arm_propensity: float | None = None
    """Probability with which the arm was drawn for this unit."""
    unaskable: str = ""
    """Name of the recorded policy that was meant and cannot be asked; empty where the first of `models` is meant."""
    standby: tuple[Model, ...] = ()
    """Earlier champions of the agent, the last one first. One of them steps in before the base, but only where a
    policy's own file is damaged or not there."""

    @property
    def meant(self) -> str:
        """Name of the policy that was to answer."""
        return self.unaskable or self.models[0].name


_plans: TTLCache[AssignmentPlan] = TTLCache()
_models: TTLCache[Model | None] = TTLCache()
_recorded: TTLCache[bool] = TTLCache()
_owners: TTLCache[str] = TTLCache()
_champions: TTLCache[Model | None] = TTLCache()
_bases: TTLCache[Model] = TTLCache()
_standby: TTLCache[tuple[Model, ...]] = TTLCache()
_settings: TTLCache[ServingSettings] = TTLCache()


def target_of(model: str, unit: str = "") -> Target:
    """The target of what an OpenAI client names as `model`: an agent, a policy, or `agent:policy`.

    An agent is answered for by its experiment's arm for this unit, else by its champion, else by the base model
    (`agent:base` names that). A policy by name has nobody to step in for it. A recorded champion cannot be asked: the
    base model answers, and the answer says for whom. Raises ModelUnknown for a name nobody set up (see `known_agents`),
    PolicyUnaskable for a recorded policy by name. A change in the registry is seen within FEEDBACK_REMEMBER_S seconds.
    """
    agent, colon, policy = model.partition(":")
    if colon:
        return _of_policy(policy, agent)
    if policy_model(model) is not None or is_recorded(model):
        return _of_policy(model)
    return _of_agent(agent, unit)


def _of_agent(agent: str, unit: str) -> Target:
    if not re.fullmatch(SLUG_PATTERN, agent):
        raise ModelUnknown(
            f"expected an agent such as support-bot, a policy, or agent:policy; found {agent[:80]!r}",
            agent[:80].lower(),
        )
    _agent_checked(agent)
    # a request without a unit is a unit of its own
    assigned = _plans.get(agent, lambda: plan_of(agent)).assign(unit or secrets.token_hex(16))
    champion = champion_model(agent)
    base = base_model(agent, champion)
    meant = base if assigned.policy == BASE else policy_model(assigned.policy)
    models = _distinct_models(meant, champion, *_fallbacks(agent, champion, base))
    if not models:
        raise BackendUnable(
            f"none of agent {agent}'s fallbacks may answer: they are policies that were rejected, or are gone; name "
            "others in its serving settings",
            param="model",
        )
    standby = () if champion is None or serving_settings(agent).fallbacks else champions_standby(agent)
    return Target(
        agent,
        models,
        assigned.arm,
        assigned.propensity if assigned.arm else None,
        unaskable=assigned.policy if meant is None and is_recorded(assigned.policy) else "",
        standby=standby,
    )


def _fallbacks(agent: str, champion: Model | None, base: Model) -> list[Model | None]:
    """Who steps in after the champion: the policies its settings name; without any, the base. A hosted model's answers
    are nothing a small base could stand in for: it has the fallbacks that are named, or none."""
    if named := serving_settings(agent).fallbacks:
        return [base if name == BASE else _policy_of(agent, name) for name in named]
    return [] if champion is not None and champion.endpoint is not None else [base]


def _policy_of(agent: str, name: str) -> Model | None:
    return policy_model(name) if _owner(name) == agent else None


def _of_policy(name: str, agent: str = "") -> Target:
    if name == BASE and re.fullmatch(SLUG_PATTERN, agent):
        _agent_checked(agent)
        return Target(agent, (base_model(agent, champion_model(agent)),))
    found = policy_model(name)
    owner = _owner(name)
    if is_recorded(name) and agent in ("", owner):
        raise PolicyUnaskable(unaskable_words(name), param="model", code="policy_unaskable")
    if found is None or (agent and owner != agent):
        whose = f" of agent {agent}" if agent else ""
        raise ModelUnknown(
            f"there is no policy {name[:80]!r}{whose} that may answer; GET /v1/models lists those that may",
            name[:80],
        )
    return Target(owner, (found,))


def _agent_checked(agent: str) -> None:
    try:
        agent_check(agent)
    except AgentUnknown as error:
        raise ModelUnknown(
            f"there is no agent and no policy named {agent!r}: record a decision of it, define it in the "
            "admin, or allow its name in GATEWAY_NEW_AGENTS (GET /v1/models lists the known ones)",
            agent,
        ) from error


def _distinct_models(*models: Model | None) -> tuple[Model, ...]:
    return tuple(dict.fromkeys(model for model in models if model is not None))


def _owner(name: str) -> str:
    return _owners.get(
        name, lambda: Policy.objects.filter(name=name).values_list("agent", flat=True).first() or ""
    )


def policy_model(name: str) -> Model | None:
    """The model of a policy that was not rejected; None where there is none, or only its recorded answers are known."""
    return _models.get(
        name, lambda: _model(Policy.objects.filter(name=name).exclude(stage=Stage.REJECTED).first())
    )


def is_recorded(name: str) -> bool:
    """True of a policy that is known by its recorded answers alone."""
    return _recorded.get(name, lambda: Policy.objects.filter(name=name, kind=RECORDED).exists())


def champion_model(agent: str) -> Model | None:
    return _champions.get(agent, lambda: _model(champion_of(agent)))


def champions_standby(agent: str) -> tuple[Model, ...]:
    """Up to STANDBY models of the agent's earlier champions, the last one first. None is hosted: a local policy's
    prompts go to a provider only where the agent's fallbacks name it."""
    return _standby.get(
        agent, lambda: tuple(model_of(one) for one in champions_before(agent, STANDBY) if one.has_files)
    )


def base_model(agent: str, champion: Model | None) -> Model:
    """The base that an agent's champion stands on; the agent's own where the champion has none, or there is none."""
    if champion is None or champion.endpoint is not None or not champion.base_model:
        return _bases.get(agent, lambda: Model(BASE, agent_base_model(agent).name))
    return Model(BASE, champion.base_model, champion.base_model_hash)


def _model(policy: Policy | None) -> Model | None:
    return None if policy is None or policy.kind == RECORDED else model_of(policy)


def serving_settings(agent: str) -> ServingSettings:
    """An agent's settings, or the defaults where it has no row."""
    return _settings.get(
        agent, lambda: ServingSettings.objects.filter(agent=agent).first() or ServingSettings(agent=agent)
    )


@dataclass(frozen=True)
class ListedModel:
    """Name that may stand as `model`."""

    id: str
    created: int
    """Unix seconds; 0 for an agent."""
    owner: str


def models_listed() -> list[ListedModel]:
    """Every agent that is known, and every policy that may answer, newest first."""
    rows = list(
        Policy.objects.exclude(stage__in=(Stage.REJECTED, Stage.RETIRED))
        .exclude(kind=RECORDED)
        .order_by("-pk")
        .values_list("name", "agent", "created_at")
    )
    return [ListedModel(agent, 0, "ratchet") for agent in agent_names()] + [
        ListedModel(name, int(at.timestamp()), agent) for name, agent, at in rows
    ]
