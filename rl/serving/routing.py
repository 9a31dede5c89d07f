"""Routing of a request: from the name it asks for to the policy, its arm, and the fallbacks."""

from __future__ import annotations

import difflib
import fnmatch
import re
import secrets
from dataclasses import dataclass, replace
from datetime import datetime

from django.conf import settings
from django.db.models import F, Q
from django.utils import timezone

from backend.installation import PROGRAM
from backend.notifications import notify
from feedback.cache import CostAwareCache, TTLCache
from feedback.explorer.bulk_readers import caller_cost_since, cost_since
from feedback.models import AgentSettings, ApiKey
from feedback.selectors import SLUG_PATTERN, agent_has_decisions, agent_slugs
from rl.agents import AGENTS, get_agent
from rl.agents.base import Agent
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
    UnrecordedCost,
)
from rl.models.agent_definitions import agent_served
from rl.models.fine_tuning import is_tuned_name, policy_of_model, tuned_models
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


class BudgetReached(ServingRefused):
    """The agent's budget of the month is spent, and only hosted models could answer."""


class ModelUnknown(ServingRefused):
    """No agent and no policy goes by the name that was asked for; the message names the nearest ones."""

    def __init__(self, message: str, name: str = "") -> None:
        nearest = nearest_names(name) if name else []
        if nearest:
            message = f"{message}; did you mean {' or '.join(nearest)}?"
        super().__init__(message, param="model", code="model_not_found")


@dataclass(frozen=True)
class Route:
    """An own model that answers before the hosted champion, where it is sure."""

    model: Model
    threshold: float | None
    """Confidence in [0, 1] from which its answer is taken; None: never."""
    explore: float
    """Share of requests that both answer."""


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

    fallbacks_named: bool = False
    """True if the agent's settings name its fallbacks."""
    route: Route | None = None
    """Of a hosted champion, where its agent routes by confidence."""

    @property
    def meant(self) -> str:
        """Name of the policy that was to answer."""
        return self.unaskable or self.models[0].name

    @property
    def definition(self) -> Agent:
        """The agent; the form of its answers is inferred for policies alone, as an app's own model answers freely."""
        return get_agent(self.agent) if self.models[0].is_the_apps else agent_served(self.agent)


_plans: TTLCache[AssignmentPlan] = TTLCache()
_models: TTLCache[Model | None] = TTLCache()
_recorded: TTLCache[bool] = TTLCache()
_owners: TTLCache[str] = TTLCache()
_tuned: TTLCache[str] = TTLCache()
_champions: TTLCache[Model | None] = TTLCache()
_bases: TTLCache[Model] = TTLCache()
_standby: TTLCache[tuple[Model, ...]] = TTLCache()
_settings: TTLCache[ServingSettings] = TTLCache()
_spent: TTLCache[float] = TTLCache()
_key_budgets: TTLCache[float | None] = TTLCache()
_key_spent: CostAwareCache[float] = CostAwareCache()


def target_of(model: str, unit: str = "", caller: str = "") -> Target:
    """The target of what an OpenAI client names as `model`: an agent, a policy, `agent:policy`, or a fine-tuned model.

    An agent is answered for by its experiment's arm for this unit, else by its champion, else by the base model
    (`agent:base` names that). A policy by name has nobody to step in for it. A recorded champion cannot be asked: the
    base model answers, and the answer says for whom. Raises ModelUnknown for a name nobody set up (see `known_agents`),
    PolicyUnaskable for a recorded policy by name, and
    BudgetReached. caller: who asks, such as key:3. A change in the registry is seen within FEEDBACK_REMEMBER_S seconds.
    """
    if is_tuned_name(model):
        return _of_policy(_tuned.get(model, lambda: policy_of_model(model)) or model)
    agent, colon, policy = model.partition(":")
    if colon:
        return _within_budget(_of_policy(policy, agent), caller)
    if policy_model(model) is not None or is_recorded(model):
        return _within_budget(_of_policy(model), caller)
    return _within_budget(_of_agent(agent, unit), caller)


def _within_budget(target: Target, caller: str) -> Target:
    """The target without hosted models once the month's budget of its agent or of the caller is reached. Raises
    BudgetReached where nobody is left to answer."""
    if all(model.endpoint is None for model in target.models):
        return target
    by_key = key_budget_reached(caller)
    if not by_key and not budget_reached(target.agent):
        return target
    local = tuple(model for model in target.models if model.endpoint is None)
    if not local:
        who = "this key" if by_key else f"agent {target.agent}"
        budget = _key_budget(caller) if by_key else serving_settings(target.agent).budget_usd
        where = f"with `{PROGRAM} api_key budget`" if by_key else "in its serving settings"
        raise BudgetReached(
            f"{who} has spent its budget of {budget:g} USD of this month, and no local policy may answer: raise it "
            f"{where}, or name fallbacks in the agent's serving settings",
            param="model",
            code="insufficient_quota",
        )
    if target.models[0].endpoint is None:
        return replace(target, models=local)
    # another policy answers than the arm's, so the answer is no evidence on the arm
    return replace(target, models=local, arm="", arm_propensity=None, route=None)


