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

from rl.bundled_models import resolve_base_model
from rl.recipes.base import BASE, START
from rl.rewards.catalogue import AUTO, MODEL

GB = 1e9
PROCESS_GB = 1.5
"""Python with torch and transformers, and on a CPU the kernels compiled for the shapes a run meets."""

BYTES = 4
"""Of a number on a CPU; on an accelerator half of it, which makes this the upper bound it says it is."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Gigabytes at the peak, None where the base model is not on this machine, and how they were worked out."""

    gb: float | None
    source: str


def memory_estimate(base_model: str, recipe: dict[str, Any], sides: int) -> MemoryEstimate:
    """Memory of a run of this recipe; `sides` are the responses of one row that are computed together."""
    folder = base_folder(base_model)
    if folder is None:
        return MemoryEstimate(
            None, f"{base_model} is not on this machine; `train_... --dry-run` downloads and measures it"
        )
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config = config.get("text_config") or config
    hidden = int(config.get("hidden_size") or config["n_embd"])
    shape = ModelShape(
        parameters=sum(_parameters(file) for file in folder.glob("*.safetensors")),
        hidden_size=hidden,
        layers=int(config.get("num_hidden_layers") or config["n_layer"]),
        middle=int(config.get("intermediate_size") or config.get("ffn_dim") or 4 * hidden),
        vocabulary=int(config["vocab_size"]),
    )
    parts = _parts(shape, recipe, sides, BYTES)
    tokens = _rows(recipe) * sides * int(recipe["max_length"])
    return MemoryEstimate(
        round(sum(parts) / GB + PROCESS_GB, 2),
        f"at most: {parts[0] / GB:.2f} GB weights, {parts[1] / GB:.2f} adapter and optimiser, {parts[2] / GB:.2f} of a "
        f"micro-batch at full length ({tokens:,} tokens), {PROCESS_GB:g} the process itself",
    )


@dataclass(frozen=True)
class ModelShape:
    """Numbers of a model that decide its memory."""

    parameters: int
    hidden_size: int
    layers: int
    middle: int
    """Width within an MLP."""
    vocabulary: int


SIZES = {
    "0.5B": ModelShape(494_000_000, 896, 24, 4864, 151_936),
    "1.5B": ModelShape(1_544_000_000, 1536, 28, 8960, 151_936),
    "3B": ModelShape(3_086_000_000, 2048, 36, 11_008, 151_936),
    "7B": ModelShape(7_616_000_000, 3584, 28, 18_944, 152_064),
    "8B": ModelShape(8_030_000_000, 4096, 32, 14_336, 128_256),
}
"""Size -> shape of a model that is often trained: Qwen2.5 of each size, and Llama 3.1 8B."""


@dataclass(frozen=True)
class Fit:
    """Memory that training a model of a size takes, and whether the machine has it."""

    size: str
    quantization: str
    """`none` or `4bit`."""
    gb: float
    """At most, at the peak."""
    fits: bool


def sizes_that_fit(
    memory_gb: float, recipe: dict[str, Any], *, on_accelerator: bool, supports_4bit: bool
) -> list[Fit]:
    """Every size of SIZES, as it is and in 4 bits, trained on pairs by a recipe, one pair at a time.

    A tenth of `memory_gb` is left to others.
    """
    found = []
    one_row = {**recipe, "batch_size": 1, "gradient_checkpointing": True}
    for size, shape in SIZES.items():
        for quantization in ("none", *(["4bit"] if supports_4bit else [])):
            # the least that a run can be cut to: micro-batches are cut where memory runs out
            parts = _parts(
                shape, {**one_row, "quantization": quantization}, 2, 2 if on_accelerator else BYTES
            )
            gb = round(sum(parts) / GB + PROCESS_GB, 1)
            found.append(Fit(size, quantization, gb, gb <= 0.9 * memory_gb))
    return found


def _rows(recipe: dict[str, Any]) -> int:
    return int(recipe.get("mini_batch_size") or recipe["batch_size"])


def _parts(shape: ModelShape, recipe: dict[str, Any], sides: int, size: int) -> tuple[float, float, float]:
    """Bytes of the weights, of the adapter with its optimiser, and of what a micro-batch keeps; `size` of a number."""
    weights = shape.parameters * (0.65 if recipe.get("quantization") == "4bit" else size)
    # a warm-up is trained on a base of its own, beside the run's
    weights *= 2 if recipe.get("warm_up_steps") else 1
    rank = int(recipe["lora_r"])
    trained = (
        shape.layers * rank * (8 * shape.hidden_size + 3 * (shape.hidden_size + shape.middle))
        if rank
        else shape.parameters
    )
    # float32 weight, gradient, two moments, twice where PPO's value has its own; at rank 0 copies beside the original
    lora = trained * 16 * (2 if recipe.get("value_backbone") == "adapter" else 1)
    if not rank:
        # of the policy training starts from, where that is the reference; and reward models that do not share the base
        has_reference = recipe.get("start_from", BASE) != BASE and recipe.get("reference") == START
        lora += trained * 4 * has_reference
        weights *= 1 + sum(
            spec.strip().startswith((MODEL, AUTO)) for spec in str(recipe.get("reward", "")).split(",")
        )
    rows = _rows(recipe)
    per_layer = rows * sides * int(recipe["max_length"]) * (10 * shape.hidden_size + 3 * shape.middle) * size
    saved = per_layer if recipe.get("gradient_checkpointing") else shape.layers * per_layer
    logits = rows * sides * int(recipe.get("max_new_tokens") or recipe["max_completion_length"])
    return weights, lora, saved + logits * shape.vocabulary * size


def base_parameters(base_model: str) -> int | None:
    """Parameters of a base model, read from the headers of its files; None where it is not on this machine."""
    folder = base_folder(base_model)
    return sum(_parameters(file) for file in folder.glob("*.safetensors")) if folder is not None else None


def base_folder(base_model: str) -> Path | None:
    """The folder of a base model that is here: the bundled one, a path, or the newest snapshot in the hub's cache."""
    given = Path(resolve_base_model(base_model)).expanduser()
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
