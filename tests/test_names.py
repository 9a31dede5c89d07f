"""Names and docstrings: nouns and verbs of the field, one meaning per name, nothing that needs a dictionary."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_architecture import PROJECT, ROOT, modules, parsed

RIDDLES = (
    "What Which How Who Whom Whose Where When Why Whether That Those These It As If So Once Likewise "
    "Asked Called Found Given Kept Said Taken Told"
)
"""First words of a docstring that can only be read with the code below it."""


@pytest.mark.slow
def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    """A docstring can be read alone: of modules, classes, functions, and below assignments."""
    files = [
        file for folder in ("backend", "feedback", "rl", "clients/python/src") for file in _files(folder)
    ]
    riddles = [
        f"{file.relative_to(ROOT)}:{text.lineno}: {text.value.strip()[:40]}"
        for file in files
        for text in _docstrings(parsed(file))
        if text.value.strip().strip("`*").split(maxsplit=1)[0].strip("`,:;.") in RIDDLES.split()
    ]
    assert riddles == [], "\n".join(riddles)


def _files(folder: str) -> list[Path]:
    return [file for file in sorted((ROOT / folder).rglob("*.py")) if "migrations" not in file.parts]


def _docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Every string that stands as a statement of its own."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value


RELATIONS = (
    "above across ahead after again alike among around as at before behind below between beyond by down each either "
    "few here how inside into later least less more most much near nearby next nobody nothing now of off often once "
    "onwards other others out over own past quite rather same since so some soon then there these they those through "
    "today together under until up what when where which who whole whose why with within without"
)
"""Adverbs, prepositions, pronouns and question words: alone they name neither a thing nor what is done to it."""

PARTICIPLES = (
    "begun bought broken brought built caught chosen done drawn driven found given gone grown heard held hidden kept "
    "known laid learnt led left lent made meant met said seen sent shown spent spoken stood stuck taken taught thrown "
    "told understood won worn written"
)
NO_PARTICIPLES = {"embed", "exceed", "feed", "need", "proceed", "seed", "speed"}
FRAMEWORK_NAMES = {"of", "to"}
"""Alternative constructors (`Moments.of`), a template filter, and what accelerate calls on a batch."""


def is_participle(word: str) -> bool:
    return word in PARTICIPLES.split() or (
        len(word) > 4 and word.endswith("ed") and word not in NO_PARTICIPLES
    )


@pytest.mark.parametrize("word", ["kept", "rated", "written", "surveyed"])
def test_participles_are_known_by_their_ending_or_by_the_list(word: str) -> None:
    assert is_participle(word)
    assert not any(is_participle(verb) for verb in ("write", "rate", "seed", "decode", "schema"))


def test_functions_are_named_by_verbs_and_nouns() -> None:
    """No function's whole name is a participle or a relation, and none ends in `_shown` or `_said`. Properties that are
    true or false are adjectives, and the columns of the admin are named as the rows' fields are."""
    odd = [
        f"{name}:{node.lineno} {node.name}"
        for name, file in PROJECT.items()
        for node in ast.walk(parsed(file))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and _is_dialect(node.name.strip("_"))
        and not _is_adjective(node)
    ]
    assert odd == [], "\n".join(odd)


def _is_dialect(name: str) -> bool:
    if "_" in name:
        return name.endswith(("_shown", "_said"))
    return name not in FRAMEWORK_NAMES and (name in RELATIONS.split() or is_participle(name))


