"""Reward for code that passes its tests: the code runs in one sandboxed process, the tests in another.

One server per process of ours keeps a warm interpreter that forks the sandboxed programs.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import itertools
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.rewards import jail, sandbox
from rl.rewards.base import RAW_HIGH, RAW_LOW, RewardSample, RewardValue
from rl.rewards.sandbox import PROBE, IsolationUnavailable, Limits, filter_program, isolation_fault

TESTS = ("tests", "test_list", "test", "unit_tests", "test_cases", "input_output")
ENTRY_POINTS = ("entry_point", "function", "fn_name", "func_name")
SETUPS = ("test_setup_code", "test_imports", "setup")
EXPECTED_OUTPUTS = ("expected_output", "expected_stdout")
COLUMNS = (*TESTS, *ENTRY_POINTS, *SETUPS, *EXPECTED_OUTPUTS, "stdin")
"""Facts of a prompt that define its tests."""


class CodeTestsRefused(ValueError):
    """Tests in an unknown shape; the message says what was found and what is read."""


@dataclass(frozen=True)
class CodeTests:
    """Tests of an answer's code: programs with asserts, calls, or expected output."""

    units: tuple[str, ...] = ()
    """Test programs."""
    each_unit: bool = False
    """True: a program is one case; False: each of its asserts is."""
    setup: str = ""
    """Run before the tests, in their process."""
    entry_point: str = ""
    """Function under test, if named."""
    cases: tuple[Mapping[str, object], ...] = ()
    """Cases of data: {"call", "expected"} or {"args", "named", "expected"}."""
    pairs: tuple[tuple[str, str], ...] = ()
    """(standard input, expected output)."""

    def as_program(self) -> dict[str, object]:
        return {
            "tests": list(self.units),
            "each_unit": self.each_unit,
            "setup": self.setup,
            "entry_point": self.entry_point,
            "given": [dict(case) for case in self.cases],
        }


def code_tests(facts: Mapping[str, object]) -> CodeTests | None:
    """The tests in a prompt's facts, or None. Raises CodeTestsRefused.

    Read are: a text of Python asserts, test functions or unittest classes; a list of such texts, one case each (MBPP's
    `test_list`); a text that defines `check(candidate)` (HumanEval's `test`, with `entry_point`); a list of {"call":
    "f(2)", "expected": 4}, {"args": [2], "expected": 4} or {"input": ..., "output": ...}; {"inputs": [...], "outputs":
    [...], "fn_name": ...} (APPS' `input_output`); `expected_output`, which the program must print.
    """
    entry_point = next((str(facts[name]) for name in ENTRY_POINTS if facts.get(name)), "")
    setup = "\n".join(_text(facts[name]) for name in SETUPS if facts.get(name))
    name = next((name for name in TESTS if facts.get(name) not in (None, "", [], {})), "")
    if not name:
        expected = next((facts[key] for key in EXPECTED_OUTPUTS if facts.get(key) is not None), None)
        return (
            None if expected is None else CodeTests(pairs=((str(facts.get("stdin") or ""), str(expected)),))
        )
    value = _unpack_json(facts[name])
    if isinstance(value, str):
        return CodeTests(units=(value,), setup=setup, entry_point=entry_point)
    if isinstance(value, Mapping):
        entry_point = next((str(value[key]) for key in ENTRY_POINTS if value.get(key)), entry_point)
        value = _columns(value)
    if not isinstance(value, Sequence):
        raise CodeTestsRefused(f"{name}: expected a text, a list or an object, found {value!r:.80}")
    if all(isinstance(item, str) for item in value):
        return CodeTests(units=tuple(value), each_unit=True, setup=setup, entry_point=entry_point)
    given: list[Mapping[str, object]] = []
    pairs: list[tuple[str, str]] = []
    for number, item in enumerate(value):
        case = _case(item, f"{name}[{number}]", bool(entry_point))
        if isinstance(case, tuple):
            pairs.append(case)
        else:
            given.append(case)
    return CodeTests(setup=setup, entry_point=entry_point, cases=tuple(given), pairs=tuple(pairs))


