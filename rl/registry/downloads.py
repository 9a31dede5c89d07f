"""Exported files as downloads, with the commands that load each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rl import artifacts
from rl.models import Artifact
from rl.registry.service import home_path


@dataclass(frozen=True)
class Download:
    artifact: Artifact
    is_file: bool
    """False for a folder, or if the file is gone."""
    lines: tuple[str, ...] = ()
    """Commands for the folder that the file was saved to."""


def artifact_file(artifact: Artifact) -> Path | None:
    """The exported file, fetched if another server made it; None if it is a folder or gone. Raises StoreFailed."""
    path = home_path(artifact.path)
    if not path.exists():
        artifacts.fetch(artifact.path)
    return path if path.is_file() else None


def downloads_of(exported: Iterable[Artifact]) -> list[Download]:
    return [Download(one, _is_file(one), load_lines(one)) for one in exported]


def _is_file(artifact: Artifact) -> bool:
    path = home_path(artifact.path)
    elsewhere = artifacts.store() is not None and artifacts.stored(artifact.path).filter(path=artifact.path)
    return path.is_file() or bool(elsewhere and not path.exists())


def load_lines(artifact: Artifact) -> tuple[str, ...]:
    """Commands for llama.cpp and Ollama; empty for files of other programs."""
    file, name = Path(artifact.path).name, artifact.policy.name
    if not file.endswith(".gguf"):
        return ()
    if artifact.format == "gguf-lora":
        return (f"llama-server -m BASE.gguf --lora {file}",)
    return (
        f"llama-server -m {file}",
        f"echo 'FROM ./{file}' > Modelfile && ollama create {name} -f Modelfile",
    )
