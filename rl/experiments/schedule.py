"""The scheduler of running experiments: stop for harm, reweight bandits, propose or make promotions."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import replace
from datetime import timedelta
from functools import partial

from django.db import transaction
from django.utils import timezone

from backend.isolation import agent_isolated
from backend.notifications import notify
from feedback.cache import CostAwareCache
from rl.experiments.results import ArmResult, Results, ResultsShown, results_of
from rl.experiments.traffic import (
    AUTO_RAMP,
    ExperimentRefused,
    event,
    experiment_lock,
    experiment_ramp,
    experiment_stop,
    experiments_running,
    out_of_service,
    ramps_remaining,
)
from rl.experiments.verdicts import HARM, MISMATCH, WON
from rl.models import Arm, Experiment, ExperimentEvent, Policy
from rl.recipes.experiment_metrics import LOWER, Metric
from rl.registry import service as registry
from rl.statistics.contrasts import Moments, bandit_chances, thompson_shares

logger = logging.getLogger("rl.experiments")

Kind = ExperimentEvent.Kind
CLOCK = "the clock"

EPOCH = timedelta(minutes=10)
"""Shortest time between two reweightings of a bandit."""


class PacedCache(CostAwareCache[Results]):
    """Cache whose entries live twenty times as long as reading took, so that each experiment takes at most 5 % of the
    scheduler's time (100,000 decisions: 4 s, every 80 s)."""

    BELIEF = 20.0


_results = PacedCache()


def tick() -> list[str]:
    """Does what each running experiment's rule says. May be repeated, also by two schedulers at once. Returns one line
    per action."""
    done = []
    for experiment in experiments_running():
        if experiment.shadow:
            continue  # `rl.online.learner` looks after it
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
    """Does what one experiment's rule says now. Raises ExperimentRefused if it was stopped meanwhile."""
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
                figures=ResultsShown.of(results),
            )
            notify("experiment_harm", f"{experiment.name} was stopped: {result.words}", name=experiment.name)
            return [f"stopped for harm: {result.words}"]
    done = []
    if any(result.verdict == MISMATCH for result in results.challengers):
        done += _event_once(experiment, Kind.MISMATCH, actor, results.challengers[0].words, results)
    winners = [result for result in results.challengers if result.verdict in WON]
    if winners:
        done += _win(experiment, max(winners, key=lambda result: result.best), results, actor)
    elif experiment.auto_ramp and results.verdict != MISMATCH:
        done += _ramp(experiment, results, actor)
    if not winners and experiment.allocation == Experiment.Allocation.THOMPSON and _epoch_is_over(experiment):
        done += bandit_reweight(experiment, results, actor=actor)
    return done


# --- A ramp -------------------------------------------------------------------------------------------------


def ramp_next(experiment: Experiment) -> int | None:
    """The next share of a ramp by the scheduler; None at the end."""
    return next((share for share in ramps_remaining(experiment) if share in AUTO_RAMP), None)


def _ramp(experiment: Experiment, results: Results, actor: str) -> list[str]:
    """Takes the next share if the loss that all users together could take is ruled out to be the margin."""
    to = ramp_next(experiment)
    if to is None or (loss := results.loss_excluded(to)) is None or loss > experiment.not_inferior:
        return []
    allowed = f"{experiment.metric}, within {experiment.not_inferior:g}"
    reason = f"at {to} % all users together lose at most {loss:.3g} of {allowed}"
    experiment_ramp(experiment, to, actor=actor, reason=reason)
    return [f"takes {to} %: {reason}"]


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
    """Records an event unless the newest of its kind says the same."""
    with transaction.atomic():
        experiment_lock(experiment)  # of two clocks one writes it
        newest = experiment.events.filter(kind=kind).first()
        if newest is not None and newest.reason == reason:
            return []
        event(experiment, kind, actor, reason=reason, figures=ResultsShown.of(results))
    return [f"{kind}: {reason}"]


def arm_promote(
    experiment: Experiment, winner: ArmResult, results: Results, *, actor: str, reason: str = ""
) -> Policy:
    """Promotes an arm's policy to champion by the experiment's result, and stops the experiment.

    The gate must find it not worse than the champion. Raises RegistryRefused if the arm has not won, or the gate
    refuses.
    """
    policy = winner.arm.policy
    if policy is None:
        raise registry.RegistryRefused(
            "the base model cannot be promoted: retire the champion instead, and the base model answers"
        )
    if winner.verdict not in WON:
        raise registry.RegistryRefused(f"{policy.name} has not won: {winner.words}")
    assert winner.effect is not None  # only the control has none
    live = {"experiment": experiment.name, "metric": experiment.metric, **dataclasses.asdict(winner.effect)}
    with transaction.atomic():
        experiment_lock(experiment)
        moved = registry.policy_promote(
            policy,
            Policy.Stage.CHAMPION,
            actor=actor,
            live=live,
            reason=reason or f"experiment {experiment.name}: {winner.words}",
        )
        event(experiment, Kind.PROMOTED, actor, reason=winner.words, figures=ResultsShown.of(results))
        experiment_stop(experiment, actor=actor, reason=f"{moved.name} was promoted to champion")
    notify("experiment_promoted", f"{experiment.name}: {moved.name} is champion", name=experiment.name)
    return moved


def winner_promote(experiment: Experiment, arm: str | None = None, *, actor: str, reason: str = "") -> Policy:
    """Promotes the policy of the named arm, or of the leading one, by fresh results. Raises ExperimentRefused and
    RegistryRefused."""
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
    """Starts a new epoch: each arm's weight is its chance to be best, at least the floor."""
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
    """The moments if less is better."""
    return replace(moments, mean=1 - moments.mean if metric.bounded else -moments.mean)
