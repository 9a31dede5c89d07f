"""Options of the training commands that learn from rewards: the rewards, and the price of KL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import CommandParser

from rl.recipes import Method
from rl.rewards.catalogue import reward_names


def rewards_add(parser: CommandParser, method: Method) -> None:
    """--reward SPEC becomes the recipe's knob `reward`, --kl-coef its `kl_knob`."""
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


def reward_knobs(options: dict[str, Any], method: Method) -> dict[str, Any]:
    """The knobs that these options set."""
    knobs: dict[str, Any] = {}
    if options.get("reward"):
        knobs["reward"] = ",".join(options["reward"])
    if options.get("kl_coef") is not None:
        knobs[method.kl_knob] = options["kl_coef"]
    return knobs
