"""The process that runs the tests; none of a model's code is executed here.

The names that tests take from the answer are stand-ins: calls go to the answer's process as plain data, results come
back as plain data, and every comparison happens here. The answer never sees an expected value. Every `assert` is a
case, and so is every test method of a `unittest.TestCase`. A case passes if it was reached and was never false, and
fails if an exception ended the tests around it.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import os
import sys
import unittest
from collections.abc import Iterator, Mapping
from typing import Any

from rl.rewards.sandbox_programs.cases import CHECK, AssertCase, Pytest, Rewriter, json_equal, names_of
from rl.rewards.sandbox_programs.wire import WireLine, decode, encode

ANSWER_MODULES = frozenset(
    ("solution", "main", "answer", "submission", "candidate", "your_module", "student", "program")
)
"""Modules from which published tests import an answer's names."""

RESERVED_EXCEPTIONS = (StopIteration, StopAsyncIteration, AssertionError, Warning)
"""Exceptions that an answer's error is never turned into: they would end loops, or look like a test's own."""


class AnswerError(Exception):
    """The answer's code failed, or its process is gone."""


class TestsUnusable(Exception):
    """The tests cannot run for any answer: they do not parse, or need something that is missing."""


class Remote:
    """A function, class or object of the answer. It can be called and read; only plain data can be compared."""

    def __init__(self, answer: AnswerProcess, target: str | int) -> None:
        self.__dict__.update(_answer=answer, _target=target)

    def __call__(self, *args: object, **named: Any) -> object:
        return self._answer.ask("call", self._target, args, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._answer.ask("attribute", self._target, (name,))

    def __getitem__(self, key: Any) -> object:
        return self._answer.ask("item", self._target, (key,))

    def __iter__(self) -> Iterator[object]:
        found = self._answer.ask("items", self._target)
        if type(found) is not list:
            raise AnswerError("expected items, found something else")
        return iter(found)

    def __str__(self) -> str:
        return str(self._answer.ask("text", self._target))

    def __len__(self) -> int:
        found = self._answer.ask("length", self._target)
        if type(found) is not int or found < 0:
            raise AnswerError("expected a length, found something else")
        return found

    def _no_data(self, *_: object) -> Any:
        raise AnswerError("an object of a class of the answer's is no plain data, and is not compared")

    def __setattr__(self, name: str, value: object) -> None:
        self._answer.ask("set", self._target, (name, value))

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = __contains__ = _no_data


class AnswerProcess:
    """The other process, as the tests see it."""

    def __init__(self, line: WireLine) -> None:
        self.line = line
        self.number = 0
        self.callbacks: list[object] = []
        self.fault = ""

    def ask(
        self,
        what: str,
        target: object,
        args: tuple[object, ...] = (),
        named: Mapping[str, object] | None = None,
    ) -> object:
        """The value of a request. Raises the built-in exception that the answer raised, or AnswerError."""
        if self.fault:
            raise AnswerError(self.fault)
        self.number += 1
        request = {
            "n": self.number,
            "do": what,
            "target": target,
            "args": [encode(a, self._handle) for a in args],
            "named": {key: encode(value, self._handle) for key, value in (named or {}).items()},
        }
        try:
            self.line.send(request)
            reply = self.line.receive()
            while isinstance(reply, dict) and "callback" in reply:
                self.line.send(self._called_back(reply))
                reply = self.line.receive()
            if type(reply) is not dict or reply.get("n") != self.number:
                raise ValueError("a reply to another request")
            if "error" in reply:
                raise _exception_of(*map(str, reply["error"][:2]))
            value = decode(reply["value"], self._resolve)
            if value is None:
                _copy_changes(
                    args, [(i, decode(item, self._resolve)) for i, item in reply.get("changed", [])]
                )
            return value
        except (EOFError, OSError, ValueError, RecursionError, LookupError, TypeError) as error:
            if isinstance(error, AnswerRaised):
                raise
            self.fault = f"the answer's process is gone or speaks nonsense: {error}"[:300]
            raise AnswerError(self.fault) from None

    def _called_back(self, reply: dict[str, Any]) -> dict[str, object]:
        try:
            args = [decode(value, self._resolve) for value in reply["args"]]
            return {"value": encode(self.callbacks[reply["callback"]](*args), self._handle)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:300]}

    def _handle(self, value: Any) -> dict[str, object]:
        if isinstance(value, Remote):
            return {"object": value.__dict__["_target"]}
        name = getattr(value, "__name__", "")
        if name and getattr(builtins, name, None) is value:
            return {"builtin": name}
        if hasattr(value, "__next__") or isinstance(value, range):
            return {"items": [encode(item, self._handle) for item in value]}
        if callable(value):
            self.callbacks.append(value)
            return {"callback": len(self.callbacks) - 1}
        raise AnswerError(f"the tests pass a {type(value).__name__}, which is no plain data")

    def _resolve(self, kind: str, said: Any) -> object:
        if kind == "object" and type(said) is int:
            return Remote(self, said)
        if kind == "items":
            return iter([decode(item, self._resolve) for item in said])
        raise ValueError(f"unknown kind {kind!r}")


