"""Experiments: list, show, start, ramp, stop, promote, tick."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from django.core.management.base import CommandError
from pydantic import Field

from backend import command
from backend.command import CommandOptions, RatchetCommand, Result
from rl.api.experiments import experiment_represent
from rl.experiments import schedule
from rl.experiments.results import ResultsShown, results_of
from rl.experiments.summary import adjustment_text, effect_interval_text, interval_text
from rl.experiments.traffic import (
    ExperimentRefused,
    assign,
    experiment_draft,
    experiment_get,
    experiment_ramp,
    experiment_start,
    experiment_stop,
)
from rl.models import Experiment
from rl.recipes.experiment_metrics import METRICS
from rl.registry import service as registry
from rl.serving.shadow import process_idle, shadow_turn
from rl.statistics.assignment import RAMP

ACTOR = "experiment"


class Options(CommandOptions):
    action: Literal["list", "show", "start", "ramp", "stop", "promote", "tick", "assign", "shadow"]
    """What to do; tick evaluates all running experiments, as the scheduler does; assign prints the arm of
    a unit; shadow asks a shadow for the answers that wait. Example: list"""
    name: Annotated[str | None, "?"] = None
    """Name of the experiment; for assign, the unit. Example: better-charts"""
    agent: str | None = None
    """SLUG: Agent whose traffic is split. Example: --agent widgets"""
    challenger: tuple[str, ...] = ()
    """POLICY: Policy of a further arm; repeatable. Example: --challenger widgets-v480"""
    control: str | None = None
    """POLICY: Policy of the control arm (default: the champion, else base). Example: --control base"""
    metric: str | None = Field(
        None,
        description=f"{', '.join(METRICS)} or outcome:NAME (default thumbs_up). Example: --metric outcome:kept",
    )
    goal: Literal["higher", "lower"] | None = None
    """Whether a higher or a lower metric is better (default higher). Example: --goal lower"""
    not_inferior: float | None = None
    """MARGIN: Win if a loss of this much is ruled out; no gain is asked for (default: a gain is). Example:
    --not-inferior 0.05"""
    ramp: Annotated[int | None, RAMP] = None
    """Percent of units to start with (default 1). Example: --ramp 10"""
    auto_ramp: bool = False
    """Let the scheduler take the share to 1, 5, 25 and 100 percent; needs --not-inferior (default: a person does)."""
    to: Annotated[int | None, RAMP] = None
    """Percent of units to ramp to. Example: --to 25"""
    shadow: Annotated[int | None, Field(ge=1, le=100)] = None
    """PERCENT: Let the challenger answer this share of the decisions beside the answer users get (default: users are
    split). Example: --shadow 10"""
    budget: float | None = None
    """USD: Stop the shadow once its answers took this much (default: no limit). Example: --budget 5"""
    group: str | None = None
    """Exclusion group: its experiments share no units (default none). Example: --group prompts"""
    bandit: bool = False
    """Adapt the split by Thompson sampling, recording propensities (default: a fixed split)."""
    promote_winner: bool = False
    """Promote a winner without asking, if it passes the gate (default: propose it)."""
    reason: str = ""
    """Reason, kept on record. Example: --reason 'enough seen'"""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Run a live experiment: split an agent's units (users, sessions) between policies and compare the "
        "arms. Examples: manage.py experiment start better-charts --agent widgets --challenger "
        "widgets-v480 --ramp 10; manage.py experiment show better-charts; manage.py experiment ramp "
        "better-charts --to 25; manage.py experiment stop better-charts --reason done"
    )

    def work(self, options: Options) -> Result:
        action = options.action
        if action == "list":
            rows = Experiment.objects.prefetch_related("arms__policy").order_by("-pk")
            if options.agent:
                rows = rows.filter(agent=options.agent)
            return {"experiments": [experiment_represent(row) for row in rows]}
        if action == "tick":
            return {"done": schedule.tick()}
        if not options.name:
            raise CommandError(f"experiment {action}: expected the name of an experiment, found none")
        if action == "assign":
            found = assign(_agent(options), options.name)
            return {"policy": found.policy, "arm": found.arm, "propensity": found.propensity}
        if action == "start":
            return experiment_represent(self._start(options.name, options))
        experiment = experiment_get(options.name)
        if action == "show":
            return {**experiment_represent(experiment), "results": ResultsShown.of(results_of(experiment))}
        if action == "shadow":
            if not experiment.shadow:
                raise CommandError(f"experiment shadow: {experiment.name} splits users and has no shadow")
            process_idle()
            return dataclasses.asdict(shadow_turn(experiment))
        if action == "ramp":
            if options.to is None:
                raise CommandError("experiment ramp: expected --to PERCENT such as --to 25, found none")
            return experiment_represent(experiment_ramp(experiment, options.to, actor=ACTOR))
        if action == "stop":
            return experiment_represent(experiment_stop(experiment, actor=ACTOR, reason=options.reason))
        policy = schedule.winner_promote(experiment, actor=ACTOR, reason=options.reason)
        return {"policy": policy.name, "stage": str(policy.stage), "experiment": experiment.name}

    def _start(self, name: str, options: Options) -> Experiment:
        """Start the draft of this name, creating it if needed."""
        draft = Experiment.objects.filter(name=name).first()
        if draft is None:
            agent = _agent(options)
            if not options.challenger:
                raise CommandError("experiment start: expected --challenger POLICY, found none")
            settings = {
                name: value
                for name in ("metric", "goal", "ramp", "group", "not_inferior")
                if (value := getattr(options, name)) is not None
            }
            if options.shadow is not None:
                settings |= {"shadow": options.shadow, "shadow_budget_usd": options.budget}
            elif options.budget is not None:
                raise CommandError("experiment start: --budget is of a shadow; add --shadow PERCENT")
            if options.bandit:
                settings["allocation"] = Experiment.Allocation.THOMPSON
            if options.auto_ramp:
                settings["auto_ramp"] = True
            if options.promote_winner:
                settings["on_win"] = Experiment.OnWin.PROMOTE
            draft = experiment_draft(
                name,
                options.challenger,
                agent=agent,
                control=options.control or "",
                actor=ACTOR,
                **settings,
            )
        return experiment_start(experiment_get(draft.name), actor=ACTOR)

    def show(self, result: Result) -> None:
        if result.get("experiments") == []:
            self.stdout.write("No experiments yet.")
        for row in result.get("experiments", []):
            arms = " against ".join(arm["policy"] for arm in row["arms"])
            self.stdout.write(
                f"{row['name']:<24} {row['agent']:<16} {row['status']:<8} {row['ramp']:>3} %  {arms}"
            )
        for line in result.get("done", []):
            self.stdout.write(line)
        if "results" in result:
            self._results(experiment_get(result["name"]))
            return
        for name, value in result.items():
            if name not in ("experiments", "done"):
                self.stdout.write(f"{name}: {value}")

    def next_step(self, result: Result) -> str:
        if result.get("experiments") == []:
            return "python manage.py experiment start NAME --agent SLUG --challenger POLICY"
        if "stage" in result:
            return command.after_promotion(result["policy"], registry.policy_get(result["policy"]).agent)
        name = next((row["name"] for row in result.get("experiments", [result]) if "name" in row), "")
        if "results" in result:
            more = next((share for share in RAMP if share > result["ramp"]), None)
            return (
                f"python manage.py experiment ramp {name} --to {more}"
                if more
                else "/experiments/ (make serve)"
            )
        return f"python manage.py experiment show {name}" if name else ""

    def _results(self, experiment: Experiment) -> None:
        results = results_of(experiment)
        metric = results.rule.metric
        self.stdout.write(
            f"{experiment.name}: {experiment.status}, {experiment.ramp} % of {experiment.agent}"
        )
        for arm in results.arms:
            self.stdout.write(
                f"  {arm.name} ({arm.arm.policy_name}): {metric.words} "
                f"{interval_text(arm.figures[metric.name], metric)}, {arm.units:,} units"
            )
            if arm.effect is not None:
                self.stdout.write(f"    {effect_interval_text(arm.effect, metric)}: {arm.words}")
                if adjusted := adjustment_text(arm.effect, metric):
                    self.stdout.write(f"    {adjusted}")


def _agent(options: Options) -> str:
    if not options.agent:
        raise ExperimentRefused("expected --agent SLUG such as --agent widgets, found none")
    return str(options.agent)
