"""Train a LoRA policy on corrections and highly rated responses."""

from __future__ import annotations

from rl.management.training import SEARCH, TrainCommand


class Command(TrainCommand):
    method = "sft"
    help = (
        "Learn to answer as people showed: from corrections and highly rated responses. "
        "Example: manage.py train_sft --agent widgets"
    )
    own_knobs = SEARCH
