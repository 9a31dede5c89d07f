"""Folders behind the names of base models: the bundled ones, and those that were added. Pure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

BUNDLED = "bundled"
"""Name of the base model that comes with the project; `bundled@<digits>` names one by the start of its hash."""

BUNDLED_MODEL = Path(__file__).resolve().parent / "bundled_model"
"""The model shipped with the project: config, safetensors, tokenizer, chat template."""

BUNDLED_ALTERNATIVES = Path(__file__).resolve().parent / "bundled_alternatives"
"""Bundled models beside the default one, each in a folder named by the start of its hash: one that was the default
once, as policies stay on theirs, or one to choose by `bundled@<digits>`."""

DIGITS = 16

ADDED_FILE = "source.json"
"""File in the folder of a model that was added (`manage.py model add`): where it came from."""

_added_home: list[Callable[[], Path]] = []


def added_models_in(home: Callable[[], Path]) -> None:
    """Name the folder that holds the models that were added; `home` is asked at each look-up."""
    _added_home[:] = [home]


def added_folder(name: str) -> Path | None:
    """The folder of the model that was added under this name; None where there is none."""
    if not _added_home or not 0 < len(name) < 100 or "/" in name or name.startswith("."):
        return None
    folder = _added_home[0]() / name
    return folder if (folder / ADDED_FILE).is_file() else None


def base_named(base_model: str, base_model_hash: str) -> str:
    """The name that finds a base again: of the bundled one also by its hash, as it is made anew now and then."""
    digits = base_model_hash.removeprefix("sha256:")
    return f"{BUNDLED}@{digits[:DIGITS]}" if base_model == BUNDLED and digits else base_model


def is_bundled(name: str) -> bool:
    """True for the bundled base model and for those beside it: `bundled`, `bundled@<digits>`."""
    return name.partition("@")[0] == BUNDLED


def resolve_base_model(name: str) -> str:
    """The folder of a bundled model or of one that was added; any other name or path stays as it is.

    `bundled@<digits>` is the bundled model of this hash, where there is one.
    """
    if not is_bundled(name):
        return str(added_folder(name) or name)
    digits = name.partition("@")[2]
    alternative = BUNDLED_ALTERNATIVES / digits[:DIGITS]
    return str(alternative if digits and alternative.is_dir() else BUNDLED_MODEL)
