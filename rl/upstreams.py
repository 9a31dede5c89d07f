"""Upstreams: add, change, list and remove the endpoints that hosted policies answer with."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cryptography.fernet import Fernet, InvalidToken
from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from backend.installation import key_file
from feedback.selectors import SLUG_PATTERN
from rl.models import Policy, PolicyEvent, Upstream
from rl.registry.service import policy_instate, policy_name_free

HIDDEN = {"id", "key_encrypted", "created_at"}
SETTINGS = tuple(field.name for field in Upstream._meta.concrete_fields if field.name not in HIDDEN)
"""Fields of an upstream that are set and shown; its API key is set alone."""
RANGES = {
    **dict.fromkeys(("timeout_s", "connect_timeout_s"), (0.001, 3600)),
    "concurrency": (1, 10_000),
    **dict.fromkeys(("price_in", "price_cached", "price_out"), (0, 1e6)),
}
"""Field -> its least and greatest value."""
TITLES = {"url": "Address", "key": "API key", "key_env": "Environment variable", "__all__": "Values"}
"""Field -> its title on a page, where that is not its name."""


class UpstreamRefused(ValueError):
    """An upstream that cannot be stored or removed; `fields` says why, field by field."""

    def __init__(
        self, message: str, fields: Mapping[str, str] | None = None, *, code: str = "invalid"
    ) -> None:
        super().__init__(message)
        self.code = code
        self.fields = dict(fields or {})

    @property
    def page_text(self) -> str:
        """The refusal as a page says it: with the titles of its form's fields."""
        named = [f"{TITLES.get(name, name.capitalize())}: {fault}." for name, fault in self.fields.items()]
        return " ".join(named) or f"{str(self)[:1].upper()}{str(self)[1:]}."


def upstream_get(name: str) -> Upstream:
    """The upstream of that name. Raises UpstreamRefused, naming those there are."""
    found = Upstream.objects.filter(name=name).first()
    if found is None:
        names = ", ".join(Upstream.objects.values_list("name", flat=True)[:10])
        there = (
            f"there are {names}"
            if names
            else "there are none yet: `upstream add NAME --url URL --model MODEL`"
        )
        raise UpstreamRefused(f"no upstream is named {name[:80]!r}; {there}", code="not_found")
    return found


def upstream_add(values: Mapping[str, Any], key: str = "") -> Upstream:
    """Store a new upstream with values of SETTINGS and its API key, if it has one. Raises UpstreamRefused."""
    if Upstream.objects.filter(name=values.get("name", "")).exists():
        raise _name_taken(values["name"])
    return upstream_change(Upstream(), values, key)


def _name_taken(name: str) -> UpstreamRefused:
    fault = f"an upstream {name} exists: change it, or choose another name"
    return UpstreamRefused(fault, {"name": "exists already"}, code="conflict")


def upstream_change(upstream: Upstream, values: Mapping[str, object], key: str = "") -> Upstream:
    """Change an upstream; without `key` its API key stays. Raises UpstreamRefused."""
    changed = upstream_fill(upstream, values, key)
    try:
        with transaction.atomic():
            changed.save()
    except IntegrityError:  # somebody else took the name meanwhile
        raise _name_taken(changed.name) from None
    return changed


def upstream_fill(upstream: Upstream, values: Mapping[str, object], key: str = "") -> Upstream:
    """A copy of an upstream with values of SETTINGS and a new API key, not saved yet. Raises UpstreamRefused."""
    faults = {name: "unknown field" for name in values if name not in SETTINGS} | _value_faults(values)
    before, upstream = upstream, copy(upstream)
    for name in values.keys() - faults.keys():
        setattr(upstream, name, values[name])
    key = key.strip()
    if upstream.pk and upstream.name != before.name:
        faults["name"] = "cannot be changed: add another upstream, and remove this one"
    if upstream.url and (fault := url_fault(str(upstream.url))):
        faults["url"] = fault
    elif before.key_encrypted and not (key or upstream.key_env) and _moved(before.url, upstream.url):
        # a key that is never shown is never sent to a new address either, unless somebody who knows it says so
        faults["key"] = "the address changed: enter the API key again"
    if key and values.get("key_env"):
        faults["key"] = "expected the key or the name of its environment variable, found both"
    if fault := key_fault(key):
        faults["key"] = fault
    if upstream.key_env and (fault := key_env_fault(str(upstream.key_env))):
        faults["key_env"] = fault
    if key:
        try:
            upstream.key_env, upstream.key_encrypted = "", key_encrypted(key)
        except UpstreamKeyMissing as missing:
            faults["key"] = str(missing)
    elif upstream.key_env:
        upstream.key_encrypted = ""
    try:
        upstream.full_clean()
    except ValidationError as error:
        said = {name: " ".join(texts).rstrip(".") for name, texts in error.message_dict.items()}
        faults = (
            said
            | {name: "expected a value, found none" for name in said if not getattr(upstream, name, 1)}
            | faults
        )
    if faults:
        raise UpstreamRefused("; ".join(f"{name}: {fault}" for name, fault in faults.items()), faults)
    upstream.url = upstream.url.rstrip("/")
    return upstream


