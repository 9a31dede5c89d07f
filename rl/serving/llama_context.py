"""llama.cpp context of one GGUF base: its weights, its key-value cache, and LoRA adapters switched on top of it."""

from __future__ import annotations

import ctypes
import logging
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from backend.installation import PROGRAM
from rl.llama_library import amx_avoid
from rl.serving.base import BackendFailed, ServingRefused

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


FloatArray = npt.NDArray[np.float32]

BATCH, PART = 512, 128
"""Tokens given to llama.cpp at once, and computed at once: a part of 512 makes a slot three times as large, and
prompts take a tenth longer."""
SCRATCH = 16
"""Responses that are scored side by side."""
ADAPTERS = 256
"""Adapters held in memory; the least recently used one is dropped."""
SMALL_BYTES = 64 * 1024**2
"""Of a base's file: below it a second thread costs more than it brings."""
CACHE_BYTES = 1024**3
"""Memory for slots and prompt cache, unless set otherwise."""
MIN_SLOTS, PROMPT_CACHE_SHARE = 2, 0.25
"""Slots whatever the memory; share of the memory that the prompt cache may take."""
MIN_SHARED_TOKENS = 8
"""Length of a common prefix from which a saved prompt is restored: fewer tokens are computed faster than copied."""

NO_ADAPTER: AdapterKey = ("", 0.0)

logging.getLogger("llama-cpp-python").setLevel(
    logging.CRITICAL
)  # its own names for the levels are off by one


@dataclass
class Slot:
    """A context of llama.cpp: the tokens in its cache, computed under one adapter."""

    pointer: object
    memory: object
    key: AdapterKey = NO_ADAPTER
    tokens: list[int] = field(default_factory=list)


