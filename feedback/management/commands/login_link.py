"""Print a one-time sign-in link."""

from __future__ import annotations

from backend.command import CommandOptions, RatchetCommand
from feedback.accounts.sign_in import SigninLink, signin_link


class Options(CommandOptions):
    user: str = "admin"
    """Who signs in (default: admin). Example: --user ada"""
    base_url: str = "http://localhost:8000"
    """Address under which people open Ratchet (default: http://localhost:8000). Example: --base-url
    https://ratchet.example"""


class Command(RatchetCommand[Options, SigninLink]):
    help = (
        "Print a sign-in link for one person, good for one use. A new person is added; the first one "
        "may open the admin. Example: manage.py login_link --user ada"
    )

    def work(self, options: Options) -> SigninLink:
        return signin_link(options.user, options.base_url)

    def show(self, result: SigninLink) -> None:
        if result.created:
            role = "may open the admin too" if result.operator else "rates"
            self.stdout.write(f"Added {result.username}, who {role}.")
        self.stdout.write(f"Open this once, before {result.expires_at:%Y-%m-%d %H:%M} UTC:")
        self.stdout.write(result.url)
