"""Starts sandboxed programs quickly: a warm interpreter that forks, each child isolated before it runs.

    python -I server.py JAIL.py FOLDER     (control socket on standard input)

A request is one JSON message with file descriptors: the lifeline (closing it ends everything), the program (a file),
source and target of its data, and for tests the pipe of the verdict. `jail.py` isolates each child; this process itself
runs only these files.
"""

from __future__ import annotations

import array
import base64
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any

PACKAGE = "rl.rewards.sandbox_programs"
FDS = 5
LIFELINE, PROGRAM, SOURCE, TARGET, VERDICT = range(FDS)

WARM = (
    "ast",
    "bisect",
    "cmath",
    "collections",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "random",
    "re",
    "string",
    "traceback",
    "typing",
    "unittest",
)
"""Modules that answers and tests often import, imported once here."""


def module_load(name: str, path: Path) -> object:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package_load(folder: Path) -> None:
    """Loads the programs as modules of `rl.rewards.sandbox_programs`, without the packages above it."""
    for name in ("rl", "rl.rewards", PACKAGE):
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = []
    for name in ("wire", "cases", "answer_host", "tests_host", "script_host"):
        module_load(f"{PACKAGE}.{name}", folder / f"{name}.py")


def child(jail: Any, asked: dict[str, Any], fds: list[int], folder: Path) -> None:
    """Isolates this process and runs the program; the first process of the namespace waits and watches."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    jail.libc.prctl(jail.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    root = os.getuid() == 0
    jail.namespaces(root)
    init = os.fork()
    if init:
        os.waitpid(init, 0)
        return
    jail.libc.prctl(jail.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    jail.new_root(folder, asked["file_mb"])
    worker = os.fork()
    if worker == 0:
        os.close(fds[LIFELINE])
        serve_task(jail, asked, fds, root)
        os._exit(0)
    ended = os.pidfd_open(worker)
    for fd in fds[1:]:
        os.close(fd)
    # the lifeline has no data while the parent lives, and ends with it
    select.select([ended, fds[LIFELINE]], [], [], asked["wall_s"])
    os._exit(0)


def serve_task(jail: Any, asked: dict[str, Any], fds: list[int], root: bool) -> None:
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)
    with os.fdopen(fds[PROGRAM], "rb") as file:
        program = json.load(file)
    jail.limits(asked)
    jail.give_up_rights(root, asked["uid"])
    jail.capabilities_drop()
    jail.refuse_calls(base64.b64decode(asked["filter"]))
    role = sys.modules[f"{PACKAGE}.{asked['role']}_host"]
    role.run(program, *fds[SOURCE:])


def message(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request and its file descriptors; None if the caller is gone."""
    fds = array.array("i")
    data, extra, _, _ = control.recvmsg(65536, socket.CMSG_SPACE(FDS * fds.itemsize))
    for level, kind, held in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(held[: len(held) - len(held) % fds.itemsize])
    return (json.loads(data), list(fds)) if data else None


def main() -> None:
    here = Path(__file__).parent
    jail = module_load("jail", Path(sys.argv[1]))
    package_load(here)
    for name in WARM:
        __import__(name)
    control = socket.socket(fileno=0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel clears up after children
    control.send(b"ready")
    while (request := message(control)) is not None:
        task, fds = request
        if os.fork() == 0:
            control.detach()
            os.close(0)
            try:
                child(jail, task, fds, Path(sys.argv[2]))
            except BaseException as error:
                sys.stderr.write(f"cannot isolate: {type(error).__name__}: {error}\n")
            os._exit(0)
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    main()
