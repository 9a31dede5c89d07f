"""Live experiments: which policy answers for a unit; create, start, ramp and stop an experiment. No torch.

Serving calls `assign(agent, unit)` per decision, or keeps `plan_of(agent)` and asks the plan, which needs no database.
It records `Assignment.arm` as the decision's arm, the policy, and `metadata["arm_propensity"]`, the probability of the
arm.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models import Prefetch, QuerySet
from django.utils import timezone

from backend.installation import PROGRAM
from rl.models import Arm, Experiment, ExperimentEvent, Policy
from rl.recipes import AB_TESTING_KNOBS
from rl.statistics.assignment import (
    BASE,
    RAMP,
    ArmPlan,
    Assignment,
    AssignmentPlan,
    ExperimentPlan,
    group_place,
)

Status = Experiment.Status
Kind = ExperimentEvent.Kind
Stage, RECORDED = Policy.Stage, Policy.Kind.RECORDED

ANSWERING = (Stage.CHALLENGER, Stage.CHAMPION)
"""Stages in which a policy may answer users."""


class ExperimentRefused(ValueError):
    """An experiment cannot be created, started or changed; the message says why and what to do."""

    code = "conflict"


# --- Who answers --------------------------------------------------------------------------------------------


def assign(agent: str, unit: str) -> Assignment:
    """A unit's policy: its arm in a running experiment, else the champion, else the base model.

    unit: a user or session that keeps its arm; empty makes this decision its own unit.
    """
    return plan_of(agent).assign(unit or secrets.token_hex(16))


def plan_of(agent: str) -> AssignmentPlan:
    """The agent's current plan; two queries.

    A shadow takes no units, nor does an experiment with a policy out of service, until the scheduler stops it.
    """
    running = experiments_with_arms(
        Experiment.objects.filter(agent=agent, status=Status.RUNNING, shadow=0).order_by("pk")
    )
    plans = tuple(experiment_plan(one) for one in running if not out_of_service(one))
    return AssignmentPlan(agent, _default_answer(agent), plans)


def _default_answer(agent: str) -> str:
    """Name of the agent's champion, else of the base."""
    champion = Policy.objects.filter(agent=agent, stage=Stage.CHAMPION).values_list("name", flat=True).first()
    return champion or BASE


def experiment_plan(experiment: Experiment) -> ExperimentPlan:
    return ExperimentPlan(
        name=experiment.name,
        salt=experiment.salt,
        ramp=float(experiment.ramp),
        arms=tuple(ArmPlan(arm.name, arm.policy_name, arm.weight) for arm in experiment.arms.all()),
        epoch=experiment.epoch if experiment.allocation == Experiment.Allocation.THOMPSON else None,
        group=experiment.group,
        group_start=experiment.group_start,
    )


def out_of_service(experiment: Experiment) -> list[str]:
    """Names of its arms' policies that may not, or cannot, answer. A shadow answers no user, so a candidate may."""
    stages = (*ANSWERING, Stage.CANDIDATE) if experiment.shadow else ANSWERING
    return [
        arm.policy.name
        for arm in experiment.arms.all()
        if arm.policy is not None
        and not (experiment.shadow and arm.is_control)
        and (arm.policy.stage not in stages or arm.policy.kind == RECORDED)
    ]


def experiments_with_arms(experiments: QuerySet[Experiment] | None = None) -> QuerySet[Experiment]:
    """These experiments (None: all), each with its arms and their policies."""
    rows = Experiment.objects.all() if experiments is None else experiments
    return rows.prefetch_related(Prefetch("arms", Arm.objects.select_related("policy")))


def experiments_running(agent: str | None = None) -> list[Experiment]:
    """Running experiments with their arms, oldest first."""
    found = Experiment.objects.filter(status=Status.RUNNING)
    if agent is not None:
        found = found.filter(agent=agent)
    return list(experiments_with_arms(found.order_by("pk")))


def experiment_get(name: str) -> Experiment:
    """The experiment of a name, with its arms. Raises ExperimentRefused, naming existing ones."""
    found: Experiment | None = experiments_with_arms(Experiment.objects.filter(name=name)).first()
    if found is None:
        names = list(Experiment.objects.values_list("name", flat=True)[:5])
        there = f"there are {', '.join(names)}" if names else "there are none yet"
        raise ExperimentRefused(f"no experiment is named {name!r}; {there}")
    return found


# --- Making, starting, ramping, stopping --------------------------------------------------------------------


@dataclass(frozen=True)
class ArmOrder:
    """An arm to create: its policy's name (`base`: the base model), its name, its weight."""

    policy: str
    name: str
    weight: float = 1.0


def policies_eligible() -> QuerySet[Policy]:
    """Policies that an experiment may use, by agent, newest first."""
    return Policy.objects.exclude(stage=Stage.REJECTED).exclude(kind=RECORDED).order_by("agent", "-pk")


