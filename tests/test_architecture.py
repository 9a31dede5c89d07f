"""Architecture: who may import whom, no torch in the web process, no circle, no file without a subject."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from rl.rewards.formats import parse_python

ROOT = Path(__file__).resolve().parent.parent
TORCH = {
    "torch",
    "transformers",
    "trl",
    "peft",
    "datasets",
    "accelerate",
    "bitsandbytes",
    "safetensors",
    "gguf",
    "lm_eval",
}
DJANGO = {"django", "rest_framework", "django_q", "unfold"}
PURE = [
    "rl.agents",
    "rl.bundled_models",
    "rl.checksums",
    "rl.datasets.examples",
    "rl.datasets.feedback_types",
    "rl.datasets.holdout",
    "rl.datasets.pairs",
    "rl.datasets.replay",
    "rl.experiments.verdicts",
    "rl.export.exporters",
    "rl.gates",
    "rl.linear",
    "rl.recipes",
    "rl.rewards",
    "rl.statistics",
]
"""Packages and modules that need the standard library and numerics alone."""

TORCH_PACKAGES = ["rl.training", "rl.export"]
ENTRY_POINTS = [
    "rl.evaluation.benchmarks",
    "rl.evaluation.judges",
    "rl.evaluation.scorer_process",
    "rl.evaluation.service",
    "rl.export.deployment",
    "rl.export.service",
    "rl.jobs.label",
    "rl.jobs.linear",
    "rl.jobs.hardware",
    "rl.jobs.plan",
    "rl.jobs.train",
    "rl.jobs.trainer",
    "rl.reward_models.service",
    "rl.reward_models.specs",
]
"""Modules with Django that import the packages of TORCH_PACKAGES, inside functions alone."""

EXPORT_SERVICES = ["rl.export.deployment", "rl.export.exporters", "rl.export.service"]
"""The part of `rl.export` that knows the registry, and the table of exporters; all else there is writers, which know no
Django."""

LAYERS = {
    "feedback": [
        "cache",
        "apps models",
        "storage",
        "selectors",
        "services",
        "recording",
        "accounts",
        "erasure",
        "explorer",
        "rating",
        "agreement",
        "transfer",
        "agents",
        "admin api management templatetags urls",
    ],
    "rl": [
        "bundled_models checksums statistics",
        "agents",
        "linear recipes rewards",
        "gates",
        "charts",
        "models",
        "datasets",
        "training",
        "registry",
        "experiments",
        "serving",
        "reward_models",
        "jobs",
        "evaluation",
        "export",
        "online",
        "selectors",
        "admin api doctor views",
        "management tasks templatetags urls",
        "apps",
    ],
}
"""Places of each app, lowest first: one imports those on lines above its own, never those on its line or below.

The entry points import `rl.training` and `rl.export` inside functions, wherever they stand."""
FREE = {"feedback": {"collector"}, "rl": set()}
"""Places beside the line: the alias of the client."""


def modules(package: str) -> list[Path]:
    path = ROOT / package.replace(".", "/")
    found = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return [file for file in found if file.exists() and "migrations" not in file.parts]


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imports(file: Path, *, top_level_only: bool = False, types: bool = True) -> tuple[str, ...]:
    """Every module a file imports, absolute; with top_level_only not those inside functions, and without `types` not
    those that only a type checker sees."""
    return tuple(_walk(_parsed(file), file, top_level_only, types and not top_level_only))


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return parse_python(file.read_text("utf-8"))


def _walk(node: ast.AST, file: Path, top_level_only: bool, types: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{file}: relative import; say where it comes from"
            assert child.module
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif (top_level_only and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))) or (
            not types and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        ):
            continue
        else:
            yield from _walk(child, file, top_level_only, types)


def within(module: str, packages: list[str] | set[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def offences(
    package: str,
    forbidden: list[str] | set[str],
    *,
    but: list[str] | None = None,
    top_level_only: bool = False,
) -> list[str]:
    return [
        f"{name_of(file)} imports {module}"
        for file in modules(package)
        for module in imports(file, top_level_only=top_level_only)
        if within(module, forbidden) and not within(module, but or [])
    ]


def is_heavy(module: str) -> bool:
    """Whether a module belongs to the training packages: what imports it waits for torch."""
    return within(module, TORCH_PACKAGES) and module != "rl.export" and not within(module, EXPORT_SERVICES)


def heavy_imports(package: str, *, top_level_only: bool = False) -> list[str]:
    """Imports of torch's stack and of the training packages by a package, named."""
    return [
        f"{name_of(file)} imports {module}"
        for file in modules(package)
        for module in imports(file, top_level_only=top_level_only)
        if within(module, TORCH) or is_heavy(module)
    ]


PROJECT = {name_of(file): file for app in LAYERS for file in modules(app)}


