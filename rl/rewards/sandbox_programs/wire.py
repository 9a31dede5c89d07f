"""Plain data as lines of JSON: all that a process with a model's code can send.

Decoded values have exact built-in types, so that comparing them cannot run the sender's code. Objects of other classes
cross as handles, which the receiver can only send back or ask about.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

LONGEST = 1 << 20
"""Most bytes of a message."""

ITEMS = 100_000
"""Most items of an iterator that is sent by its items."""

Handle = Callable[[object], Mapping[str, object]]


def _no_handle(value: object) -> Any:
    raise ValueError(f"expected plain data, found {type(value).__name__}")


def encode(value: object, handle: Handle = _no_handle) -> Any:
    """A value as JSON; subclasses of built-in types count as those, others go through `handle`."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__index__(value)
        return number if -(1 << 53) < number < 1 << 53 else {"int": format(number, "x")}
    if isinstance(value, float):
        return {"float": float.__repr__(value)}
    if isinstance(value, list):
        return [encode(item, handle) for item in list.__iter__(value)]
    if isinstance(value, dict):
        pairs = dict.items(value)
        return {"dict": [[encode(key, handle), encode(item, handle)] for key, item in pairs]}
    kinds: tuple[Any, ...] = (tuple, set, frozenset)
    for kind in kinds:
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, handle) for item in kind.__iter__(value)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [float.__repr__(value.real), float.__repr__(value.imag)]}
    return handle(value)


PLAIN: dict[str, Callable[[Any], object]] = {
    "int": lambda said: int(said, 16),
    "float": float,
    "bytes": bytes.fromhex,
    "complex": lambda said: complex(float(said[0]), float(said[1])),
}


def decode(
    said: object, handle: Callable[[str, object], object] = lambda kind, said: _no_handle(said)
) -> object:
    """The value that `encode` made its JSON of. Raises ValueError for anything else."""
    if said is None or isinstance(said, (bool, int, str)):
        return said
    if isinstance(said, float):
        raise ValueError("expected a number as {'float': text}, found a bare one")
    if isinstance(said, list):
        return [decode(item, handle) for item in said]
    if not isinstance(said, dict) or len(said) != 1:
        raise ValueError("expected an object of one key")
    ((kind, value),) = said.items()
    try:
        if kind == "dict":
            return {decode(key, handle): decode(item, handle) for key, item in value}
        if kind in ("tuple", "set", "frozenset"):
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](
                [decode(item, handle) for item in value]
            )
        if kind in PLAIN:
            return PLAIN[kind](value)
    except (TypeError, IndexError, OverflowError) as error:
        raise ValueError(f"not a {kind}: {error}") from None
    return handle(kind, value)


class WireLine:
    """Messages over two pipes, one line of JSON each."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self._rest = b""

    def send(self, message: object) -> None:
        """Raises ValueError for a message that is too long, OSError if nobody reads."""
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(data) > LONGEST:
            raise ValueError(f"{len(data):,} bytes of data, at most {LONGEST:,} are sent")
        while data:
            data = data[os.write(self.target, data) :]

    def receive(self) -> Any:
        """The next message. Raises EOFError at the end, ValueError for an invalid message."""
        while b"\n" not in self._rest:
            chunk = os.read(self.source, 65536)
            if not chunk or len(self._rest) > LONGEST:
                raise EOFError("no further message")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)