def _text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _unpack_json(value: object) -> object:
    """JSON in a text, as datasets with one column type store it; other texts are programs."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _columns(value: Mapping[str, object]) -> object:
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise CodeTestsRefused(
            f'expected {{"inputs": [...], "outputs": [...]}} of one length, found {sorted(map(str, value))}'
        )
    return [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]


def _case(item: object, what: str, function: bool) -> Mapping[str, object] | tuple[str, str]:
    if not isinstance(item, Mapping):
        raise CodeTestsRefused(f"{what}: expected an object, as the others are, found {item!r:.80}")
    key = next(
        (key for key in ("expected", "output", "expected_output", "stdout", "result") if key in item), ""
    )
    if not key:
        raise CodeTestsRefused(f"{what}: expected `expected` or `output`, found {', '.join(map(str, item))}")
    expected = item[key]
    if isinstance(item.get("call"), str):
        return {"call": item["call"], "expected": expected}
    if "args" in item or "kwargs" in item:
        return {
            "args": list(item.get("args") or []),
            "named": dict(item.get("kwargs") or {}),
            "expected": expected,
        }
    case_input = item["stdin"] if "stdin" in item else item.get("input")
    if "stdin" in item or key == "stdout" or (isinstance(case_input, str) and not function):
        return str(case_input or ""), str(expected)
    if isinstance(case_input, list):
        return {"args": case_input, "expected": expected}
    if isinstance(case_input, Mapping):
        return {"args": [], "named": dict(case_input), "expected": expected}
    if "input" not in item:
        raise CodeTestsRefused(
            f"{what}: expected `call`, `args` or `input`, found {', '.join(map(str, item))}"
        )
    return {"args": [case_input], "expected": expected}


FENCE = re.compile(r"```[ \t]*+(\w*+)[^\n]*+(?:\n(.*?)(?:(```)|\Z)|\Z)", re.DOTALL)
"""A fenced block. One without an end takes the rest of the text, so that the search stops there."""
NAMES = {
    "python": "python",
    "py": "python",
    "python3": "python",
    "sh": "shell",
    "bash": "shell",
    "shell": "shell",
}

AT_ONCE = min(8, 2 * (os.cpu_count() or 1))
"""Answers tested at the same time."""


class CodeExecutionDisabled(RuntimeError):
    """Running a model's code was not enabled."""


def code_of(response: str, default: str = "python") -> tuple[str, str] | None:
    """(language, code) of the first fenced block in a known language; the whole text if nothing is fenced."""
    blocks = [(name, code) for name, code, end in FENCE.findall(response) if end]
    for name, code in blocks:
        language = NAMES.get(name.lower(), default if not name else None)
        if language:
            return language, code
    return None if blocks or not response.strip() else (default, response)


@dataclass(frozen=True)
class CodeExecutionReward:
    """-2 to 2 by the share of tests that pass; does not apply to prompts without tests.

    The prompt names its tests. They run in a process of their own that calls the code's
    functions and compares plain data. Code that exits, patches or prints therefore earns nothing. Off unless `enabled`;
    raises IsolationUnavailable rather than run without a sandbox.
    """

    enabled: bool = False
    limits: sandbox.Limits = field(default_factory=sandbox.Limits)
    language: str = "python"
    name: str = "code_execution"

    def __post_init__(self) -> None:
        if not self.enabled:
            raise CodeExecutionDisabled(
                "code_execution runs code written by a model and is off by default; set "
                "ENABLE_CODE_EXECUTION=true to enable it. Code runs in a sandbox without network, see "
                "docs/reward-reference.md"
            )

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        """One value per sample, in order; equal answers to equal tests run once."""
        at = server()
        jobs = [self._job(sample) for sample in samples]
        distinct = {repr(job): job for job in jobs if not isinstance(job, RewardValue)}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            values = dict(
                zip(distinct, pool.map(lambda job: self._run_tests(at, *job), distinct.values()), strict=True)
            )
        return [job if isinstance(job, RewardValue) else values[repr(job)] for job in jobs]

    def inapplicable(self, sample: RewardSample) -> str:
        """Why no answer to this prompt can be judged; empty if it can."""
        try:
            return "" if code_tests(sample.facts) else NO_TESTS
        except CodeTestsRefused as refusal:
            return str(refusal)

    def _job(self, sample: RewardSample) -> tuple[str, str, CodeTests] | RewardValue:
        if why := self.inapplicable(sample):
            return RewardValue(None, {"why": why})
        tests = code_tests(sample.facts)
        assert tests is not None
        found = code_of(sample.response, self.language)
        if found is None:
            return RewardValue(RAW_LOW, {"fault": "no code in the response"})
        language, code = found
        if language == "shell" and not tests.pairs:
            return RewardValue(RAW_LOW, {"fault": "the tests call Python, the response is a shell script"})
        return language, code, tests

    def _run_tests(self, at: JailServer, language: str, code: str, tests: CodeTests) -> RewardValue:
        successes = cases = 0
        detail: dict[str, object] = {"language": language}
        if tests.units or tests.cases:
            verdict = tests_run(at, code, tests.as_program(), self.limits)
            if "unusable" in verdict:
                return RewardValue(None, {"why": str(verdict["unusable"])})
            successes, cases = int(verdict.get("passed", 0)), int(verdict.get("cases", 1))
            detail["faults"] = verdict.get("faults") or ([] if verdict else ["stopped: time or memory"])
        for given, expected in tests.pairs:
            if language == "python":
                output = script_run(at, code, given, self.limits)
            else:
                output = sandbox.run(code, language, self.limits, stdin=given).output
            successes += _lines(output) == _lines(expected)
            cases += 1
            detail["output"] = output[-2000:]
        share = successes / max(cases, 1)
        return RewardValue(
            RAW_LOW + (RAW_HIGH - RAW_LOW) * share, {**detail, "passed": successes, "cases": cases}
        )


