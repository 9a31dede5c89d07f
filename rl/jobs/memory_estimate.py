"""Peak memory of a training run from the base model's files alone: no torch, nothing loaded.

`train_<method> --dry-run` measures the activations; here they come from the architecture's shape at full length, which
is an upper bound.
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
from rl.recipes.fit import FLOAT32_BYTES, NF4_BYTES, ModelShape, kept_at_most, memory_of
from rl.rewards.catalogue import reward_models_named


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
    shape = ModelShape.of(config, sum(_parameters(file) for file in folder.glob("*.safetensors")))
    knobs = recipe.as_dict()
    responses = sides * (1 if least else int(knobs.get("mini_batch_size") or recipe.batch_size))
    sparing = least or recipe.gradient_checkpointing
    memory = memory_of(
        shape,
        recipe,
        size=NF4_BYTES if recipe.quantization == "4bit" else FLOAT32_BYTES,
        kept=kept_at_most(shape, recipe, responses, FLOAT32_BYTES, sparing=sparing),
        judges=reward_models_named(str(knobs.get("reward", ""))),
    )
    tokens = f"{responses * recipe.max_length:,} tokens"
    return MemoryEstimate(round(memory.gb, 2), f"at most: {memory.words()}, at full length ({tokens})")


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
