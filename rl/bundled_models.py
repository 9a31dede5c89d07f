"""Folders behind the names of base models: the bundled one, and those that were added. Pure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

BUNDLED = "bundled"
"""Name of the base model that comes with the project."""

BUNDLED_MODEL = Path(__file__).resolve().parent / "bundled_model"
"""The model shipped with the project: config, safetensors, tokenizer, chat template."""

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


def resolve_base_model(name: str) -> str:
    """The folder of the bundled model or of one that was added; any other name or path stays as it is."""
    return str(BUNDLED_MODEL if name == BUNDLED else added_folder(name) or name)