def project_imports(file: Path, *, types: bool = True) -> set[str]:
    """Modules of the project that a file imports; a package counts where no module of it is named."""
    found = set(imports(file, types=types)) & set(PROJECT)
    return {module for module in found if not any(other.startswith(module + ".") for other in found)} - {
        name_of(file)
    }


@pytest.mark.slow
@pytest.mark.parametrize("app", LAYERS)
def test_packages_import_only_what_lies_below_them(app: str) -> None:
    rank = {place: number for number, line in enumerate(LAYERS[app]) for place in line.split()}
    places = {name.split(".")[1] for name in PROJECT if name.startswith(app + ".")}
    assert places - FREE[app] == set(rank), "a new package or module needs its line in LAYERS"
    upward = [
        f"{name} imports {module}"
        for name, file in PROJECT.items()
        if name.startswith(app + ".") and name.split(".")[1] in rank
        for module in project_imports(file, types=False)
        if module.startswith(app + ".") and module.split(".")[1] in rank
        if name.split(".")[1] != module.split(".")[1]
        and rank[name.split(".")[1]] <= rank[module.split(".")[1]]
    ]
    assert upward == []


@pytest.mark.slow
def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: project_imports(file, types=False) for name, file in PROJECT.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def test_feedback_knows_nothing_of_rl_and_torch() -> None:
    assert offences("feedback", {"rl", *TORCH}) == []


def test_the_client_needs_the_standard_library_alone() -> None:
    client = [*(ROOT / "clients" / "python" / "src").rglob("*.py")]
    assert len(client) > 1
    outside = [
        f"{file.name} imports {module}"
        for file in client
        for module in imports(file)
        if module.split(".")[0] not in sys.stdlib_module_names and not within(module, ["ratchet_client"])
    ]
    assert outside == []


@pytest.mark.slow
def test_the_server_runs_without_the_client() -> None:
    """Nothing of the server imports the client's package; `feedback.collector`, its alias, is imported by nobody."""
    server = [file for folder in ("backend", "feedback", "rl") for file in modules(folder)]
    assert [
        f"{name_of(file)} imports {module}"
        for file in server
        if name_of(file) != "feedback.collector"
        for module in imports(file)
        if within(module, ["ratchet_client", "feedback.collector"])
    ] == []


@pytest.mark.parametrize("package", PURE)
def test_pure_packages_know_neither_django_nor_torch(package: str) -> None:
    assert offences(package, {*DJANGO, *TORCH, "feedback", "backend"}) == []
    assert offences(package, ["rl"], but=PURE) == []


def test_the_training_packages_know_no_django_and_no_feedback() -> None:
    outside = [
        f"{name} imports {module}"
        for name, file in PROJECT.items()
        if is_heavy(name)
        for module in imports(file)
        if within(module, {*DJANGO, "feedback", "backend"})
        or (
            (module in PROJECT and not within(module, [*PURE, "rl.training"]) and not is_heavy(module))
            # a package's own file is empty, or imports on first use
            and not any(other.startswith(module + ".") for other in [*PURE, "rl.export.service"])
        )
    ]
    assert outside == []


def test_no_process_that_serves_loads_scikit_learn() -> None:
    outside = offences("rl", {"sklearn"}, top_level_only=True)
    assert [one for one in outside if not one.startswith("rl.training.")] == []


def test_training_does_not_know_export() -> None:
    assert offences("rl.training", ["rl.export"]) == []


@pytest.mark.parametrize(
    "package",
    [
        "rl.datasets",
        "rl.admin",
        "rl.apps",
        "rl.charts",
        "rl.experiments",
        "rl.jobs.lifecycle",
        "rl.management.simulation",
        "rl.models",
        "rl.online",
        "rl.registry",
        "rl.selectors",
        "rl.views",
    ],
)
def test_the_rest_of_rl_has_no_torch(package: str) -> None:
    # Hugging Face's own format is written by its library, imported when it is asked for
    allowed = "rl.datasets.export imports datasets"
    assert [one for one in heavy_imports(package) if not one.startswith(allowed)] == []


def test_serving_knows_neither_torch_nor_runs() -> None:
    assert heavy_imports("rl.serving") + offences("rl.serving", {"rl.export", "rl.jobs"}) == []


def test_only_entry_points_import_training_and_only_inside_functions() -> None:
    outside = [
        f"{name} imports {module}"
        for name, file in PROJECT.items()
        if not is_heavy(name) and not within(name, [*ENTRY_POINTS, "rl.management.commands.build_base_model"])
        for module in imports(file, types=False)  # the type of a result may be named anywhere
        if is_heavy(module)
    ]
    assert outside == []
    for module in [*ENTRY_POINTS, "rl.management"]:
        assert heavy_imports(module, top_level_only=True) == []


