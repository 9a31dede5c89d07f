"""Code that only seems to pass its tests earns nothing, whatever shape the tests have; honest code earns all."""

from typing import Any

import pytest

from rl.rewards import sandbox
from rl.rewards.base import RewardSample, RewardValue, reward_normalise
from rl.rewards.code_execution import CodeExecutionReward
from rl.rewards.sandbox import Limits
from tests.support.reward_hacks import HACKS, HALF_RIGHT, HONEST, SHAPES

pytestmark = pytest.mark.skipif(
    bool(sandbox.isolation_fault()), reason=f"no isolation here: {sandbox.isolation_fault()}"
)

TIGHT = Limits(wall_s=3.0, cpu_s=1, memory_mb=256, processes=8, file_mb=4, output_bytes=20_000)


def values_of(codes: list[str], facts: dict[str, Any]) -> list[RewardValue]:
    reward = CodeExecutionReward(enabled=True, limits=TIGHT)
    return reward.score([RewardSample([], f"```python\n{code}\n```", "assistant", facts) for code in codes])


def earned(code: str, **facts: Any) -> float | None:
    (value,) = values_of([code], facts)
    return None if value.raw is None else reward_normalise(value.raw)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_honest_code_earns_all_and_half_right_code_half(shape: str) -> None:
    honest, half = values_of([HONEST, HALF_RIGHT], SHAPES[shape])
    assert (honest.raw, half.raw) == (2.0, 0.0)


@pytest.mark.slow
def test_no_known_hack_earns_anything() -> None:
    """Each hack meets one shape of tests, all of them some; `benchmarks/reward_hacks.py` tries each on each."""
    assert len(HACKS) >= 50
    shapes = list(SHAPES.values())
    reward = CodeExecutionReward(enabled=True, limits=TIGHT)
    values = reward.score(
        [
            RewardSample([], f"```python\n{code}\n```", "assistant", shapes[i % len(shapes)])
            for i, code in enumerate(HACKS.values())
        ]
    )
    found = dict(zip(HACKS, values, strict=True))
    assert {name: value for name, value in found.items() if value.raw != -2} == {}


def test_shapes_of_tests_are_read() -> None:
    # a pair of input and output is a case and a status is nothing
    pairs = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5\n", "output": "10\n"}]
    assert earned("a, b = map(int, input().split())\nprint(a + b)\nraise SystemExit(1)", tests=pairs) == 1.0
    assert earned("print(3)", tests=pairs) == 0.5
    assert earned("import os\nos._exit(0)", tests=pairs) == 0.0
    # published shapes are read
    apps = '{"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}'
    assert earned("def add(a, b):\n    return a + b", input_output=apps) == 1.0
    assert earned("def add(a, b):\n    return (a, b)", tests=[{"args": [1, 2], "expected": [1, 2]}]) == 1.0
    assert earned("def add(a, b):\n    return a - b", tests=[{"input": {"a": 3, "b": 1}, "output": 2}]) == 1.0
    setup = {"test_setup_code": "import math", "test_list": ["assert math.isclose(half(3), 1.5)"]}
    assert earned("def half(x):\n    return x / 2", **setup) == 1.0


TEXT = """
import pytest
from solution import Stack, depth as deep

def test_order():
    stack = Stack([1])
    stack.push(2)
    assert [stack.pop(), len(stack), stack[0], stack.name] == [2, 1, 1, "s"]

def test_empty():
    with pytest.raises(IndexError):
        Stack([]).pop()

def test_in_place():
    items = [3, 1, 2]
    deep(items, key=lambda x: -x)
    assert items == [3, 2, 1]

for value in (1, 2):
    try:
        deep(None)
        assert False
    except TypeError as error:
        assert "NoneType" in str(error)
"""


def test_classes_errors_callbacks_and_changes_in_place_cross() -> None:
    code = (
        "class Stack:\n    name = 's'\n    def __init__(self, items): self.items = items\n"
        "    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()\n"
        "    def __len__(self): return len(self.items)\n    def __getitem__(self, i): return self.items[i]\n"
        "def depth(items, key=None):\n    if items is None: raise TypeError('NoneType')\n    items.sort(key=key)"
    )
    assert earned(code, tests=TEXT) == 1.0
    # cases: the order, the error, the change in place, `assert False`; and what the error says, where there was one
    assert earned(code.replace("items.sort(key=key)", "pass"), tests=TEXT) == pytest.approx(4 / 5)
    assert earned(code.replace("raise TypeError('NoneType')", "return"), tests=TEXT) == pytest.approx(3 / 4)


def test_asserts_that_an_answer_ended_before_they_were_reached_fail() -> None:
    tests = (
        "def test_all():\n    values = f(3)\n    assert values == 1\n    assert f(4) == 2\nassert f(5) == 3"
    )
    assert earned(
        "def f(x):\n    if x == 3: raise ValueError\n    return x - 2", tests=tests
    ) == pytest.approx(1 / 3)
    # a loop over what the answer returned has not been reached when it returned nothing
    assert earned("def f(x): return []", tests="for x in f(1):\n    assert x == 1") == 0.0


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({}, "the prompt has no tests"),
        ({"tests": "assert f(1 == 2"}, "do not parse"),
        ({"tests": "import no_such_library\nassert f(1) == 2"}, "import no_such_library"),
        ({"tests": "f(1)"}, "check nothing"),
        ({"tests": [{"question": 1}]}, "expected `expected` or `output`"),
    ],
)
def test_tests_that_cannot_speak_leave_the_reward_out(facts: dict[str, Any], why: str) -> None:
    (value,) = values_of(["def f(x): return 2"], facts)
    assert value.raw is None
    assert why in value.detail["why"]


def test_half_a_class_of_values_is_data_and_the_rest_is_not() -> None:
    tests = "assert f(0) == (1, {2}, b'3', 4j, {5: None}, 1 << 70)\nassert f(1) == {'a': 1}\nassert [*f(2)] == [0, 1]"
    code = (
        "import collections\ndef f(x):\n    if x == 0: return (1, {2}, b'3', 4j, {5: None}, 1 << 70)\n"
        "    if x == 1: return collections.OrderedDict(a=1)\n    return (i for i in range(2))"
    )
    assert earned(code, tests=tests) == 1.0
