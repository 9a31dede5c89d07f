"""Create, list and revoke the keys of apps and scripts."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import CommandParser

from backend.command import RatchetCommand
from feedback.accounts.authentication import key_create, key_revoke, keys_all
from feedback.models import ApiKey


class Command(RatchetCommand):
    help = (
        "Create, list and revoke API keys. A key is printed once, when it is created; only its hash is "
        "stored. Example: manage.py api_key create support-app --scopes ingest,rate"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        actions = parser.add_subparsers(dest="action", required=True, metavar="create|list|revoke")
        create = actions.add_parser("create", help="Create a key and print it once.")
        create.add_argument("name", help="Name of the key, unique: what it is for. Example: support-app")
        create.add_argument(
            "--scopes",
            required=True,
            metavar="SCOPES",
            help="Permissions, separated by commas: ingest (record decisions, outcomes, traces), rate "
            "(rate and compare, as itself), rate_as (on behalf of others, whom `rater` names), read "
            "(find, read, export), operate (train, promote). Example: --scopes ingest,rate",
        )
        listing = actions.add_parser("list", help="List all keys with scopes, last use, and whether revoked.")
        revoke = actions.add_parser("revoke", help="Revoke a key for good; it is refused within seconds.")
        revoke.add_argument("name", help="The key's name. Example: support-app")
        for sub in (create, listing, revoke):
            sub.add_argument(
                "--json",
                action="store_true",
                default=argparse.SUPPRESS,
                help="The same as --json before the action.",
            )

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        if options["action"] == "create":
            scopes = [scope.strip() for scope in options["scopes"].split(",") if scope.strip()]
            row, secret = key_create(options["name"], scopes)
            return {"action": "create", "key": secret, **_key_summary(row)}
        if options["action"] == "revoke":
            return {"action": "revoke", **_key_summary(key_revoke(options["name"]))}
        return {"action": "list", "keys": [_key_summary(row) for row in keys_all()]}

    def show(self, result: dict[str, Any]) -> None:
        if result["action"] == "create":
            self.note(f"Key {result['name']}, scopes {', '.join(result['scopes'])}. It is shown only once:")
            self.stdout.write(result["key"])
            self.note("Send it as the header Authorization: Bearer KEY; docs/api.md has the calls")
        elif result["action"] == "revoke":
            self.stdout.write(f"Key {result['name']} was revoked.")
        elif not result["keys"]:
            self.stdout.write(
                "No keys yet. Create one: python manage.py api_key create NAME --scopes ingest,rate"
            )
        else:
            times = ("created_at", "last_used_at", "revoked_at")
            rows = [
                (
                    key["name"],
                    key["prefix"],
                    ", ".join(key["scopes"]),
                    *(str(key[at] or "")[:16] for at in times),
                )
                for key in result["keys"]
            ]
            self.table(rows, ("name", "begins", "scopes", "made", "used last", "revoked"))


def _key_summary(row: ApiKey) -> dict[str, Any]:
    return {
        "name": row.name,
        "prefix": row.prefix,
        "scopes": row.scopes,
        "created_at": row.created_at,
        "last_used_at": row.last_used_at,
        "revoked_at": row.revoked_at,
    }
