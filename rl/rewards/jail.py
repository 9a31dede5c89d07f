"""Runs as its own program: isolates itself, then runs one command. Standard library only.

    python -I jail.py '{"command": [...], "work": DIR, "memory_mb": ..., "cpu_s": ..., "processes": ...,
    "file_mb": ..., "filter": ...}'

It makes new user (unless root), mount, process, network, IPC and host-name namespaces; a root file system in memory
with the system's programs read-only and an empty work folder; limits; no capabilities, and the rights of nobody if
started as root; a system call filter that prevents further namespaces. If any step fails it exits with CANNOT_ISOLATE
before the command runs: it never runs less isolated than asked.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import resource
import shutil
import signal
import struct
import sys
from pathlib import Path
from typing import Any

CANNOT_ISOLATE = 97
"""Exit status if the command was not run."""

CLONE = {
    "mount": 0x00020000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
SECCOMP_MODE_FILTER = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITY_VERSION = 0x20080522
NOBODY_UID = 65534
VARIABLES = {"PATH": "/usr/bin:/bin", "HOME": "/box", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}  # noqa: S108
"""Environment of the sandboxed program."""

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raises OSError for a failed call of the C library."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: Path, kind: str | None, flags: int, options: str | None = None) -> None:
    check(
        libc.mount(
            source.encode(),
            str(target).encode(),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            options.encode() if options else None,
        ),
        f"mount {source} on {target}",
    )


def namespaces(root: bool) -> None:
    """Leaves the host's processes, network, mounts, IPC and host name; without root rights through a user namespace."""
    uid, gid = os.getuid(), os.getgid()
    flags = CLONE["mount"] | CLONE["uts"] | CLONE["ipc"] | CLONE["pid"] | CLONE["net"]
    check(libc.unshare(flags if root else flags | CLONE["user"]), "unshare")
    if not root:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def bind_read_only(source: Path, root: Path) -> None:
    """Shows a folder or file of the host, read-only, at the same path under the new root."""
    target = root / source.relative_to("/")
    if source.is_symlink():  # /bin and /lib are links into /usr on most systems
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source.readlink())
        return
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount(str(source), target, None, MS_BIND | MS_REC)
    mount(
        "none",
        target,
        None,
        MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | (MS_NODEV if source.is_dir() else 0),
    )


def new_root(work: Path, file_mb: int) -> None:
    """Builds the root file system: the system's programs, a few devices, and /box with the files of `work`."""
    root = work / "root"
    root.mkdir(exist_ok=True)  # programs of one server share the place: each mounts a root of its own there
    mount("none", Path("/"), None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={file_mb}m,mode=755")
    shown = {Path(p) for p in ("/usr", "/bin", "/lib", "/lib64")} | {Path(sys.base_prefix)}
    inside = {
        path for path in shown if not any(other != path and path.is_relative_to(other) for other in shown)
    }
    for path in sorted(inside):
        if path.exists():
            bind_read_only(path, root)
    for device in ("null", "zero", "urandom"):
        bind_read_only(Path("/dev") / device, root)
    for folder in ("box", "tmp", "old"):
        (root / folder).mkdir()
        (root / folder).chmod(0o777)
    for file in work.iterdir():
        if file.is_file():
            shutil.copyfile(file, root / "box" / file.name)
    os.chdir(root)
    number = PIVOT_ROOT[os.uname().machine]
    check(libc.syscall(ctypes.c_long(number), b".", b"old"), "pivot_root")
    os.chdir("/box")
    check(libc.umount2(b"/old", MNT_DETACH), "umount /old")
    Path("/old").rmdir()


def limits(asked: dict[str, Any]) -> None:
    """Sets the limits of a process, which its children inherit."""
    megabyte = 1 << 20
    for kind, value in (
        (resource.RLIMIT_AS, asked["memory_mb"] * megabyte),
        (resource.RLIMIT_CPU, asked["cpu_s"]),
        (resource.RLIMIT_NPROC, asked["processes"]),
        (resource.RLIMIT_FSIZE, asked["file_mb"] * megabyte),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_STACK, 64 * megabyte),
    ):
        resource.setrlimit(kind, (value, value))


def give_up_rights(root: bool, uid: int = NOBODY_UID) -> None:
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails beyond the last one there is
    if root:
        os.setgroups([])
        os.setresgid(NOBODY_UID, NOBODY_UID, NOBODY_UID)
        os.setresuid(uid, uid, uid)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def capabilities_drop() -> None:
    """Drops every capability at once: a program that is not started anew (execve) would keep them."""
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    number = CAPSET[os.uname().machine]
    check(libc.syscall(ctypes.c_long(number), header, bytes(24)), "capset")


class Program(ctypes.Structure):
    """struct sock_fprog of the kernel."""

    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def refuse_calls(code: bytes) -> None:
    """Sets a seccomp filter (`rl.rewards.sandbox`) for this process and its children; needs no_new_privs."""
    buffer = ctypes.create_string_buffer(code, len(code))
    program = Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "seccomp")


def main() -> int:
    order = json.loads(sys.argv[1])
    root = os.getuid() == 0
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        namespaces(root)
    except (OSError, KeyError) as error:
        sys.stderr.write(f"cannot isolate: {error}\n")
        return CANNOT_ISOLATE
    init = os.fork()  # the first process of the new namespace: when it ends, the kernel ends all others in it
    if init:
        return os.waitstatus_to_exitcode(os.waitpid(init, 0)[1]) % 256
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        new_root(Path(order["work"]), order["file_mb"])
    except (OSError, KeyError) as error:
        sys.stderr.write(f"cannot isolate: {error}\n")
        os._exit(CANNOT_ISOLATE)
    child = os.fork()  # not the first process itself: that one would survive its own limits' signals
    if child == 0:
        try:
            limits(order)
            give_up_rights(root)
            refuse_calls(base64.b64decode(order["filter"]))
            os.execve(order["command"][0], order["command"], VARIABLES)  # noqa: S606
        except (OSError, KeyError, ValueError) as error:
            sys.stderr.write(f"cannot isolate: {error}\n")
        os._exit(CANNOT_ISOLATE)
    status = 0
    while True:
        pid, found = os.waitpid(-1, 0)
        if pid == child:
            status = found
            break
    code = os.waitstatus_to_exitcode(status)
    os._exit(128 - code if code < 0 else code)


if __name__ == "__main__":
    sys.exit(main())