class LlamaContext:
    """Weights, adapters, and slots. Not thread-safe: whoever uses it holds a lock.

    The weights are loaded once. An adapter in use has a slot (llama-server's word): a context of llama.cpp with a cache
    of its own. Keys and values computed under one adapter are never read under another, nor under the base. There are
    as many slots as cache_bytes hold. With more adapters than that, the least recently used one loses its slot;
    llama.cpp then plans its computation anew, and the slot's prompt goes to the prompt cache, for that adapter alone.
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
        amx_avoid()
        self._lib = llama_cpp
        try:
            params = llama_cpp.llama_model_default_params()
            self.model = LlamaModel(path_model=str(path), params=params, verbose=True)
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
        self._adapters: OrderedDict[str, object] = OrderedDict()
        self._slots: list[Slot] = []
        """In the order of last use, the most recent one last."""
        self.max_slots = max(
            MIN_SLOTS, min(ADAPTERS, int((1 - PROMPT_CACHE_SHARE) * cache_bytes / self.slot_bytes()))
        )
        """Most slots at a time."""
        self._prompt_cache = PromptCache(int(PROMPT_CACHE_SHARE * cache_bytes))
        try:
            self._slot = self._create_slot()
        except BackendFailed as failure:
            self.close()
            raise ServingRefused(str(failure)) from failure

    def _create_slot(self) -> Slot:
        pointer = self._lib.llama_init_from_model(self.model.model, self._options)
        if not pointer:
            raise BackendFailed(f"llama.cpp cannot make a context of {self._options.n_ctx} tokens")
        self._slots.append(Slot(pointer, self._lib.llama_get_memory(pointer)))
        return self._slots[-1]

    def slot_bytes(self) -> int:
        """Memory that one slot takes at most: keys and values in float16, and the largest matrices of one part."""
        lib, model = self._lib, self.model.model
        known = self.model.metadata()
        heads, width = lib.llama_model_n_head(model), lib.llama_model_n_embd(model)
        kind, cells = known.get("general.architecture", ""), self._options.n_ctx
        lengths = [int(known.get(f"{kind}.attention.{n}_length", width // heads)) for n in ("key", "value")]
        cell_bytes = lib.llama_model_n_layer(model) * lib.llama_model_n_head_kv(model) * sum(lengths) * 2
        return int(cells * cell_bytes + PART * 4 * (cells * heads + self.vocabulary + 8 * width))

    # --- Adapters -----------------------------------------------------------------------------------------

    def use(self, path: Path | None, scale: float = 1.0) -> None:
        """Switch to an adapter's file, or to the base; loads the file the first time.

        Raises BackendFailed where there is no such file, or it does not go with the base.
        """
        key = NO_ADAPTER if path is None else (str(path), scale)
        pointer = None if path is None else self._adapter(path)
        if key == self._slot.key:
            return
        found = next((slot for slot in self._slots if slot.key == key), None)
        if found is None:
            found = self._create_slot() if len(self._slots) < self.max_slots else self._slots[0]
            self._save_prompt(found)
            self._set(found, key, pointer)
        self._slots.remove(found)
        self._slots.append(found)
        self._slot = found

    def _set(self, slot: Slot, key: AdapterKey, pointer: object) -> None:
        self._empty(slot)
        if pointer is None:
            code = self._lib.llama_set_adapters_lora(slot.pointer, None, 0, None)
        else:
            pointers = (self._lib.llama_adapter_lora_p_ctypes * 1)(pointer)
            code = self._lib.llama_set_adapters_lora(slot.pointer, pointers, 1, (ctypes.c_float * 1)(key[1]))
        if code != 0:
            raise BackendFailed(f"llama.cpp cannot switch to the adapter {key[0] or 'none'} (code {code})")
        slot.key = key

    def _save_prompt(self, slot: Slot) -> None:
        """Save the prompt of a slot before the slot is given to another adapter."""
        size = (
            self._lib.llama_state_seq_get_size(slot.pointer, 0)
            if len(slot.tokens) >= MIN_SHARED_TOKENS
            else 0
        )
        if not 0 < size <= self._prompt_cache.max_bytes:
            return
        state = (ctypes.c_uint8 * size)()
        if self._lib.llama_state_seq_get_data(slot.pointer, state, size, 0) == size:
            self._prompt_cache.put(slot.key, slot.tokens.copy(), state)

    def _restore_prompt(self, slot: Slot, wanted: Sequence[int]) -> None:
        """Restore the saved prompt of an empty slot's adapter, where the wanted prompt shares its beginning."""
        entry = self._prompt_cache.get(slot.key)
        if slot.tokens or entry is None or tokens_shared(entry[0], wanted) < MIN_SHARED_TOKENS:
            return
        tokens, state = entry
        self._prompt_cache.drop(slot.key)
        if self._lib.llama_state_seq_set_data(slot.pointer, state, len(state), 0) == len(state):
            slot.tokens[:] = tokens
        else:
            self._empty(slot)

    def _adapter(self, path: Path) -> object:
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

    def adapter_value(self, path: Path, key: str) -> str:
        """A text in the header of an adapter's file; empty where it has none. Raises BackendFailed as `use`."""
        pointer, size = self._adapter(path), 1 << 14
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = self._lib.llama_adapter_meta_val_str(pointer, key.encode(), buffer, size)
            if length < size:
                return buffer.value.decode() if length >= 0 else ""
            size = length + 1

    def _drop(self, name: str) -> None:
        for slot in self._slots:
            if slot.key[0] == name:
                self._set(slot, NO_ADAPTER, None)
        self._prompt_cache.drop_file(name)
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
        slot = self._slot
        self._restore_prompt(slot, tokens)
        # the last token is always computed: its logits are what is asked for
        shared = tokens_shared(slot.tokens, tokens[:-1])
        if not self._lib.llama_memory_seq_rm(slot.memory, 0, shared, -1):
            # a model that remembers more than keys and values cannot go back to the middle
            self._empty(slot)
            shared = 0
        del slot.tokens[shared:]
        return self.append(tokens[shared:])

    def append(self, tokens: Sequence[int]) -> FloatArray:
        """Compute further tokens; the logits after the last one."""
        slot = self._slot
        try:
            for start in range(0, len(tokens), BATCH):
                part = tokens[start : start + BATCH]
                first = len(slot.tokens)
                last = start + len(part) == len(tokens)
                self._decode(
                    [(token, first + i, 0, last and i == len(part) - 1) for i, token in enumerate(part)]
                )
                slot.tokens += part
        except BackendFailed:
            self._empty(slot)
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
        slot, first = self._slot, len(self._slot.tokens)
        if any(first + len(tail) > self.context or len(tail) > BATCH for _, tail in group):
            raise ServingRefused(
                f"expected responses of at most {BATCH} tokens, {self.context} with their prompt",
                param="candidates",
                code="context_length_exceeded",
            )
        rows: list[tuple[int, int, int, bool]] = []
        try:
            for place, (_, tail) in enumerate(group, start=1):
                self._lib.llama_memory_seq_cp(slot.memory, 0, place, -1, -1)
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
                self._lib.llama_memory_seq_rm(slot.memory, place, -1, -1)

    def forget(self) -> None:
        """Empty the slots and the prompt cache."""
        self._prompt_cache.clear()
        for slot in self._slots:
            self._empty(slot)

    def _empty(self, slot: Slot) -> None:
        # what is no cell's any more is never read; filling it with zeros takes as long as it is large
        self._lib.llama_memory_clear(slot.memory, False)
        slot.tokens.clear()

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
        code = self._lib.llama_decode(self._slot.pointer, batch)
        if code != 0:
            raise BackendFailed(f"llama.cpp cannot compute {len(rows)} tokens (code {code})")

    def _logits(self, row: int) -> FloatArray:
        """The logits of a row of the last batch: (vocabulary,); valid until the next one is computed."""
        pointer = self._lib.llama_get_logits_ith(self._slot.pointer, row)
        # `np.ctypeslib.as_array` takes 0.1 ms, as long as drawing a token
        row_type = ctypes.c_float * self.vocabulary
        return np.frombuffer(row_type.from_address(ctypes.addressof(pointer.contents)), np.float32)

    def close(self) -> None:
        """Free contexts, adapters and weights, in this order."""
        for slot in self._slots:
            self._lib.llama_set_adapters_lora(slot.pointer, None, 0, None)
            self._lib.llama_free(slot.pointer)
        self._slots.clear()
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
