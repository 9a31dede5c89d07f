"""The way from a hosted model to your own, in five stations.

It is derived from what is stored, so it can be left and resumed. Each station is answered by an existing service: the
log, a run, the gate, an experiment, the ledger. `flywheel_step` takes the next step that needs no person.
"""

from __future__ import annotations

from dataclasses import dataclass

from django.db import transaction
from django.utils.text import slugify

from backend.installation import PROGRAM
from rl.datasets.teachers import teacher_log
from rl.experiments.results import results_of
from rl.experiments.schedule import winner_promote
from rl.experiments.traffic import (
    AUTO_RAMP,
    experiment_draft,
    experiment_start,
    experiments_running,
)
from rl.experiments.verdicts import COLLECTING, HARM, MISMATCH, WON
from rl.gates.rules import CHALLENGER
from rl.jobs.estimates import order_automatic, order_place
from rl.jobs.method_selection import MANY_ANSWERS as FEWEST_ANSWERS
from rl.models import Experiment, Policy, TrainingRun
from rl.recipes import DISTIL
from rl.registry.checklist import gate_checklists, policy_verdict
from rl.registry.gate_evidence import gate_bounds
from rl.registry.incumbents import incumbent_sync
from rl.registry.service import policy_promote
from rl.savings import ledger_cached

MARGIN = 0.05
"""Loss of the experiment's metric that is ruled out, where the gate names none."""

DONE, NOW, OPEN = "done", "now", "open"

Stage, STOPPED = Policy.Stage, Experiment.Status.STOPPED


@dataclass(frozen=True)
class Station:
    """One station: its state, what is there, and what it waits for."""

    name: str
    """record, train, prove, ramp or save."""
    title: str
    state: str
    """DONE, NOW or OPEN; exactly one is NOW until all are done."""
    found: str
    waits_for: str = ""
    """Empty if the station is passed, or the next step can be taken now."""
    command: str = ""
    """Command or page that does it."""
    page: str = ""
    """Page with the button for it, where the command has one."""
    automatic: bool = False
    """True if `flywheel_step` does it."""


@dataclass(frozen=True)
class Flywheel:
    """Where an agent stands."""

    agent: str
    stations: tuple[Station, ...]

    @property
    def at(self) -> Station | None:
        """The station that is next; None if all are passed."""
        return next((one for one in self.stations if one.state == NOW), None)


def flywheel(agent: str) -> Flywheel:
    """Where an agent stands on its way to a model of its own."""
    incumbent_sync(agent)
    policy, run = _own_policy(agent), _run(agent)
    experiment = _experiment(policy)
    found = [
        _record(agent, policy),
        _train(agent, policy, run),
        _prove(policy),
        _ramp(policy, experiment),
        _save(agent, policy),
    ]
    first = next((place for place, one in enumerate(found) if one.state != DONE), len(found))
    stations = [_at(one, place, first) for place, one in enumerate(found)]
    return Flywheel(agent, tuple(stations))


def _at(station: Station, place: int, first: int) -> Station:
    if place < first:
        return station
    if place == first:
        return Station(**{**vars(station), "state": NOW})
    return Station(station.name, station.title, OPEN, "")


def _own_policy(agent: str) -> Policy | None:
    """The trained policy that is furthest, the newest of these; None without one."""
    order = (Stage.CHAMPION, Stage.CHALLENGER, Stage.CANDIDATE)
    rows = Policy.objects.filter(
        agent=agent, kind__in=(Policy.Kind.ADAPTER, Policy.Kind.LINEAR), stage__in=order
    )
    return min(rows, key=lambda one: (order.index(Stage(one.stage)), -one.pk), default=None)


def _run(agent: str) -> TrainingRun | None:
    return TrainingRun.objects.filter(agent=agent, stage_of=None).order_by("-pk").first()


def _experiment(policy: Policy | None) -> Experiment | None:
    """The running experiment with this policy as a challenger."""
    if policy is None:
        return None
    for experiment in experiments_running(policy.agent):
        if any(arm.policy_id == policy.pk and not arm.is_control for arm in experiment.arms.all()):
            return experiment
    return None


def _record(agent: str, policy: Policy | None) -> Station:
    log = teacher_log(agent)
    count, title = (log.answers, log.title) if log else (0, "your app's model")
    found = f"{count:,} unrated answers of {title} are recorded."
    if policy is not None or count >= FEWEST_ANSWERS:
        return Station("record", "Record what answers today", DONE, found)
    waits = f"{FEWEST_ANSWERS - count:,} more answers"
    return Station("record", "Record what answers today", NOW, found, waits, f"/start/?agent={agent}")


def _train(agent: str, policy: Policy | None, run: TrainingRun | None) -> Station:
    title = "Train your own on them"
    if policy is not None:
        return Station("train", title, DONE, f"{policy.name} is trained.")
    if run is not None and run.status in (TrainingRun.Status.QUEUED, TrainingRun.Status.RUNNING):
        return Station("train", title, NOW, f"Run {run.pk} is {run.status}.", "the run", f"/runs/{run.pk}/")
    command = f"{PROGRAM} run_pipeline --agent {agent} --method {DISTIL}"
    found = "" if run is None else f"Run {run.pk} was {run.status}: {run.reason_and_step}"
    return Station("train", title, NOW, found, "", command, automatic=True)


