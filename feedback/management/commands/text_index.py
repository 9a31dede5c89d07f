"""Create, drop or show the PostgreSQL text index."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from backend.command import RatchetCommand
from feedback.explorer.search import (
    TextIndexRefused,
    text_index_bytes,
    text_index_drop,
    text_index_exists,
    text_index_make,
)


class Command(RatchetCommand):
    help = (
        "Create, drop or show the PostgreSQL trigram index for text search over all decisions. Without it, "
        "a search reads 20,000 decisions per page; with it, writing a decision takes the database about "
        "three times as long. Example: manage.py text_index make"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "action",
            choices=["make", "drop", "status"],
            help="make: create the index; drop: remove it; status: print whether it exists.",
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
            self.stdout.write(f"The text index exists, {result['bytes'] / 1e6:,.1f} MB.")
        else:
            self.stdout.write("There is no text index: a search reads 20,000 decisions per page.")
