"""Every regular expression of the product takes linear time on hostile text: the test finds the expressions itself."""

import ast
import importlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"backend": ROOT, "feedback": ROOT, "rl": ROOT, "ratchet_client": ROOT / "clients/python/src"}
CALLS = ("compile", "match", "search", "fullmatch", "sub", "subn", "split", "findall", "finditer")
ANCHORED = {"match", "fullmatch"}
LENGTHS = (1024, 4096, 32768)
"""Characters of an attack. The limits of outside text are far above them."""
SUSPECT = 6.0
"""Time for 4 times the text, above which the longest attack is tried: linear needs 4 times, quadratic 16 times."""
QUADRATIC = 24.0
"""Time for 8 times the text: linear needs 8 times, quadratic 64 times."""
MEASURABLE_S = 0.015
"""Processor time for the longest attack. Linear expressions mostly stay below, whatever a clock does."""


@dataclass(frozen=True)
class Expression:
    place: str
    pattern: Any
    """Text or bytes."""
    flags: int
    is_anchored: bool
    """Only matched at the start of a text."""


def expressions() -> Iterator[Expression]:
    """Arguments of `re.*` in the product, with the flags and the methods that are called on them."""
    trees = {
        file: ast.parse(file.read_text("utf-8"))
        for name, root in SOURCES.items()
        for file in sorted((root / name).rglob("*.py"))
        if "tests" not in file.parts
    }
    used: dict[str, set[str]] = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in CALLS:
                used.setdefault(ast.unparse(node.value).rpartition(".")[2], set()).add(node.attr)
    for file, tree in trees.items():
        names = {
            id(node.value): ast.unparse(node.targets[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
        }
        for node in ast.walk(tree):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in CALLS
                and ast.unparse(node.func.value) == "re"
                and node.args
            ):
                continue
            pattern, flags = _value(node.args[0], file), _flags(node, file)
            methods = {node.func.attr}
            if methods == {"compile"}:
                methods = used.get(names.get(id(node), ""), {"search"})
            if pattern is not None:
                yield Expression(
                    f"{file.relative_to(ROOT)}:{node.lineno}", pattern, flags, methods <= ANCHORED
                )


def _value(node: ast.expr, file: Path) -> Any:
    """A pattern as its module sees it; values of a call stand for themselves as the letter a."""
    if isinstance(node, ast.Constant):
        return node.value
    root = next(root for name, root in SOURCES.items() if root / name in file.parents)
    module = importlib.import_module(
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    )
    try:
        return eval(compile(ast.Expression(node), str(file), "eval"), vars(module))
    except (NameError, AttributeError, TypeError):
        if isinstance(node, ast.JoinedStr):
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "a" for part in node.values)
    return None


def _flags(node: ast.Call, file: Path) -> int:
    found = [keyword.value for keyword in node.keywords if keyword.arg == "flags"]
    found += [arg for arg in node.args[1:] if ast.unparse(arg).startswith("re.")]
    return sum(int(eval(ast.unparse(flag), {"re": re})) for flag in found)


def sample(tree: Any, other: str, least: int) -> list[str]:
    """Characters that lead through a parsed pattern, one each; of a branch the longest.

    other: what any character is; least: times that an optional part is taken.
    """
    found: list[str] = []
    for code, value in tree:
        if code is codes.LITERAL:
            found.append(chr(value))
        elif code in (codes.ANY, codes.NOT_LITERAL):
            found.append(other)
        elif code is codes.IN:
            found.append(_of_class(value, other))
        elif code is codes.BRANCH:
            found += max((sample(one, other, least) for one in value[1]), key=len)
        elif code is codes.SUBPATTERN:
            found += sample(value[3], other, least)
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            found += sample(value[2], other, least) * min(max(value[0], least), 3)
        elif code is codes.ATOMIC_GROUP:
            found += sample(value, other, least)
    return found


CATEGORIES = {codes.CATEGORY_SPACE: " ", codes.CATEGORY_DIGIT: "1", codes.CATEGORY_WORD: "a"}


