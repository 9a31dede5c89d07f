"""What a model's self-test found, on disk for later runs: a retrain need not test again what has not changed."""

from __future__ import annotations

import functools
import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rl.training.machine import cpu_model
from rl.training.packed.prefix_attention import ATTENTION
from rl.training.packed.row_cache import row_key
from rl.training.policy import LoadedPolicy

LIBRARIES = ("torch", "transformers", "peft", "trl")

SOURCES = (
    "layer_compilation.py", "flex.py", "frozen_head.py", "selection.py", "fused_layers.py", "logps.py", "packing.py",
    "prefix_attention.py",
)  # fmt: skip
"""Files beside this one that decide how a packed row is computed."""


def finding_key(policy: LoadedPolicy, *asked: str) -> bytes:
    """Of everything a finding depends on but the rows: weights, arithmetic, adapter, machine, libraries, our code."""
    shapes = [
        f"{name} {tuple(parameter.shape)} {parameter.dtype}"
        for name, parameter in policy.model.named_parameters()
        if parameter.requires_grad
    ]
    cuda = policy.device.type == "cuda"
    return row_key(
        policy.base_model_hash,
        str(policy.model.dtype),
        policy.quantization,
        _attention(policy),
        json.dumps(shapes),
        torch.cuda.get_device_name(policy.device) if cuda else cpu_model(),
        str(torch.is_autocast_enabled(policy.device.type)),
        _code(),
        *asked,
    )


def finding_read(policy: LoadedPolicy, key: bytes, longest: int) -> dict[str, Any] | None:
    """What was kept under the key, unless only shorter rows were tested: a sliding window shows beyond its width."""
    if policy.findings is None:
        return None
    kept = policy.findings.get([key]).get(key)
    finding: dict[str, Any] | None = json.loads(kept) if kept is not None else None
    return finding if finding is not None and finding["longest"] >= longest else None


def finding_keep(policy: LoadedPolicy, key: bytes, longest: int, **facts: Any) -> None:
    """Keep facts under the key, with the tokens of the longest row they were found on."""
    if policy.findings is not None:
        policy.findings.put({key: json.dumps({**facts, "longest": longest}).encode()})


def _attention(policy: LoadedPolicy) -> str:
    kind = str(policy.model.config._attn_implementation)
    return "sdpa" if kind == ATTENTION else kind  # ours was put in sdpa's place


@functools.cache
def _code() -> str:
    digest = hashlib.sha256()
    for library in LIBRARIES:
        digest.update(f"{library} {version(library)}\n".encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()