def experiment_draft(
    name: str,
    challengers: Sequence[str],
    *,
    actor: str,
    agent: str = "",
    control: str = "",
    **settings: object,
) -> Experiment:
    """A draft of policies against a control: the named one, else the champion, else the base model.

    agent defaults to the first challenger's. Raises ExperimentRefused.
    """
    if not agent:
        first = Policy.objects.filter(name__in=challengers[:1]).first()
        if first is None:
            raise ExperimentRefused("expected a policy to try")
        agent = first.agent
    names = (
        ["challenger"] if len(challengers) == 1 else [f"challenger-{n + 1}" for n in range(len(challengers))]
    )
    arms = [ArmOrder(policy, arm) for policy, arm in zip(challengers, names, strict=True)]
    return experiment_create(
        agent, name, [ArmOrder(control or _default_answer(agent), "control"), *arms], actor=actor, **settings
    )


def experiment_create(
    agent: str, name: str, arms: Sequence[ArmOrder], *, actor: str, **settings: object
) -> Experiment:
    """Creates a draft. The first arm is the control.

    settings: fields of Experiment (metric, goal, ramp, group, allocation, guardrails, on_win, ...). Missing ones come
    from the section `ab_testing` of RATCHET_CONFIG, else from the model. Raises ExperimentRefused.
    """
    if len(arms) < 2:
        raise ExperimentRefused(f"an experiment has at least two arms, found {len(arms)}")
    names = {arm.policy for arm in arms} - {BASE}
    policies = {policy.name: policy for policy in Policy.objects.filter(name__in=names)}
    for arm in arms:
        policy = policies.get(arm.policy)
        if arm.policy != BASE and (policy is None or policy.agent != agent):
            raise ExperimentRefused(f"expected policies of agent {agent} or {BASE}, found {arm.policy!r}")
        if policy is not None and policy.kind == RECORDED and not (settings.get("shadow") and arm is arms[0]):
            raise ExperimentRefused(
                f"{arm.name}: {policy.name} is known by its recorded answers alone, so this server cannot answer with "
                f"it; take {BASE} or another policy for this arm, or connect the app's model as an upstream"
            )
    if settings.get("shadow") and (len(arms) != 2 or arms[1].policy == BASE):
        raise ExperimentRefused("a shadow is one policy beside the control: expected one challenger")
    experiment = Experiment(agent=agent, name=name, created_by=actor, **{**_configuration(), **settings})
    rows = [
        Arm(
            experiment=experiment,
            name=arm.name,
            policy=policies.get(arm.policy),
            weight=arm.weight,
            is_control=number == 0,
        )
        for number, arm in enumerate(arms)
    ]
    if len({arm.name for arm in arms}) != len(arms):
        raise ExperimentRefused("expected a different name for every arm")
    try:
        experiment.full_clean()
        for row in rows:
            row.clean_fields(exclude=["experiment"])
    except ValidationError as error:
        raise ExperimentRefused(_faults(error)) from error
    if not all(row.weight > 0 for row in rows):
        raise ExperimentRefused("expected weights above 0")
    try:
        with transaction.atomic():
            experiment.save()
            for row in rows:
                row.experiment = experiment
                row.save()
            event(experiment, Kind.CREATED, actor, figures={arm.name: arm.policy_name for arm in rows})
    except IntegrityError as error:
        raise ExperimentRefused(
            f"an experiment {name} was made at the same time: choose another name"
        ) from error
    return experiment


def _configuration() -> dict[str, object]:
    given: dict[str, Any] = dict(django_settings.RATCHET_CONFIG.get("ab_testing", {}))
    if unknown := sorted(set(given) - set(AB_TESTING_KNOBS)):
        raise ExperimentRefused(
            f"ab_testing: no knob {unknown[0]!r}; there are {', '.join(AB_TESTING_KNOBS)}"
        )
    return given


def experiment_start(experiment: Experiment, *, actor: str) -> Experiment:
    """Starts taking units. Raises ExperimentRefused.

    Its policies must be challengers or the champion. No other experiment of the agent may run, except in one exclusion
    group with room left.
    """
    try:
        return _start(experiment, actor)
    except IntegrityError as error:
        raise ExperimentRefused(
            f"another experiment of {experiment.agent} was started at the same time; reload and try again"
        ) from error


def _start(experiment: Experiment, actor: str) -> Experiment:
    with transaction.atomic():
        current = experiment_lock(experiment)
        if current.status != Status.DRAFT:
            raise ExperimentRefused(f"{current.name} is {current.status}; only a draft is started")
        _check_arms(current)
        start = _place(current)
        current.status, current.started_at, current.group_start = Status.RUNNING, timezone.now(), start
        current.save(update_fields=["status", "started_at", "group_start"])
        event(current, Kind.STARTED, actor, figures={"ramp": current.ramp})
    return current


