"""A warm interpreter that forks walled-in programs, and the pipes to them. One server per process of ours."""

from __future__ import annotations

import atexit
import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.rewards import jail
from rl.rewards.sandbox import PROBE, IsolationUnavailable, Limits, isolation_fault
from rl.rewards.syscalls import filter_program

SERVER = Path(__file__).parent / "sandbox_programs" / "server.py"
FIRST_UID, UIDS = 60_000, 4_000
"""Users that programs run as where the server is root's: one each, so that the limit of processes is each one's own."""

GRACE_S = 2.0
"""Seconds beyond its wall time after which a program that said nothing is given up."""


class JailServer:
    """Starts programs behind the walls of `rl.rewards.jail`, a few milliseconds each."""

    def __init__(self) -> None:
        """Raises IsolationUnavailable where the walls cannot be built, or do not hold."""
        self.owner = os.getpid()
        self.folder = Path(tempfile.mkdtemp(prefix="ratchet-sandbox-"))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603
                [str(Path(sys.executable).resolve()), "-I", str(SERVER), str(jail.__file__), str(self.folder)],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=jail.VARIABLES,
                start_new_session=True,
            )  # fmt: skip
        self.control = ours
        self.lock = threading.Lock()
        self.numbers = itertools.count()
        self.filter = base64.b64encode(filter_program(os.uname().machine)).decode()
        self.control.settimeout(30)
        if self.control.recv(16) != b"ready":
            raise IsolationUnavailable("code is not run here: the server of the sandbox did not start")

    def start(
        self,
        role: str,
        program: Mapping[str, Any],
        limits: Limits,
        fds: Sequence[int],
        *,
        extra_s: float = 0.0,
    ) -> None:
        """Start a program of a role (`script`, `answer`, `tests`); `fds`: its lifeline, source, target[, verdict].

        It ends with its lifeline, or after the wall time and `extra_s`.
        """
        file = os.memfd_create("program")
        try:
            os.write(file, json.dumps(program).encode())
            os.lseek(file, 0, os.SEEK_SET)
            with self.lock:
                request = {
                    "role": role, "memory_mb": limits.memory_mb, "cpu_s": limits.cpu_s, "file_mb": limits.file_mb,
                    "processes": limits.processes, "wall_s": limits.wall_s + extra_s, "filter": self.filter,
                    "uid": FIRST_UID + next(self.numbers) % UIDS,
                }  # fmt: skip
                socket.send_fds(self.control, [json.dumps(request).encode()], [fds[0], file, *fds[1:]])
        finally:
            os.close(file)

    @property
    def alive(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        self.control.close()
        if self.owner == os.getpid():
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait()
            shutil.rmtree(self.folder, ignore_errors=True)


_server: JailServer | None = None
_starting = threading.Lock()


def server() -> JailServer:
    """This process's server, started and tried when it is first asked for. Raises IsolationUnavailable."""
    global _server
    with _starting:
        if _server is None or not _server.alive:
            fault = isolation_fault()
            if fault:
                raise IsolationUnavailable(
                    f"code is not run here, because it cannot be isolated: {fault}. "
                    "Linux with user namespaces (or root) is needed"
                )
            started = JailServer()
            with tempfile.NamedTemporaryFile("w", prefix="ratchet-outside-") as outside:
                result = script_run(started, PROBE.format(outside=outside.name), "", Limits(wall_s=20.0))
            if result.strip() != "walled in":
                started.close()
                raise IsolationUnavailable(
                    f"code is not run here: the walls do not hold ({result.strip()[-300:]})"
                )
            atexit.register(started.close)
            _server = started
        return _server


def script_run(at: JailServer, code: str, given: str, limits: Limits) -> str:
    """Standard output of a Python program, at most `limits.output_bytes`, given a standard input."""
    with Pipes() as pipes:
        alive, hold = pipes.make()
        source = os.memfd_create("input")
        pipes.add(source)
        os.write(source, given.encode("utf-8", "surrogatepass"))
        os.lseek(source, 0, os.SEEK_SET)
        output, target = pipes.make()
        at.start("script", {"code": code}, limits, [alive, source, target])
        pipes.close(alive, source, target)
        data = read_all(output, limits.output_bytes, time.monotonic() + limits.wall_s + GRACE_S)
        pipes.close(hold)
    return data.decode("utf-8", "replace")


def tests_run(at: JailServer, code: str, tests: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """The verdict of tests on a program, from a process that runs no line of the program; {} where there is none."""
    with Pipes() as pipes:
        alive, hold = pipes.make()
        calls, ask = pipes.make()
        replies, reply = pipes.make()
        verdict, say = pipes.make()
        at.start("answer", {"code": code}, limits, [alive, calls, reply])
        at.start("tests", tests, limits, [alive, replies, ask, say], extra_s=GRACE_S / 2)
        pipes.close(alive, calls, reply, replies, ask, say)
        data = read_all(verdict, 1 << 16, time.monotonic() + limits.wall_s + GRACE_S)
        pipes.close(hold)
    try:
        response = json.loads(data)
    except ValueError:
        return {}
    return response if isinstance(response, dict) else {}


class Pipes:
    """File descriptors that are closed at the end, those still open."""

    def __init__(self) -> None:
        self.open: set[int] = set()

    def make(self) -> tuple[int, int]:
        """A pipe: where it is read, where it is written."""
        pair = os.pipe2(os.O_CLOEXEC)
        self.open.update(pair)
        return pair

    def add(self, fd: int) -> None:
        self.open.add(fd)

    def close(self, *fds: int) -> None:
        for fd in fds:
            self.open.discard(fd)
            os.close(fd)

    def __enter__(self) -> Pipes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(*list(self.open))


def read_all(fd: int, most: int, until: float) -> bytes:
    """Bytes read until the end, at most so many and not beyond a time (monotonic)."""
    data = b""
    while len(data) < most and (left := until - time.monotonic()) > 0:
        if select.select([fd], [], [], left)[0]:
            chunk = os.read(fd, 65536)
            if not chunk:
                break
            data += chunk
    return data[:most]
