"""A prompt's tests, in the shapes that files have, as one plan for the sandbox. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    cases: tuple[Mapping[str, Any], ...] = ()
    """Cases of data: {"call", "expected"} or {"args", "named", "expected"}."""
    pairs: tuple[tuple[str, str], ...] = ()
    """(standard input, expected output)."""

    def as_program(self) -> dict[str, Any]:
        return {
            "tests": list(self.units),
            "each_unit": self.each_unit,
            "setup": self.setup,
            "entry_point": self.entry_point,
            "given": [dict(case) for case in self.cases],
        }


def code_tests(facts: Mapping[str, Any]) -> CodeTests | None:
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
    given: list[Mapping[str, Any]] = []
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


def _unpack_json(value: Any) -> Any:
    """JSON in a text, as datasets with one column type store it; other texts are programs."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _columns(value: Mapping[str, Any]) -> Any:
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise CodeTestsRefused(
            f'expected {{"inputs": [...], "outputs": [...]}} of one length, found {sorted(map(str, value))}'
        )
    return [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]


def _case(item: Any, what: str, function: bool) -> Mapping[str, Any] | tuple[str, str]:
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
