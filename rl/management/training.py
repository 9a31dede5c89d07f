"""Base of the training commands: `train_<slug>` and `train --method SLUG`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from django.core.management.base import CommandError, CommandParser
from pydantic import ConfigDict, Field

from backend import command
from backend.command import BY_HAND, CommandOptions, RatchetCommand, Result, options_add
from rl.management.options import base_model_field, base_model_given, knobs_assigned
from rl.recipes import DATASET_CONFIG, Method
from rl.recipes.methods import method_named

if TYPE_CHECKING:
    from rl.jobs.lifecycle import TrainOrder
from rl.rewards.catalogue import reward_names

SHARED_KNOBS = {
    "epochs": "Passes over the training rows; fractions allowed. Example: --epochs 2",
    "max_steps": "Number of optimiser steps, in place of --epochs; -1: by --epochs. Example: --max-steps 50",
    "minutes": "Time limit of the training and its stages, in minutes. Training fits its passes and rows to the limit "
    "and stops there; 0 sets no limit. Default: 20 on a machine without an accelerator, none on one with an "
    "accelerator and none for the bundled model. Example: --minutes 5",
    "batch_size": "Rows per micro-batch. Example: --batch-size 8",
    "learning_rate": "Peak learning rate. Example: --learning-rate 5e-5",
    "lora_r": "Rank of the LoRA adapter. Example: --lora-r 16",
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
"""Knob that is an option of every method with it -> its help."""


class TrainOptions(CommandOptions):
    """Options of every method; a method's own are extra ones."""

    model_config = ConfigDict(extra="allow")

    config: Annotated[str | None, BY_HAND]
    agent: str | None = None
    """SLUG: Agent whose feedback is trained on (default: the only one). Example: --agent widgets"""
    set: tuple[str, ...] = ()
    """KNOB=VALUE: Set any knob of the recipe; repeatable. Example: --set warmup_ratio=0.2"""
    source: Literal["db", "file"] = "db"
    """Source of the feedback: db, the database (default), or file."""
    data_file: Path | None = None
    """F: File of pairs or ratings in any known format; implies --source file. Example: --data-file
    pairs.jsonl"""
    ratings_file: Path | None = None
    """F: Ratings to --data-file, for formats with two files. Example: --ratings-file ratings.json"""
    min_samples: int | None = Field(
        None,
        description="N: Least number of training rows; with fewer the training is refused (default "
        f"{DATASET_CONFIG['min_samples']}). Example: --min-samples 50",
    )
    max_samples: int | None = None
    """N: Train on at most N rows, sampled by hash (default: all). Example: --max-samples 500"""
    output: Path | None = None
    """DIR: Folder to write the policy to (default: RATCHET_HOME/policies/<agent>/<policy>). Example:
    --output out/widgets"""
    resume: int | None = None
    """RUN: Resume a killed, cancelled or failed run from its newest checkpoint. Example: --resume 17"""
    queued: int | None = None
    """RUN: Train a queued run (requested over REST or a page) with the options stored in it. Example:
    --queued 17"""
    dry_run: bool = False
    """Build the dataset, print counts, recipe and estimated steps, minutes and memory; train nothing."""

    def more(self, name: str) -> Any:
        """Value of an option that only some methods have; None without it."""
        return (self.model_extra or {}).get(name)


class AdapterOptions(CommandOptions):
    model: str | None = base_model_field("--model", "Base model", "the agent's")
    no_quantization: bool = False
    """Load the base model in full precision (default: as the preset says)."""
    export: bool = False
    """Export the policy to GGUF after training."""
    quantization: str = "q4_k_m"
    """Q: Quantization of --export (default q4_k_m). Example: --quantization q8_0"""
    register_ollama: bool = False
    """Export to GGUF and create a model from it on the Ollama server at OLLAMA_HOST."""


