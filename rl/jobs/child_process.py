"""Processes of the workers: one child per job, in a group of its own, one job per device, none left behind."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from django.conf import settings

from backend.installation import command_arguments

logger = logging.getLogger("rl.jobs.child_process")

PR_SET_PDEATHSIG = 1


def dies_with_parent() -> Callable[[], None] | None:
    """Function for a child to call before it becomes its program, so that the kernel sends it TERM when its
    parent dies.

    Linux has it; elsewhere None, and a child outlives a parent that was killed.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return ask


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


def command_run(arguments: list[str], log: Path) -> int:
    """Run a command of this project as a child that holds the device; what it says is added to the log.

    Returns its exit status; below 0 the signal that killed it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with device() as held, log.open("ab") as log_file:
        child = subprocess.Popen(  # noqa: S603
            command_line(arguments),
            cwd=settings.BASE_DIR,  # not where the worker was started: another app may have a package `backend` there
            stdout=log_file,
            stderr=log_file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is the worker's to pass on
            preexec_fn=dies_with_parent(),
            pass_fds=[held],
        )
        try:
            return child.wait()
        except BaseException:
            # the worker is told to stop, or the job took longer than the cluster allows
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            raise
