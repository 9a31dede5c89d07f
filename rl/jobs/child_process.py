"""Processes of the workers: one child per job, in a group of its own, one job per device, none left behind.

Adding a base model is such a job: a download and a conversion of a minute, which no web request waits for.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from django.conf import settings
from django_q.tasks import async_task

from backend.installation import command_arguments
from rl.base_models.service import addition_note, addition_of, models_home
from rl.jobs.supervisor import dies_with_parent

logger = logging.getLogger("rl.jobs.child_process")


@contextmanager
def device() -> Iterator[int]:
    """Hold this machine's device; waits for whoever has it. Gives a file descriptor that a child inherits.

    The lock belongs to all who have the descriptor: a child that outlives its worker keeps the device to itself.
    """
    # machines share the data folder, and not their devices
    path = settings.RATCHET_HOME / "cache" / f"device-{socket.gethostname()}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def command_line(arguments: list[str]) -> list[str]:
    """The words that start a command of this project; a training goes through TRAIN_LAUNCHER where one is set."""
    launcher = settings.TRAIN_LAUNCHER if arguments[0].startswith("train_") else []
    return [*(launcher or [sys.executable]), *command_arguments(*arguments)]


def command_run(arguments: list[str], log: Path, *, uses_device: bool = True) -> int:
    """Run a command of this project as a child that holds the device; what it says is added to the log.

    uses_device: False of a command that trains nothing, which waits for no training.

    Returns its exit status; below 0 the signal that killed it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with device() if uses_device else nullcontext() as held, log.open("ab") as log_file:
        child = subprocess.Popen(  # noqa: S603
            command_line(arguments),
            cwd=settings.BASE_DIR,  # not where the worker was started: another app may have a package `backend` there
            stdout=log_file,
            stderr=log_file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is the worker's to pass on
            preexec_fn=dies_with_parent(),
            pass_fds=[] if held is None else [held],
        )
        try:
            return child.wait()
        except BaseException:
            # the worker is told to stop, or the job took longer than the cluster allows
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            raise


WAITS = "waits for a worker"


def base_model_add_dispatch(text: str) -> None:
    """Hand the adding of a base model to the workers, once; again where it failed."""
    addition = addition_of(text)
    if addition is None or addition.failed:
        addition_note(text, WAITS)
        async_task("rl.tasks.base_model_add", text, task_name=f"add {text}"[:100])


def base_model_add(text: str) -> str:
    """Add a base model in a process of its own, which notes how far it is. Returns what it said last."""
    status = command_run(["model", "add", text], models_home() / ".adding" / "worker.log")
    addition = addition_of(text)
    if status and (addition is None or not addition.failed):
        addition = addition_note(text, f"the process that added it ended with {status}", failed=True)
    return addition.words if addition else "added"