class TrainCommand(RatchetCommand[TrainOptions, Result]):
    method: str

    @property
    def row(self) -> Method:
        return method_named(self.method)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        if self.row.adapter:
            options_add(parser, AdapterOptions)
        self._add_knobs(parser)
        if self.row.rewarded:
            rewards_add(parser, self.row)

    def _add_knobs(self, parser: CommandParser) -> None:
        add, presets = parser.add_argument, self.row.presets
        add(
            "--config",
            choices=list(presets),
            help="Preset of the recipe (default: chosen by the detected hardware). Example: --config cpu",
        )
        for knob, text in self._knobs.items():
            defaults = ", ".join(f"{name} {getattr(recipe, knob)}" for name, recipe in presets.items())
            kind = type(getattr(presets["default"], knob))
            # The recipe parses true and false; bool() of any text is True.
            add(
                f"--{knob.replace('_', '-')}",
                type=str if kind is bool else kind,
                help=f"{text} (presets: {defaults})",
            )

    @property
    def _knobs(self) -> dict[str, str]:
        """Knob with an option -> its help."""
        has = self.row.presets["default"].as_dict()
        return {knob: text for knob, text in SHARED_KNOBS.items() if knob in has} | dict(self.row.options)

    def work(self, options: TrainOptions) -> Result | None:
        # Before the slow imports below, so that a wrong name fails at once.
        base_model = base_model_given(options.more("model"), self)
        from rl.jobs.train import FollowerEnded

        try:
            return self._train(options, base_model)
        except FollowerEnded:
            return None

    def _train(self, options: TrainOptions, base_model: str | None) -> Result:
        from rl.jobs import train
        from rl.jobs.plan import train_plan
        from rl.online import pipeline

        if options.resume is not None:
            with self.bar("training") as bar:
                result = train.train_resume(options.resume, bar.update, actor=f"train_{self.method}")
        elif options.queued is not None:
            with self.bar("training") as bar:
                result = pipeline.run_train(options.queued, bar.update, actor=f"train_{self.method}")
        else:
            order = self._order(options, base_model)
            if options.dry_run:
                with self.bar("dry run") as bar:
                    plan = train_plan(order, bar.update)
                arguments = {**dict(options), "agent": plan["agent"]}
                return {
                    "dry_run": True,
                    **plan,
                    "command": self.command_line(arguments, without=("dry_run",)),
                }
            with self.bar("training") as bar:
                result = train.train(order, bar.update, self.note)
        if result["status"] == "cancelled":
            raise CommandError(
                f"run {result['run']} {result['stopped']}; its checkpoints are kept; resume with: "
                f"python manage.py train_{self.method} --resume {result['run']}"
            )
        if (options.more("export") or options.more("register_ollama")) and result["policy"]:
            from rl.export.service import ExportOrder, export

            export_order = ExportOrder(
                policy=result["policy"],
                format="gguf",
                quantization=options.more("quantization"),
                actor=f"train_{self.method}",
            )
            with self.bar("exporting") as bar:
                result["export"] = export(export_order, bar.update)
        if options.more("register_ollama") and result["policy"]:
            from rl.export.service import policy_register
            from rl.models import Policy

            policy = Policy.objects.get(name=result["policy"])
            with self.bar("registering") as bar:
                result["ollama"] = policy_register(policy, actor=f"train_{self.method}", progress=bar.update)
        return result

    def _order(self, options: TrainOptions, base_model: str | None) -> TrainOrder:
        from rl.jobs.estimates import agent_for
        from rl.jobs.lifecycle import TrainOrder

        knobs = {name: options.more(name) for name in self._knobs if options.more(name) is not None}
        knobs |= knobs_assigned(options.set)
        if options.more("no_quantization"):
            knobs["quantization"] = "none"
        knobs |= reward_knobs(options, self.row)
        from_file = options.source == "file" or options.data_file is not None
        return TrainOrder(
            agent=agent_for(options.agent, from_file=from_file),
            method=self.method,
            config=options.config,
            base_model=base_model,
            knobs=knobs,
            source="file" if from_file else "db",
            data_file=options.data_file,
            ratings_file=options.ratings_file,
            min_samples=options.min_samples,
            max_samples=options.max_samples,
            output=options.output,
            actor=f"train_{self.method}",
        )

    def show(self, result: Result) -> None:
        rows = [
            *_data_rows(result),
            *(self._plan_rows(result) if result.get("dry_run") else self._run_rows(result)),
        ]
        self.table(rows)

    def _plan_rows(self, result: Result) -> Iterator[tuple[str, str]]:
        yield (
            "estimate",
            f"{result['estimated_steps']:,} steps, {result['estimated_minutes']:.1f} min, "
            f"{result['estimated_memory_gb']:.1f} GB",
        )
        for stage in result.get("stages", ()):
            yield "first", stage
        for name in ("not_fitted", "doubt"):
            if result.get(name):
                yield "note", f"[bold]{result[name]}[/bold]"
        if looks := result["preflight"]:
            yield "answers", preflight_text(looks)
            if result["warning"]:
                yield "note", f"[bold]{result['warning']}[/bold]"
        yield from _gate_rows(result)
        if result["base_model"]:
            yield "base model", result["base_model"]
        yield "recipe", f"{result['config']}: " + ", ".join(f"{k}={v}" for k, v in result["recipe"].items())

    def _run_rows(self, result: Result) -> Iterator[tuple[str, str]]:
        if self.row.adapter:
            best = result.get("best_step")
            weights = f", weights of the best evaluation (step {best:,})" if best else ""
            yield "steps", f"{result['steps']:,} in {result['seconds']:.0f} s{weights}"
        else:
            yield "fit", f"{result['seconds']:.2f} s"
        if result["stopped_early"]:
            yield "stopped early", result["stopped_early"]
        figures = {name: value for name, value in result["metrics"].items() if name in FIGURE_TITLES}
        yield "figures", ", ".join(f"{FIGURE_TITLES[name]} {value:.3g}" for name, value in figures.items())
        if looks := result["preflight"]:
            yield "answers", preflight_text(looks)
        for stage in result["stages"]:
            yield "stage", f"run {stage['run']}, {stage['method']}, {stage['status']}: {stage['made']}"
        for note in result["notes"]:
            yield "note", note
        if result["policy"]:
            yield "policy", f"[bold]{result['policy']}[/bold]"
        yield from _gate_rows(result)
        yield "files", result["checkpoint"]
        for folder in result["epochs"]:
            yield "", folder
        if result["files"]["plot"]:
            yield "", result["files"]["plot"]
        for file in result.get("export", {}).get("files", []):
            yield "", file["path"]
        if made := result.get("ollama"):
            yield "ollama", f"{made['name']} at {made['host']}"

    def next_step(self, result: Result) -> str:
        if result.get("dry_run"):
            return str(result["command"])
        if not result["policy"]:
            return command.after_reward_model(result["agent"], result["run"])
        from rl.registry import service as registry
        from rl.registry.gate_evidence import rival_name

        champion = rival_name(registry.policy_get(result["policy"]))
        return command.after_training(result["policy"], "" if champion == "base" else champion)


