"""Peak memory of a training run, worked out from the base model's files alone: no torch, nothing loaded.

Weights, the adapter with its optimiser, what the largest micro-batch keeps for the way back, and the process itself.
`train_<method> --dry-run` counts the activations on a trial; here they are taken from the architecture's shape at full
length, which is an upper bound.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from django.conf import settings

GB = 1e9
PROCESS_GB = 1.5
"""Python with torch and transformers, and on a CPU the kernels compiled for the shapes a run meets."""

BYTES = 4
"""Of a number on a CPU; on an accelerator half of it, which makes this the upper bound it says it is."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Gigabytes at the peak, None where the base model is not on this machine, and how they were worked out."""

    gb: float | None
    by: str


def memory_estimate(base_model: str, recipe: dict[str, Any], sides: int) -> MemoryEstimate:
    """Memory of a run of this recipe; `sides` are the responses of one row that are computed together."""
    folder = base_folder(base_model)
    if folder is None:
        return MemoryEstimate(
            None, f"{base_model} is not on this machine; `train_... --dry-run` fetches and measures it"
        )
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config = config.get("text_config") or config
    hidden = int(config.get("hidden_size") or config["n_embd"])
    layers = int(config.get("num_hidden_layers") or config["n_layer"])
    middle = int(config.get("intermediate_size") or config.get("ffn_dim") or 4 * hidden)
    parameters = sum(_parameters(file) for file in folder.glob("*.safetensors"))
    weights = parameters * (0.65 if recipe.get("quantization") == "4bit" else BYTES)
    lora = layers * int(recipe["lora_r"]) * (8 * hidden + 3 * (hidden + middle)) * 16
    rows = int(recipe.get("mini_batch_size") or recipe["batch_size"])
    tokens = rows * sides * int(recipe["max_length"])
    per_layer = tokens * (10 * hidden + 3 * middle) * BYTES
    kept = per_layer if recipe.get("gradient_checkpointing") else layers * per_layer
    logits = rows * sides * int(recipe.get("max_new_tokens") or recipe["max_completion_length"])
    kept += logits * int(config["vocab_size"]) * BYTES
    total = (weights + lora + kept) / GB + PROCESS_GB
    return MemoryEstimate(
        round(total, 2),
        f"at most: {weights / GB:.2f} GB weights, {lora / GB:.2f} adapter and optimiser, {kept / GB:.2f} of a "
        f"micro-batch at full length ({tokens:,} tokens), {PROCESS_GB:g} the process itself",
    )


def base_folder(base_model: str) -> Path | None:
    """The folder of a base model that is here: the bundled one, a path, or the newest snapshot in the hub's cache."""
    if base_model == "bundled":
        return Path(settings.BASE_DIR) / "rl" / "bundled_model"
    given = Path(base_model).expanduser()
    if (given / "config.json").is_file():
        return given
    hub = settings.HF_HUB_CACHE / f"models--{base_model.replace('/', '--')}" / "snapshots"
    found = sorted(hub.glob("*/config.json"), key=lambda path: -path.stat().st_mtime)
    return next((path.parent for path in found if any(path.parent.glob("*.safetensors"))), None)


def _parameters(file: Path) -> int:
    """Numbers in a safetensors file, by its header."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