class AnswerRaised(Exception):
    """Marks an exception as one that the answer raised."""


def _exception_of(name: str, text: str) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, RESERVED_EXCEPTIONS):
        try:
            return type(name, (kind, AnswerRaised), {})(text)
        except TypeError:
            pass
    return AnswerError(f"{name}: {text}")


def _copy_changes(args: tuple[Any, ...], found: list[tuple[int, Any]]) -> None:
    """Applies in-place changes of lists, dictionaries and sets by a function to the tests' arguments."""
    for i, after in found:
        before = args[i]
        if type(before) is not type(after):
            continue
        if isinstance(before, list):
            before[:] = after
        elif isinstance(before, (dict, set)):
            before.clear()
            before.update(after)


class Tests:
    """A program of tests and its cases."""

    def __init__(self, program: dict[str, Any], answer: AnswerProcess) -> None:
        self.answer = answer
        self.entry_point = program.get("entry_point") or ""
        self.units: list[str] = program["tests"]
        self.each_unit: bool = program.get("each_unit", False)
        self.cases: list[AssertCase] = []
        self.outcomes: list[bool] = []
        """Results of the cases that count: of each assert, test method, or unit."""
        self.faults: list[str] = []
        self.space: dict[str, object] = {"__name__": "tests", CHECK: self._check, "Exception": Exception}

    def _check(self, number: int, value: object) -> None:
        case = self.cases[number]
        case.reached += 1
        try:
            case.failed += not value
        except Exception:
            case.failed += 1

    def run(self, setup: str, given: list[dict[str, object]]) -> None:
        """Runs everything. Raises TestsUnusable."""
        trees = [self._parse(text) for text in (setup, *self.units)]
        defined, read = names_of(ast.Module([node for tree in trees for node in tree.body], []))
        wanted = {name for name in read - defined if not hasattr(builtins, name) and name != CHECK}
        if self.entry_point:
            wanted.add(self.entry_point)
        for tree in trees:
            self._imports_settle(tree)
        for name in wanted:
            self.space[name] = Remote(self.answer, name)
        self._unit(trees[0], counts=False, usable=True)
        for tree in trees[1:]:
            first = len(self.cases)
            ended = self._unit(tree)
            self._settle(self.cases[first:], ended)
        for case in given:
            self._run_data_case(case)

    def _parse(self, text: str) -> ast.Module:
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError) as error:
            raise TestsUnusable(f"the tests do not parse: {error}") from None

    def _imports_settle(self, tree: ast.Module) -> None:
        """Removes imports of the answer's module, whose names are stand-ins. Raises TestsUnusable for
        missing modules."""
        for node in list(tree.body):
            if isinstance(node, ast.ImportFrom) and node.module in ANSWER_MODULES and not node.level:
                for alias in node.names:
                    if alias.name != "*":
                        self.space[alias.asname or alias.name] = Remote(self.answer, alias.name)
                tree.body.remove(node)
        for found in ast.walk(tree):
            modules = []
            if isinstance(found, ast.Import):
                modules = [alias.name for alias in found.names]
            elif isinstance(found, ast.ImportFrom):
                modules = [found.module or ""]
            for module in modules:
                if importlib.util.find_spec(module.partition(".")[0]) is None:
                    raise TestsUnusable(f"the tests import {module}, which the sandbox does not have")

    def _unit(self, tree: ast.Module, *, counts: bool = True, usable: bool = False) -> bool:
        """Runs the statements one by one; returns whether all of them ended normally."""
        helpers = {
            n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        body = Rewriter(self.cases).visit(tree).body if counts else tree.body
        is_over = True
        for node in body:
            is_over &= self._statement(ast.Module([node], []), usable)
        for made in body if counts else []:
            if isinstance(made, ast.ClassDef):
                held = self.space.get(made.name)
                if isinstance(held, type) and issubclass(held, unittest.TestCase):
                    self._methods(held)
                elif isinstance(held, type) and made.name.startswith("Test"):
                    self._plain_methods(held)
            elif isinstance(made, ast.FunctionDef) and made.name not in helpers:
                is_over &= self._function(made)
        return is_over

    def _statement(self, tree: ast.Module, usable: bool = False) -> bool:
        try:
            exec(compile(ast.fix_missing_locations(tree), "tests", "exec"), self.space)  # noqa: S102
        except BaseException as error:
            if usable:
                raise TestsUnusable(f"the tests' setup failed: {type(error).__name__}: {error}") from None
            self.faults.append(f"{type(error).__name__}: {error}"[:300])
            return False
        return True

    def _function(self, node: ast.FunctionDef) -> bool:
        """Calls `test_...()` as pytest would, and `check(candidate)` as HumanEval does."""
        if node.name == "check" and len(node.args.args) == 1:
            name = self.entry_point or self._only_function()
            self.space.setdefault(name, Remote(self.answer, name))
            call = f"check({name})"
        elif node.name.startswith("test") and not node.args.args:
            call = f"{node.name}()"
        else:
            return True
        return self._statement(ast.parse(call))

    def _only_function(self) -> str:
        found = self.answer.ask("defined", "")
        names = (
            [name for name in found if type(name) is str and name.isidentifier()]
            if type(found) is list
            else []
        )
        if not names:
            raise AnswerError("the answer defines no function")
        return names[-1]

    def _methods(self, kind: type[unittest.TestCase]) -> None:
        suite = unittest.defaultTestLoader.loadTestsFromTestCase(kind)
        for test in suite:
            result = unittest.TestResult()
            test.run(result)
            self.outcomes.append(result.wasSuccessful() and not result.skipped)

    def _plain_methods(self, kind: type) -> None:
        for name in [name for name in vars(kind) if name.startswith("test")]:
            try:
                getattr(kind(), name)()
                self.outcomes.append(True)
            except Exception as error:
                self.faults.append(f"{type(error).__name__}: {error}"[:300])
                self.outcomes.append(False)

    def _settle(self, cases: list[AssertCase], ended: bool) -> None:
        reached = any(case.reached and not case.never for case in cases)
        found = []
        for case in cases:
            if case.never:
                found.append(ended and not case.reached)
            elif case.reached or not case.branch or not (ended and reached):
                found.append(bool(case.reached) and not case.failed)
        if self.each_unit:
            if cases:
                self.outcomes.append(ended and all(found) and bool(found))
        else:
            self.outcomes += found

    def _run_data_case(self, case: dict[str, Any]) -> None:
        """Runs one case of data: a call, its arguments, the expected result."""
        try:
            if "call" in case:
                tree = ast.parse(case["call"], mode="eval")
                for name in names_of(tree)[1]:
                    if not hasattr(builtins, name) and name not in self.space:
                        self.space[name] = Remote(self.answer, name)
                found = eval(compile(tree, "call", "eval"), self.space)  # noqa: S307 - the tests' own words
            else:
                name = self.entry_point or self._only_function()
                found = Remote(self.answer, name)(*case["args"], **case.get("named", {}))
            self.outcomes.append(json_equal(found, case["expected"]))
        except Exception as error:
            self.faults.append(f"{type(error).__name__}: {error}"[:300])
            self.outcomes.append(False)


def run(program: dict[str, Any], source: int, target: int, verdict: int) -> None:
    """Runs the tests and writes the verdict: {"passed", "cases"}, or {"unusable": why}; with "faults"."""
    pytest = Pytest("pytest")
    pytest.__spec__ = importlib.util.spec_from_loader("pytest", None)
    sys.modules.setdefault("pytest", pytest)
    tests = Tests(program, AnswerProcess(WireLine(source, target)))
    reply: dict[str, object]
    try:
        tests.run(program.get("setup", ""), program.get("given", []))
        reply = {"passed": sum(tests.outcomes), "cases": len(tests.outcomes)}
        if not tests.outcomes:
            reply = {"unusable": "the tests check nothing: no assert, no case"}
    except TestsUnusable as error:
        reply = {"unusable": str(error)[:300]}
    except Exception as error:
        reply = {"passed": 0, "cases": max(1, len(tests.outcomes))}
        tests.faults.append(f"{type(error).__name__}: {error}"[:300])
    reply["faults"] = tests.faults[:3]
    WireLine(source, verdict).send(reply)
    os.close(verdict)
