"""Base of the training commands: `train_<slug>`, made from the method's row, and `train --method SLUG`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError, CommandParser
from rich.table import Table

from backend import next_steps
from backend.command import RatchetCommand
from rl.management.base_model_option import base_model_given
from rl.management.reward_options import reward_knobs, rewards_add
from rl.recipes import DATASET_CONFIG, Method, RecipeError
from rl.recipes.methods import method_named

if TYPE_CHECKING:
    from rl.jobs.lifecycle import TrainOrder

SHARED_KNOBS = {
    "epochs": "Passes over the training rows; fractions allowed. Example: --epochs 2",
    "max_steps": "Number of optimiser steps, in place of --epochs; -1: by --epochs. Example: --max-steps 50",
    "minutes": "Time limit of the training and its stages, in minutes. Training fits its passes and rows to the limit "
    "and stops there; 0 sets no limit. Default: 20 on a machine without an accelerator, none on one with an "
    "accelerator and none for the bundled model. Example: --minutes 5",
    "batch_size": "Rows per micro-batch. Example: --batch-size 8",
    "learning_rate": "Peak learning rate. Example: --learning-rate 5e-5",
    "lora_r": "Rank of the LoRA adapter; 0 is full fine-tuning. Example: --lora-r 16",
    "max_length": (
        "Most tokens of prompt and response together; longer rows lose the oldest prompt tokens. Example: "
        "--max-length 1024"
    ),
    "checkpoints": (
        "Checkpoints to keep: newest, or epoch for the adapter of each epoch too. Example: --checkpoints "
        "epoch"
    ),
    "seed": "Seed of data order and initial adapter weights. Example: --seed 1",
}
"""Knobs that are options of every method whose recipe has them -> what `--help` says of each."""


class TrainCommand(RatchetCommand):
    """`train_<slug>`: preset and options to an order, the order to `rl.jobs.train`."""

    method: str

    @property
    def row(self) -> Method:
        """The method's row."""
        return method_named(self.method)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        self._add_source(parser)
        self._add_knobs(parser)
        self._add_dataset(parser)
        self._add_run(parser)
        if self.row.rewarded:
            rewards_add(parser, self.row)
        if self.row.adapter:
            self._add_exports(parser)

    def _add_source(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--agent",
            metavar="SLUG",
            help="Agent whose feedback is trained on (default: the only one). Example: --agent widgets",
        )

    def _add_knobs(self, parser: CommandParser) -> None:
        """Options that are knobs of the recipe, with each preset's value."""
        add, presets = parser.add_argument, self.row.presets
        add(
            "--config",
            choices=list(presets),
            help="Preset of the recipe (default: chosen by the detected hardware). Example: --config cpu",
        )
        if self.row.adapter:
            add(
                "--model",
                metavar="NAME_OR_PATH",
                help="Base model: a folder, a Hugging Face name, a GGUF file, ollama:NAME, package:NAME or smollm2 "
                "(default: the agent's). Example: --model smollm2",
            )
        for knob, text in self._knobs.items():
            defaults = ", ".join(f"{name} {getattr(recipe, knob)}" for name, recipe in presets.items())
            kind = type(getattr(presets["default"], knob))
            # the recipe reads true and false; bool() of any text is true
            add(
                f"--{knob.replace('_', '-')}",
                type=str if kind is bool else kind,
                help=f"{text} (presets: {defaults})",
            )
        for name, flag in self.row.flags.items():
            add(f"--{name}", action="store_true", help=flag.help)
        add(
            "--set",
            action="append",
            default=[],
            metavar="KNOB=VALUE",
            help="Set any knob of the recipe; repeatable. Example: --set warmup_ratio=0.2",
        )

    def _add_dataset(self, parser: CommandParser) -> None:
        add = parser.add_argument
        add(
            "--source",
            choices=["db", "file"],
            default="db",
            help="Source of the feedback: db, the database (default), or file.",
        )
        add(
            "--data-file",
            type=Path,
            metavar="F",
            help="File of pairs or ratings in any known format; implies --source file. Example: --data-file "
            "pairs.jsonl",
        )
        add(
            "--ratings-file",
            type=Path,
            metavar="F",
            help="Ratings to --data-file, for formats with two files. Example: --ratings-file ratings.json",
        )
        add(
            "--min-samples",
            type=int,
            metavar="N",
            help="Least number of training rows; with fewer the training is refused (default "
            f"{DATASET_CONFIG['min_samples']}). Example: --min-samples 50",
        )
        add(
            "--max-samples",
            type=int,
            metavar="N",
            help="Train on at most N rows, sampled by hash (default: all). Example: --max-samples 500",
        )

    def _add_run(self, parser: CommandParser) -> None:
        add = parser.add_argument
        add(
            "--output",
            type=Path,
            metavar="DIR",
            help="Folder to write the policy to (default: RATCHET_HOME/policies/<agent>/<policy>). Example: "
            "--output out/widgets",
        )
        if self.row.adapter:
            add(
                "--no-quantization",
                action="store_true",
                help="Load the base model in full precision (default: as the preset says).",
            )
        add(
            "--resume",
            type=int,
            metavar="RUN",
            help="Resume a killed, cancelled or failed run from its newest checkpoint. Example: --resume 17",
        )
        add(
            "--queued",
            type=int,
            metavar="RUN",
            help="Train a queued run (requested over REST or a page) with the options stored in it. "
            "Example: --queued 17",
        )
        add(
            "--dry-run",
            action="store_true",
            help="Build the dataset, print counts, recipe and estimated steps, minutes and memory; train "
            "nothing.",
        )

    def _add_exports(self, parser: CommandParser) -> None:
        add = parser.add_argument
        add("--export", action="store_true", help="Export the policy to GGUF after training.")
        add(
            "--quantization",
            default="q4_k_m",
            metavar="Q",
            help="Quantization of --export (default q4_k_m). Example: --quantization q8_0",
        )
        add(
            "--register-ollama",
            action="store_true",
            help="Export to GGUF and create a model from it on the Ollama server at OLLAMA_HOST.",
        )

    @property
    def _knobs(self) -> dict[str, str]:
        """Knobs of the recipe that are options -> their help."""
        has = self.row.presets["default"].as_dict()
        return {knob: text for knob, text in SHARED_KNOBS.items() if knob in has} | dict(self.row.options)

    def work(self, options: dict[str, Any]) -> dict[str, Any] | None:
        # a wrong name fails before the seconds that the imports below take
        base_model = base_model_given(options.get("model"), self)
        from rl.jobs.distributed_runs import FollowerEnded

        try:
            return self._train(options, base_model)
        except FollowerEnded:
            return None

    def _train(self, options: dict[str, Any], base_model: str | None) -> dict[str, Any]:
        from rl.jobs import train
        from rl.jobs.plan import train_plan
        from rl.online import pipeline

        if options["resume"] is not None:
            with self.bar("training") as bar:
                result = train.train_resume(options["resume"], bar.update, actor=f"train_{self.method}")
        elif options["queued"] is not None:
            with self.bar("training") as bar:
                result = pipeline.run_train(options["queued"], bar.update, actor=f"train_{self.method}")
        else:
            order = self._order(options, base_model)
            if options["dry_run"]:
                with self.bar("dry run") as bar:
                    plan = train_plan(order, bar.update)
                arguments = {**options, "agent": plan["agent"]}
                return {
                    "dry_run": True,
                    **plan,
                    "command": self.command_line(arguments, without=("dry_run",)),
                }
            with self.bar("training") as bar:
                result = train.train(order, bar.update, self.note)
        if result["status"] == "cancelled":
            raise CommandError(
                f"run {result['run']} {result['stopped']}; what it had done is kept; resume with: "
                f"python manage.py train_{self.method} --resume {result['run']}"
            )
        if (options.get("export") or options.get("register_ollama")) and result["policy"]:
            from rl.export.service import ExportOrder, export

            with self.bar("exporting") as bar:
                result["export"] = export(
                    ExportOrder(
                        policy=result["policy"], format="gguf", quantization=options["quantization"],
                        actor=f"train_{self.method}",
                    ),
                    bar.update,
                )  # fmt: skip
        if options.get("register_ollama") and result["policy"]:
            from rl.export import deployment
            from rl.models import Policy

            policy = Policy.objects.get(name=result["policy"])
            with self.bar("registering") as bar:
                result["ollama"] = deployment.policy_register(
                    policy, actor=f"train_{self.method}", progress=bar.update
                )
        return result

    def _order(self, options: dict[str, Any], base_model: str | None) -> TrainOrder:
        from rl.jobs.estimates import agent_for
        from rl.jobs.lifecycle import TrainOrder

        knobs = {name: options[name] for name in self._knobs if options.get(name) is not None}
        for assignment in options["set"]:
            knob, separator, value = assignment.partition("=")
            if not separator:
                raise RecipeError(f"expected --set KNOB=VALUE, found {assignment!r}")
            knobs[knob.strip()] = value.strip()
        if options.get("no_quantization"):
            knobs["quantization"] = "none"
        knobs |= {flag.knob: flag.value for name, flag in self.row.flags.items() if options.get(name)}
        knobs |= reward_knobs(options, self.row)
        from_file = options["source"] == "file" or options["data_file"] is not None
        return TrainOrder(
            agent=agent_for(options["agent"], from_file=from_file),
            method=self.method,
            config=options["config"],
            base_model=base_model,
            knobs=knobs,
            source="file" if from_file else "db",
            data_file=options["data_file"],
            ratings_file=options["ratings_file"],
            min_samples=options["min_samples"],
            max_samples=options["max_samples"],
            output=options["output"],
            actor=f"train_{self.method}",
        )

    def show(self, result: dict[str, Any]) -> None:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        samples = result["samples"]
        table.add_row(
            "samples",
            ", ".join(f"{samples.get(split, 0):,} {split}" for split in ("train", "eval", "holdout")),
        )
        if sources := result.get("sources"):
            table.add_row("made of", ", ".join(f"{count:,} {source}" for source, count in sources.items()))
        if balance := result.get("balance"):
            by = balance["by_reward"]
            balance_text = f"{balance['good']:,} good, {balance['bad']:,} bad"
            if by["good"] + by["bad"]:
                balance_text += (
                    f"; of them {by['good']:,} good and {by['bad']:,} bad by a reward of at least, or below, "
                    f"{result['query']['threshold']:g}"
                )
            table.add_row("responses", balance_text)
        for what in ("left_out", "truncated"):
            if counts := {reason: count for reason, count in result.get(what, {}).items() if count}:
                table.add_row(
                    what.replace("_", " "),
                    ", ".join(f"{count:,} {reason}" for reason, count in counts.items()),
                )
        for decision, why in result.get("query", {}).get("unreadable", {}).items():
            table.add_row("unreadable", f"decision {decision}: {why} (see /problems/)")
        if result["simulated_share"]:
            table.add_row("feedback", f"{100 * result['simulated_share']:.0f} % SIMULATED")
        if result.get("dry_run"):
            table.add_row(
                "estimate",
                f"{result['estimated_steps']:,} steps, {result['estimated_minutes']:.1f} min, "
                f"{result['estimated_memory_gb']:.1f} GB",
            )
            for stage in result.get("stages", ()):
                table.add_row("first", stage)
            if result.get("not_fitted"):
                table.add_row("note", f"[bold]{result['not_fitted']}[/bold]")
            self._add_outlook(table, result)
            if result["base_model"]:
                table.add_row("base model", result["base_model"])
            table.add_row(
                "recipe", f"{result['config']}: " + ", ".join(f"{k}={v}" for k, v in result["recipe"].items())
            )
            self.console.print(table)
            return
        figures = {name: value for name, value in result["metrics"].items() if name in FIGURE_TITLES}
        best = (
            (f", weights of the best evaluation (step {result['best_step']:,})")
            if result.get("best_step")
            else ""
        )
        if self.row.adapter:
            table.add_row("steps", f"{result['steps']:,} in {result['seconds']:.0f} s{best}")
        else:
            table.add_row("fit", f"{result['seconds']:.2f} s")
        if result["stopped_early"]:
            table.add_row("stopped early", result["stopped_early"])
        table.add_row(
            "figures", ", ".join(f"{FIGURE_TITLES[name]} {value:.3g}" for name, value in figures.items())
        )
        for one in result["search"].get("tries", ()):
            table.add_row("tried" if one["try"] == 1 else "", search_text(one, result["search"]["figure"]))
        if looks := result["preflight"]:
            table.add_row("answers", preflight_text(looks))
        for stage in result["stages"]:
            table.add_row(
                "stage", f"run {stage['run']}, {stage['method']}, {stage['status']}: {stage['made']}"
            )
        for note in result["notes"]:
            table.add_row("note", note)
        if result["policy"]:
            table.add_row("policy", f"[bold]{result['policy']}[/bold]")
        self._add_outlook(table, result)
        table.add_row("files", result["checkpoint"])
        for folder in result["epochs"]:
            table.add_row("", folder)
        if result["files"]["plot"]:
            table.add_row("", result["files"]["plot"])
        for file in result.get("export", {}).get("files", []):
            table.add_row("", file["path"])
        if made := result.get("ollama"):
            table.add_row("ollama", f"{made['name']} at {made['host']}")
        self.console.print(table)

    def _add_outlook(self, table: Table, result: dict[str, Any]) -> None:
        """Add the reward's chance to teach anything, and the distance from the gate."""
        if result.get("doubt") and result.get("dry_run"):
            table.add_row("note", f"[bold]{result['doubt']}[/bold]")
        if result.get("dry_run") and (looks := result["preflight"]):
            table.add_row("answers", preflight_text(looks))
            if result["warning"]:
                table.add_row("note", f"[bold]{result['warning']}[/bold]")
        if distance := result.get("evidence"):
            table.add_row("gate", distance["words"])

    def next_step(self, result: dict[str, Any]) -> str:
        if result.get("dry_run"):
            return str(result["command"])
        if not result["policy"]:
            return next_steps.after_reward_model(result["agent"], result["run"])
        from rl.registry import service as registry
        from rl.registry.gate_evidence import rival_name

        champion = rival_name(registry.policy_get(result["policy"]))
        return next_steps.after_training(result["policy"], "" if champion == "base" else champion)


