"""Train a LoRA policy on preference pairs with DPO."""

from __future__ import annotations

from rl.management.training import SEARCH, TrainCommand


class Command(TrainCommand):
    method = "dpo"
    help = (
        "Learn from preference pairs with direct preference optimisation and enter the result in the registry. "
        "Example: manage.py train_dpo --agent widgets"
    )
    own_knobs = {
        **SEARCH,
        "beta": (float, "Strength of the pull towards the base policy, above 0. Example: --beta 0.1"),
        "loss": (str, "sigmoid, ipo, hinge, robust, ... Example: --loss ipo"),
    }
