"""llama.cpp context of one GGUF base: its weights, its key-value cache, and LoRA adapters switched on top of it."""

from __future__ import annotations

import ctypes
import logging
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from backend.installation import PROGRAM
from rl.serving.base import BackendFailed, ServingRefused
from rl.serving.kv_cache import AdapterKey, PutAside, tokens_shared

FloatArray = npt.NDArray[np.float32]

BATCH, PART = 512, 128
"""Tokens given to llama.cpp at once, and computed at once: a part of 512 makes a seat three times as large, and
prompts take a tenth longer."""
SCRATCH = 16
"""Responses that are scored side by side."""
ADAPTERS = 256
"""Adapters held in memory; the one used longest ago makes room."""
SMALL_BYTES = 64 * 1024**2
"""Of a base's file: below it a second thread costs more than it brings."""
CACHE_BYTES = 1024**3
"""Of seats and of prompts put aside, where nobody says otherwise."""
FEWEST_SEATS, ASIDE = 2, 0.25
"""Seats there always are; share of the memory that is kept for prompts put aside."""
SHARED_LEAST = 8
"""Tokens of a prompt put aside that have to be wanted again: fewer are computed sooner than they are copied."""

NO_ADAPTER: AdapterKey = ("", 0.0)

logging.getLogger("llama-cpp-python").setLevel(
    logging.CRITICAL
)  # its own names for the levels are off by one


@dataclass
class Seat:
    """A context of llama.cpp: the tokens in its cache, computed under one adapter."""

    pointer: Any
    memory: Any
    key: AdapterKey = NO_ADAPTER
    tokens: list[int] = field(default_factory=list)


