"""One GGUF base in this process: its weights, its key-value cache, and LoRA adapters switched on top of it."""

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

from rl.serving.base import BackendFailed, ServingRefused

FloatArray = npt.NDArray[np.float32]

BATCH = 512
"""Tokens computed at once."""
KEPT = 4
"""Adapters whose last prompt stays in the cache, so that a prompt that begins alike is not computed from its start."""
SCRATCH = 16
"""Sequences beside those: responses that are scored side by side."""
ADAPTERS = 256
"""Adapters held in memory; the one used longest ago makes room."""
SMALL_BYTES = 64 * 1024**2
"""Below this a second thread costs more than it brings."""

AdapterKey = tuple[str, float]
"""An adapter's file and its scale; the base is ("", 0.0)."""
NO_ADAPTER: AdapterKey = ("", 0.0)

logging.getLogger("llama-cpp-python").setLevel(
    logging.CRITICAL
)  # its own names for the levels are off by one


@dataclass
class Kept:
    """A sequence of the cache and the tokens it holds, computed under one adapter."""

    sequence: int
    tokens: list[int] = field(default_factory=list)


class LlamaContext:
    """Weights, cache and adapters. Not thread-safe: whoever uses it holds a lock.

    Every adapter has a sequence of its own in the cache: keys and values computed under one adapter are never read
    under another, nor under the base.
    """

    def __init__(self, path: Path, *, context: int = 2048, threads: int | None = None) -> None:
        import llama_cpp
        from llama_cpp._internals import LlamaModel

        if not path.is_file():
            raise ServingRefused(
                f"expected a GGUF file at {path}, found none; make one with `manage.py export_model`"
            )
        self._lib: Any = llama_cpp
        try:
            params = llama_cpp.llama_model_default_params()
            self.model: Any = LlamaModel(path_model=str(path), params=params, verbose=True)
        except ValueError as error:
            raise ServingRefused(f"llama.cpp cannot read {path}: {error}") from error
        self.context = min(context, self.model.n_ctx_train())
        """Tokens of prompt and answer together."""
        threads = threads or (1 if path.stat().st_size < SMALL_BYTES else cores())
        options = llama_cpp.llama_context_default_params()
        # room for one conversation at full length, and as much again for what others left in the cache
        self._cells = 2 * self.context
        options.n_ctx = self._cells
        options.n_batch = options.n_ubatch = min(BATCH, self._cells)
        options.n_seq_max = KEPT + SCRATCH
        options.n_threads = options.n_threads_batch = threads
        options.kv_unified = True
        # its sums in float16 move a response's log-probability by up to 0.06 nats with the order of the batch
        options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.no_perf = True
        self._batch_size = int(options.n_batch)
        self._ctx: Any = llama_cpp.llama_init_from_model(self.model.model, options)
        if not self._ctx:
            self.model.close()
            raise ServingRefused(f"llama.cpp cannot make a context of {self._cells} tokens for {path}")
        self._memory = llama_cpp.llama_get_memory(self._ctx)
        self._batch = llama_cpp.llama_batch_init(self._batch_size, 0, 1)
        self.vocabulary = self.model.n_vocab()
        self._adapters: OrderedDict[str, Any] = OrderedDict()
        self._active = NO_ADAPTER
        self._kept: OrderedDict[AdapterKey, Kept] = OrderedDict()

    # --- Adapters -----------------------------------------------------------------------------------------

    def use(self, path: Path | None, scale: float = 1.0) -> AdapterKey:
        """Switch to an adapter's file, or to the base; loads the file the first time. Raises ServingRefused."""
        key = NO_ADAPTER if path is None else (str(path), scale)
        if path is not None:
            pointer = self._adapter(path)
        if key == self._active:
            return key
        if path is None:
            code = self._lib.llama_set_adapters_lora(self._ctx, None, 0, None)
        else:
            pointers = (self._lib.llama_adapter_lora_p_ctypes * 1)(pointer)
            code = self._lib.llama_set_adapters_lora(self._ctx, pointers, 1, (ctypes.c_float * 1)(scale))
        if code != 0:
            raise BackendFailed(f"llama.cpp cannot switch to the adapter {key[0] or 'none'} (code {code})")
        self._active = key
        return key

    def _adapter(self, path: Path) -> Any:
        name = str(path)
        if name in self._adapters:
            self._adapters.move_to_end(name)
            return self._adapters[name]
        if not path.is_file():
            raise BackendFailed(
                f"expected a GGUF adapter at {path}, found none; make it with `manage.py export_model --format "
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
        if self._active[0] == name:
            self.use(None)
        self._lib.llama_adapter_lora_free(self._adapters.pop(name))
        for key in [key for key in self._kept if key[0] == name]:
            self._forget(key)

    # --- The cache ----------------------------------------------------------------------------------------

    def prompt(self, tokens: Sequence[int]) -> tuple[Kept, FloatArray]:
        """Compute a prompt under the adapter in use; its sequence, and the logits after its last token.

        What the adapter's own sequence already holds of the prompt's beginning is not computed again.
        """
        if not 0 < len(tokens) < self.context:
            raise ServingRefused(
                f"the prompt is {len(tokens)} tokens long, and this model reads {self.context} with its answer",
                param="messages",
                code="context_length_exceeded",
            )
        kept = self._own()
        shared = 0
        # the last token is always computed: its logits are what is asked for
        for held, wanted in zip(kept.tokens, tokens[:-1], strict=False):
            if held != wanted:
                break
            shared += 1
        if not self._lib.llama_memory_seq_rm(self._memory, kept.sequence, shared, -1):
            self._lib.llama_memory_seq_rm(self._memory, kept.sequence, -1, -1)
            shared = 0
        del kept.tokens[shared:]
        return kept, self.append(kept, tokens[shared:])

    def append(self, kept: Kept, tokens: Sequence[int]) -> FloatArray:
        """Compute further tokens of a sequence; the logits after the last one."""
        self._room(len(tokens))
        try:
            for start in range(0, len(tokens), self._batch_size):
                part = tokens[start : start + self._batch_size]
                first = len(kept.tokens)
                last = start + len(part) == len(tokens)
                self._decode(
                    [
                        (token, first + i, kept.sequence, last and i == len(part) - 1)
                        for i, token in enumerate(part)
                    ]
                )
                kept.tokens += part
        except BackendFailed:
            self._forget(self._active)
            raise
        return self._logits(len(part) - 1)

    def branches(self, kept: Kept, tails: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, FloatArray]]:
        """Continue one sequence in several ways at once, the shared part computed once; the sequence stays as it was.

        Gives (tail, position in it, logits after that token) for every token of every tail.
        """
        waiting = list(enumerate(tails))
        while waiting:
            room = self._batch_size
            group: list[tuple[int, Sequence[int]]] = []
            while waiting and len(group) < SCRATCH and (not group or len(waiting[0][1]) <= room):
                group.append(waiting.pop(0))
                room -= len(group[-1][1])
            yield from self._group(kept, group)

    def _group(
        self, kept: Kept, group: Sequence[tuple[int, Sequence[int]]]
    ) -> Iterator[tuple[int, int, FloatArray]]:
        first = len(kept.tokens)
        if any(first + len(tail) > self.context or len(tail) > self._batch_size for _, tail in group):
            raise ServingRefused(
                f"prompt and response are longer than the {self.context} tokens this model reads",
                param="candidates",
                code="context_length_exceeded",
            )
        self._room(sum(len(tail) for _, tail in group))
        rows: list[tuple[int, int, int, bool]] = []
        try:
            for place, (_, tail) in enumerate(group):
                self._lib.llama_memory_seq_cp(self._memory, kept.sequence, KEPT + place, -1, -1)
                rows += [(token, first + i, KEPT + place, True) for i, token in enumerate(tail)]
            if rows:
                self._decode(rows)
            row = 0
            for number, tail in group:
                for position in range(len(tail)):
                    yield number, position, self._logits(row)
                    row += 1
        finally:
            for place in range(len(group)):
                self._lib.llama_memory_seq_rm(self._memory, KEPT + place, -1, -1)

    def forget(self) -> None:
        """Empty the cache."""
        self._lib.llama_memory_clear(self._memory, True)
        self._kept.clear()

    def _own(self) -> Kept:
        """The sequence of the adapter in use; the adapter used longest ago gives up its own where none is free."""
        key = self._active
        if key not in self._kept:
            if len(self._kept) >= KEPT:
                self._forget(next(iter(self._kept)))
            taken = {kept.sequence for kept in self._kept.values()}
            self._kept[key] = Kept(next(i for i in range(KEPT) if i not in taken))
        self._kept.move_to_end(key)
        return self._kept[key]

    def _forget(self, key: AdapterKey) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            self._lib.llama_memory_seq_rm(self._memory, kept.sequence, -1, -1)

    def _room(self, tokens: int) -> None:
        """Make room in the cache: others' prompts go first, the one used longest ago before the rest."""
        while sum(len(kept.tokens) for kept in self._kept.values()) + tokens > self._cells:
            other = next((key for key in self._kept if key != self._active), None)
            if other is None:
                return  # a conversation at its full length fits twice
            self._forget(other)

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
        code = self._lib.llama_decode(self._ctx, batch)
        if code != 0:
            raise BackendFailed(f"llama.cpp cannot compute {len(rows)} tokens (code {code})")

    def _logits(self, row: int) -> FloatArray:
        """The logits of a row of the last batch: (vocabulary,); valid until the next one is computed."""
        pointer = self._lib.llama_get_logits_ith(self._ctx, row)
        found: FloatArray = np.ctypeslib.as_array(pointer, shape=(self.vocabulary,))
        return found

    def close(self) -> None:
        """Free adapters, context and weights, in this order."""
        if self._ctx is None:
            return
        self._lib.llama_set_adapters_lora(self._ctx, None, 0, None)
        for pointer in self._adapters.values():
            self._lib.llama_adapter_lora_free(pointer)
        self._adapters.clear()
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._ctx)
        self._ctx = None
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
