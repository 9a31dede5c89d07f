"""The sandbox holds what tries to get out or to take too much, and the host does not notice."""

import ast
import dataclasses
import os
import socket
import subprocess
import threading
import time
import venv
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl.rewards import sandbox
from rl.rewards.base import RewardSample, reward_normalise
from rl.rewards.code_execution import FIRST_UID, CodeExecutionReward, script_run, server
from rl.rewards.sandbox import IsolationUnavailable, Limits

TIGHT = Limits(wall_s=2.0, cpu_s=1, memory_mb=256, processes=8, file_mb=4, output_bytes=20_000)
PATIENT = dataclasses.replace(TIGHT, wall_s=60.0)
"""For what ends by itself: on a busy machine a process may take seconds to begin."""

walled = pytest.mark.skipif(
    bool(sandbox.isolation_fault()), reason=f"no isolation here: {sandbox.isolation_fault()}"
)


def reward_of(code: str, **facts: Any) -> float:
    (value,) = CodeExecutionReward(enabled=True, limits=TIGHT).score(
        [RewardSample([], f"```python\n{code}\n```", "assistant", facts)]
    )
    assert value.raw is not None
    return value.raw


@walled
def test_code_that_passes_its_tests_earns_all() -> None:
    code = "def add(a, b):\n    return a + b"
    assert reward_of(code, tests="assert add(2, 3) == 5") == 2
    assert reward_of(code, tests="assert add(2, 3) == 6") == -2
    assert reward_of("print(6 * 7)", expected_output="42\n") == 2
    assert reward_of("print(6 * 7)", expected_output="43") == -2
    assert reward_of("print(int(input()) + 1)", tests=[{"input": "41\n", "output": "42\n"}]) == 2


@walled
def test_a_shell_runs_too() -> None:
    ran = sandbox.run("read x; echo $((x * 7)); pwd", "shell", PATIENT, stdin="6\n")
    assert ran.ok
    assert ran.output == "42\n/box\n"


HARM = {
    "fork bomb": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        True,
    ),
    "endless loop": ("while True:\n    pass", True),
    "sleep": ("import time\ntime.sleep(600)", True),
    "output flood": ("while True:\n    print('x' * 1000)", True),
    "10 GB": ("x = bytearray(10 << 30)", False),
    "a full disk": ("with open('f', 'wb') as f:\n    while True:\n        f.write(b'x' * 100_000)", False),
    "a file outside": ("print(open('/etc/passwd').read())", False),
    "a link outside": (
        "import os\nos.symlink('/../../../etc/passwd', '/box/l')\nprint(open('/box/l').read())",
        False,
    ),
    "writing to the system": ("open('/usr/bin/x', 'w')", False),
    "becoming root": ("import os\nos.setuid(0)\nos.setgid(0)\nopen('/usr/bin/x', 'w')", False),
    "the environment": (
        "import os\nraise SystemExit('SECRET_KEY' in os.environ or len(os.environ) > 8 or 3)",
        False,
    ),
}
"""What it tries -> the code, and whether it must be stopped (or fails by itself)."""


@pytest.mark.slow
@walled
@pytest.mark.parametrize("what", list(HARM))
def test_harm_is_contained_and_earns_nothing(what: str) -> None:
    code, stopped = HARM[what]
    before = {process.pid for process in psutil.process_iter()}
    ran = sandbox.run(code, "python", TIGHT if stopped else PATIENT)
    assert not ran.ok, ran
    assert bool(ran.exceeded_limit) == stopped, ran
    assert len(ran.output) <= TIGHT.output_bytes
    assert "root:" not in ran.output
    assert "walled" not in ran.output
    left = [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.pid not in before and "main.py" in (process.info["cmdline"] or [])
    ]
    assert psutil.wait_procs(left, timeout=5)[1] == []  # killed; the kernel may take a moment to clear up
    assert reward_normalise(reward_of(code, tests="assert done() == 1")) == 0.0