def _is_adjective(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = " ".join(ast.unparse(one) for one in node.decorator_list)
    is_flag = node.returns is not None and "bool" in ast.unparse(node.returns)
    return "display(" in decorators or ("property" in decorators and is_flag)


STANDARD_FIELDS = (
    "accepted chosen created disliked dispreferred expected left liked observed packed padded preferred rejected "
    "shared simulated since truncated until"
)
"""Words of the field and of records everywhere; `left` is the side of a pair."""

WIRE_CLASSES = (
    "AgentDeleted AnswerCheck CalculationResult CollectorStatus Damage Diagnosis ErasureReport GoldenResult Hardware "
    "ImportReport Look Manifest OllamaModel OutcomeFacts PipelineResult Progress QueueProgress SuggestionCounts "
    "TrainResult"
)
"""Classes whose fields are the keys of a file or of an answer of the API: a rename there is one for users."""


STANDARD_MODULES = {"packed"}
"""Of packed rows, as the field calls several sequences in one row."""


def test_modules_are_named_by_nouns() -> None:
    """No package or module is a participle or a relation alone, and none ends in a participle, which says nothing of
    what was done to."""
    parts = {
        (name, part)
        for name in PROJECT
        for part in name.split(".")
        if part.strip("_") not in STANDARD_MODULES
    }
    odd = [
        f"{name}: {part}"
        for name, part in sorted(parts)
        if part in RELATIONS.split() or is_participle(part.rpartition("_")[2])
    ]
    assert odd == [], "\n".join(odd)


@pytest.mark.slow
def test_fields_are_named_by_nouns() -> None:
    """No field of a dataclass or a tuple is a participle or a relation alone; flags are adjectives."""
    files = [
        file for folder in ("backend", "feedback", "rl", "clients/python/src") for file in _files(folder)
    ]
    odd = [
        f"{file.relative_to(ROOT)}:{field.lineno} {record.name}.{name}"
        for file in files
        for record in ast.walk(parsed(file))
        if isinstance(record, ast.ClassDef) and _is_record(record) and record.name not in WIRE_CLASSES.split()
        for field in record.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if (name := field.target.id.strip("_")) in RELATIONS.split() or is_participle(name)
        if name not in STANDARD_FIELDS.split() and "bool" not in ast.unparse(field.annotation)
    ]
    assert odd == [], "\n".join(odd)


CONSTRUCTORS = ("__init__", "settle")


@pytest.mark.slow
def test_private_attributes_of_training_are_declared() -> None:
    """What a method assigns to `self._name` is declared in the class's body or by its constructor, or by a base's:
    mypy sees no attribute of TRL's trainers, and a renamed declaration would be missed where it is read first."""
    classes = {
        node.name: node
        for file in _files("rl/training")
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.ClassDef)
    }
    odd = [
        f"{name}: {attribute}"
        for name, node in classes.items()
        for attribute in sorted(_assigned(node) - _declared(node, classes))
        if attribute.startswith("_")
    ]
    assert odd == [], "\n".join(odd)


def _assigned(node: ast.AST) -> set[str]:
    """Attributes of `self` that are assigned."""
    return {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and ast.unparse(one.value) == "self"
    }


def _declared(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    fields = [one for one in node.body if isinstance(one, (ast.Assign, ast.AnnAssign))]
    names = {target.id for one in fields for target in ast.walk(one) if isinstance(target, ast.Name)}
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name in CONSTRUCTORS:
            names |= _assigned(one)
    bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
    return names.union(*(_declared(classes[base], classes) for base in bases if base in classes))


def _is_record(node: ast.ClassDef) -> bool:
    marks = " ".join(ast.unparse(one) for one in (*node.decorator_list, *node.bases))
    return any(mark in marks for mark in ("dataclass", "NamedTuple", "TypedDict"))


LONG_LIVED_LINES = 10
NOUN_FOLDERS = ("backend", "clients/python/src", "docs", "examples", "feedback", "rl")
"""Where local names are held to nouns: everything but tests and benchmarks."""
STANDARD_LOCALS = (*STANDARD_FIELDS.split(), "hidden", "seed", "whole")
"""Words of the field: `hidden` are hidden states."""


@pytest.mark.slow
def test_locals_that_live_long_are_named_by_nouns() -> None:
    """From its first assignment to its last use no local of more than ten lines is a participle or a relation alone;
    what is true or false is named `is_...` or `has_...`."""
    odd = [
        f"{file.relative_to(ROOT)}:{first} {name}"
        for folder in NOUN_FOLDERS
        for file in _files(folder)
        for function in ast.walk(parsed(file))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for name, first, last in _locals(function)
        if last - first > LONG_LIVED_LINES
        if name in RELATIONS.split() or is_participle(name)
        if name not in STANDARD_LOCALS and not name.startswith(("is_", "has_"))
    ]
    assert odd == [], "\n".join(odd)


def _locals(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[tuple[str, int, int]]:
    """Name, line of the first assignment and line of the last use of what a function assigns."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    assigned = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    lines = {name: [node.lineno for node in names if node.id == name] for name in assigned}
    return [(name.strip("_"), min(at), max(at)) for name, at in lines.items()]


STANDARD_CONSTANTS = ("bundled", "learnt")
"""The base model's name, and the table of feedback that a run read."""


@pytest.mark.slow
def test_constants_and_classes_are_named_by_nouns() -> None:
    """No name at the top of a module is a participle or a relation alone: what a module remembers, its bounds, its
    types and classes."""
    odd = [
        f"{file.relative_to(ROOT)}:{statement.lineno} {name}"
        for folder in ("backend", "feedback", "rl", "clients/python/src")
        for file in _files(folder)
        for statement in parsed(file).body
        for name in _top_names(statement)
        if name in RELATIONS.split() or (is_participle(name) and "_" not in name)
        if name not in STANDARD_CONSTANTS
    ]
    assert odd == [], "\n".join(odd)


def _top_names(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement defines, in lower case and without leading underscores."""
    if isinstance(statement, ast.ClassDef):
        words = re.findall(r"[A-Z][^A-Z]*", statement.name)
        yield statement.name.strip("_").lower() if len(words) < 2 else ""
    for target in getattr(statement, "targets", [getattr(statement, "target", None)]):
        if isinstance(target, ast.Name):
            yield target.id.strip("_").lower()


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
