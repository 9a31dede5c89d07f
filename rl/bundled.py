"""Folders of the bundled base model and of the former ones that policies were trained on. Pure."""

from __future__ import annotations

from pathlib import Path

BUNDLED = "bundled"
"""Name of the base model that comes with the project; `bundled@<digits>` names one by the start of its hash."""

BUNDLED_MODEL = Path(__file__).resolve().parent / "bundled_model"
"""The model shipped with the project: config, safetensors, tokenizer, chat template."""

FORMER_MODELS = Path(__file__).resolve().parent / "former_models"
"""Other bundled models, former ones and second ones, each in a folder named by the start of its hash: policies stay on
theirs."""

FIRST_HASH = "sha256:c2e900d014b182dc78fe3f86e28be66c9e7a9999284193b5806a2562adcc3138"
"""Of the first bundled model: reward and label models on it did not note a hash."""

DIGITS = 16


def base_named(base_model: str, base_model_hash: str) -> str:
    """The name that finds a base again: of the bundled one also by its hash, as it is made anew now and then."""
    digits = base_model_hash.removeprefix("sha256:")
    return f"{BUNDLED}@{digits[:DIGITS]}" if base_model == BUNDLED and digits else base_model


def resolve_base_model(name: str) -> str:
    """`bundled` becomes the shipped model's directory, `bundled@<digits>` that of a former one of this hash, where
    there is one; any other name or path stays as it is."""
    base, _, digits = name.partition("@")
    if base != BUNDLED:
        return name
    former = FORMER_MODELS / digits[:DIGITS]
    return str(former if digits and former.is_dir() else BUNDLED_MODEL)