def _place(experiment: Experiment) -> float:
    """Start of its part of its group, in percent; 0 outside groups. Raises ExperimentRefused."""
    running = list(Experiment.objects.filter(status=Status.RUNNING).exclude(pk=experiment.pk))
    group, reserve = experiment.group, experiment.group_reserve
    for rival in running:
        if rival.agent == experiment.agent and not (group and rival.group == group):
            raise ExperimentRefused(
                f"{rival.name} is running for {experiment.agent}; stop it, or put both in one exclusion group"
            )
    if not group:
        return 0.0
    if experiment.ramp > reserve:
        raise ExperimentRefused(
            f"a ramp of {experiment.ramp} % is more than the {reserve} % reserved in its group"
        )
    taken = [(rival.group_start, float(rival.group_reserve)) for rival in running if rival.group == group]
    place = group_place(taken, reserve)
    if place is None:
        raise ExperimentRefused(
            f"exclusion group {group} has no {reserve} % of units left in one piece; "
            f"{sum(percent for _, percent in taken):g} % are reserved"
        )
    return place


def arms_of(experiment: Experiment) -> list[Arm]:
    """Its arms, control first. Raises ExperimentRefused for an incomplete draft."""
    arms = list(experiment.arms.all())
    if len(arms) < 2 or not any(arm.is_control for arm in arms):
        raise ExperimentRefused(f"{experiment.name} needs a control and at least one other arm")
    return arms


def _check_arms(experiment: Experiment) -> None:
    arms = arms_of(experiment)
    if idle := out_of_service(experiment):
        if experiment.shadow:
            raise ExperimentRefused(f"{idle[0]} was rejected or retired: choose another policy")
        raise ExperimentRefused(
            f"{idle[0]} may not answer users yet: promote it with `{PROGRAM} policy promote {idle[0]} --to challenger`"
        )
    if experiment.allocation == Experiment.Allocation.THOMPSON and experiment.floor * len(arms) > 1:
        raise ExperimentRefused(
            f"a floor of {experiment.floor:g} for each of {len(arms)} arms sums to more than 1"
        )


def experiment_ramp(experiment: Experiment, to: int, *, actor: str, reason: str = "") -> Experiment:
    """Takes more units; units keep their arms. Raises ExperimentRefused."""
    with transaction.atomic():
        current = experiment_lock(experiment)
        if current.status == Status.STOPPED:
            raise ExperimentRefused(f"{current.name} was stopped")
        if current.shadow:
            raise ExperimentRefused(f"{current.name} is a shadow and has no part of the traffic")
        if to not in RAMP or to <= current.ramp:
            steps = ", ".join(map(str, ramps_remaining(current))) or "nothing more"
            raise ExperimentRefused(
                f"{current.name} takes {current.ramp} % and can go on to {steps}, found {to!r}: "
                "a smaller share would remove units from their arms"
            )
        if current.group and to > current.group_reserve:
            raise ExperimentRefused(f"{current.name} reserved {current.group_reserve} % of its group's units")
        before, current.ramp = current.ramp, to
        current.save(update_fields=["ramp"])
        event(current, Kind.RAMPED, actor, reason=reason, figures={"from": before, "to": to})
    return current


def experiment_stop(
    experiment: Experiment,
    *,
    actor: str,
    reason: str,
    kind: str = Kind.STOPPED,
    figures: Mapping[str, object] | None = None,
) -> Experiment:
    """Stops it: every unit gets the champion again. Raises ExperimentRefused."""
    if not reason.strip():
        raise ExperimentRefused("expected a reason for stopping the experiment (kept on record), found none")
    with transaction.atomic():
        current = experiment_lock(experiment)
        if current.status == Status.STOPPED:
            raise ExperimentRefused(f"{current.name} was stopped already: {current.reason}")
        now = timezone.now()
        current.started_at = current.started_at or now  # a draft that was given up
        current.status, current.ended_at, current.reason = Status.STOPPED, now, reason
        current.save(update_fields=["status", "started_at", "ended_at", "reason"])
        event(current, kind, actor, reason=reason, figures=figures)
    return current


def event(
    experiment: Experiment,
    kind: str,
    actor: str,
    *,
    reason: str = "",
    figures: Mapping[str, object] | None = None,
) -> ExperimentEvent:
    """Records an event of an experiment."""
    return ExperimentEvent.objects.create(
        experiment=experiment, kind=kind, actor=actor, reason=reason, figures=dict(figures or {})
    )


def experiment_lock(experiment: Experiment) -> Experiment:
    """The current row, locked until the transaction ends."""
    Experiment.objects.select_for_update().get(pk=experiment.pk)
    found: Experiment = experiments_with_arms(Experiment.objects.filter(pk=experiment.pk)).get()
    return found


def _faults(error: ValidationError) -> str:
    fields = getattr(error, "message_dict", None) or {"experiment": error.messages}
    return "; ".join(f"{name}: {' '.join(messages)}" for name, messages in fields.items())


AUTO_RAMP = (1, 5, 25, 100)
"""Percent of units on a ramp by the scheduler."""


def ramps_remaining(experiment: Experiment) -> list[int]:
    """Steps it can still be ramped to."""
    if experiment.status == Status.STOPPED or experiment.shadow:
        return []
    most = experiment.group_reserve if experiment.group else RAMP[-1]
    return [step for step in RAMP if experiment.ramp < step <= most]
