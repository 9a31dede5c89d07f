"""Train a label model on people's ratings and suggest ratings for other decisions."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from backend.command import RatchetCommand
from rl.jobs import label
from rl.jobs.estimates import agent_for
from rl.management.options import base_model_given, base_model_option


class Command(RatchetCommand):
    help = (
        "Train a label model on people's ratings and suggest ratings, with calibrated probabilities, "
        "for decisions not rated yet; a person accepts or overrules each on /rate/. Example: manage.py "
        "auto_label --agent support-bot"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--agent",
            metavar="SLUG",
            help="Whose decisions (default: the only agent's). Example: --agent filer",
        )
        parser.add_argument(
            "--limit",
            type=int,
            default=label.MAX_SUGGESTIONS,
            metavar="N",
            help="How many unrated decisions to suggest a rating for, newest first (default %(default)s). "
            "Example: --limit 200",
        )
        base_model_option(
            parser,
            "--base-model",
            "Base model whose embeddings are features",
            "the champion's base model, else the agent's",
        )
        parser.add_argument(
            "--seed",
            type=int,
            default=42,
            help="Seed of the cross-validation folds (default 42). Example: --seed 7",
        )

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        base_model = base_model_given(options["base_model"], self)
        with self.bar("reading") as bar:
            return label.auto_label(
                agent_for(options["agent"], from_file=False),
                limit=options["limit"],
                base_model=base_model,
                seed=options["seed"],
                progress=bar.update,
            )

    def next_step(self, result: dict[str, Any]) -> str:
        return f"accept or overrule them at /rate/?agent={result['agent']} (make serve)"

    def show(self, result: dict[str, Any]) -> None:
        found = result["figures"]
        self.stdout.write(
            f"{result['labels']}: trained on {result['ratings']:,} ratings by people; on held-out ratings "
            f"it is right in {100 * found['accuracy']:.1f} %, Brier score {found['brier']:.3f} "
            f"({found['brier_base']:.3f} without it), calibration error {found['calibration_error']:.3f}."
        )
        for name, why in result["left_out"].items():
            self.stdout.write(f"Not used: {name} ({why}).")
        self.stdout.write(f"{result['suggested']:,} ratings suggested.")