class LlamaContext:
    """Weights, adapters, and seats. Not thread-safe: whoever uses it holds a lock.

    The weights are there once. An adapter in use has a seat, which is a context of llama.cpp with a cache of its own:
    keys and values computed under one adapter are never read under another, nor under the base. There are as many
    seats as cache_bytes hold. With more adapters than that, the one used longest ago gives up its seat; llama.cpp then
    plans its computation anew, and what the seat held of its prompt is put aside, to be read by that adapter alone.
    """

    def __init__(
        self,
        path: Path,
        *,
        context: int = 2048,
        threads: int | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        import llama_cpp
        from llama_cpp._internals import LlamaModel

        if not path.is_file():
            raise ServingRefused(
                f"expected a GGUF file at {path}, found none; make one with `{PROGRAM} export_model`"
            )
        self._lib: Any = llama_cpp
        try:
            params = llama_cpp.llama_model_default_params()
            self.model: Any = LlamaModel(path_model=str(path), params=params, verbose=True)
        except ValueError as error:
            raise ServingRefused(f"llama.cpp cannot read {path}: {error}") from error
        size = path.stat().st_size
        self.context = min(context, self.model.n_ctx_train())
        """Tokens of prompt and answer together."""
        threads = threads or (1 if size < SMALL_BYTES else cores())
        self._options = llama_cpp.llama_context_default_params()
        # one conversation at full length, and a batch of responses that go on from it
        self._options.n_ctx = self.context + BATCH
        self._options.n_batch, self._options.n_ubatch = BATCH, PART
        self._options.n_seq_max = 1 + SCRATCH
        self._options.n_threads = self._options.n_threads_batch = threads
        self._options.kv_unified = True
        # its sums in float16 move a response's log-probability by up to 0.06 nats with the order of the batch
        self._options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._options.no_perf = True
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.vocabulary = self.model.n_vocab()
        self._adapters: OrderedDict[str, Any] = OrderedDict()
        self._seats: list[Seat] = []
        """The one used last is the last."""
        self.seats = max(FEWEST_SEATS, min(ADAPTERS, int((1 - ASIDE) * cache_bytes / self.seat_bytes())))
        """Largest number of seats."""
        self._aside = PutAside(int(ASIDE * cache_bytes))
        try:
            self._seat = self._create_seat()
        except BackendFailed as failure:
            self.close()
            raise ServingRefused(str(failure)) from failure

    def _create_seat(self) -> Seat:
        pointer = self._lib.llama_init_from_model(self.model.model, self._options)
        if not pointer:
            raise BackendFailed(f"llama.cpp cannot make a context of {self._options.n_ctx} tokens")
        self._seats.append(Seat(pointer, self._lib.llama_get_memory(pointer)))
        return self._seats[-1]

    def seat_bytes(self) -> int:
        """Memory that one seat takes at most: keys and values in float16, and the largest matrices of one part."""
        lib, model = self._lib, self.model.model
        known = self.model.metadata()
        heads, width = lib.llama_model_n_head(model), lib.llama_model_n_embd(model)
        kind, cells = known.get("general.architecture", ""), self._options.n_ctx
        lengths = [int(known.get(f"{kind}.attention.{n}_length", width // heads)) for n in ("key", "value")]
        kept = lib.llama_model_n_layer(model) * lib.llama_model_n_head_kv(model) * sum(lengths) * 2
        return int(cells * kept + PART * 4 * (cells * heads + self.vocabulary + 8 * width))

    # --- Adapters -----------------------------------------------------------------------------------------

    def use(self, path: Path | None, scale: float = 1.0) -> None:
        """Switch to an adapter's file, or to the base; loads the file the first time.

        Raises BackendFailed where there is no such file, or it does not go with the base.
        """
        key = NO_ADAPTER if path is None else (str(path), scale)
        pointer = None if path is None else self._adapter(path)
        if key == self._seat.key:
            return
        found = next((seat for seat in self._seats if seat.key == key), None)
        if found is None:
            found = self._create_seat() if len(self._seats) < self.seats else self._seats[0]
            self._put_aside(found)
            self._set(found, key, pointer)
        self._seats.remove(found)
        self._seats.append(found)
        self._seat = found

    def _set(self, seat: Seat, key: AdapterKey, pointer: Any) -> None:
        self._empty(seat)
        if pointer is None:
            code = self._lib.llama_set_adapters_lora(seat.pointer, None, 0, None)
        else:
            pointers = (self._lib.llama_adapter_lora_p_ctypes * 1)(pointer)
            code = self._lib.llama_set_adapters_lora(seat.pointer, pointers, 1, (ctypes.c_float * 1)(key[1]))
        if code != 0:
            raise BackendFailed(f"llama.cpp cannot switch to the adapter {key[0] or 'none'} (code {code})")
        seat.key = key

    def _put_aside(self, seat: Seat) -> None:
        """Keep what a seat holds, before it is given to another adapter."""
        size = self._lib.llama_state_seq_get_size(seat.pointer, 0) if len(seat.tokens) >= SHARED_LEAST else 0
        if not 0 < size <= self._aside.most_bytes:
            return
        state = (ctypes.c_uint8 * size)()
        if self._lib.llama_state_seq_get_data(seat.pointer, state, size, 0) == size:
            self._aside.put(seat.key, seat.tokens.copy(), state)

    def _restore_cache(self, seat: Seat, wanted: Sequence[int]) -> None:
        """Give a seat that holds nothing what its adapter had put aside, where the wanted prompt begins like it."""
        aside = self._aside.get(seat.key)
        if seat.tokens or aside is None or tokens_shared(aside[0], wanted) < SHARED_LEAST:
            return
        tokens, state = aside
        self._aside.drop(seat.key)
        if self._lib.llama_state_seq_set_data(seat.pointer, state, len(state), 0) == len(state):
            seat.tokens[:] = tokens
        else:
            self._empty(seat)

    def _adapter(self, path: Path) -> Any:
        name = str(path)
        if name in self._adapters:
            self._adapters.move_to_end(name)
            return self._adapters[name]
        if not path.is_file():
            raise BackendFailed(
                f"expected a GGUF adapter at {path}, found none; make it with `{PROGRAM} export_model --format "
                "gguf-lora`",
                kind="missing",
            )
        pointer = self._lib.llama_adapter_lora_init(self.model.model, name.encode())
        if not pointer:
            raise BackendFailed(f"llama.cpp cannot put the adapter {path} on this base model", kind="missing")
        while len(self._adapters) >= ADAPTERS:
            self._drop(next(iter(self._adapters)))
        self._adapters[name] = pointer
        return pointer

    def _drop(self, name: str) -> None:
        for seat in self._seats:
            if seat.key[0] == name:
                self._set(seat, NO_ADAPTER, None)
        self._aside.drop_file(name)
        self._lib.llama_adapter_lora_free(self._adapters.pop(name))

    # --- The cache ----------------------------------------------------------------------------------------

    def prompt(self, tokens: Sequence[int]) -> FloatArray:
        """Compute a prompt under the adapter in use; the logits after its last token.

        What the adapter's cache already holds of the prompt's beginning is not computed again.
        """
        if not 0 < len(tokens) < self.context:
            raise ServingRefused(
                f"the prompt has {len(tokens)} tokens; expected at most {self.context} together with "
                "the answer",
                param="messages",
                code="context_length_exceeded",
            )
        seat = self._seat
        self._restore_cache(seat, tokens)
        # the last token is always computed: its logits are what is asked for
        shared = tokens_shared(seat.tokens, tokens[:-1])
        if not self._lib.llama_memory_seq_rm(seat.memory, 0, shared, -1):
            # a model that remembers more than keys and values cannot go back to the middle
            self._empty(seat)
            shared = 0
        del seat.tokens[shared:]
        return self.append(tokens[shared:])

    def append(self, tokens: Sequence[int]) -> FloatArray:
        """Compute further tokens; the logits after the last one."""
        seat = self._seat
        try:
            for start in range(0, len(tokens), BATCH):
                part = tokens[start : start + BATCH]
                first = len(seat.tokens)
                last = start + len(part) == len(tokens)
                self._decode(
                    [(token, first + i, 0, last and i == len(part) - 1) for i, token in enumerate(part)]
                )
                seat.tokens += part
        except BackendFailed:
            self._empty(seat)
            raise
        return self._logits(len(part) - 1)

    def branches(self, tails: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, FloatArray]]:
        """Go on from what was computed in several ways at once, the shared part computed once and left as it was.

        Gives (tail, position in it, logits after that token) for every token of every tail.
        """
        waiting = list(enumerate(tails))
        while waiting:
            room = BATCH
            group: list[tuple[int, Sequence[int]]] = []
            while waiting and len(group) < SCRATCH and (not group or len(waiting[0][1]) <= room):
                group.append(waiting.pop(0))
                room -= len(group[-1][1])
            yield from self._group(group)

    def _group(self, group: Sequence[tuple[int, Sequence[int]]]) -> Iterator[tuple[int, int, FloatArray]]:
        seat, first = self._seat, len(self._seat.tokens)
        if any(first + len(tail) > self.context or len(tail) > BATCH for _, tail in group):
            raise ServingRefused(
                f"expected responses of at most {BATCH} tokens, {self.context} with their prompt",
                param="candidates",
                code="context_length_exceeded",
            )
        rows: list[tuple[int, int, int, bool]] = []
        try:
            for place, (_, tail) in enumerate(group, start=1):
                self._lib.llama_memory_seq_cp(seat.memory, 0, place, -1, -1)
                rows += [(token, first + i, place, True) for i, token in enumerate(tail)]
            if rows:
                self._decode(rows)
            row = 0
            for number, tail in group:
                for position in range(len(tail)):
                    yield number, position, self._logits(row)
                    row += 1
        finally:
            for place in range(1, len(group) + 1):
                self._lib.llama_memory_seq_rm(seat.memory, place, -1, -1)

    def forget(self) -> None:
        """Empty every cache, and what was put aside."""
        self._aside.clear()
        for seat in self._seats:
            self._empty(seat)

    def _empty(self, seat: Seat) -> None:
        # what is no cell's any more is never read; filling it with zeros takes as long as it is large
        self._lib.llama_memory_clear(seat.memory, False)
        seat.tokens.clear()

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Compute (token, position, sequence, are logits wanted) rows."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        code = self._lib.llama_decode(self._seat.pointer, batch)
        if code != 0:
            raise BackendFailed(f"llama.cpp cannot compute {len(rows)} tokens (code {code})")

    def _logits(self, row: int) -> FloatArray:
        """The logits of a row of the last batch: (vocabulary,); valid until the next one is computed."""
        pointer = self._lib.llama_get_logits_ith(self._seat.pointer, row)
        found: FloatArray = np.ctypeslib.as_array(pointer, shape=(self.vocabulary,))
        return found

    def close(self) -> None:
        """Free contexts, adapters and weights, in this order."""
        for seat in self._seats:
            self._lib.llama_set_adapters_lora(seat.pointer, None, 0, None)
            self._lib.llama_free(seat.pointer)
        self._seats.clear()
        for pointer in self._adapters.values():
            self._lib.llama_adapter_lora_free(pointer)
        self._adapters.clear()
        if self._batch is not None:
            self._lib.llama_batch_free(self._batch)
            self._batch = None
        self.model.close()


def cores() -> int:
    """Physical cores this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


@contextmanager
def grammar_sampler(context: LlamaContext, gbnf: str) -> Iterator[Any]:
    """A grammar of llama.cpp at its start. Raises ServingRefused where it cannot be read."""
    lib = context._lib
    pointer = lib.llama_sampler_init_grammar(context.model.vocab, gbnf.encode(), b"root")
    if not pointer:
        raise ServingRefused("llama.cpp cannot make a grammar of this JSON schema", param="response_format")
    try:
        yield pointer
    finally:
        lib.llama_sampler_free(pointer)
