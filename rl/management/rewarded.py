"""Options shared by the training commands that learn from rewards: the rewards, and the price of KL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import CommandParser

from rl.jobs.estimates import TrainOrder
from rl.management.training import TrainCommand
from rl.recipes import RECIPES


class RewardedCommand(TrainCommand):
    """`train_ppo` and its like: --reward SPEC becomes the recipe's knob `reward`, --kl-coef its `kl_knob`."""

    kl_knob: str

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--reward",
            action="append",
            metavar="SPEC",
            help="What is rewarded, repeatable, the mean counts: model:RUN_OR_PATH (a reward model), agent, "
            "answer, code_execution, syntax, tool_success, task_completion, efficiency, format, learned, or a dotted "
            "path to a function (default: agent). Example: --reward agent --reward model:17",
        )
        defaults = ", ".join(
            f"{name} {getattr(recipe, self.kl_knob)}" for name, recipe in RECIPES[self.method].items()
        )
        parser.add_argument(
            "--kl-coef",
            type=float,
            help=f"Price of one nat of distance from the base, in units of reward. Example: --kl-coef 0.1 "
            f"(presets: {defaults})",
        )
        parser.add_argument(
            "--data",
            type=Path,
            dest="data_file",
            metavar="F",
            help="The same as --data-file; prompts with their tests or answers will do. "
            "Example: --data prompts.jsonl",
        )

    def _order(self, options: dict[str, Any]) -> TrainOrder:
        order = super()._order(options)
        if options["reward"]:
            order.knobs["reward"] = ",".join(options["reward"])
        if options["kl_coef"] is not None:
            order.knobs[self.kl_knob] = options["kl_coef"]
        return order
