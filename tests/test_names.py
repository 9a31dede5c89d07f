"""Names: one meaning each, and no module without a subject."""

from __future__ import annotations

import ast

import pytest

from tests.test_architecture import PROJECT, ROOT, modules, parsed


@pytest.mark.slow
def test_no_two_classes_share_a_name() -> None:
    """One meaning per name: of classes at the top of a module. Django finds a command by the name `Command`."""
    places: dict[str, list[str]] = {}
    for name, file in PROJECT.items():
        for node in parsed(file).body:
            if isinstance(node, ast.ClassDef) and node.name != "Command":
                places.setdefault(node.name, []).append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_module_without_a_subject() -> None:
    nameless = [
        str(p.relative_to(ROOT))
        for r in ("backend", "feedback", "rl")
        for p in (ROOT / r).rglob("*")
        if p.stem in ("utils", "core", "helpers", "common")
    ]
    assert nameless == []


FIELD_ALIASES = {"np", "npt", "pd", "nn", "F", "plt", "st"}
"""Short names that everybody in the field gives a module."""

PUBLIC_ALIASES = {"PPOConfig": "PPORecipe", "RewardModelConfig": "RewardModelRecipe"}
"""Names that users of TRL expect, for classes of ours."""


@pytest.mark.slow
def test_an_import_is_renamed_only_to_tell_it_apart() -> None:
    """`import views as agent_views` and `import service as registry` say where a name comes from; any other alias
    would be a second name for one thing."""
    files = [
        file
        for folder in ("backend", "benchmarks", "clients", "docs", "examples", "feedback", "rl", "tests")
        for file in modules(folder)
    ]
    renamed = [
        f"{file.relative_to(ROOT)}: {alias.name} as {alias.asname}"
        for file in files
        for node in ast.walk(parsed(file))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if alias.asname not in (None, *FIELD_ALIASES)
        if PUBLIC_ALIASES.get(alias.asname or "") != alias.name
        if not _tells_apart(alias, getattr(node, "module", None) or "")
    ]
    assert renamed == []


def _tells_apart(alias: ast.alias, module: str) -> bool:
    """Whether an alias holds the name itself, or is the name of the package or module it comes from."""
    name, asname = alias.name.rpartition(".")[2].lower().rstrip("s"), (alias.asname or "").lower()
    return name in asname or asname == module.rpartition(".")[2] or (module, name) in OTHER_PACKAGES


OTHER_PACKAGES = {("onnxruntime.capi", "onnxruntime_pybind11_state")}
"""Modules of libraries with names that say nothing."""
