"""`manage.py build_base_model`: train the bundled base model from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import CommandParser

from backend.command import RatchetCommand


class Command(RatchetCommand):
    help = (
        "Train the bundled base model from random weights and evaluate it; an interrupted build is "
        "resumed. Example: manage.py build_base_model --output var/my-base"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        from rl.training.base_model import BATCH_SIZE, BUNDLED_MODEL, STEPS

        super().add_arguments(parser)
        parser.add_argument(
            "--output",
            type=Path,
            default=BUNDLED_MODEL,
            metavar="DIR",
            help="Directory for the model files (default: the bundled model's). Example: --output "
            "var/my-base",
        )
        parser.add_argument(
            "--force",
            action="store_true",
            help="Replace the model in the output directory (default: refuse).",
        )
        parser.add_argument(
            "--steps",
            type=int,
            default=STEPS,
            metavar="N",
            help="Optimiser steps (default: %(default)s). Example: --steps 200",
        )
        parser.add_argument(
            "--batch-size",
            type=int,
            default=BATCH_SIZE,
            metavar="N",
            help="Examples per step (default: %(default)s, for one core; hundreds fit a GPU). "
            "Example: --batch-size 256",
        )
        parser.add_argument(
            "--seed",
            type=int,
            default=0,
            metavar="N",
            help="Seed of the examples and the weights (default: %(default)s). Example: --seed 7",
        )

        parser.add_argument(
            "--start-from",
            default="",
            metavar="MODEL",
            help="Base model to train further instead of building one from random weights; give another --seed "
            "than its own. Example: --start-from bundled --seed 1",
        )

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        from rl.training import base_measure, base_model

        output: Path = options["output"]
        if (output / "config.json").exists() and not options["force"]:
            raise ValueError(
                f"expected a directory without a model, found one in {output}: add --force to replace it, "
                "or choose another --output"
            )
        with self.bar("build base model") as bar:
            built = base_model.build_base_model(
                output,
                seed=options["seed"],
                steps=options["steps"],
                batch_size=options["batch_size"],
                start_from=options["start_from"],
                progress=lambda step, steps, loss: bar.update(step, steps, f"loss {loss:.3f} nats"),
            )
        self.note("evaluating it on the built-in agents' prompts")
        return {**built, "agents": base_measure.base_model_measure(output, seed=options["seed"])}

    def show(self, result: dict[str, Any]) -> None:
        self.stdout.write(
            f"{result['path']}: {result['parameters'] / 1e6:.2f} M parameters, {result['bytes'] / 1e6:.1f} MB, "
            f"{result['steps']} steps in {result['seconds']:.0f} s, loss {result['loss']:.3f} nats per token"
        )
        for agent, figures in result["agents"].items():
            told = (
                f"{figures['valid_greedy']:.0%} valid greedy, {figures['valid_sampled']:.0%} at temperature 1"
            )
            if "evenness" in figures:
                told += f"; answers spread over {figures['evenness']:.0%} of the options"
            if "preference_accuracy" in figures:
                told += f"; {figures['preference_accuracy']:.0%} preference accuracy (the taste is simulated)"
            self.stdout.write(f"{agent}: {told} ({figures['prompts']} prompts)")

    def next_step(self, result: dict[str, Any]) -> str:
        return f"python manage.py train_dpo --model {result['path']}"
