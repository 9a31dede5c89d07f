"""Cache of self-test results on disk: a retrain need not measure again what has not changed."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

from packed_forward.prefix_attention import ATTENTION
from packed_forward.row_cache import RowCache, row_key

LIBRARIES = ("torch", "transformers", "peft", "trl")

SOURCES = (
    "flex.py",
    "forward.py",
    "fused_layers.py",
    "layer_compilation.py",
    "logps.py",
    "packing.py",
    "prefix_attention.py",
    "selection.py",
    "selftest.py",
    "strategies.py",
)
"""Files beside this one that decide how a packed row is computed."""


@dataclass(frozen=True)
class SelftestCache:
    """Store of self-test results, with the facts about a model that it does not carry itself."""

    rows: RowCache
    base_model_hash: str
    quantization: str
    """`none` or `4bit`."""
    processor: str
    """The CPU's name; a result on CUDA goes by the card's."""


class CachedPolicy(Protocol):
    """The part of `selftest.PackablePolicy` that a key is made of."""

    @property
    def model(self) -> torch.nn.Module: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def selftest_cache(self) -> SelftestCache | None: ...


def selftest_key(policy: CachedPolicy, *conditions: str) -> bytes | None:
    """Key of all that a result depends on but the rows: weights, arithmetic, adapter, machine, libraries, our code.

    None for a policy without a cache.
    """
    cache = policy.selftest_cache
    if cache is None:
        return None
    shapes = [
        f"{name} {tuple(parameter.shape)} {parameter.dtype}"
        for name, parameter in policy.model.named_parameters()
        if parameter.requires_grad
    ]
    cuda = policy.device.type == "cuda"
    return row_key(
        cache.base_model_hash,
        str(policy.model.dtype),
        cache.quantization,
        _attention(policy.model),
        json.dumps(shapes),
        torch.cuda.get_device_name(policy.device) if cuda else cache.processor,
        str(torch.is_autocast_enabled(policy.device.type)),
        packed_code(),
        *conditions,
    )


def selftest_read(policy: CachedPolicy, key: bytes, longest: int) -> dict[str, Any] | None:
    """The result under the key, unless only shorter rows were tested: a sliding window shows beyond its width."""
    if policy.selftest_cache is None:
        return None
    stored = policy.selftest_cache.rows.get([key]).get(key)
    result: dict[str, Any] | None = json.loads(stored) if stored is not None else None
    return result if result is not None and result["longest"] >= longest else None


def selftest_store(policy: CachedPolicy, key: bytes, longest: int, **result: Any) -> None:
    """Store a result under the key, with the tokens of the longest row it was measured on."""
    if policy.selftest_cache is not None:
        policy.selftest_cache.rows.put({key: json.dumps({**result, "longest": longest}).encode()})


def _attention(model: torch.nn.Module) -> str:
    kind = str(model.config._attn_implementation)
    return "sdpa" if kind == ATTENTION else kind  # prefix attention was put in sdpa's place


@functools.cache
def packed_code() -> str:
    """Sum over the code that computes packed rows, and the versions of its libraries."""
    digest = hashlib.sha256()
    for library in LIBRARIES:
        digest.update(f"{library} {version(library)}\n".encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()
