"""Phases of a training before it has its dataset, and who is told of them."""

from __future__ import annotations

from collections.abc import Callable

from rl.jobs.lifecycle import ProgressCallback

HARDWARE, READING = "looking at the hardware", "reading the feedback"


def phase_callback(progress: ProgressCallback | None) -> Callable[[str], None]:
    """Callback that names a phase before there is a run to write it into."""

    def phase(name: str) -> None:
        if progress is not None:
            progress(0, 0, name)

    return phase
