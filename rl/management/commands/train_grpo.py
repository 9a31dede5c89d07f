"""Train a LoRA policy on groups of answers to one prompt, each rewarded against the others."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from rl.jobs.estimates import TrainOrder
from rl.management.rewarded import RewardedCommand


class Command(RewardedCommand):
    method = "grpo"
    kl_knob = "beta"
    help = (
        "Answer each prompt several times, have the answers rewarded, and learn from those that beat the others of "
        "their group (group relative policy optimisation); enter the result in the registry. "
        "Example: manage.py train_grpo --agent filer --reward agent"
    )
    own_knobs = {
        "num_generations": (int, "Answers to each prompt that compete. Example: --num-generations 8"),
        "max_new_tokens": (int, "Most tokens of a response. Example: --max-new-tokens 64"),
        "temperature": (float, "Temperature of sampling, above 0. Example: --temperature 0.9"),
    }

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--logged",
            action="store_true",
            help="Sample nothing: learn from prompts here that have several rated answers.",
        )

    def _order(self, options: dict[str, Any]) -> TrainOrder:
        order = super()._order(options)
        if options["logged"]:
            order.knobs["mode"] = "logged"
        return order
