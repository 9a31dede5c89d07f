"""Read what a server sends: one JSON object, or an event stream of them. Every fault is a BackendFailed."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from urllib3.exceptions import HTTPError

from rl.serving.base import BackendFailed

LONGEST_ANSWER = 16 * 1024**2
"""Bytes of an answer, or of one line of a stream, at most."""
MALFORMED = "malformed"
"""Kind of a failure whose cause is what the server sent: it is up, and sent no answer."""
HIDDEN = b"[hidden]"
DONE: Mapping[str, Any] = {}
"""Stands for the line `data: [DONE]`; compared by identity."""
DEEPEST = 300
"""Levels of lists and objects within each other, at most: what is deeper can be neither read nor written here."""
EVENT_LINE = re.compile(r"$|:|(?:data|event|id|retry)\b")


def key_hidden(raw: bytes, key: str) -> bytes:
    """What a server sent, without the API key that some repeat in their errors; also as it stands within JSON."""
    if key:
        for secret in (key, json.dumps(key)[1:-1], key.replace("/", "\\/")):
            raw = raw.replace(secret.encode(), HIDDEN)
    return raw


def body_read(response: Any, deadline: float, key: str = "") -> bytes:
    """The rest of an answer, without the API key. Raises BackendFailed where it is too long, or not there by the
    deadline."""
    parts: list[bytes] = []
    size = 0
    try:
        while part := response.read1(65_536):
            parts.append(part)
            size += len(part)
            if size > LONGEST_ANSWER or time.monotonic() > deadline:
                response.close()
                raise BackendFailed("the answer is too long, or takes too long to arrive", kind="timeout")
    except (HTTPError, OSError) as error:
        raise BackendFailed(f"the answer broke off: {error}") from error
    return key_hidden(b"".join(parts), key)


def object_read(data: str, name: str) -> Mapping[str, Any]:
    """A JSON object; a number that JSON does not have, such as -Infinity, becomes null.

    Raises BackendFailed where it is no object, nested too deep, or an error.
    """
    try:
        found = json.loads(data, parse_float=_finite, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise BackendFailed(f"{name} sent what is not JSON: {data[:200]!r}", kind=MALFORMED) from error
    if not isinstance(found, dict):
        raise BackendFailed(f"{name} sent no JSON object: {data[:200]!r}", kind=MALFORMED)
    if data.count("[") + data.count("{") > DEEPEST and _is_deep(found):
        raise BackendFailed(f"{name} sent JSON of more than {DEEPEST} levels", kind=MALFORMED)
    if fault := found.get("error"):
        said = fault.get("message") if isinstance(fault, Mapping) else fault
        raise BackendFailed(f"{name} failed within its answer: {said or data[:200]}", kind=MALFORMED)
    return found


def _finite(text: str) -> float | None:
    found = float(text)
    return found if math.isfinite(found) else None


def _is_deep(found: Any) -> bool:
    level = [found]
    for _ in range(DEEPEST):
        inner = (
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))
        )
        level = [child for children in inner for child in children]
    return bool(level)


def error_read(raw: bytes) -> tuple[str, str, str]:
    """Message, code and parameter of an error body, or what was said instead."""
    try:
        error = json.loads(raw)["error"]
        if isinstance(error, dict):
            code = error.get("code") or error.get("type")
            found = (error.get("message"), code, error.get("param"))
            return str(found[0] or "no reason given"), str(found[1] or ""), str(found[2] or "")
        return str(error), "", ""
    except (ValueError, KeyError, TypeError, RecursionError):
        return raw[:1000].decode("utf-8", "replace") or "no reason given", "", ""


def events_read(response: Any, deadline: float, name: str, key: str = "") -> Iterator[Mapping[str, Any]]:
    """The JSON objects of an event stream, each as soon as it has arrived; DONE at `[DONE]`, and nothing after it."""
    stray, events = "", 0
    for line in _lines(response, deadline, name, key):
        if not EVENT_LINE.match(line):
            stray = stray or line
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            yield DONE
            return
        if data:  # else a comment, another field of an event, or nothing
            events += 1
            yield object_read(data, name)
    if stray and not events:
        raise BackendFailed(f"{name} sent no event stream: {stray[:200]!r}", kind=MALFORMED)


def _lines(response: Any, deadline: float, name: str, key: str) -> Iterator[str]:
    held = b""
    while part := response.read1(65_536):
        if time.monotonic() > deadline:
            raise BackendFailed(f"{name} takes too long", kind="timeout")
        *whole, held = (held + part).split(b"\n")
        if len(held) > LONGEST_ANSWER:
            raise BackendFailed(f"{name} sent a line of more than {LONGEST_ANSWER:,} bytes", kind=MALFORMED)
        for line in whole:
            yield key_hidden(line, key).decode("utf-8", "replace").rstrip("\r")
    if held:
        yield key_hidden(held, key).decode("utf-8", "replace").rstrip("\r")
