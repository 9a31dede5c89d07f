"""Upstreams: add, change, list, test and remove endpoints of providers."""

from __future__ import annotations

import getpass
import json
import sys
from contextlib import suppress
from typing import Annotated, Literal

from django.core.management.base import CommandError, CommandParser

from backend.command import BY_HAND, CommandOptions, RatchetCommand, Result
from rl.models import Upstream
from rl.serving.upstream_test import upstream_test
from rl.upstreams import (
    hosted_policy_create,
    upstream_add,
    upstream_change,
    upstream_get,
    upstream_remove,
    upstream_represent,
)

ACTOR = "upstream"


class Options(CommandOptions):
    key: Annotated[bool, BY_HAND]
    key_env: Annotated[str | None, BY_HAND]
    action: Literal["add", "change", "list", "test", "remove"]
    """What to do. Example: add"""
    name: Annotated[str, "?"] = ""
    """Name of the upstream. Example: openai"""
    url: str | None = None
    """Base URL. Example: --url https://api.openai.com/v1"""
    model: str | None = None
    """The provider's model id. Example: --model gpt-5-mini"""
    dialect: Annotated[str | None, tuple(Upstream.Dialect.values)] = None
    """API of the endpoint: openai (chat completions), responses (OpenAI responses) or anthropic
    (messages) (default: openai). Example: --dialect anthropic"""
    schemas: Annotated[str | None, tuple(Upstream.Schemas.values)] = None
    """How the endpoint is told the form of an answer (default: json_schema; `upstream test` finds out).
    Example: --schemas json_object"""
    timeout_s: float | None = None
    """S: Seconds an answer may take (default: 60)."""
    context_tokens: int | None = None
    """N: Tokens of prompt and answer together (default: unknown)."""
    price_in: float | None = None
    """USD: US dollars per million prompt tokens (default: the bundled price table)."""
    price_cached: float | None = None
    """USD: US dollars per million cached prompt tokens (default: the bundled price table)."""
    price_out: float | None = None
    """USD: US dollars per million answered tokens (default: the bundled price table)."""
    agent: str | None = None
    """SLUG: Let this upstream answer for an agent from now on, unless a policy trained here does.
    Example: --agent support-bot"""
    parameters: str | None = None
    """JSON: Parameters sent with each request for --agent (default: none).
    Example: --agent support-bot --parameters '{"temperature": 0.2}'"""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Add, change, list, test and remove upstreams: the endpoints of providers that answer for your agents. "
        "Examples: manage.py upstream add openai --url https://api.openai.com/v1 --model gpt-5-mini --key-env "
        "OPENAI_API_KEY --agent support-bot; manage.py upstream test openai"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        key = parser.add_mutually_exclusive_group()
        key.add_argument(
            "--key-env",
            metavar="VAR",
            help="Environment variable that holds the API key. Example: --key-env OPENAI_API_KEY",
        )
        key.add_argument(
            "--key",
            action="store_true",
            help="Read the API key from standard input, or ask for it on a terminal, and store it encrypted. It is "
            "never an argument, which other users could see. Example: --key < key.txt",
        )

    def work(self, options: Options) -> Result:
        action, name = options.action, options.name
        if (action == "list") != (not name):
            raise CommandError(
                f"upstream {action}: expected {'no name' if action == 'list' else 'a name'}, found {name or 'none'}"
            )
        parameters = _parameters(options)
        if action == "list":
            return {"upstreams": [upstream_represent(one) for one in Upstream.objects.all()]}
        if action == "add":
            missing = [f"--{option}" for option in ("url", "model") if not getattr(options, option)]
            if missing:
                raise CommandError(f"upstream add: expected {' and '.join(missing)}")
            return self._added(
                upstream_add({"name": name, **_values(options)}, _key(options)), options, parameters
            )
        upstream = upstream_get(name)
        if action == "change":
            return self._added(
                upstream_change(upstream, _values(options), _key(options)), options, parameters
            )
        if action == "test":
            with self.bar(f"asking {name}") as bar:
                return upstream_test(upstream, lambda line: bar.update(0, 0, line)).model_dump()
        upstream_remove(upstream)
        return {"removed": name}

    def _added(
        self, upstream: Upstream, options: Options, parameters: dict[str, object]
    ) -> dict[str, object]:
        if not options.agent:
            return upstream_represent(upstream)
        policy = hosted_policy_create(options.agent, upstream, parameters=parameters, actor=ACTOR)
        return {**upstream_represent(upstream), "policy": policy.name, "stage": policy.stage}

    def show(self, result: Result) -> None:
        if "upstreams" in result:
            for one in result["upstreams"]:
                self.stdout.write(
                    f"{one['name']:16} {one['dialect']:10} {one['model']:28} key: {one['key']:12} {one['url']}"
                )
            if not result["upstreams"]:
                self.stdout.write("No upstreams yet.")
        elif "removed" in result:
            self.stdout.write(f"{result['removed']} removed")
        elif "answer" in result:
            self.stdout.write(
                f"{result['model']} answered {result['answer']!r} in {result['latency_ms']:,.0f} ms"
            )
            self.stdout.write(f"form of answers: {result['schemas']}")
        else:
            self.stdout.write(f"{result['name']}: {result['model']} at {result['url']}, key: {result['key']}")
            if result["warning"]:
                self.note(result["warning"])
            if "policy" in result:
                self.stdout.write(f"{result['policy']} is {result['stage']}")

    def next_step(self, result: Result) -> str:
        return f"manage.py upstream test {result['name']}" if "url" in result else ""


def _values(options: Options) -> dict[str, object]:
    names = ("url", "model", "dialect", "schemas", "key_env", "timeout_s", "context_tokens")
    prices = ("price_in", "price_cached", "price_out")
    given = {name: getattr(options, name) for name in (*names, *prices)}
    return {name: value for name, value in given.items() if value is not None}


def _parameters(options: Options) -> dict[str, object]:
    if options.parameters is None:
        return {}
    if not options.agent:
        raise CommandError(
            "--parameters: expected --agent too, whose requests are sent with them; found none"
        )
    with suppress(ValueError):
        if isinstance(found := json.loads(options.parameters), dict):
            return found
    raise CommandError(
        f"--parameters: expected a JSON object such as '{{\"temperature\": 0.2}}', found {options.parameters[:80]!r}"
    )


def _key(options: Options) -> str:
    """The API key: asked for without echo on a terminal, else the first line of standard input."""
    if not options.key:
        return ""
    key = (getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline()).strip()
    if not key:
        raise CommandError("--key: expected the API key on standard input, found nothing")
    return key
