"""Experiments from a terminal: list, show, start, ramp, stop, promote, tick."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from backend import next_steps
from backend.command import RatchetCommand
from rl.api.experiments import experiment_represent
from rl.experiments import schedule
from rl.experiments.results import results_of, results_represent
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
from rl.statistics.assignment import RAMP

ACTOR = "experiment"


class Command(RatchetCommand):
    help = (
        "Split an agent's users between policies and see who does better. Examples: manage.py experiment start "
        "better-charts --agent widgets --challenger widgets-v480 --ramp 10; manage.py experiment show better-charts; "
        "manage.py experiment ramp better-charts --to 25; manage.py experiment stop better-charts --reason done"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "action",
            choices=["list", "show", "start", "ramp", "stop", "promote", "tick", "assign"],
            help="What to do; tick looks at all that run, as the clock does; assign says who answers. Example: list",
        )
        parser.add_argument(
            "name", nargs="?", help="The experiment; for assign the unit. Example: better-charts"
        )
        parser.add_argument("--agent", metavar="SLUG", help="Whose traffic. Example: --agent widgets")
        parser.add_argument(
            "--challenger",
            action="append",
            default=[],
            metavar="POLICY",
            help="Policy to try (repeatable). Example: --challenger widgets-v480",
        )
        parser.add_argument(
            "--control",
            metavar="POLICY",
            help="What it is compared with (default: the champion, else base). Example: --control base",
        )
        parser.add_argument(
            "--metric",
            default=None,
            help=f"{', '.join(METRICS)} or outcome:NAME (default thumbs_up). Example: --metric outcome:kept",
        )
        parser.add_argument(
            "--goal", choices=["higher", "lower"], default=None, help="Which way is better (default higher)."
        )
        parser.add_argument(
            "--ramp", type=int, choices=RAMP, default=None, help="Percent of units to begin with (default 1)."
        )
        parser.add_argument(
            "--to", type=int, choices=RAMP, help="Percent of units to ramp to. Example: --to 25"
        )
        parser.add_argument(
            "--group", default=None, help="Exclusion group (default none). Example: --group prompts"
        )
        parser.add_argument(
            "--bandit",
            action="store_true",
            help="Give more to what seems better (Thompson), with its propensity.",
        )
        parser.add_argument(
            "--promote-winner", action="store_true", help="Promote a winner at once, where its gate opens."
        )
        parser.add_argument("--reason", default="", help='Why. Example: --reason "enough seen"')

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        action = options["action"]
        if action == "list":
            rows = Experiment.objects.prefetch_related("arms__policy").order_by("-pk")
            if options["agent"]:
                rows = rows.filter(agent=options["agent"])
            return {"experiments": [experiment_represent(row) for row in rows]}
        if action == "tick":
            return {"done": schedule.tick()}
        if not options["name"]:
            raise CommandError(f"experiment {action} takes a name")
        if action == "assign":
            found = assign(_agent(options), options["name"])
            return {"policy": found.policy, "arm": found.arm, "propensity": found.propensity}
        if action == "start":
            return experiment_represent(self._start(options))
        experiment = experiment_get(options["name"])
        if action == "show":
            return {**experiment_represent(experiment), "results": results_represent(results_of(experiment))}
        if action == "ramp":
            if options["to"] is None:
                raise CommandError("experiment ramp takes --to, such as --to 25")
            return experiment_represent(experiment_ramp(experiment, options["to"], actor=ACTOR))
        if action == "stop":
            return experiment_represent(experiment_stop(experiment, actor=ACTOR, reason=options["reason"]))
        policy = schedule.winner_promote(experiment, actor=ACTOR, reason=options["reason"])
        return {"policy": policy.name, "stage": str(policy.stage), "experiment": experiment.name}

    def _start(self, options: dict[str, Any]) -> Experiment:
        """Start a draft of that name, or make one and start it."""
        name = options["name"]
        draft = Experiment.objects.filter(name=name).first()
        if draft is None:
            agent = _agent(options)
            if not options["challenger"]:
                raise CommandError("experiment start takes --challenger POLICY")
            settings = {
                name: options[name]
                for name in ("metric", "goal", "ramp", "group")
                if options[name] is not None
            }
            if options["bandit"]:
                settings["allocation"] = Experiment.Allocation.THOMPSON
            if options["promote_winner"]:
                settings["on_win"] = Experiment.OnWin.PROMOTE
            draft = experiment_draft(
                name,
                options["challenger"],
                agent=agent,
                control=options["control"] or "",
                actor=ACTOR,
                **settings,
            )
        return experiment_start(experiment_get(draft.name), actor=ACTOR)

    def show(self, result: dict[str, Any]) -> None:
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

    def next_step(self, result: dict[str, Any]) -> str:
        if result.get("experiments") == []:
            return "python manage.py experiment start NAME --agent SLUG --challenger POLICY"
        if "stage" in result:
            return next_steps.after_promotion(result["policy"], registry.policy_get(result["policy"]).agent)
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


def _agent(options: dict[str, Any]) -> str:
    if not options["agent"]:
        raise ExperimentRefused("expected --agent, such as --agent widgets")
    return str(options["agent"])
