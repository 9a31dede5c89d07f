"""Reward for code that runs: what a model wrote is really executed, walled in, against tests where there are any."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from rl.rewards import sandbox
from rl.rewards.base import RAW_HIGH, RAW_LOW, RewardSample, RewardValue

FENCE = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)```", re.DOTALL)
NAMES = {
    "python": "python",
    "py": "python",
    "python3": "python",
    "sh": "shell",
    "bash": "shell",
    "shell": "shell",
}


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
    """2 where the code ran and passed, 0 where it ran and printed something else than `expected_output`, -2 where it
    failed, had to be stopped or was not there: a reward of nothing for whatever the walls held back.

    `facts["tests"]` is code put after it (Python asserts, shell tests); `facts["expected_output"]` is compared with
    what it printed, white space at the ends aside. Off unless `enabled`; raises IsolationUnavailable rather than run
    unwalled.
    """

    enabled: bool = False
    limits: sandbox.Limits = field(default_factory=sandbox.Limits)
    language: str = "python"
    name: str = "code_execution"

    def __post_init__(self) -> None:
        if not self.enabled:
            raise CodeExecutionDisabled(
                "code_execution runs what a model wrote and is off; set ENABLE_CODE_EXECUTION=true to switch it on. "
                "Code runs without network in an empty folder, see docs/rewards.md"
            )

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        return [self._one(sample) for sample in samples]

    def _one(self, sample: RewardSample) -> RewardValue:
        found = code_of(sample.response, self.language)
        if found is None:
            return RewardValue(RAW_LOW, {"fault": "no code in the response"})
        language, code = found
        tests = sample.facts.get("tests")
        ran = sandbox.run(f"{code}\n{tests}\n" if tests else code, language, self.limits)
        detail = {
            "language": language,
            "exit_code": ran.exit_code,
            "stopped": ran.stopped,
            "seconds": ran.seconds,
            "output": ran.output[-2000:],
        }
        if not ran.ok:
            return RewardValue(RAW_LOW, detail)
        expected = sample.facts.get("expected_output")
        if expected is not None and ran.output.strip() != str(expected).strip():
            return RewardValue(0.0, detail)
        return RewardValue(RAW_HIGH, detail)
