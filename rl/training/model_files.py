"""Files of base models and adapters on disk, checked for completeness. Weights are read from safetensors only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rl.bundled_models import resolve_base_model
from rl.checksums import FileDamaged, sums_check

FACTS = "ratchet.json"
"""File beside an adapter's weights: its base, its agent, its method."""


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


class PolicyLoadError(ValueError):
    """A model or adapter that cannot be used; the message says what was expected, what was found and what to do."""


def adapter_read(path: str | Path) -> dict[str, Any]:
    """The facts written beside an adapter ({} for one made elsewhere). Raises PolicyLoadError for anything else."""
    path = Path(path)
    if not path.is_dir():
        raise PolicyLoadError(
            f"expected an adapter directory at {path}, found {'a file' if path.exists() else 'none'}"
        )
    missing = [name for name in ADAPTER_FILES if not (path / name).is_file()]
    if missing:
        if (path / "adapter_model.bin").exists():
            raise PolicyLoadError(
                f"{path} holds its adapter as a pickle (adapter_model.bin), which can run code when read; "
                f"only safetensors are read: save it again with safe_serialization=True"
            )
        raise PolicyLoadError(
            f"{path} is no adapter: expected {' and '.join(ADAPTER_FILES)}, found {_listing(path)}"
        )
    _check_safetensors(path / ADAPTER_FILES[1])
    _check_sums(path, "restore it from a backup, or train it again")
    if not (path / FACTS).is_file():
        return {}
    try:
        facts = json.loads((path / FACTS).read_text("utf-8"))
    except ValueError as error:
        raise PolicyLoadError(
            f"{path / FACTS} is not readable JSON ({error}): copy the adapter again"
        ) from error
    if not isinstance(facts, dict):
        raise PolicyLoadError(f"expected an object in {path / FACTS}, found {type(facts).__name__}")
    return facts


def base_check(
    what: str,
    facts: Mapping[str, Any],
    base_model: str,
    found: str,
    files: Mapping[str, str] | None = None,
) -> None:
    """Raises PolicyLoadError where `what` was trained on another base than the one whose hash is `found`.

    The message names those of the base's `files` (`base_files`) that are others. What notes no hash passes.
    """
    expected = str(facts.get("base_model_hash") or "")
    if expected and expected != found:
        raise PolicyLoadError(
            f"{what} was trained on {facts.get('base_model')!r} ({expected[:19]}…), but {base_model!r} is "
            f"{found[:19]}…{base_changes(facts, files or {})}: it only works with its own base model. Give that one, "
            "or train it again"
        )


def base_changes(facts: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """Files in which a base differs from the one an adapter was trained on, as words to add to a message."""
    before = facts.get("base_files")
    if not isinstance(before, dict) or not before or not files:
        return ""
    changed = [name for name in sorted(before.keys() | files.keys()) if before.get(name) != files.get(name)]
    return f" (changed since: {', '.join(changed[:4])})" if changed else ""


def model_located(base_model: str) -> str:
    """A directory that holds a model, or a hub name."""

    source = resolve_base_model(base_model)
    path = Path(source).expanduser()
    looks_like_path = (
        path.exists() or path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1
    )
    if not looks_like_path:
        return source
    if not path.is_dir():
        raise PolicyLoadError(
            f"expected a model directory at {path}, found {'a file' if path.exists() else 'none'}"
        )
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise PolicyLoadError(
            f"{path} is an adapter, not a base model: give its base model, and it as the adapter"
        )
    weights = list(path.glob("*.safetensors"))
    if not weights and (list(path.glob("*.bin")) or list(path.glob("*.pt"))):
        raise PolicyLoadError(
            f"{path} holds its weights as pickles ({_listing(path)}), which can run code when read; "
            f"only safetensors are read: convert it with model.save_pretrained(..., safe_serialization=True)"
        )
    if not weights or not (path / "config.json").is_file():
        raise PolicyLoadError(
            f"{path} is no model: expected config.json and *.safetensors, found {_listing(path)}"
        )
    for file in weights:
        _check_safetensors(file)
    _check_sums(path, "copy or download the model again")
    return str(path)


def _check_safetensors(file: Path) -> None:
    try:
        with safe_open(file, framework="pt"):
            pass  # the header names every tensor's place, so a cut file is noticed without reading the weights
    except (SafetensorError, OSError) as error:
        raise PolicyLoadError(
            f"{file} is no whole safetensors file ({error}): copy or download it again"
        ) from error


def _check_sums(folder: Path, remedy: str) -> None:
    """Compare a folder with the sums recorded beside its files. Raises PolicyLoadError naming the file."""
    try:
        sums_check(folder, remedy)
    except FileDamaged as damage:
        raise PolicyLoadError(str(damage)) from damage


def _listing(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    return (
        ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        if names
        else "nothing"
    )
