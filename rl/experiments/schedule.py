"""The clock over running experiments: stop for harm, draw a bandit's weights anew, propose or make promotions."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta
from functools import partial

from django.db import transaction
from django.utils import timezone

from backend.isolation import agent_isolated
from backend.notifications import notify
from feedback.cache import CostAwareCache
from rl.experiments.results import ArmResult, Results, results_of, results_represent
from rl.experiments.traffic import (
    ExperimentRefused,
    event,
    experiment_lock,
    experiment_stop,
    experiments_running,
    out_of_service,
)
from rl.experiments.verdicts import BETTER, HARM, MISMATCH
from rl.models import Arm, Experiment, ExperimentEvent, Policy
from rl.recipes.experiment_metrics import LOWER, Metric
from rl.registry import service as registry
from rl.statistics.contrasts import Moments, bandit_chances, thompson_shares

logger = logging.getLogger("rl.experiments")

Kind = ExperimentEvent.Kind
CLOCK = "the clock"

EPOCH = timedelta(minutes=10)
"""Shortest time between two draws of a bandit's weights."""


class PacedCache(CostAwareCache[Results]):
    """Cache with entries that live twenty times as long as reading took: an experiment of 100,000 decisions,
    which takes 4 s, is looked at every 80 s, and the clock gives a twentieth of its time to each at most."""

    BELIEF = 20.0


_results = PacedCache()


def tick() -> list[str]:
    """Look at every running experiment and do what its rule says; may be repeated, and meet another clock doing it.

    Returns what was done, a line each.
    """
    done = []
    for experiment in experiments_running():
        done += agent_isolated(
            f"experiment {experiment.pk}", experiment.agent, partial(_checks_due, experiment)
        )
    for line in done:
        logger.info("tick: %s", line)
    return done


def _checks_due(experiment: Experiment) -> list[str]:
    try:
        return [f"experiment {experiment.name}: {line}" for line in experiment_look(experiment)]
    except ExperimentRefused as refusal:
        logger.info("%s: %s", experiment.name, refusal)  # another clock or a person was faster
        return []


def experiment_look(experiment: Experiment, *, actor: str = CLOCK) -> list[str]:
    """Do what one experiment's rule says now. Raises ExperimentRefused where it was stopped meanwhile."""
    if gone := out_of_service(experiment):
        reason = f"{gone[0]} is no longer a champion or challenger"
        experiment_stop(experiment, actor=actor, reason=reason)
        return [f"stopped: {reason}"]
    results = _results.get((experiment.pk, experiment.epoch), lambda: results_of(experiment))
    for result in results.challengers:
        if result.verdict == HARM:
            experiment_stop(
                experiment,
                actor=actor,
                reason=result.words,
                kind=Kind.HARM,
                figures=results_represent(results),
            )
            notify("experiment_harm", f"{experiment.name} was stopped: {result.words}", name=experiment.name)
            return [f"stopped for harm: {result.words}"]
    done = []
    if any(result.verdict == MISMATCH for result in results.challengers):
        done += _event_once(experiment, Kind.MISMATCH, actor, results.challengers[0].words, results)
    winners = [result for result in results.challengers if result.verdict == BETTER]
    if winners:
        done += _win(experiment, max(winners, key=lambda result: result.best), results, actor)
    elif experiment.allocation == Experiment.Allocation.THOMPSON and _epoch_is_over(experiment):
        done += bandit_reweight(experiment, results, actor=actor)
    return done


# --- A winner -----------------------------------------------------------------------------------------------


def _win(experiment: Experiment, winner: ArmResult, results: Results, actor: str) -> list[str]:
    if experiment.on_win == Experiment.OnWin.PROMOTE and winner.arm.policy is not None:
        try:
            arm_promote(experiment, winner, results, actor=actor)
        except registry.RegistryRefused as refusal:
            return _event_once(experiment, Kind.HELD, actor, str(refusal), results)
        return [f"{winner.arm.policy.name} is champion: {winner.words}"]
    is_new = _event_once(
        experiment, Kind.PROPOSED, actor, f"promote {winner.arm.policy_name}: {winner.words}", results
    )
    if is_new:
        notify("experiment_win", f"{experiment.name}: {is_new[0]}", name=experiment.name)
    return is_new


