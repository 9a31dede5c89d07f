"""Reward for code that does what its tests ask: the code runs in one walled-in process, the tests in another."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rl.rewards import sandbox
from rl.rewards.base import RAW_HIGH, RAW_LOW, RewardSample, RewardValue
from rl.rewards.code_tests import CodeTests, CodeTestsRefused, code_tests
from rl.rewards.jail_server import JailServer, script_run, server, tests_run

FENCE = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)```", re.DOTALL)
NAMES = {
    "python": "python",
    "py": "python",
    "python3": "python",
    "sh": "shell",
    "bash": "shell",
    "shell": "shell",
}

AT_ONCE = min(8, 2 * (os.cpu_count() or 1))
"""Answers that are tested at the same time."""


class CodeExecutionDisabled(RuntimeError):
    """Running what a model wrote was not switched on."""


def code_of(response: str, default: str = "python") -> tuple[str, str] | None:
    """(language, code) of the first fenced block in a known language; of the whole text where nothing is fenced."""
    blocks = FENCE.findall(response)
    for name, code in blocks:
        language = NAMES.get(name.lower(), default if not name else None)
        if language:
            return language, code
    return None if blocks or not response.strip() else (default, response)


@dataclass(frozen=True)
class CodeExecutionReward:
    """-2 where no test passes up to 2 where all do, by the share that pass; does not apply where a prompt has no tests.

    Tests are facts of the prompt, in the shapes of `rl.rewards.code_tests.code_tests`. They run in a process of their
    own: what the code defines is called from there, and what comes back is plain data that is compared there, so that
    code that ends its process, patches what it finds or prints what it likes earns nothing by it. Off unless `enabled`;
    raises IsolationUnavailable rather than run unwalled.
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
                "docs/rewards.md"
            )

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        """One value per sample, in order; equal answers to equal tests are run once."""
        at = server()
        jobs = [self._job(sample) for sample in samples]
        distinct = {repr(job): job for job in jobs if not isinstance(job, RewardValue)}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            values = dict(
                zip(distinct, pool.map(lambda job: self._run_tests(at, *job), distinct.values()), strict=True)
            )
        return [job if isinstance(job, RewardValue) else values[repr(job)] for job in jobs]

    def inapplicable(self, sample: RewardSample) -> str:
        """Reason why no answer to this prompt can be judged; empty where one can."""
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
        detail: dict[str, Any] = {"language": language}
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
    """Lines of output, white space at the ends of lines and of the whole aside."""
    return [line.rstrip() for line in text.strip().splitlines()]
