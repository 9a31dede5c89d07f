"""Create, list and revoke the keys of apps and scripts."""

from __future__ import annotations

import argparse
from typing import Annotated

from django.core.management.base import CommandError, CommandParser

from backend.command import BY_HAND, CommandOptions, RatchetCommand, Result
from feedback.accounts.authentication import key_budget, key_create, key_revoke, keys_all
from feedback.models import ApiKey


class Options(CommandOptions):
    action: Annotated[str, BY_HAND]
    name: Annotated[str, BY_HAND] = ""
    scopes: Annotated[str, BY_HAND] = ""
    agent: Annotated[str, BY_HAND] = ""
    origin: Annotated[str, BY_HAND] = ""
    usd: Annotated[str, BY_HAND] = ""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Create, list and revoke API keys. A key is printed once, when it is created; only its hash is "
        "stored. Example: manage.py api_key create support-app --scopes ingest,rate"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        actions = parser.add_subparsers(dest="action", required=True, metavar="create|list|revoke|budget")
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
        create.add_argument(
            "--origin",
            default="",
            metavar="SITE",
            help="Make the key publishable: it may stand in the pages of this site and works only there. It rates "
            "answers of --agent, and needs --scopes rate. Example: --origin https://shop.example",
        )
        create.add_argument(
            "--agent",
            default="",
            metavar="SLUG",
            help="The only agent a publishable key rates. Example: --agent support-bot",
        )
        listing = actions.add_parser("list", help="List all keys with scopes, last use, and whether revoked.")
        revoke = actions.add_parser("revoke", help="Revoke a key for good; it is refused within seconds.")
        revoke.add_argument("name", help="The key's name. Example: support-app")
        budget = actions.add_parser(
            "budget", help="Limit what providers may take a month for a key's requests."
        )
        budget.add_argument("name", help="The key's name. Example: support-app")
        budget.add_argument("usd", help="US dollars a month, or none for no limit. Example: 20")
        for sub in (create, listing, revoke, budget):
            sub.add_argument(
                "--json",
                action="store_true",
                default=argparse.SUPPRESS,
                help="The same as --json before the action.",
            )

    def work(self, options: Options) -> Result:
        if options.action == "create":
            scopes = [scope.strip() for scope in options.scopes.split(",") if scope.strip()]
            row, secret = key_create(options.name, scopes, agent=options.agent, origin=options.origin)
            return {"action": "create", "key": secret, **_key_summary(row)}
        if options.action == "revoke":
            return {"action": "revoke", **_key_summary(key_revoke(options.name))}
        if options.action == "budget":
            usd = None if options.usd == "none" else _dollars(options.usd)
            return {"action": "budget", **_key_summary(key_budget(options.name, usd))}
        return {"action": "list", "keys": [_key_summary(row) for row in keys_all()]}

    def show(self, result: Result) -> None:
        if result["action"] == "create":
            self.note(f"Key {result['name']}, scopes {', '.join(result['scopes'])}. It is shown only once:")
            self.stdout.write(result["key"])
            self.note("Send it as the header Authorization: Bearer KEY; docs/api.md has the calls")
        elif result["action"] == "revoke":
            self.stdout.write(f"Key {result['name']} was revoked.")
        elif result["action"] == "budget":
            limit = "no limit" if result["budget_usd"] is None else f"{result['budget_usd']:g} USD a month"
            self.stdout.write(f"Providers may take {limit} for requests of {result['name']}.")
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
                    ", ".join(key["scopes"])
                    + (f" ({key['agent']} on {key['origin']})" if key["origin"] else ""),
                    *(str(key[at] or "")[:16] for at in times),
                )
                for key in result["keys"]
            ]
            self.table(rows, ("name", "begins", "scopes", "made", "used last", "revoked"))


def _dollars(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise CommandError(
            f"api_key budget: expected US dollars such as 20, or none; found {text!r}"
        ) from None


def _key_summary(row: ApiKey) -> Result:
    return {
        "name": row.name,
        "prefix": row.prefix,
        "scopes": row.scopes,
        "agent": row.agent,
        "origin": row.origin,
        "budget_usd": row.budget_usd,
        "created_at": row.created_at,
        "last_used_at": row.last_used_at,
        "revoked_at": row.revoked_at,
    }