def budget_reached(agent: str) -> bool:
    """True once an agent's providers took its budget of this month. Costs are read every FEEDBACK_REMEMBER_S seconds,
    so that answers of that time may come on top."""
    budget = serving_settings(agent).budget_usd
    return budget is not None and _spent.get(agent, lambda: month_cost(agent)) >= budget


def month_cost(agent: str) -> float:
    """US dollars that an agent's providers took this month, for decisions and beside them."""
    beside = UnrecordedCost.objects.filter(agent=agent, month=month_start())
    return cost_since(agent, month_start()) + (beside.values_list("cost_usd", flat=True).first() or 0.0)


def cost_keep(agent: str, usd: float | None) -> None:
    """Count what a provider took for an answer that is no decision, where it is known."""
    if usd:
        row, _ = UnrecordedCost.objects.get_or_create(agent=agent, month=month_start())
        UnrecordedCost.objects.filter(pk=row.pk).update(cost_usd=F("cost_usd") + usd)


def key_budget_reached(caller: str) -> bool:
    """True once providers took a key's budget of this month for its requests, by `budget_reached`'s clock."""
    budget = _key_budget(caller)
    return (
        budget is not None
        and _key_spent.get(caller, lambda: caller_cost_since(caller, month_start())) >= budget
    )


def _key_budget(caller: str) -> float | None:
    kind, _, number = caller.partition(":")
    if kind != "key":
        return None
    rows = ApiKey.objects.filter(pk=number).values_list("budget_usd", flat=True)
    return _key_budgets.get(caller, rows.first)


def month_start() -> datetime:
    return timezone.localtime().replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def budgets_notice() -> list[str]:
    """Notify of each budget that was reached this month, once. Returns a line per notice."""
    done = []
    for row in ServingSettings.objects.exclude(budget_usd=None):
        start = month_start()
        fresh = Q(budget_noticed_at=None) | Q(budget_noticed_at__lt=start)
        spent = month_cost(row.agent)
        if row.budget_usd is None or spent < row.budget_usd:
            continue
        if ServingSettings.objects.filter(fresh, pk=row.pk).update(budget_noticed_at=timezone.now()):
            text = f"agent {row.agent} has spent {spent:.2f} of {row.budget_usd:.2f} USD: only local policies answer"
            notify("budget_reached", text, agent=row.agent, spent_usd=spent, budget_usd=row.budget_usd)
            done.append(text)
    for key in ApiKey.objects.exclude(budget_usd=None).filter(revoked_at=None):
        start = month_start()
        fresh = Q(budget_noticed_at=None) | Q(budget_noticed_at__lt=start)
        spent = caller_cost_since(key.ident, start)
        if key.budget_usd is None or spent < key.budget_usd:
            continue
        if ApiKey.objects.filter(fresh, pk=key.pk).update(budget_noticed_at=timezone.now()):
            text = f"key {key.name} has spent {spent:.2f} of {key.budget_usd:.2f} USD: only local policies answer it"
            notify("budget_reached", text, key=key.name, spent_usd=spent, budget_usd=key.budget_usd)
            done.append(text)
    return done


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
        fallbacks_named=bool(serving_settings(agent).fallbacks),
        route=None if assigned.arm else _route(agent, models[0]),
    )


def _route(agent: str, champion: Model) -> Route | None:
    wanted = serving_settings(agent)
    own = policy_model(wanted.route_policy) if wanted.route_policy and champion.endpoint is not None else None
    if own is None or own.endpoint is not None:
        return None
    basis = route_basis(wanted, champion.name)
    is_current = all(wanted.route_report.get(name) == value for name, value in basis.items())
    return Route(own, wanted.route_threshold if is_current else None, wanted.route_explore)


def route_basis(row: ServingSettings, champion: str) -> dict[str, object]:
    """What a threshold was set for: it says nothing of another policy, champion or loss."""
    return {"policy": row.route_policy, "champion": champion, "loss": row.route_loss}


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
    tuned = tuned_models()
    return [ListedModel(agent, 0, "ratchet") for agent in agent_names()] + [
        ListedModel(shown, int(at.timestamp()), agent)
        for name, agent, at in rows
        for shown in (name, tuned.get(name))
        if shown
    ]