@transaction.atomic
def upstream_remove(upstream: Upstream) -> None:
    """Remove an upstream and its API key. Raises UpstreamRefused while a policy is answered by it."""
    # a hosted policy that is being made goes first
    Upstream.objects.select_for_update().filter(pk=upstream.pk).first()
    if names := list(upstream.policies.values_list("name", flat=True)[:4]):
        raise UpstreamRefused(
            f"{upstream.name} answers for {', '.join(names)}, whose history needs it: take away its key at your "
            "provider, or change its address or model instead",
            code="conflict",
        )
    upstream.delete()


def url_warning(url: str) -> str:
    """What is unsafe about an address; empty where nothing is."""
    parts = urlsplit(url)
    if parts.scheme != "http" or _is_this_machine(parts.hostname or ""):
        return ""
    return (
        f"http://{parts.hostname} is not encrypted: prompts, answers and the API key can be read on the way. "
        "Use https."
    )


def _value_faults(values: Mapping[str, object]) -> dict[str, str]:
    """Field -> why its value cannot be stored: a number out of its range (or none at all), a text with NUL."""
    faults = {}
    for name, value in values.items():
        low, high = RANGES.get(name, (0, 0))
        if high and isinstance(value, (int, float)) and not low <= value <= high:
            faults[name] = f"expected a number from {low:g} to {high:,.0f}, found {value!r:.20}"
        if isinstance(value, str) and "\x00" in value:
            faults[name] = "expected a text without NUL characters"
    return faults


def url_fault(url: str) -> str:
    """Reason why an address cannot be a base URL; empty where it can."""
    example = "an address such as https://api.openai.com/v1"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return f"expected {example}: {error}"
    if parts.username is not None or parts.password is not None:
        return "expected an address without a user name or password: the API key has a field of its own"
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or any(mark in url for mark in "?# \t\r\n\x00")
    ):
        return f"expected {example}, without ? or #"
    return ""


def upstream_represent(upstream: Upstream) -> dict[str, object]:
    """An upstream as commands and REST show it: never its key, only where that is."""
    return {
        **{name: getattr(upstream, name) for name in SETTINGS},
        "key": key_place(upstream),
        "policies": list(upstream.policies.order_by("pk").values_list("name", flat=True)),
        "warning": url_warning(upstream.url),
    }


def key_place(upstream: Upstream) -> str:
    """Where an upstream's API key is: environment, stored or none."""
    return "environment" if upstream.key_env else "stored" if upstream.key_encrypted else "none"


def _moved(before: str, now: str) -> bool:
    """True if two addresses have another scheme, host or port."""
    return urlsplit(before)[:2] != urlsplit(now)[:2]


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


# --- API keys --------------------------------------------------------------------------------------------------


KEY_FILE = "upstream_key"
"""File in RATCHET_HOME that encrypts the stored API keys. A backup leaves it out."""
OTHERS_SECRETS = re.compile(r"SECRET|PASSWORD|DATABASE|_URL$|_DSN$", re.IGNORECASE)
"""Environment variables that are never sent to an upstream: whoever may set one up could read them there."""


class UpstreamKeyMissing(ValueError):
    """The API key of an upstream is not there, or cannot be decrypted; the message says what to do."""


def upstream_key(upstream: Upstream) -> str:
    """The API key of an upstream; empty where it needs none. Raises UpstreamKeyMissing."""
    if upstream.key_env:
        key = (settings.UPSTREAM_KEY_OF(upstream.key_env) or "").strip()
        if not key:
            raise UpstreamKeyMissing(
                f"upstream {upstream.name} takes its API key from the environment variable {upstream.key_env}, which "
                "is not set in this process: set it and start again, or store the key at /upstreams/"
            )
        if fault := key_fault(key):
            raise UpstreamKeyMissing(
                f"upstream {upstream.name} takes its API key from the environment variable {upstream.key_env}: {fault}"
            )
        return key
    if not upstream.key_encrypted:
        return ""
    try:
        return _cipher().decrypt(upstream.key_encrypted).decode()
    except InvalidToken:
        raise UpstreamKeyMissing(
            f"the API key of upstream {upstream.name} cannot be decrypted: it was stored under another "
            f"{KEY_FILE} file, and backups leave that file out. Enter the API key again at /upstreams/"
        ) from None