def _prove(policy: Policy | None) -> Station:
    title = "Show that it is not worse"
    if policy is None:
        return Station("prove", title, OPEN, "")
    verdict = policy_verdict(policy)
    if policy.stage != Stage.CANDIDATE:
        return Station("prove", title, DONE, f"{policy.name} is {policy.stage}. {verdict.result}".strip())
    (check,) = gate_checklists(policy, [CHALLENGER])
    page = f"/policies/{policy.name}/"
    if check.opens:
        command = f"{PROGRAM} policy promote {policy.name} --to {CHALLENGER}"
        return Station("prove", title, NOW, verdict.words, "", command, automatic=True)
    waits = verdict.action.words if verdict.action else check.unmet[0].words
    return Station("prove", title, NOW, verdict.words, waits, check.command or page, page)


def _ramp(policy: Policy | None, experiment: Experiment | None) -> Station:
    title = "Give it more of the traffic, step by step"
    if policy is None or policy.stage == Stage.CANDIDATE:
        return Station("ramp", title, OPEN, "")
    if policy.stage == Stage.CHAMPION:
        return Station("ramp", title, DONE, f"{policy.name} answers everybody.")
    if experiment is None:
        command = f"{PROGRAM} experiment start NAME --agent {policy.agent} --challenger {policy.name}"
        if ended := Experiment.objects.filter(
            arms__policy=policy, arms__is_control=False, status=STOPPED
        ).first():
            found = f"{ended.name} was stopped: {ended.reason}"
            return Station("ramp", title, NOW, found, "a person: start another experiment", command)
        return Station("ramp", title, NOW, f"{policy.name} answers nobody yet.", "", command, automatic=True)
    results = results_of(experiment)
    found = f"{experiment.name} has {experiment.ramp} % of the traffic: {results.leader.words}."
    page = f"/experiments/{experiment.pk}/"
    if results.verdict in WON:
        command = f"{PROGRAM} experiment promote {experiment.name}"
        return Station("ramp", title, NOW, found, "", command, automatic=True)
    if results.verdict in (HARM, MISMATCH):
        return Station("ramp", title, NOW, found, "a person: look at its page", page)
    if results.verdict == COLLECTING:
        counts = min(one.figures[results.rule.metric.name].n for one in results.arms)
        waits = f"{max(results.rule.min_units - counts, 1):,} more users with a value in each arm"
    else:
        further = results.leader.effect.needed if results.leader.effect else None
        waits = f"about {further:,} more users" if further else "more rated answers"
    return Station("ramp", title, NOW, found, waits, page)


def _save(agent: str, policy: Policy | None) -> Station:
    title = "See what it saves"
    if policy is None or policy.stage != Stage.CHAMPION:
        return Station("save", title, OPEN, "")
    months = [row for row in ledger_cached() if row.agent == agent]
    if not months:
        return Station("save", title, NOW, "", "an answer of a hosted model with a known price", "/savings/")
    return Station("save", title, DONE, months[0].words, "", f"/savings/?agent={agent}")


# --- The next step ----------------------------------------------------------------------------------------------


class FlywheelWaits(ValueError):
    """The next step needs a person or more data; the message says what."""

    code = "conflict"


def flywheel_step(agent: str, *, actor: str) -> str:
    """Take the next step that needs no person, and say which. Raises FlywheelWaits, and what the services refuse."""
    station = flywheel(agent).at
    if station is None:
        raise FlywheelWaits(f"{agent} has passed all stations: nothing is left to do")
    if not station.automatic:
        raise FlywheelWaits(f"{station.title}: it waits for {station.waits_for} ({station.command})")
    if station.name == "train":
        run = order_place(order_automatic(agent, DISTIL, actor=actor), judge=True)
        return f"run {run.pk} ({run.method}) waits for a worker"
    policy = _own_policy(agent)
    assert policy is not None  # stations after the training have one
    if station.name == "prove":
        policy_promote(
            policy, Stage.CHALLENGER, actor=actor, reason="flywheel: a ticket to 1 % of the traffic"
        )
        return f"{policy.name} is challenger"
    return _ramp_step(policy, actor)


def _ramp_step(policy: Policy, actor: str) -> str:
    experiment = _experiment(policy)
    if experiment is None:
        margin = gate_bounds(policy.agent).not_inferior or MARGIN
        with transaction.atomic():  # no draft is left of one that cannot start
            draft = experiment_draft(
                f"{slugify(policy.name)[:50]}-ramp",
                [policy.name],
                agent=policy.agent,
                actor=actor,
                ramp=AUTO_RAMP[0],
                auto_ramp=True,
                not_inferior=margin,
                hypothesis=f"{policy.name} is not worse than what answers today",
            )
            experiment_start(draft, actor=actor)
        return f"experiment {draft.name} gives {policy.name} part of {AUTO_RAMP[0]} % of the traffic"
    return f"{winner_promote(experiment, actor=actor).name} is champion"
