"""Method `preferred`: supervised fine-tuning on the preferred response of each pair.

The baseline "Preferred-FT" of Rafailov et al. 2023 (arXiv 2305.18290, section 6): what a preference loss has to beat.
This module is imported by every process, so it names the trainer by its path and imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl.recipes.base import AdapterRecipe, Method


@dataclass(frozen=True)
class PreferredRecipe(AdapterRecipe):
    """Knobs of every adapter method, and one of its own."""

    once: bool = True
    """Show each preferred response once, however many it was preferred to; false shows it for every pair."""


PREFERRED_CONFIG = {
    "default": PreferredRecipe(learning_rate=1e-4),
    "cpu": PreferredRecipe(learning_rate=2e-3, batch_size=16, min_steps=250),
}

METHOD = Method(
    "preferred",
    "pairs",
    PREFERRED_CONFIG,
    trainer="ratchet_mail.trainer:PreferredTrainer",
    estimate="ratchet_mail.trainer:preferred",
    help="Learn to answer as the preferred response of each pair does (Preferred-FT). "
    "Example: manage.py train_preferred --agent mail-desk",
    options={"once": "Show each preferred response once: true or false. Example: --once false"},
)