def _of_class(items: Any, other: str) -> str:
    if items[0][0] is codes.NEGATE:
        taken = re.compile("".join(["[", *(_class_text(item) for item in items[1:]), "]"]))
        return next(one for one in other + 'x 1-"\n{' if not taken.match(one))
    code, value = items[0]
    if code is codes.CATEGORY:
        return CATEGORIES.get(value, "x")
    return chr(value if code is codes.LITERAL else value[0])


def _class_text(item: Any) -> str:
    code, value = item
    if code is codes.CATEGORY:
        names = {"SPACE": r"\s", "DIGIT": r"\d", "WORD": r"\w"}
        kind = str(value).removeprefix("CATEGORY_").removeprefix("NOT_")
        return names[kind].upper() if "NOT_" in str(value) else names[kind]
    low, high = (value, value) if code is codes.LITERAL else value
    return f"{re.escape(chr(low))}-{re.escape(chr(high))}"


def attacks(expression: Expression) -> Iterator[Callable[[int], str]]:
    """Texts of any length that walk into the pattern, repeat a piece of its way, and fail."""
    text = (
        expression.pattern.decode("latin-1") if isinstance(expression.pattern, bytes) else expression.pattern
    )
    tree = parser.parse(text, expression.flags)
    for way in {"".join(sample(tree, other, least))[:80] for other in "x " for least in (0, 1)}:
        yield from _attacks_along(way)


def _attacks_along(way: str) -> Iterator[Callable[[int], str]]:
    pieces = {way[:end] for end in range(1, len(way) + 1)}
    pieces |= {way[at : at + size] for at in range(len(way)) for size in (1, 2, 3)}
    pieces |= {" ", "\n", "a", "1", " \n"}
    for piece in sorted(pieces):
        at = way.find(piece)
        for start in {"", way[: max(at, 0)], way[: max(at, 0) + len(piece)]}:
            for end in ("", "\x01"):
                yield lambda n, s=start, p=piece, e=end: s + p * (n // len(p)) + e  # type: ignore[misc]


def growth(expression: Expression) -> str:
    """The attack under which the expression is not linear; empty if none is known."""
    compiled = re.compile(expression.pattern, expression.flags)
    run = compiled.match if expression.is_anchored else compiled.findall
    as_given = (lambda text: text.encode()) if isinstance(expression.pattern, bytes) else str

    def seconds(text: Any) -> float:
        found = []
        for _ in range(2):
            began = time.thread_time()
            run(text)
            found.append(time.thread_time() - began)
        return min(found)

    short, middle, long = LENGTHS
    for attack in attacks(expression):
        before = seconds(as_given(attack(middle)))
        if before > SUSPECT * seconds(as_given(attack(short))):
            taken = seconds(as_given(attack(long)))
            if taken > max(MEASURABLE_S, QUADRATIC * before):
                return f"{expression.place} {expression.pattern!r}: {attack(24)!r}, {long} characters {taken:.2f} s"
    return ""


def test_every_expression_of_the_product_is_linear(record_property: Callable[[str, object], None]) -> None:
    def too_long(*_: object) -> None:
        raise TimeoutError

    known = list(expressions())
    assert len(known) > 90
    record_property("tried", len(known))
    old, slow = signal.signal(signal.SIGALRM, too_long), []
    try:
        for expression in known:
            signal.setitimer(signal.ITIMER_REAL, 60)
            try:
                slow += [found] if (found := growth(expression)) else []
            except TimeoutError:
                slow.append(f"{expression.place}: no end within a minute")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert not slow, "\n".join(slow)


@pytest.mark.parametrize(
    ("pattern", "is_anchored"),
    [
        (r"```[ \t]*(\w*)[^\n]*\n(.*?)```", False),
        (r"\s+$", False),
        (r"x*x*y", True),
        (r'<details\b[^>]*\btype="reasoning"[^>]*>', True),
    ],
)
def test_the_measure_knows_a_quadratic_expression(pattern: str, is_anchored: bool) -> None:
    assert growth(Expression("here", pattern, re.DOTALL, is_anchored))


def test_the_measure_lets_a_linear_expression_pass() -> None:
    assert not growth(Expression("here", r"\d+(\.\d+)?", 0, True))