@pytest.mark.slow
@walled
def test_the_network_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reached = threading.Event()

        def listen() -> None:
            server.settimeout(3)
            try:
                server.accept()[0].close()
                reached.set()
            except TimeoutError:
                pass

        thread = threading.Thread(target=listen)
        thread.start()
        ran = sandbox.run(
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)", "python", PATIENT
        )
        thread.join()
    assert not ran.ok
    assert not reached.is_set()


INSIDE = {
    "unshare": "libc.unshare(0x10000000)",
    "unshare of mounts": "libc.unshare(0x00020000)",
    "clone": "libc.syscall(56 if x86 else 220, 0x10000000 | 17, 0, 0, 0, 0)",
    "clone3": "libc.syscall(435, ctypes.byref(ctypes.create_string_buffer(88)), 88)",
    "setns": "libc.setns(0, 0)",
    "mount": "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)",
    "ptrace": "libc.ptrace(16, os.getppid(), 0, 0)",
    "bpf": "libc.syscall(321 if x86 else 280, 0, 0, 0)",
    "io_uring": "libc.syscall(425, 1, 0)",
    "keys": "libc.syscall(250 if x86 else 219, 0, -3, 0)",
    "a socket to the host of a virtual machine": "libc.socket(40, 1, 0)",
    "a socket of the kernel's crypto": "libc.socket(38, 5, 0)",
    "a raw packet": "libc.socket(17, 3, 0)",
    "System V shared memory": "libc.shmget(0, 64 << 20, 0o1600)",
    "a System V message queue": "libc.msgget(0, 0o1600)",
    "a file in memory": "libc.syscall(319 if x86 else 279, b'f', 0)",
    "a secret file in memory": "libc.syscall(447, 0)",
    "a POSIX message queue": "libc.syscall(240 if x86 else 180, b'q', 0o102, 0o600, None)",
}
"""What it tries -> the call; x32 calls and other ABIs end the process."""


@walled
@pytest.mark.parametrize("what", list(INSIDE))
def test_new_walls_inside_the_walls_cannot_be_built(what: str) -> None:
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nx86 = os.uname().machine == 'x86_64'\n"
    )
    ran = sandbox.run(f"{code}print({INSIDE[what]}, ctypes.get_errno())", "python", PATIENT)
    assert ran.ok, ran
    result, number = map(int, ran.output.split())
    assert result == -1
    # EPERM, or ENOSYS and EAFNOSUPPORT: never EINVAL or EFAULT, which would say that the kernel looked at it
    assert number in (1, 38, 97)


HOLDING = """
import ctypes
libc, held, piece = ctypes.CDLL(None, use_errno=True), 0, 64 << 20
libc.shmat.restype = ctypes.c_void_p
for _ in range(8):
    segment = libc.shmget(0, piece, 0o1600)
    if segment < 0:
        break
    place = libc.shmat(segment, None, 0)
    ctypes.memset(place, 1, piece)
    libc.shmdt(ctypes.c_void_p(place))
    held += piece
print(held)
"""


@walled
def test_no_memory_is_held_that_nobody_has_mapped() -> None:
    """512 MB of System V segments, beside a limit of 256 MB: each is filled, unmapped, and would live on."""
    assert sandbox.run(HOLDING, "python", PATIENT).output == "0\n"


@walled
def test_a_forked_program_has_no_more_rights_than_a_started_one() -> None:
    calls = ", ".join(f"({call}, ctypes.get_errno())" for call in INSIDE.values())
    code = f"""
import ctypes, os
libc, x86 = ctypes.CDLL(None, use_errno=True), os.uname().machine == 'x86_64'
print([{calls}])
print(os.getuid(), os.getgroups(), os.path.isdir('/proc'))
data = ctypes.create_string_buffer(24)
libc.syscall(125 if x86 else 90, (ctypes.c_uint32 * 2)(0x20080522, 0), data)
print(data.raw == bytes(24))
def is_open(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False
print(sorted(os.environ), list(filter(is_open, range(3, 64))))
"""
    lines = script_run(server(), code, "", PATIENT).splitlines()
    for result, number in ast.literal_eval(lines[0]):
        assert (result, number in (1, 38, 97)) == (-1, True)
    uid, rest = lines[1].split(" ", 1)
    assert rest == "[] False"
    assert uid == "0" if os.getuid() else int(uid) >= FIRST_UID
    assert lines[2] == "True"  # not one capability
    assert lines[3] == "['HOME', 'LANG', 'PATH', 'TMPDIR'] []"  # no descriptor but its standard ones


