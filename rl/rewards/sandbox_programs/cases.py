"""Test cases: counted asserts, compared values, and the part of pytest that tests use.

Belongs to the process that runs tests; no answer's code runs here.
"""

from __future__ import annotations

import ast
import math
import types
from typing import Any

CHECK = "ratchet_case"
"""Name by which rewritten tests report a case."""

ITERATOR: Any = type(iter([]))
"""Type of an answer's iterator: one over the items it sent."""


class AssertCase:
    """One assert of the tests."""

    def __init__(self, line: int, never: bool, branch: bool) -> None:
        self.line = line
        self.never = never
        """`assert False`: it must not be reached."""
        self.branch = branch
        """True if the case is in one of several branches."""
        self.reached = self.failed = 0


class Rewriter(ast.NodeTransformer):
    """Turns each assert into a counted case that does not end the test."""

    def __init__(self, cases: list[AssertCase]) -> None:
        self.cases = cases
        self.branches = 0

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        never = isinstance(node.test, ast.Constant) and not node.test.value
        self.cases.append(AssertCase(node.lineno, never, self.branches > 0))
        number = len(self.cases) - 1
        tried, failed = (
            ast.Expr(ast.Call(ast.Name(CHECK, ast.Load()), [ast.Constant(number), value], []))
            for value in (node.test, ast.Constant(False))
        )
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [failed])
        return ast.copy_location(ast.Try([tried], [handler], [], []), node)

    def visit_With(self, node: ast.With) -> ast.AST:
        """`with pytest.raises(...)` is a case, like an assert."""
        calls = [item.context_expr for item in node.items]
        raises = any(
            isinstance(call, ast.Call)
            and getattr(call.func, "attr", getattr(call.func, "id", "")) == "raises"
            for call in calls
        )
        if not raises:
            self.generic_visit(node)
            return node
        self.cases.append(AssertCase(node.lineno, False, self.branches > 0))
        failed, passed = (
            ast.Expr(
                ast.Call(
                    ast.Name(CHECK, ast.Load()), [ast.Constant(len(self.cases) - 1), ast.Constant(ok)], []
                )
            )
            for ok in (False, True)
        )
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [failed])
        return ast.copy_location(ast.Try([node], [handler], [passed], []), node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node  # its methods are cases, each as a whole

    def visit_If(self, node: ast.If) -> ast.AST:
        self.branches += 1
        self.generic_visit(node)
        self.branches -= 1
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.branches += 1
        self.generic_visit(node)
        self.branches -= 1
        return node


def names_of(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The names a program defines anywhere, and those it reads."""
    definitions: set[str] = set()
    read: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else definitions).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            definitions.add(node.name)
        elif isinstance(node, ast.arg):
            definitions.add(node.arg)
        elif isinstance(node, ast.alias):
            definitions.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            definitions.add(node.name)
    return definitions, read


def json_equal(actual: object, expected: object) -> bool:
    """True if plain data equals what a JSON file expects: tuples as lists, keys as texts, floats to 1e-9."""
    if isinstance(actual, ITERATOR):
        actual = list(actual)
    if isinstance(actual, (list, tuple)) and isinstance(expected, (list, tuple)):
        pairs = zip(actual, expected, strict=False)
        return len(actual) == len(expected) and all(json_equal(one, other) for one, other in pairs)
    if isinstance(actual, (set, frozenset)) and isinstance(expected, list):
        try:
            return len(actual) == len(expected) and actual == set(expected)
        except TypeError:
            return False
    if isinstance(actual, dict) and isinstance(expected, dict):
        texts = {str(key): value for key, value in actual.items()}
        return len(texts) == len(actual) == len(expected) and all(
            key in texts and json_equal(texts[key], value) for key, value in expected.items()
        )
    if isinstance(actual, bool) or isinstance(expected, bool):
        return actual is expected
    if isinstance(actual, (int, float)) and isinstance(expected, (int, float)):
        if isinstance(actual, int) and isinstance(expected, int):
            return actual == expected
        return math.isclose(actual, expected, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(expected, str) and actual is not None and not isinstance(actual, str):
        try:
            return json_equal(actual, ast.literal_eval(expected))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return False
    return type(actual) is type(expected) and bool(actual == expected)


class Pytest(types.ModuleType):
    """The part of pytest that tests of a function use."""

    class _Raises:
        def __init__(self, kinds: Any) -> None:
            self.kinds = kinds
            self.value: BaseException | None = None

        def __enter__(self) -> object:
            return self

        def __exit__(self, kind: Any, error: Any, trace: object) -> bool:
            if kind is None:
                raise AssertionError("did not raise")
            self.value = error
            return issubclass(kind, self.kinds)

    def raises(self, kinds: object, **_: object) -> object:
        return self._Raises(kinds)

    class approx:
        def __init__(self, expected: Any, rel: float = 1e-6, abs: float = 1e-12) -> None:
            self.expected, self.rel, self.abs = expected, rel, abs

        def __eq__(self, other: object) -> bool:
            expected = self.expected
            if isinstance(expected, (list, tuple)):
                return (
                    type(other) is type(expected)
                    and len(other) == len(expected)
                    and all(
                        math.isclose(a, b, rel_tol=self.rel, abs_tol=self.abs)
                        for a, b in zip(other, expected, strict=True)
                    )
                )
            return isinstance(other, (int, float)) and math.isclose(
                other, expected, rel_tol=self.rel, abs_tol=self.abs
            )

        __hash__ = None  # type: ignore[assignment]
