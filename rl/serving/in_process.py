"""Answer with llama.cpp in this process: one question at a time, others wait their turn."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rl.models.learning import IN_PROCESS
from rl.serving.base import (
    BASE,
    Ask,
    BackendFailed,
    BackendUnable,
    Model,
    Piece,
    SentMessage,
    ServingRefused,
)
from rl.serving.files import files_of
from rl.serving.guards import ConcurrencyLimiter
from rl.serving.llama import LlamaPolicy, ask_check
from rl.serving.llama_context import CACHE_BYTES

BASES = 2
"""Base models held in memory; agents commonly share one."""


class InProcess:
    """llama.cpp with every base loaded once, and every policy an adapter on its base."""

    name = IN_PROCESS

    def __init__(self, *, context: int = 4096, waiting: int = 64, cache_bytes: int = CACHE_BYTES) -> None:
        self._context, self._cache_bytes = context, cache_bytes
        self._turns = ConcurrencyLimiter(1, waiting, "llama.cpp in process")
        self._bases: OrderedDict[Path, LlamaPolicy] = OrderedDict()

    def pieces(self, ask: Ask, model: Model, timeout_s: float) -> Iterator[Piece]:
        """A stream is written by a thread of its own: a reader who is slow, or gone, must not keep others waiting."""
        ask_check(ask)
        deadline = time.monotonic() + timeout_s
        if not ask.stream:
            with self._open_policy(model, timeout_s) as (llama, adapter):
                whole = list(llama.stream(_ask_for_model(ask, model), adapter, deadline=deadline))
            yield from whole
            return
        pieces: queue.SimpleQueue[Piece | Exception | None] = queue.SimpleQueue()
        stop = threading.Event()

        def write() -> None:
            try:
                with self._open_policy(model, timeout_s) as (llama, adapter):
                    for piece in llama.stream(_ask_for_model(ask, model), adapter, deadline=deadline):
                        if stop.is_set():
                            return
                        pieces.put(piece)
                pieces.put(None)
            except Exception as error:
                pieces.put(error)  # raised by the reader, below

        threading.Thread(target=write, name="ratchet-llama", daemon=True).start()
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            stop.set()

    def log_probabilities(
        self, messages: Sequence[SentMessage], responses: Sequence[str], model: Model, timeout_s: float
    ) -> list[float]:
        with self._open_policy(model, timeout_s) as (llama, adapter):
            return llama.log_probabilities(messages, responses, adapter)

    @contextmanager
    def _open_policy(self, model: Model, timeout_s: float) -> Iterator[tuple[LlamaPolicy, Path | None]]:
        base, adapter = files_of(model)
        with self._turns.turn(timeout_s):
            yield self._base(base), adapter

    def _base(self, path: Path) -> LlamaPolicy:
        if path not in self._bases:
            while len(self._bases) >= BASES:
                self._bases.popitem(last=False)[1].close()
            try:
                self._bases[path] = LlamaPolicy(path, context=self._context, cache_bytes=self._cache_bytes)
            except ImportError as error:
                raise BackendUnable(
                    "llama-cpp-python is not installed: pip install -r requirements-rl.txt, or name a server in "
                    "LOCAL_BACKENDS",
                    code="unsupported",
                ) from error
            except ServingRefused as refusal:
                raise BackendFailed(str(refusal), kind="missing") from refusal
        self._bases.move_to_end(path)
        return self._bases[path]

    def close(self) -> None:
        while self._bases:
            self._bases.popitem()[1].close()


def _ask_for_model(ask: Ask, model: Model) -> Ask:
    """The closed set of answers holds for policies: the base model, which never saw them, answers freely."""
    return dataclasses.replace(ask, answers=()) if model.name == BASE and ask.answers else ask
