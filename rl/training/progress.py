"""What a trainer tells the outside while it works, and the checkpoints it can trust when it starts again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Protocol

COMPLETE = "complete.json"
"""Written last into a checkpoint: file name -> bytes. Without it, or where a size differs, it is half-written."""


class TrainListener(Protocol):
    """Who follows a run: a progress bar, a database row, a test. Called on rank 0 only."""

    def on_start(self, total_steps: int) -> None:
        """Before the first step, with the optimiser steps the whole run takes."""

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """A row of metrics, every `logging_steps`; keys starting with `eval_` come from the eval split."""

    def on_step(self, step: int, total: int) -> None:
        """After each optimiser step."""

    def on_note(self, text: str) -> None:
        """Something a person should know (truncation, a checkpoint skipped, 4-bit not available)."""

    def should_stop(self) -> bool:
        """Asked after each step; True saves a checkpoint and ends the run as `cancelled`."""


class Silent:
    """A TrainListener that listens to nothing and never stops."""

    def on_start(self, total_steps: int) -> None: ...

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None: ...

    def on_step(self, step: int, total: int) -> None: ...

    def on_note(self, text: str) -> None: ...

    def should_stop(self) -> bool:
        return False


def checkpoint_seal(path: Path) -> None:
    """Note the size of every file, so that a copy cut off later is noticed too."""
    sizes = {str(file.relative_to(path)): file.stat().st_size for file in _files(path)}
    half = path / f".{COMPLETE}.{os.getpid()}"
    half.write_text(json.dumps(sizes, indent=1), "utf-8")
    half.replace(path / COMPLETE)


def checkpoint_is_whole(path: Path) -> bool:
    """Whether a sealed checkpoint still holds every file at its size."""
    try:
        sizes = json.loads((path / COMPLETE).read_text("utf-8"))
        return bool(sizes) and all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


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
        notes.append(f"{path.name} was only half-written and is not used")
    return None, notes


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
