"""A run's own folder: it can be written, nobody else's run is in it, and a resumed run is the one that began there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.training.progress import checkpoint_last
from rl.training.result import TrainingRefused


def folder_prepare(output_dir: Path, *, resume: bool) -> tuple[Path | None, list[str]]:
    """Make `output_dir` with its `checkpoints/`; return the checkpoint to go on from (None: start), and notes.

    Raises TrainingRefused for a folder that cannot be written, or holds an earlier run's checkpoints unless `resume`.
    """
    checkpoints = output_dir / "checkpoints"
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        probe = checkpoints / f".writable.{os.getpid()}"  # each process of a launch makes its own
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise TrainingRefused(
            f"expected a folder that can be written at {output_dir}, found {error.strerror}: "
            f"choose another or change its permissions"
        ) from error
    if resume:
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


def same_run_check(output_dir: Path, now: Mapping[str, Any], *, resumed: bool, main: bool) -> None:
    """A resumed run must be the one that was interrupted, or its steps and data order would not be.

    `now` says what the run is made of, its `recipe` as a dict of knobs; a run that begins has it written down by its
    `main` process. Raises TrainingRefused naming what differs.
    """
    file = output_dir / "run.json"
    if not resumed:
        if main:
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
            f"cannot resume {output_dir}: it was started with other {', '.join(different)}; "
            f"start a new run, or give what it was started with"
        )