@pytest.mark.slow
@walled
def test_a_program_ends_with_its_lifeline_and_its_wall_time() -> None:
    began = time.monotonic()
    assert (
        script_run(server(), "import time; print('begun', flush=True); time.sleep(60)", "", TIGHT)
        == "begun\n"
    )
    assert time.monotonic() - began < 30
    assert server().alive


@walled
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the x32 ABI is x86-64's")
def test_a_call_by_another_abi_ends_the_process() -> None:
    ran = sandbox.run(
        "import ctypes\nctypes.CDLL(None).syscall(0x40000000 | 272, 0x10000000)\nprint('alive')",
        "python",
        PATIENT,
    )
    assert not ran.ok
    assert "alive" not in ran.output


@walled
def test_ordinary_programs_notice_nothing() -> None:
    code = (
        "import multiprocessing, socket, subprocess, threading\n"
        "done = []\n"
        "thread = threading.Thread(target=done.append, args=(1,)); thread.start(); thread.join()\n"
        "done.append(int(subprocess.run(['/bin/sh', '-c', 'echo 2'], capture_output=True).stdout))\n"
        "one, other = socket.socketpair(); one.send(b'3'); done.append(int(other.recv(1)))\n"
        "child = multiprocessing.get_context('fork').Process(target=print, args=('four',))\n"
        "child.start(); child.join()\n"
        "print(done)\n"
    )
    ran = sandbox.run(code, "python", PATIENT)
    assert ran.ok, ran
    assert ran.output == "four\n[1, 2, 3]\n"


@walled
def test_what_is_left_in_the_background_ends_with_it(tmp_path: Path) -> None:
    marker = f"ratchet-left-{os.getpid()}"
    ran = sandbox.run(
        f"import subprocess\nsubprocess.Popen(['/bin/sh', '-c', 'sleep 600 # {marker}'])\nprint('gone')",
        "python",
        PATIENT,
    )
    assert ran.ok, ran
    time.sleep(0.1)
    assert not [p for p in psutil.process_iter(["cmdline"]) if marker in " ".join(p.info["cmdline"] or [])]


@walled
def test_nothing_is_left_on_the_disk() -> None:
    import tempfile

    folder = Path(tempfile.gettempdir())
    before = set(folder.glob("ratchet-sandbox-*"))
    sandbox.run("open('x', 'w').write('y')", "python", PATIENT)
    assert set(folder.glob("ratchet-sandbox-*")) <= before


def test_without_walls_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "isolation_fault", lambda: "a test says so")
    witness = tmp_path / "witness"
    with pytest.raises(IsolationUnavailable, match="cannot be isolated: a test says so"):
        sandbox.run(f"open({str(witness)!r}, 'w')")
    assert not witness.exists()


@pytest.mark.slow
@walled
def test_an_environment_of_copies_runs_code_too(tmp_path: Path) -> None:
    """Its interpreter is a file of its own, which is not shown behind the walls."""
    venv.create(tmp_path, symlinks=False)
    ask = (
        "import sys; sys.path.insert(0, {!r})\n"
        "from rl.rewards import sandbox; print(sandbox.run('print(6 * 7)').output)"
    )
    done = subprocess.run(
        [tmp_path / "bin" / "python", "-c", ask.format(str(Path(__file__).resolve().parent.parent))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "42", done.stderr


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(ValueError, match="python or shell"):
        sandbox.run("main = 1", "haskell")
