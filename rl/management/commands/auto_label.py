"""Learn from people's ratings, and suggest ratings for decisions that wait for one."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from backend.command import RatchetCommand
from rl.jobs import label
from rl.jobs.estimates import agent_for


class Command(RatchetCommand):
    help = (
        "Train a label model on people's ratings and suggest ratings, with calibrated confidence, for decisions that "
        "wait for one; a person accepts or overrules them on /rate/. Example: manage.py auto_label --agent support-bot"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--agent",
            metavar="SLUG",
            help="Whose decisions (default: the only agent's). Example: --agent filer",
        )
        parser.add_argument(
            "--limit",
            type=int,
            default=label.SUGGESTED,
            metavar="N",
            help="Newest waiting decisions to suggest a rating for (default %(default)s).",
        )
        parser.add_argument(
            "--base-model",
            metavar="NAME_OR_PATH",
            help="Whose embeddings are read (default: the champion's base, else RATCHET_BASE_MODEL).",
        )
        parser.add_argument("--seed", type=int, default=42, help="Draws the folds (default 42).")

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        with self.bar("reading") as bar:
            return label.auto_label(
                agent_for(options["agent"], from_file=False),
                limit=options["limit"],
                base_model=options["base_model"],
                seed=options["seed"],
                progress=bar.update,
            )

    def next_step(self, result: dict[str, Any]) -> str:
        return f"accept or overrule them at /rate/?agent={result['agent']} (make serve)"

    def show(self, result: dict[str, Any]) -> None:
        found = result["figures"]
        self.stdout.write(
            f"{result['labels']}: learnt from {result['ratings']:,} ratings by people; on ratings left out it is right "
            f"in {100 * found['accuracy']:.1f} %, Brier score {found['brier']:.3f} ({found['brier_base']:.3f} without "
            f"it), calibration error {found['calibration_error']:.3f}."
        )
        for name, why in result["left_out"].items():
            self.stdout.write(f"Not used: {name} ({why}).")
        self.stdout.write(f"{result['suggested']:,} ratings suggested.")
