"""Web, workers and the clock as one program: started together, restarted when one dies, ended together."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import psutil
from django.conf import settings

from backend.installation import PROGRAM, command_arguments

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
BOOT_S = 300.0
"""A cluster that has not all of its processes after so long is replaced: on a busy machine they take minutes."""
STEADY_S = 60.0
"""A process that lived for so long starts over in PAUSE_S."""
SPAWN_S = 0.3
"""A cluster starts its three processes within this time. It replaces a dead one half a second later at the earliest."""

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


@dataclass
class Service:
    """One of the processes."""

    name: str
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
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


@dataclass
class Cluster(Service):
    """A cluster of django-q2: a sentinel that starts a worker, a monitor and a pusher, in this order.

    Worker and monitor hold the lock of their queue while they wait. Killed, they keep it, and whoever the sentinel
    starts in their place waits for ever. So the whole cluster is killed and started again. The pusher holds none.
    """

    readers: list[psutil.Process] = field(default_factory=list)
    """Its first worker and monitor."""

    def start(self) -> None:
        self.readers = []
        super().start()

    def check(self) -> None:
        if self.process is not None and self.process.poll() is None and self._reader_lost(self.process.pid):
            logger.warning("%s lost a process, and all of its processes are replaced", self.name)
            _signal_group(self.process.pid, signal.SIGKILL)
            self.process.wait()
        super().check()

    def _reader_lost(self, pid: int) -> bool:
        if not self.readers:
            crew = cluster_crew(pid)
            if len(crew) < 3:
                return time.monotonic() - self.started > BOOT_S
            if crew[-1].create_time() - crew[0].create_time() > SPAWN_S:
                return True  # one was replaced before the first look
            self.readers = crew[:2]
        return not all(map(_lives, self.readers))


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
    python, cluster = sys.executable, [sys.executable, *command_arguments("qcluster")]
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
        Cluster("workers", cluster),
        Cluster("training", ["/usr/bin/env", "Q_CLUSTER_NAME=training", *cluster]),
        Service("clock", [python, *command_arguments("online_learner", "watch", "--every", str(every_s))]),
    ]


def supervise(running: list[Service], stop: Callable[[], bool]) -> None:
    """Keep the services running until `stop()`; then end them and everything they started."""
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
        # a cluster told to stop waits for its training to end, and loses nothing when it does not
        number = signal.SIGKILL if isinstance(service, Cluster) else signal.SIGTERM
        _signal_group(service.process.pid, number)
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


def cluster_crew(pid: int) -> list[psutil.Process]:
    """Worker, monitor and pusher of the cluster with this process id, those that live, the oldest first."""
    family = _children(pid)
    sentinels = {process.pid for process in family if _ignore_ended(process.ppid) == pid}
    crew = [process for process in family if _ignore_ended(process.ppid) in sentinels and _lives(process)]
    return sorted(crew, key=lambda process: (process.create_time(), process.pid))


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
    return process.is_running() and bool(_ignore_ended(lambda: process.status() != psutil.STATUS_ZOMBIE))


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # all of them ended
