"""Train a linear policy: regularised logistic regression, for agents whose answers are a choice."""

from __future__ import annotations

from rl.management.training import SHARED_KNOBS, TrainCommand


class Command(TrainCommand):
    method = "linear"
    help = (
        "Learn which answer to choose with regularised logistic regression, without a base model and within seconds, "
        "and enter the result in the registry. Example: manage.py train_linear --agent widgets"
    )
    shared_knobs = {"seed": SHARED_KNOBS["seed"]}
    own_knobs = {
        "feedback": (str, "auto, pairs, scores (thumbs too) or corrections. Example: --feedback scores"),
        "penalty": (str, "Inverse strength of the L2 penalty, or auto. Example: --penalty 0.3"),
        "features": (str, "words, crossed, parts, or auto. Example: --features crossed"),
    }
