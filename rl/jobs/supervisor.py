"""Web, workers and the clock as one program: started together, restarted when one dies, ended together."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import psutil
from django.conf import settings

from backend.installation import PROGRAM, command_arguments
from rl.jobs.child_process import dies_with_parent

logger = logging.getLogger("rl.jobs.supervisor")

LOOK_S = 0.5
"""Seconds between two looks at the processes."""
PORT_WAIT_S = 5.0
"""Seconds a port may still be held by a server that ends."""
STOP_S = 30.0
"""Seconds the processes and their children have to end by themselves: a training keeps a checkpoint."""
WEB_THREADS = 256
"""Requests one web process has in hand at once: most of them wait for a model. A thread begins when it is needed."""
PAUSE_S = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0)
"""Before a process that died is started again, by how often it died in a row."""
STEADY_S = 60.0
"""A process that lived for so long starts over in PAUSE_S."""


@dataclass
class Service:
    """One of the processes."""

    name: str
    command: list[str]
    at_once: bool = False
    """Ended by KILL: a cluster told to stop waits for its training to end, and loses nothing when it does not."""
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    deaths: int = 0
    again_at: float = 0.0

    def start(self) -> None:
        self.process = subprocess.Popen(  # noqa: S603
            self.command,
            cwd=settings.BASE_DIR,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a group of its own: stopped with its children, by us, in order
            preexec_fn=dies_with_parent(),
        )
        self.started = time.monotonic()
        logger.info("%s started as process %s", self.name, self.process.pid)

    def check(self) -> None:
        """Start it again where it died and its pause is over."""
        now = time.monotonic()
        if self.process is not None and self.process.poll() is not None:
            self.deaths = 0 if now - self.started > STEADY_S else self.deaths
            pause = PAUSE_S[min(self.deaths, len(PAUSE_S) - 1)]
            logger.warning("%s ended with %s; again in %g s", self.name, self.process.returncode, pause)
            _signal_group(self.process.pid, signal.SIGKILL)  # what it left behind
            self.process, self.deaths, self.again_at = None, self.deaths + 1, now + pause
        if self.process is None and now >= self.again_at:
            self.start()


class PortTaken(ValueError):
    """Somebody else listens there; the message says where, and what to do."""


def port_wait(host: str, port: int) -> None:
    """Return once the port can be listened at: a server that just ended may hold it a moment. Raises PortTaken."""
    deadline = time.monotonic() + PORT_WAIT_S
    while True:
        try:
            with socket.create_server((host, port)):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise PortTaken(
                    f"cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}): stop the program "
                    f"there, or use another port: {PROGRAM} serve --port {port + 1}"
                ) from None
        time.sleep(0.1)


def port_answers(host: str, port: int) -> bool:
    """True if something listens there."""
    try:
        with socket.create_connection(("127.0.0.1" if host == "0.0.0.0" else host, port), timeout=0.2):  # noqa: S104
            return True
    except OSError:
        return False


def services(
    port: int, host: str, web_workers: int, every_s: float, web_threads: int = WEB_THREADS
) -> list[Service]:
    """gunicorn, the cluster that does what is short, the cluster that trains, and the clock."""
    python, cluster = sys.executable, command_arguments("qcluster")
    return [
        Service(
            "web",
            [
                python,
                "-m",
                "gunicorn",
                "backend.wsgi",
                "--bind",
                f"{host}:{port}",
                "--workers",
                str(web_workers),
                "--threads",
                str(web_threads),
                # longer than a proxy keeps an idle connection (Caddy: 2 minutes): it never asks on a closed one
                "--keep-alive",
                "130",
                # its socket lies in the home folder, one for all servers of a person, and nothing here asks it
                "--no-control-socket",
                "--log-level",
                "warning",
            ],
        ),
        Service("workers", [python, *cluster], at_once=True),
        Service("training", ["/usr/bin/env", "Q_CLUSTER_NAME=training", python, *cluster], at_once=True),
        Service("clock", [python, *command_arguments("online_learner", "watch", "--every", str(every_s))]),
    ]


def supervise(running: list[Service], stop: Callable[[], bool]) -> None:
    """Keep the services running until `stop()`; then end them and everything they started."""
    # counts of processes that are long gone
    shutil.rmtree(settings.PROMETHEUS_MULTIPROC_DIR, ignore_errors=True)
    try:
        while not stop():
            for service in running:
                service.check()
            time.sleep(LOOK_S)
    finally:
        _end(running)


def _end(running: list[Service]) -> None:
    """End every group, tell children in groups of their own (trainings) to stop, then KILL what is left."""
    processes: list[psutil.Process] = []
    for service in running:
        if service.process is None or service.process.poll() is not None:
            continue
        children = _children(service.process.pid)
        processes += children
        for child in children:
            if _ignore_ended(partial(os.getpgid, child.pid)) != service.process.pid:
                _ignore_ended(child.terminate)
        _signal_group(service.process.pid, signal.SIGKILL if service.at_once else signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        served = [service.process for service in running if service.process is not None]
        if all(process.poll() is not None for process in served) and not any(map(_lives, processes)):
            return
        time.sleep(0.1)
    for service in running:
        if service.process is not None:
            _signal_group(service.process.pid, signal.SIGKILL)
    for process in filter(_lives, processes):
        logger.warning("process %s did not end in %g s and is killed", process.pid, STOP_S)
        _ignore_ended(process.kill)


def _children(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _ignore_ended(act: Callable[[], object]) -> object:
    """A process may end at any moment, which is what is wanted of it."""
    try:
        return act()
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False


def _lives(process: psutil.Process) -> bool:
    return bool(_ignore_ended(lambda: process.status() != psutil.STATUS_ZOMBIE))


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # all of them ended
