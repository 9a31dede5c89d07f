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

from django.conf import settings

from rl.bundled_models import resolve_base_model
from rl.recipes import Recipe
from rl.recipes.memory import GB, NF4_BYTES, ModelShape, kept_bytes, trained_bytes, weights_bytes
from rl.rewards.catalogue import reward_models_named

PROCESS_GB = 1.5
"""Python with torch and transformers, and on a CPU the kernels compiled for the shapes a run meets."""

BYTES = 4
"""Of a number on a CPU; on an accelerator half of it, which makes this the upper bound it says it is."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Gigabytes at the peak, None where the base model is not on this machine, and how they were worked out."""

    gb: float | None
    source: str


def memory_at_most(base_model: str, recipe: Recipe, sides: int, *, least: bool = False) -> MemoryEstimate:
    """Memory of a run of this recipe; `sides` are the responses of one row that are computed together.

    least: of the run cut to one row at a time, with gradient checkpointing.
    """
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
    rows = 1 if least else int(recipe.as_dict().get("mini_batch_size") or recipe.batch_size)
    size = NF4_BYTES if recipe.quantization == "4bit" else BYTES
    sparing = least or recipe.gradient_checkpointing
    parts = (
        weights_bytes(
            shape, recipe, size, judges=reward_models_named(str(recipe.as_dict().get("reward", "")))
        ),
        trained_bytes(shape, recipe),
        kept_bytes(shape, recipe, rows * sides, BYTES, sparing=sparing),
    )
    tokens = rows * sides * recipe.max_length
    return MemoryEstimate(
        round(sum(parts) / GB + PROCESS_GB, 2),
        f"at most: {parts[0] / GB:.2f} GB weights, {parts[1] / GB:.2f} adapter and optimiser, {parts[2] / GB:.2f} of a "
        f"micro-batch at full length ({tokens:,} tokens), {PROCESS_GB:g} the process itself",
    )


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
    memory_gb: float, recipe: Recipe, *, on_accelerator: bool, supports_4bit: bool
) -> list[Fit]:
    """Every size of SIZES, as it is and in 4 bits, trained on pairs by a recipe, one pair at a time.

    A tenth of `memory_gb` is left to others.
    """
    found = []
    number = 2 if on_accelerator else BYTES
    for size, shape in SIZES.items():
        # the least that a run can be cut to: micro-batches are cut where memory runs out
        rest = trained_bytes(shape, recipe) + kept_bytes(shape, recipe, 2, number, sparing=True)
        for quantization in ("none", *(["4bit"] if supports_4bit else [])):
            weights = weights_bytes(shape, recipe, NF4_BYTES if quantization == "4bit" else number)
            gb = round((weights + rest) / GB + PROCESS_GB, 1)
            found.append(Fit(size, quantization, gb, gb <= 0.9 * memory_gb))
    return found


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
