"""Progress reports of a run, and checksums by which a resumed run verifies its checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Protocol

from rl.checksums import file_sum

COMPLETE = "complete.json"
"""Written last into a checkpoint: file name -> [bytes, SHA-256]. Without it, or where one differs, it is not whole."""


class TrainListener(Protocol):
    """Listener of a run: a progress bar, a database row, a test. Called on rank 0 only."""

    def on_start(self, total_steps: int) -> None:
        """Before the first step, with the optimiser steps the whole run takes."""

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """A row of metrics, every `logging_steps`; keys starting with `eval_` come from the eval split."""

    def on_step(self, step: int, total: int) -> None:
        """After each optimiser step."""

    def on_phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Report the phase that begins, in words ("loading the model"); or how far it is, where a total is known."""

    def on_note(self, text: str) -> None:
        """Something a person should know (truncation, a checkpoint skipped, 4-bit not available)."""

    def should_stop(self) -> bool:
        """True once a stop was requested: the run keeps a checkpoint and ends as `cancelled`."""

    def hold(self) -> None:
        """Put off stop requests: a step is being written into weights, optimizer and checkpoint."""

    def release(self) -> None:
        """Let stop requests interrupt again, anywhere. Raises KeyboardInterrupt for one that was put off."""


class Silent:
    """A TrainListener that listens to nothing and never stops."""

    def on_start(self, total_steps: int) -> None: ...

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None: ...

    def on_step(self, step: int, total: int) -> None: ...

    def on_phase(self, name: str, done: int = 0, total: int = 0) -> None: ...

    def on_note(self, text: str) -> None: ...

    def should_stop(self) -> bool:
        return False

    def hold(self) -> None: ...

    def release(self) -> None: ...


def checkpoint_seal(path: Path) -> None:
    """Note size and sum of every file, so that a copy cut off later, or a flipped byte, is noticed too."""
    sizes = {str(file.relative_to(path)): [file.stat().st_size, file_sum(file)] for file in _files(path)}
    half = path / f".{COMPLETE}.{os.getpid()}"
    half.write_text(json.dumps(sizes, indent=1), "utf-8")
    half.replace(path / COMPLETE)


def checkpoint_is_whole(path: Path) -> bool:
    """True if a sealed checkpoint still holds every file as it was; of one sealed by sizes alone, at its
    size."""
    try:
        sizes = json.loads((path / COMPLETE).read_text("utf-8"))
        return bool(sizes) and all(_is_as_sealed(path / name, sealed) for name, sealed in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _is_as_sealed(file: Path, sealed: int | list[Any]) -> bool:
    size, digest = sealed if isinstance(sealed, list) else (sealed, None)
    return file.stat().st_size == size and (digest is None or file_sum(file) == digest)


def checkpoint_last(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint-<step> in `folder`, and a note on each newer, half-written one it removed."""
    found = sorted(
        (path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()),
        key=lambda path: int(path.name.removeprefix("checkpoint-")),
        reverse=True,
    )
    notes: list[str] = []
    for path in found:
        if checkpoint_is_whole(path):
            return path, notes
        # left in place it would count as one of the checkpoints kept, and push a whole one out; every process of a
        # launch comes here, and one is enough to remove it
        shutil.rmtree(path, ignore_errors=True)
        notes.append(f"{path.name} was only half-written or is damaged, and is not used")
    return None, notes


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
