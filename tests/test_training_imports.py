"""Import circles within rl/training, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.test_architecture import modules, name_of

ROOT = Path(__file__).resolve().parent.parent


def import_graph(package: str) -> dict[str, set[str]]:
    """Module -> modules of the package it imports anywhere: at the top, inside functions, for type checkers."""
    names = {name_of(file) for file in modules(package)}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for file in modules(package):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                # `from package import module` needs the module; `from module import name` the module before it
                wanted = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name_of(file)] |= {
                    one if one in names else one.rpartition(".")[0] for one in wanted
                } & names
            elif isinstance(node, ast.Import):
                graph[name_of(file)] |= {alias.name for alias in node.names} & names
    return {name: imported - {name} for name, imported in graph.items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other, each sorted; a graph without circles has none."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        front = list(graph[start])
        while front:
            module = front.pop()
            if module not in seen:
                seen.add(module)
                front += graph[module]
        return seen

    reach = {module: reached(module) for module in graph}
    groups = {
        tuple(sorted(other for other in reach[module] if module in reach[other]))
        for module in graph
        if module in reach[module]
    }
    return [list(group) for group in sorted(groups)]


def test_circles_are_found_through_any_number_of_modules() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"f"}, "f": {"e"}}
    assert circles(graph) == [["a", "b", "c"], ["e", "f"]]


def test_training_has_no_import_circles_even_for_type_checkers() -> None:
    assert circles(import_graph("rl.training")) == []


def test_no_trainer_is_handed_to_what_it_calls() -> None:
    """Functions are given a RunContext, not the trainer that owns them."""
    owners = [
        f"{name_of(file)}:{node.lineno}"
        for file in modules("rl.training")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.arg) and node.arg == "owner"
    ]
    assert owners == []
