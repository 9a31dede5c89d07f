"""What known reward hacks earn: code and tests in one process, as harnesses commonly run them, and as here.

    python benchmarks/reward_hacks.py [--json]

Prints a row for each hack of `tests/support/reward_hacks.py` and each honest solution, then answers tested a second.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.rewards import sandbox
from rl.rewards.base import RewardSample, reward_normalise
from rl.rewards.code_execution import CodeExecutionReward
from rl.rewards.sandbox import Limits
from tests.support.reward_hacks import ASSERTS, HACKS, HALF_RIGHT, HONEST, SHAPES

LIMITS = Limits(wall_s=3.0, cpu_s=1, memory_mb=256, processes=8, file_mb=4)
TESTS = "\n".join(ASSERTS)
HONEST_CODE = {"honest": HONEST, "right for two of four": HALF_RIGHT}
TIMED = 64
"""Answers that are timed: as many as the `cpu` preset samples in a step."""


def earned(codes: list[str], facts: dict[str, object]) -> list[float]:
    """The place of each reward in [0, 1], as `code_execution` gives it."""
    values = CodeExecutionReward(enabled=True, limits=LIMITS).score(
        [RewardSample([], f"```python\n{code}\n```", "assistant", facts) for code in codes]
    )
    return [reward_normalise(-2.0 if value.raw is None else value.raw) for value in values]


def appended(code: str) -> float:
    """1 where code with the asserts below it ends with status 0: the common harness."""
    return float(sandbox.run(f"{code}\n{TESTS}\n", "python", LIMITS).ok)


def rates() -> dict[str, float]:
    """Answers tested a second, each another, before and now."""
    codes = [f"# {i}\n{HONEST}" for i in range(TIMED)]
    earned(codes[:1], SHAPES["asserts in one text"])  # starts the server
    began = time.perf_counter()
    for code in codes[:16]:
        appended(code)
    middle = time.perf_counter()
    assert earned(codes, SHAPES["asserts in one text"]) == [1.0] * TIMED
    return {"one_process": 16 / (middle - began), "two_processes": TIMED / (time.perf_counter() - middle)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    arguments = parser.parse_args()
    codes = HONEST_CODE | HACKS
    before = {name: appended(code) for name, code in codes.items()}
    now = {
        shape: dict(zip(codes, earned(list(codes.values()), facts), strict=True))
        for shape, facts in SHAPES.items()
    }
    speed = rates()
    result = {
        "hacks": len(HACKS),
        "paid_in_one_process": sum(before[name] > 0 for name in HACKS),
        "paid_here": {shape: sum(found[name] > 0 for name in HACKS) for shape, found in now.items()},
        "answers_a_second": speed,
        "cores": os.cpu_count(),
        "rows": {name: [before[name], *(found[name] for found in now.values())] for name in codes},
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{'':48}  one process  " + "  ".join(SHAPES))
    for name in codes:
        cells = "  ".join(f"{found[name]:{len(shape)}.2f}" for shape, found in now.items())
        print(f"{name:48}  {before[name]:11.2f}  {cells}")
    print(f"\nof {len(HACKS)} hacks, {result['paid_in_one_process']} are paid in one process;", end=" ")
    print("here " + ", ".join(f"{count} ({shape})" for shape, count in result["paid_here"].items()))
    print(
        f"answers a second on {os.cpu_count()} cores: {speed['one_process']:.1f} in one process each, ",
        end="",
    )
    print(f"{speed['two_processes']:.1f} here")


if __name__ == "__main__":
    main()