def preflight_text(looks: Mapping[str, Mapping[str, Any]]) -> str:
    """`valid: 13 % before, 96 % after (24 asked)` of the looks at a policy's answers, one or two."""
    shares = ", ".join(f"{100 * look['share']:.0f} % {when}" for when, look in looks.items())
    return f"valid: {shares} ({next(iter(looks.values()))['asked']} sampled)"


def search_text(one: Mapping[str, Any], figure: str) -> str:
    """One recipe of a search: its knobs, its figure on the eval split, and whether it is the one that was kept."""
    knobs = ", ".join(f"{knob} {one[knob]:g}" for knob in ("learning_rate", "epochs", "beta") if knob in one)
    found = f"{figure} {one['value']:.4g}" if one["value"] is not None else one.get("failed", "no figure")
    return f"{knobs}: {found}{' (kept)' if one.get('kept') else ''}"


FIGURE_TITLES = {
    "loss": "loss",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "mean_token_accuracy": "token accuracy",
    "accuracy": "held-out accuracy",
    "cv_accuracy": "cross-validated accuracy",
    "eval_accuracy": "eval accuracy",
    "brier": "Brier score",
    "calibration_error": "calibration error",
    "kl": "kl",
    "log_ratio": "log-ratio to the base model",
    "eval_loss": "eval loss",
    "eval_rewards/accuracies": "eval accuracy",
    "reward": "reward",
    "eval_reward_before": "held-out reward before",
    "eval_reward": "held-out reward",
    "eval_kl": "held-out KL to the base model",
}
"""Final figures worth a place in the table, and what to call them there."""
