"""Checks of a run's folder: it can be written, holds no other run, and a resumed run is the one that began there."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from rl.training.progress import checkpoint_last
from rl.training.result import TrainingFailed, TrainingRefused
from rl.training.run_context import RunContext


def folder_prepare(context: RunContext[Any]) -> tuple[Path | None, list[str]]:
    """Make the run's folder with its `checkpoints/`; return the checkpoint to go on from (None: start), and notes.

    Raises TrainingRefused for a folder that cannot be written, or holds an earlier run's checkpoints while the run does
    not resume.
    """
    output_dir = context.output_dir
    checkpoints = output_dir / "checkpoints"
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        probe = checkpoints / f".writable.{os.getpid()}"  # each process of a launch makes its own
        try:
            probe.write_bytes(bytes(4096))  # a full disk still takes names
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise TrainingRefused(
            f"expected a folder that can be written at {output_dir}, found {error.strerror}: "
            f"free some space, choose another or change its permissions"
        ) from error
    if context.resume:
        checkpoint, notes = checkpoint_last(checkpoints)
        begins = (
            f"resuming from {checkpoint.name}" if checkpoint else "no whole checkpoint: starting at step 0"
        )
        return checkpoint, [*notes, begins]
    if any(checkpoints.glob("checkpoint-*")):
        raise TrainingRefused(
            f"expected a folder without checkpoints at {checkpoints}, found those of an earlier run: "
            f"resume that run, or give another folder"
        )
    return None, []


def same_run_check(context: RunContext[Any], now: Mapping[str, Any], *, resumed: bool) -> None:
    """A resumed run must be the one that was interrupted, or its steps and data order would not be.

    `now` says what the run is made of, its `recipe` as a dict of knobs; a new run's `main` process records it. Raises
    TrainingRefused naming what differs.
    """
    file = context.output_dir / "run.json"
    if not resumed:
        if context.main_process:
            file.write_text(json.dumps(now, indent=2) + "\n", "utf-8")
        return
    try:
        then = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingRefused(f"cannot resume: {file} is missing or broken ({error})") from error
    different = [name for name in now if then.get(name) != now[name]]
    if "recipe" in different and isinstance(then.get("recipe"), dict):
        different.remove("recipe")
        different += [
            f"{knob} ({then['recipe'].get(knob)!r}, now {value!r})"
            for knob, value in now["recipe"].items()
            if then["recipe"].get(knob) != value
        ]
    if different:
        raise TrainingRefused(
            f"cannot resume {context.output_dir}: it was started with other {', '.join(different)}; "
            f"start a new run, or give what it was started with"
        )


@contextlib.contextmanager
def failures_explained(context: RunContext[Any]) -> Iterator[None]:
    """Inside, running out of memory or disk is a TrainingFailed that says what to do; other errors pass."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingFailed(
            f"the accelerator ran out of memory: lower batch_size (now {context.recipe.batch_size}) or max_length "
            f"(now {context.recipe.max_length}), or use the small_gpu preset"
        ) from error
    except (OSError, SafetensorError, RuntimeError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        if not full and shutil.disk_usage(context.output_dir).free > 1 << 20:
            raise
        raise TrainingFailed(
            f"the disk of {context.output_dir} is full: free some space and resume; the last whole checkpoint is kept"
        ) from error
