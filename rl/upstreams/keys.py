"""API keys of upstreams: encrypted in the database under a key that lies in a file beside it, or in the environment."""

from __future__ import annotations

import re
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken
from django.conf import settings

from backend.installation import key_file
from rl.models import Upstream

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