def key_encrypted(key: str) -> str:
    """An API key as it is stored. Raises UpstreamKeyMissing where the file that encrypts it cannot be used."""
    return _cipher().encrypt(key.encode()).decode()


def key_fault(key: str) -> str:
    """Reason why a text cannot be an API key, without the text; empty where it can."""
    if not key.isascii() or not key.isprintable() or " " in key or len(key) > 1000:
        return "expected an API key: at most 1,000 letters, digits and signs, without spaces"
    return ""


def key_env_fault(name: str) -> str:
    """Reason why an environment variable cannot hold an API key; empty where it can."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return f"expected the name of an environment variable such as OPENAI_API_KEY, found {name[:20]!r}"
    if OTHERS_SECRETS.search(name) or not re.search(r"KEY|TOKEN", name, re.IGNORECASE):
        return (
            f"expected a variable that holds an API key, such as OPENAI_API_KEY: its name contains KEY or TOKEN, and "
            f"not SECRET, PASSWORD, DATABASE, _URL or _DSN; found {name[:100]}"
        )
    return ""


def _cipher() -> Fernet:
    path: Path = settings.RATCHET_HOME / KEY_FILE
    try:
        return Fernet(key_file(path, lambda: Fernet.generate_key().decode()))
    except OSError as error:
        raise UpstreamKeyMissing(
            f"the file {KEY_FILE} in RATCHET_HOME cannot be read or written ({error.strerror}): let the user that runs "
            "Ratchet read and write it"
        ) from None
    except ValueError:
        raise UpstreamKeyMissing(
            f"the file {KEY_FILE} in RATCHET_HOME holds no key: put the right file back, or remove it and enter every "
            "API key again at /upstreams/"
        ) from None


# --- Hosted policies -------------------------------------------------------------------------------------------


SENT_BY_RATCHET = ("model", "messages", "input", "system", "instructions", "stream", "tools")
"""Parameters that the gateway takes from each request."""


@transaction.atomic
def hosted_policy_create(
    agent: str,
    upstream: Upstream,
    *,
    model: str = "",
    parameters: Mapping[str, object] | None = None,
    actor: str,
) -> Policy:
    """The hosted policy of an agent for a model and parameters (by default the upstream's model and none).

    It becomes the agent's champion where there is none, or where the champion is hosted or recorded. It stays a
    candidate beside a champion that was trained here. Raises UpstreamRefused.
    """
    parameters = dict(parameters or {})
    if not re.fullmatch(SLUG_PATTERN, agent):
        fault = f"expected a short name such as support-bot, found {agent[:80]!r}"
        raise UpstreamRefused(f"agent: {fault}", {"agent": fault})
    if taken := sorted(parameters.keys() & set(SENT_BY_RATCHET)):
        fault = f"{', '.join(taken)} cannot be set: each request says it"
        raise UpstreamRefused(f"parameters: {fault}", {"parameters": fault})
    model = model or upstream.model
    # two first requests at once make one policy, and nobody removes the upstream meanwhile
    if not Upstream.objects.select_for_update().filter(pk=upstream.pk).exists():
        raise UpstreamRefused(
            f"upstream {upstream.name} was removed meanwhile: add it again", code="conflict"
        )
    same = Policy.objects.filter(agent=agent, kind=Policy.Kind.HOSTED, upstream=upstream, base_model=model)
    same = same.exclude(stage=Policy.Stage.REJECTED)
    policy = next((one for one in same if one.parameters == parameters), None)
    if policy is None:
        policy = _created(agent=agent, upstream=upstream, base_model=model, parameters=parameters)
        PolicyEvent.objects.create(
            policy=policy,
            kind=PolicyEvent.Kind.REGISTERED,
            to_stage=policy.stage,
            actor=actor,
            reason=f"{model} of upstream {upstream.name}",
        )
    policy_instate(policy, actor=actor, reason=f"{upstream.name} answers for {agent}")
    return policy


def _created(**facts: Any) -> Policy:
    """A hosted policy under the first free name of its agent and model."""
    plain = re.sub(r"[^a-z0-9.]+", "-", facts["base_model"].lower()).strip("-.")
    name = policy_name_free(f"{facts['agent']}-{plain}"[:180])
    try:
        with transaction.atomic():
            return Policy.objects.create(name=name, kind=Policy.Kind.HOSTED, **facts)
    except IntegrityError:  # the same model of another upstream took the name meanwhile
        return _created(**facts)
