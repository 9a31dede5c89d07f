"""The index of texts: made, taken away, looked at."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from backend.command import RatchetCommand
from feedback.explorer.text_index import (
    TextIndexRefused,
    text_index_bytes,
    text_index_drop,
    text_index_exists,
    text_index_make,
)


class Command(RatchetCommand):
    help = (
        "An index that finds a text among all decisions at once, on PostgreSQL. Without it a search looks through "
        "20,000 decisions a page; with it recording a decision takes the database about three times as long. "
        "Example: manage.py text_index make"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "action",
            choices=["make", "drop", "status"],
            help="Make it, take it away, or say whether it is there.",
        )

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        try:
            if options["action"] == "make":
                text_index_make()
        except TextIndexRefused as refusal:
            raise CommandError(str(refusal)) from refusal
        if options["action"] == "drop":
            text_index_drop()
        return {"exists": text_index_exists(), "bytes": text_index_bytes()}

    def show(self, result: dict[str, Any]) -> None:
        if result["exists"]:
            self.stdout.write(f"The index of texts is there, {result['bytes'] / 1e6:,.1f} MB.")
        else:
            self.stdout.write("There is no index of texts: a search looks through 20,000 decisions a page.")
