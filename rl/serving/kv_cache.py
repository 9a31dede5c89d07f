"""Prompt cache: key-value states of prompts whose adapter has no slot at the moment, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Sized

AdapterKey = tuple[str, float]
"""An adapter's file and its scale; the base is ("", 0.0)."""


class PromptCache:
    """Tokens and state of one prompt per adapter; beyond `max_bytes` the oldest entry is evicted."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._states: OrderedDict[AdapterKey, tuple[list[int], Sized]] = OrderedDict()

    def put(self, key: AdapterKey, tokens: list[int], state: Sized) -> None:
        """Save a prompt. state: bytes as `llama_state_seq_get_data` wrote them."""
        self.drop(key)
        self._states[key] = (tokens, state)
        self.bytes += len(state)
        while self.bytes > self.max_bytes:
            self.drop(next(iter(self._states)))

    def get(self, key: AdapterKey) -> tuple[list[int], Sized] | None:
        return self._states.get(key)

    def drop(self, key: AdapterKey) -> None:
        if key in self._states:
            self.bytes -= len(self._states.pop(key)[1])

    def drop_file(self, name: str) -> None:
        """Forget the prompts of an adapter's file, at every scale."""
        for key in [key for key in self._states if key[0] == name]:
            self.drop(key)

    def clear(self) -> None:
        self._states.clear()
        self.bytes = 0


def tokens_shared(held: Sequence[int], wanted: Sequence[int]) -> int:
    """Length of the common prefix of two prompts, in tokens."""
    count = 0
    for one, other in zip(held, wanted, strict=False):
        if one != other:
            break
        count += 1
    return count