def _data_rows(result: Result) -> Iterator[tuple[str, str]]:
    samples = result["samples"]
    yield "samples", ", ".join(f"{samples.get(split, 0):,} {split}" for split in ("train", "eval", "holdout"))
    if sources := result.get("sources"):
        yield "made of", ", ".join(f"{count:,} {source}" for source, count in sources.items())
    if balance := result.get("balance"):
        by = balance["by_reward"]
        text = f"{balance['good']:,} good, {balance['bad']:,} bad"
        if by["good"] + by["bad"]:
            text += (
                f"; {by['good']:,} of the good and {by['bad']:,} of the bad ones by their reward (good from "
                f"{result['query']['threshold']:g})"
            )
        yield "responses", text
    for what in ("left_out", "truncated"):
        if counts := {reason: count for reason, count in result.get(what, {}).items() if count}:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
            yield what.replace("_", " "), reasons
    for decision, why in result.get("query", {}).get("unreadable", {}).items():
        yield "unreadable", f"decision {decision}: {why} (see /problems/)"
    if result["simulated_share"]:
        yield "feedback", f"{100 * result['simulated_share']:.0f} % SIMULATED"


def _gate_rows(result: Result) -> Iterator[tuple[str, str]]:
    if distance := result.get("evidence"):
        yield "gate", distance["words"]


def preflight_text(looks: Mapping[str, Mapping[str, Any]]) -> str:
    """`valid: 13 % before, 96 % after (24 sampled)` of one or two checks of a policy's answers."""
    shares = ", ".join(f"{100 * look['share']:.0f} % {when}" for when, look in looks.items())
    return f"valid: {shares} ({next(iter(looks.values()))['asked']} sampled)"


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
"""Metric that the table shows -> its title."""


def rewards_add(parser: CommandParser, method: Method) -> None:
    """Add --reward (the knob `reward`) and --kl-coef (the method's `kl_knob`)."""
    parser.add_argument(
        "--reward",
        action="append",
        metavar="SPEC",
        help="Reward function, repeatable (their mean is the reward): model:RUN_OR_PATH (a reward model), "
        f"{', '.join(reward_names())}, learned, or a dotted path to a function (default: agent). "
        "Example: --reward agent --reward model:17",
    )
    defaults = ", ".join(
        f"{name} {getattr(recipe, method.kl_knob)}" for name, recipe in method.presets.items()
    )
    parser.add_argument(
        "--kl-coef",
        type=float,
        help="KL coefficient: penalty per nat of KL divergence from the reference, in units of reward. "
        f"Example: --kl-coef 0.1 (presets: {defaults})",
    )
    parser.add_argument(
        "--data",
        type=Path,
        dest="data_file",
        metavar="F",
        help="The same as --data-file; here also a file of prompts with tests or right answers. Example: "
        "--data prompts.jsonl",
    )


def reward_knobs(options: TrainOptions, method: Method) -> dict[str, object]:
    knobs: dict[str, object] = {}
    if options.more("reward"):
        knobs["reward"] = ",".join(options.more("reward"))
    if options.more("kl_coef") is not None:
        knobs[method.kl_knob] = options.more("kl_coef")
    return knobs
