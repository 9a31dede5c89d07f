"""Print a one-time sign-in link."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from backend.command import CommandOptions, RatchetCommand
from feedback.accounts.sign_in import signin_link


class Command(RatchetCommand):
    help = (
        "Print a sign-in link for one person, good for one use. A new person is added; the first one "
        "may open the admin. Example: manage.py login_link --user ada"
    )

    class Options(CommandOptions):
        user: str = "admin"
        """Who signs in (default: admin). Example: --user ada"""
        base_url: str = "http://localhost:8000"
        """Address under which people open Ratchet (default: http://localhost:8000). Example: --base-url
        https://ratchet.example"""

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        return asdict(signin_link(options["user"], options["base_url"]))

    def show(self, result: dict[str, Any]) -> None:
        if result["created"]:
            role = "may open the admin too" if result["operator"] else "rates"
            self.stdout.write(f"Added {result['username']}, who {role}.")
        self.stdout.write(f"Open this once, before {result['expires_at']:%Y-%m-%d %H:%M} UTC:")
        self.stdout.write(result["url"])
