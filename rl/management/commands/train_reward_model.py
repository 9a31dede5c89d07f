"""Train a model that scores responses as people do."""

from __future__ import annotations

from rl.management.training import TrainCommand


class Command(TrainCommand):
    method = "reward_model"
    help = (
        "Learn to score responses from preferences, scores or thumbs; later runs use it as --reward model:RUN. "
        "Example: manage.py train_reward_model --agent widgets --objective pairwise"
    )
    own_knobs = {
        "objective": (str, "pairwise, regression or binary. Example: --objective binary"),
        "architecture": (
            str,
            "causal (a score head on the base) or encoder (DeBERTa and its like, by --model). "
            "Example: --architecture encoder",
        ),
    }
