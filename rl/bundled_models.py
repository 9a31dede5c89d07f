"""Folders of the bundled base models: the default one, and those beside it that are named by their hash. Pure."""

from __future__ import annotations

from pathlib import Path

BUNDLED = "bundled"
"""Name of the base model that comes with the project; `bundled@<digits>` names one by the start of its hash."""

BUNDLED_MODEL = Path(__file__).resolve().parent / "bundled_model"
"""The model shipped with the project: config, safetensors, tokenizer, chat template."""

BUNDLED_ALTERNATIVES = Path(__file__).resolve().parent / "bundled_alternatives"
"""Bundled models beside the default one, each in a folder named by the start of its hash: one that was the default
once, as policies stay on theirs, or one to choose by `bundled@<digits>`."""

DIGITS = 16


def base_named(base_model: str, base_model_hash: str) -> str:
    """The name that finds a base again: of the bundled one also by its hash, as it is made anew now and then."""
    digits = base_model_hash.removeprefix("sha256:")
    return f"{BUNDLED}@{digits[:DIGITS]}" if base_model == BUNDLED and digits else base_model


def is_bundled(name: str) -> bool:
    """True for the bundled base model and for those beside it: `bundled`, `bundled@<digits>`."""
    return name.partition("@")[0] == BUNDLED


def resolve_base_model(name: str) -> str:
    """`bundled` becomes the shipped model's directory, `bundled@<digits>` that of the one of this hash, where
    there is one; any other name or path stays as it is."""
    if not is_bundled(name):
        return name
    digits = name.partition("@")[2]
    alternative = BUNDLED_ALTERNATIVES / digits[:DIGITS]
    return str(alternative if digits and alternative.is_dir() else BUNDLED_MODEL)
