"""Train a LoRA policy on single good and bad responses with KTO."""

from __future__ import annotations

from rl.management.training import SEARCH, TrainCommand


class Command(TrainCommand):
    method = "kto"
    help = (
        "Learn from thumbs without pairs by Kahneman-Tversky optimisation and enter the result in the registry. "
        "Example: manage.py train_kto --agent widgets"
    )
    own_knobs = {
        **SEARCH,
        "beta": (float, "Strength of the pull towards the base policy, above 0. Example: --beta 0.1"),
        "loss": (str, "kto, apo_zero_unpaired or logistic. Example: --loss kto"),
    }
