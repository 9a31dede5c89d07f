"""Cache of key-value states of prompts under adapters that were switched out: bounded in bytes, each for its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Sized

AdapterKey = tuple[str, float]
"""An adapter's file and its scale; the base is ("", 0.0)."""


class PutAside:
    """The tokens and the state of one prompt per adapter; the one put aside longest ago makes room."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self._kept: OrderedDict[AdapterKey, tuple[list[int], Sized]] = OrderedDict()

    def put(self, key: AdapterKey, tokens: list[int], state: Sized) -> None:
        """state: bytes as llama.cpp wrote them."""
        self.drop(key)
        self._kept[key] = (tokens, state)
        self.bytes += len(state)
        while self.bytes > self.most_bytes:
            self.drop(next(iter(self._kept)))

    def get(self, key: AdapterKey) -> tuple[list[int], Sized] | None:
        return self._kept.get(key)

    def drop(self, key: AdapterKey) -> None:
        if key in self._kept:
            self.bytes -= len(self._kept.pop(key)[1])

    def drop_file(self, name: str) -> None:
        """An adapter's file at whatever scale."""
        for key in [key for key in self._kept if key[0] == name]:
            self.drop(key)

    def clear(self) -> None:
        self._kept.clear()
        self.bytes = 0


def tokens_shared(held: Sequence[int], wanted: Sequence[int]) -> int:
    """Length of the common prefix of two prompts, in tokens."""
    count = 0
    for one, other in zip(held, wanted, strict=False):
        if one != other:
            break
        count += 1
    return count