NO_TESTS = "the prompt has no tests (facts: tests, test_list, input_output or expected_output)"


def _lines(text: str) -> list[str]:
    """Lines of output without trailing blanks and outer blank lines."""
    return [line.rstrip() for line in text.strip().splitlines()]


# --- The server of the sandbox ---


SERVER = Path(__file__).parent / "sandbox_programs" / "server.py"
FIRST_UID, UIDS = 60_000, 4_000
"""Users that programs run as if the server is root: one each, so that each has its own process limit."""

GRACE_S = 2.0
"""Seconds beyond its wall time after which a silent program is given up."""


class JailServer:
    """Starts programs in the sandbox of `rl.rewards.jail`, in a few milliseconds each."""

    def __init__(self) -> None:
        """Raises IsolationUnavailable if the sandbox cannot be built, or does not hold."""
        self.owner = os.getpid()
        self.folder = Path(tempfile.mkdtemp(prefix="ratchet-sandbox-"))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603
                [
                    str(Path(sys.executable).resolve()),
                    "-I",
                    str(SERVER),
                    str(jail.__file__),
                    str(self.folder),
                ],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=jail.VARIABLES,
                start_new_session=True,
            )
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
        """Starts a program of a role (`script`, `answer`, `tests`); `fds`: its lifeline, source, target[, verdict].

        It ends with its lifeline, or after the wall time plus `extra_s`.
        """
        file = os.memfd_create("program")
        try:
            os.write(file, json.dumps(program).encode())
            os.lseek(file, 0, os.SEEK_SET)
            with self.lock:
                request = {
                    "role": role,
                    "memory_mb": limits.memory_mb,
                    "cpu_s": limits.cpu_s,
                    "file_mb": limits.file_mb,
                    "processes": limits.processes,
                    "wall_s": limits.wall_s + extra_s,
                    "filter": self.filter,
                    "uid": FIRST_UID + next(self.numbers) % UIDS,
                }
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
    """This process's server, started and tested on first use. Raises IsolationUnavailable."""
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
                    f"code is not run here: a check of the sandbox failed ({result.strip()[-300:]})"
                )
            atexit.register(started.close)
            _server = started
        return _server


def script_run(at: JailServer, code: str, given: str, limits: Limits) -> str:
    """Standard output of a Python program with this standard input, at most `limits.output_bytes`."""
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


def tests_run(at: JailServer, code: str, tests: Mapping[str, object], limits: Limits) -> dict[str, Any]:
    """The verdict of tests on a program, from a process that executes none of the program; {} without a verdict."""
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
    """File descriptors, closed at the end."""

    def __init__(self) -> None:
        self.open: set[int] = set()

    def make(self) -> tuple[int, int]:
        """A pipe: (read end, write end)."""
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
    """Bytes read until the end, at most `most`, and until a time (monotonic)."""
    data = b""
    while len(data) < most and (left := until - time.monotonic()) > 0:
        if select.select([fd], [], [], left)[0]:
            chunk = os.read(fd, 65536)
            if not chunk:
                break
            data += chunk
    return data[:most]
