"""Runs a model's code in a sandbox (built by `rl.rewards.jail`), or refuses to."""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import json
import os
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rl.rewards import jail


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


# --- System calls that sandboxed code may not make ---

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
AT_NUMBER, AT_ARCH, AT_FIRST = 0, 4, 16
"""Offsets of a call's number, its architecture and the low half of its first argument in seccomp_data
(linux/seccomp.h); both architectures are little-endian."""

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
"""Calls of the x32 ABI have their own numbers and are all refused."""
NAMESPACES = 0x7E020080
"""CLONE_NEW*: user, pid, net, ipc, uts, mount, cgroup, time."""
FAMILIES = (1, 2, 10)
"""Allowed sockets: unix, IPv4 and IPv6; the latter lead nowhere in an empty network namespace."""

# name -> numbers on x86_64 and aarch64 (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h)
REFUSED_CALLS: dict[str, tuple[int, int]] = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    # memory that outlives its mapping; the limit counts mapped memory only
    "shmget": (29, 194),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
}
CLONE, CLONE3, SOCKET = (56, 220), (435, 435), (41, 198)


def filter_program(machine: str) -> bytes:
    """The filter for a machine of ARCH as the kernel reads it: consecutive struct sock_filter."""
    index = list(ARCH).index(machine)
    code: list[tuple[int, int, int, int]] = [
        (LOAD, 0, 0, AT_ARCH),
        (JUMP_EQUAL, 1, 0, ARCH[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, AT_NUMBER),
    ]
    if machine == "x86_64":
        code += [(JUMP_AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    for numbers in REFUSED_CALLS.values():
        code += [(JUMP_EQUAL, 0, 1, numbers[index]), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    # its flags are in memory, which a filter cannot read; the C library then falls back to clone
    code += [(JUMP_EQUAL, 0, 1, CLONE3[index]), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    code += [
        (JUMP_EQUAL, 0, 4, CLONE[index]),
        (LOAD, 0, 0, AT_FIRST),
        (JUMP_BITS, 0, 1, NAMESPACES),
        (RETURN, 0, 0, ERRNO | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    families = [(JUMP_EQUAL, len(FAMILIES) - number, 0, family) for number, family in enumerate(FAMILIES)]
    code += [
        (JUMP_EQUAL, 0, 2 + len(FAMILIES), SOCKET[index]),
        (LOAD, 0, 0, AT_FIRST),
        *families,
        (RETURN, 0, 0, ERRNO | errno.EAFNOSUPPORT),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
