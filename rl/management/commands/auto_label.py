"""Train a label model on people's ratings and suggest ratings for other decisions."""

from __future__ import annotations

from typing import Any

from backend.command import CommandOptions, RatchetCommand
from rl.jobs import label
from rl.jobs.estimates import agent_for
from rl.management.options import base_model_field, base_model_given


class Command(RatchetCommand):
    help = (
        "Train a label model on people's ratings and suggest ratings, with calibrated probabilities, "
        "for decisions not rated yet; a person accepts or overrules each on /rate/. Example: manage.py "
        "auto_label --agent support-bot"
    )

    class Options(CommandOptions):
        base_model: str | None = base_model_field(
            "--base-model",
            "Base model whose embeddings are features",
            "the champion's base model, else the agent's",
        )
        agent: str | None = None
        """SLUG: Whose decisions (default: the only agent's). Example: --agent filer"""
        limit: int = label.MAX_SUGGESTIONS
        """N: How many unrated decisions to suggest a rating for, newest first (default %(default)s). Example:
        --limit 200"""
        seed: int = 42
        """Seed of the cross-validation folds (default 42). Example: --seed 7"""

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
