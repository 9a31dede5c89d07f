"""Lines of the log, without secrets: sign-in tokens, API keys, session cookies and passwords in addresses."""

from __future__ import annotations

import logging
import re

PLACEHOLDER = "[hidden]"

_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    # a one-time link: Django logs the address of what it refuses, and a refused link may still be good
    (re.compile(r"(/accounts/link/[^/\s\"']+/)[^/\s\"']+"), rf"\1{PLACEHOLDER}"),
    # an API key keeps its public beginning, by which it is found in the list of keys
    (re.compile(r"(rk_[A-Za-z0-9_-]{8})[A-Za-z0-9_-]{32}"), rf"\1{PLACEHOLDER}"),
    (re.compile(r"(?i)(bearer\s+)(?!rk_)[^\s\"',]+"), rf"\1{PLACEHOLDER}"),
    (re.compile(r"((?:sessionid|csrftoken|csrfmiddlewaretoken)=)[^;&\s\"']+"), rf"\1{PLACEHOLDER}"),
    (re.compile(r"(://[^:/@\s\"']*:)[^@/\s\"']+(?=@)"), rf"\1{PLACEHOLDER}"),
)


def secrets_hidden(text: str) -> str:
    """A text with `[hidden]` where a secret stood."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


class SecretsHidden(logging.Formatter):
    """A formatter that hides secrets in the whole line, its arguments and traceback included."""

    def format(self, record: logging.LogRecord) -> str:
        return secrets_hidden(super().format(record))