def _event_once(experiment: Experiment, kind: str, actor: str, reason: str, results: Results) -> list[str]:
    """Keep an event, unless the newest of its kind says the same."""
    with transaction.atomic():
        experiment_lock(experiment)  # of two clocks one writes it
        newest = experiment.events.filter(kind=kind).first()
        if newest is not None and newest.reason == reason:
            return []
        event(experiment, kind, actor, reason=reason, figures=results_represent(results))
    return [f"{kind}: {reason}"]


def arm_promote(
    experiment: Experiment, winner: ArmResult, results: Results, *, actor: str, reason: str = ""
) -> Policy:
    """Make an arm's policy the champion on the strength of the experiment, and end that.

    The gate must find it not worse than the champion; that it is better, users have shown. Raises RegistryRefused where
    the arm is not shown to be better, or the gate stays closed.
    """
    policy = winner.arm.policy
    if policy is None:
        raise registry.RegistryRefused(
            "the base model cannot be promoted: retire the champion instead, and the base model answers"
        )
    if winner.verdict != BETTER:
        raise registry.RegistryRefused(f"{policy.name} is not shown to be better: {winner.words}")
    assert winner.effect is not None  # only the control has none
    live = {"experiment": experiment.name, "metric": experiment.metric, **winner.effect.as_dict()}
    with transaction.atomic():
        experiment_lock(experiment)
        moved = registry.policy_promote(
            policy, Policy.Stage.CHAMPION, actor=actor, live=live,
            reason=reason or f"experiment {experiment.name}: {winner.words}",
        )  # fmt: skip
        event(experiment, Kind.PROMOTED, actor, reason=winner.words, figures=results_represent(results))
        experiment_stop(experiment, actor=actor, reason=f"{moved.name} was promoted to champion")
    notify("experiment_promoted", f"{experiment.name}: {moved.name} is champion", name=experiment.name)
    return moved


def winner_promote(experiment: Experiment, arm: str | None = None, *, actor: str, reason: str = "") -> Policy:
    """Make the policy of the arm of that name the champion, of the leading arm where none is named, by results that are
    read now. Raises ExperimentRefused and RegistryRefused."""
    results = results_of(experiment)
    named = {result.name: result for result in results.challengers}
    winner = results.leader if arm is None else named.get(arm)
    if winner is None:
        raise ExperimentRefused(f"expected one of {', '.join(named)}")
    return arm_promote(experiment, winner, results, actor=actor, reason=reason)


# --- A bandit -----------------------------------------------------------------------------------------------


def _epoch_is_over(experiment: Experiment) -> bool:
    newest = experiment.events.filter(kind__in=(Kind.REWEIGHTED, Kind.STARTED)).first()
    return newest is None or timezone.now() - newest.created_at >= EPOCH


def bandit_reweight(experiment: Experiment, results: Results, *, actor: str = CLOCK) -> list[str]:
    """Begin a new epoch: each arm its chance to be best by what is known now, none below the floor."""
    metric, lower = results.rule.metric, results.rule.goal == LOWER
    moments = [_negate(result.moments, metric) if lower else result.moments for result in results.arms]
    shares = thompson_shares(bandit_chances(moments, bounded=metric.bounded), experiment.floor)
    with transaction.atomic():
        current = experiment_lock(experiment)
        if current.epoch != experiment.epoch:
            raise ExperimentRefused(f"{experiment.name} was reweighted by another process at the same time")
        Experiment.objects.filter(pk=experiment.pk).update(epoch=current.epoch + 1)
        for result, share in zip(results.arms, shares, strict=True):
            Arm.objects.filter(pk=result.arm.pk).update(weight=share)
        weights = {result.name: round(share, 6) for result, share in zip(results.arms, shares, strict=True)}
        event(experiment, Kind.REWEIGHTED, actor, figures={"epoch": current.epoch + 1, "weights": weights})
    return ["weights " + ", ".join(f"{name} {100 * share:.1f} %" for name, share in weights.items())]


def _negate(moments: Moments, metric: Metric) -> Moments:
    """The same where less is better."""
    return replace(moments, mean=1 - moments.mean if metric.bounded else -moments.mean)
