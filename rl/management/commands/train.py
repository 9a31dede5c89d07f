"""Train by any method."""

from __future__ import annotations

from django.core.management.base import CommandParser

from backend.command import Result
from rl.management.training import SHARED_KNOBS, TrainCommand, TrainOptions
from rl.recipes import Recipe
from rl.recipes.methods import METHODS


class Command(TrainCommand):
    help = (
        "Train by any method, built in or of a plugin. The same as train_<method>, but the method's own "
        "knobs are given by --set. Example: manage.py train --method dpo --agent widgets --set beta=0.2"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--method", required=True, choices=list(METHODS), help="Training method. Example: --method dpo"
        )
        self.method = next(iter(METHODS))  # Until the options are read.
        super().add_arguments(parser)

    def _add_knobs(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--config",
            metavar="NAME",
            help="Preset of the recipe (default: chosen by the detected hardware). Example: --config cpu",
        )
        for knob, text in SHARED_KNOBS.items():
            parser.add_argument(f"--{knob.replace('_', '-')}", type=type(getattr(Recipe(), knob)), help=text)

    @property
    def _knobs(self) -> dict[str, str]:
        return SHARED_KNOBS  # The recipe refuses knobs that it lacks.

    def work(self, options: TrainOptions) -> Result | None:
        self.method = options.more("method")
        return super().work(options)