def test_interfaces_import_no_training() -> None:
    for package in (
        "rl.views",
        "rl.admin",
        "rl.api",
        "rl.api.loop",
        "rl.api.gateway",
        "rl.api.decide",
        "rl.api.health",
        "rl.tasks",
        "feedback.rating.views",
        "feedback.admin",
        "feedback.api",
    ):
        assert heavy_imports(package) == []


def test_only_settings_read_the_environment() -> None:
    readers = [
        name_of(file)
        for package in ("backend", "feedback", "rl")
        for file in modules(package)
        # the word alone: a column of an export may be called environment
        if re.search(r"\benviron\b|getenv", file.read_text("utf-8"))
    ]
    assert [name for name in readers if name not in ENVIRONMENT_READERS] == []


ENVIRONMENT_READERS = {
    "backend.settings",
    "backend.console",  # names the settings module, as manage.py does, and sets what OpenMP reads before torch
    "backend.wsgi",  # Django's own two entry points name the settings module there
    "backend.asgi",
}


def test_rl_has_an_empty_package_file() -> None:
    assert (ROOT / "rl" / "__init__.py").read_text("utf-8").strip() == ""


@pytest.mark.slow
def test_every_module_says_what_it_is_for() -> None:
    silent = [
        name_of(file)
        for package in ("backend", "feedback", "rl")
        for file in modules(package)
        if file.read_text("utf-8").strip()
        and file.name != "apps.py"
        and not ast.get_docstring(ast.parse(file.read_text("utf-8")))
    ]
    assert silent == []


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
        for text in _docstrings(_parsed(file))
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
        for node in ast.walk(_parsed(file))
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
        for record in ast.walk(_parsed(file))
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
        for node in ast.walk(_parsed(file))
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
NOUN_PACKAGES = (
    "feedback/accounts", "feedback/agents", "feedback/agreement", "feedback/api", "feedback/erasure", "feedback/rating",
    "feedback/recording", "feedback/storage", "feedback/transfer", "rl/agents", "rl/api", "rl/charts", "rl/datasets",
    "rl/evaluation", "rl/experiments", "rl/export", "rl/gates", "rl/jobs", "rl/linear", "rl/online", "rl/registry",
    "rl/reward_models", "rl/rewards", "rl/serving", "rl/statistics", "rl/training",
)  # fmt: skip
"""Where local names are held to nouns; elsewhere, as in the builder of the bundled base (`base_*`), not yet."""
STANDARD_LOCALS = (*STANDARD_FIELDS.split(), "hidden", "seed", "whole")
"""Words of the field: `hidden` are hidden states."""


@pytest.mark.slow
def test_locals_that_live_long_are_named_by_nouns() -> None:
    """From its first assignment to its last use no local of more than ten lines is a participle or a relation alone;
    what is true or false is named `is_...` or `has_...`."""
    odd = [
        f"{file.relative_to(ROOT)}:{first} {name}"
        for package in NOUN_PACKAGES
        for file in _files(package)
        if not file.name.startswith("base_") or package != "rl/training"
        for function in ast.walk(_parsed(file))
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


@pytest.mark.slow
def test_no_two_classes_share_a_name() -> None:
    """One meaning per name: of classes at the top of a module. Django finds a command by the name `Command`."""
    places: dict[str, list[str]] = {}
    for name, file in PROJECT.items():
        for node in _parsed(file).body:
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
        for node in ast.walk(_parsed(file))
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


@pytest.mark.slow
def test_the_web_process_runs_without_torch() -> None:
    code = (
        "import sys, backend.wsgi\n"
        "from django.urls import get_resolver\n"
        "get_resolver().url_patterns\n"
        "from django.contrib import admin\n"
        "admin.autodiscover()\n"
        f"heavy = {sorted(TORCH)!r}\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_command_starts_without_the_statistics_it_may_never_need() -> None:
    code = "import sys, django; django.setup(); print('scipy.stats' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "backend.settings"},
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr


@pytest.mark.slow
def test_the_training_packages_runs_without_django() -> None:
    code = (
        "import sys\n"
        # not there at all, rather than not imported: a library below us imports Django where it finds it
        "sys.modules['django'] = sys.modules['feedback'] = None\n"
        "import rl.training.dpo, rl.training.evaluate, rl.export.gguf, rl.export.merged_model, rl.export.lora\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_lightweight_requirements_hold_no_torch() -> None:
    lines = (ROOT / "requirements.txt").read_text("utf-8").lower()
    assert [
        name for name in ("torch", "transformers", "trl", "peft", "llama-cpp") if f"\n{name}" in lines
    ] == []


def test_every_direct_dependency_is_pinned() -> None:
    loose = [
        line
        for name in ("requirements.txt", "requirements-rl.txt", "requirements-dev.txt")
        for line in (ROOT / name).read_text("utf-8").splitlines()
        if line.strip() and not line.startswith(("#", "-r")) and "==" not in line
    ]
    assert loose == []
