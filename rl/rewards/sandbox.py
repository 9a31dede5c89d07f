"""Runs a model's code in a sandbox (built by `rl.rewards.jail`), or refuses to."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rl.rewards import jail
from rl.rewards.syscalls import ARCH, filter_program


def interpreter() -> str:
    """Path of a Python that is visible inside the sandbox.

    That is the one a virtual environment was made from: `venv --copies` has its own interpreter in a hidden folder.
    """
    own = Path(sys.executable).resolve()
    original = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    return str(original if original.is_file() and not own.is_relative_to(sys.base_prefix) else own)


LANGUAGES = {
    "python": ("main.py", [interpreter(), "-I", "main.py"]),
    "shell": ("main.sh", ["/bin/sh", "main.sh"]),
}
"""Language -> its file, and the command that runs it."""


PROBE = """
import ctypes, os, socket
assert ctypes.CDLL(None).unshare(0x10000000) != 0, 'namespaces can be made inside'
assert not os.path.exists({outside!r}), 'files outside are seen'
assert not os.path.exists('/etc/passwd'), '/etc is seen'
assert not os.path.isdir('/proc/1'), 'processes are seen'
assert os.getpid() < 10, 'processes are shared'
try:
    socket.create_connection(('127.0.0.1', 9), 1)
except ConnectionRefusedError:
    raise AssertionError('the network is there')
except OSError:
    pass
print('walled in')
"""
"""Program that tests the sandbox from inside; `outside` names a file that must not be visible."""


class IsolationUnavailable(RuntimeError):
    """This machine cannot isolate code; nothing was run."""


@dataclass(frozen=True)
class Limits:
    """Limits of a run in the sandbox. Memory is per process, with at most `processes` of them."""

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_mb: int = 512
    processes: int = 16
    file_mb: int = 16
    output_bytes: int = 64_000


@dataclass(frozen=True)
class SandboxResult:
    """Result of a run in the sandbox."""

    exit_code: int | None
    """None if it was stopped."""
    output: str
    """Both streams as they came, at most `Limits.output_bytes`."""
    exceeded_limit: str
    """Limit that ended it: `wall time`, `cpu time`, `output`; empty if it ended by itself."""
    seconds: float

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.exceeded_limit


def run(
    code: str, language: str = "python", limits: Limits | None = None, *, stdin: str = ""
) -> SandboxResult:
    """Runs code in its own folder without network; `stdin` is its standard input.

    Raises IsolationUnavailable if the sandbox cannot be built, ValueError for another language.
    """
    if language not in LANGUAGES:
        raise ValueError(f"a language is {' or '.join(LANGUAGES)}, found {language!r}")
    fault = isolation_fault()
    if fault:
        raise IsolationUnavailable(
            f"code is not run here, because it cannot be isolated: {fault}. "
            "Linux with user namespaces (or root) is needed"
        )
    return _run(code, language, limits or Limits(), stdin)


@functools.cache
def isolation_fault() -> str:
    """Why code cannot be isolated on this machine; empty if it can. Tested once per process, from inside."""
    if not sys.platform.startswith("linux"):
        return f"namespaces are Linux's, this is {sys.platform}"
    if os.uname().machine not in jail.PIVOT_ROOT or os.uname().machine not in ARCH:
        return f"an unknown processor, {os.uname().machine}"
    with tempfile.NamedTemporaryFile("w", prefix="ratchet-outside-") as outside:
        probe = PROBE.format(outside=outside.name)
        ran = _run(probe, "python", Limits(wall_s=20.0))
    return (
        ""
        if ran.ok and ran.output.strip() == "walled in"
        else (ran.output.strip() or f"exit {ran.exit_code}")[-300:]
    )


def _run(code: str, language: str, limits: Limits, stdin: str = "") -> SandboxResult:
    name, command = LANGUAGES[language]
    work = Path(tempfile.mkdtemp(prefix="ratchet-sandbox-"))
    try:
        (work / name).write_text(code, "utf-8", "surrogatepass")
        order = {
            "command": [str(Path(command[0]).resolve()), *command[1:]],
            "work": str(work),
            "memory_mb": limits.memory_mb,
            "cpu_s": limits.cpu_s,
            "processes": limits.processes,
            "file_mb": limits.file_mb,
            "filter": base64.b64encode(filter_program(os.uname().machine)).decode(),
        }
        began = time.monotonic()
        with tempfile.TemporaryFile() as given:
            given.write(stdin.encode("utf-8", "surrogatepass"))
            given.seek(0)
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-I", str(Path(jail.__file__)), json.dumps(order)],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={},
                start_new_session=True,
            )
        output, stopped = _watch(process, limits, began)
        code_found: int | None = process.returncode
        if not stopped and code_found == 128 + signal.SIGXCPU:
            stopped = "cpu time"
        if not stopped and code_found == 128 + signal.SIGKILL:
            stopped = "cpu time" if time.monotonic() - began >= limits.cpu_s else "memory"
        return SandboxResult(
            None if stopped else code_found, output, stopped, round(time.monotonic() - began, 3)
        )
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _watch(process: subprocess.Popen[bytes], limits: Limits, began: float) -> tuple[str, str]:
    """Reads its output until it ends, prints too much or takes too long; then kills everything it started."""
    assert process.stdout is not None
    chunks: list[bytes] = []
    size, limit = 0, ""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not limit:
            left = began + limits.wall_s - time.monotonic()
            if left <= 0:
                limit = "wall time"
            elif selector.select(min(left, 0.5)):
                chunk = os.read(process.stdout.fileno(), 65536)
                if not chunk:
                    break
                chunks.append(chunk)
                size += len(chunk)
                if size > limits.output_bytes:
                    limit = "output"
            elif process.poll() is not None:
                break  # ended, but something kept the pipe: it ends with its namespace
    with contextlib.suppress(ProcessLookupError):  # it ended by itself
        os.killpg(process.pid, signal.SIGKILL)  # the first process of the namespace takes all others with it
    process.wait()
    process.stdout.close()
    text = b"".join(chunks)[: limits.output_bytes].decode("utf-8", "replace")
    return text, limit
