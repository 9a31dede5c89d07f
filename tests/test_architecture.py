"""Architecture: who may import whom, no torch in the web process, no circle, no file without a subject."""

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

from rl.rewards.answers import parse_python

ROOT = Path(__file__).resolve().parent.parent
TORCH = set(
    (
        "torch transformers trl peft datasets accelerate bitsandbytes safetensors gguf lm_eval packed_forward"
    ).split()
)
DJANGO = {"django", "rest_framework", "django_q", "unfold"}
PURE = (
    "rl.agents rl.base_models.sources rl.bundled_models rl.chat_templates rl.checksums rl.decoding rl.llama_library "
    "rl.datasets.examples rl.datasets.feedback_types rl.datasets.holdout rl.datasets.pairs "
    "rl.experiments.verdicts rl.export.agreement rl.export.artifact rl.gates rl.linear rl.recipes "
    "rl.rewards rl.statistics"
).split()
"""Packages and modules that need the standard library and numerics alone."""

TORCH_PACKAGES = ["rl.training", "rl.export", "rl.base_models.dequantise"]
ENTRY_POINTS = (
    "rl.base_models.service rl.evaluation.benchmarks rl.evaluation.candidates rl.evaluation.judging "
    "rl.evaluation.service rl.evaluation.sides rl.export.service rl.jobs.trainer "
    "rl.jobs.linear rl.jobs.plan rl.jobs.train rl.reward_models.service"
).split()
"""Modules with Django that import the packages of TORCH_PACKAGES, inside functions alone."""

EXPORT_SERVICES = ["rl.export.agreement", "rl.export.artifact", "rl.export.service"]
"""The part of `rl.export` that knows the registry, the table of exporters and the figures of a check; all else there is
writers, which know no Django."""

LAYERS = {
    "feedback": [
        "cache messages",
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
        "admin api templatetags urls",
        "management",
    ],
    "rl": [
        "bundled_models checksums llama_library statistics",
        "agents",
        "chat_templates",
        "decoding linear recipes rewards",
        "gates",
        "charts",
        "models",
        "artifacts",
        "datasets",
        "training",
        "base_models registry",
        "upstreams",
        "experiments",
        "serving",
        "reward_models",
        "jobs",
        "export",
        "evaluation",
        "online",
        "fine_tuning",
        "savings selectors tracking",
        "flywheel",
        "admin api views",
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
    return tuple(_walk(parsed(file), file, top_level_only, types and not top_level_only))


@functools.cache
def parsed(file: Path) -> ast.Module:
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


@pytest.mark.slow
def test_no_folders_import_each_other_in_a_circle() -> None:
    """A folder and those inside it count as one place: a package's face names its parts, which build on its files."""
    graph: dict[str, set[str]] = {}
    project = PROJECT | {name_of(file): file for file in modules("backend")}
    for file in project.values():
        here = file.parent.relative_to(ROOT)
        for module in set(imports(file, types=False)) & set(project):
            there = project[module].parent.relative_to(ROOT)
            if not (here.is_relative_to(there) or there.is_relative_to(here)):
                graph.setdefault(str(here), set()).add(str(there))
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


def test_some_packages_stand_alone() -> None:
    # formats load no django
    code = "import sys, feedback.transfer.formats; sys.exit('django' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
    # the packed forward needs nothing of this project
    found = {module.split(".")[0] for file in (ROOT / "packed").rglob("*.py") for module in imports(file)}
    assert found & {"rl", "feedback", "backend", "tests", "tools", "django"} == set()
    assert found >= {"packed_forward", "torch", "transformers", "peft", "trl"}


@pytest.mark.slow
def test_the_server_shares_the_clients_outbox_alone() -> None:
    server = [file for folder in ("backend", "feedback", "rl") for file in modules(folder)]
    shared = {f"ratchet_client.{module}" for module in ("outbox", "problem_log", "processes")}
    found = {
        ".".join(module.split(".")[:2])
        for file in server
        if name_of(file) != "feedback.collector"
        for module in imports(file)
        if within(module, ["ratchet_client", "feedback.collector"])
    }
    assert found == shared


@pytest.mark.slow
def test_the_program_imports_no_tool() -> None:
    assert [one for package in ("backend", *LAYERS) for one in offences(package, {"tools", "tests"})] == []


@pytest.mark.parametrize("package", ["feedback.messages", *PURE])
def test_pure_packages_know_neither_django_nor_torch(package: str) -> None:
    assert offences(package, {*DJANGO, *TORCH, "feedback", "backend"}, but=["feedback.messages"]) == []
    assert offences(package, ["rl"], but=PURE) == []


def test_the_training_packages_know_no_django_and_no_feedback() -> None:
    outside = [
        f"{name} imports {module}"
        for name, file in PROJECT.items()
        if is_heavy(name)
        for module in imports(file)
        if (within(module, {*DJANGO, "feedback", "backend"}) and not within(module, ["feedback.messages"]))
        or (
            (
                module in PROJECT
                and not within(module, [*PURE, "rl.training", "feedback.messages"])
                and not is_heavy(module)
            )
            # a package's own file is empty, or imports on first use
            and not any(other.startswith(module + ".") for other in [*PURE, "rl.export.service"])
        )
    ]
    assert outside == []


def test_scikit_learn_and_export_stay_out() -> None:
    # no process that serves loads scikit learn
    outside = offences("rl", {"sklearn"}, top_level_only=True)
    assert [one for one in outside if not one.startswith("rl.training.")] == []
    # training does not know export
    assert offences("rl.training", ["rl.export"]) == []


@pytest.mark.parametrize(
    "package",
    (
        "rl.datasets rl.admin rl.apps rl.charts rl.experiments rl.jobs.lifecycle rl.management.simulation "
        "rl.models rl.online rl.registry rl.selectors rl.views"
    ).split(),
)
def test_the_rest_of_rl_has_no_torch(package: str) -> None:
    assert heavy_imports(package) == []


def test_serving_knows_neither_torch_nor_runs() -> None:
    assert heavy_imports("rl.serving") + offences("rl.serving", {"rl.export", "rl.jobs"}) == []


def test_only_entry_points_import_training_and_only_inside_functions() -> None:
    outside = [
        f"{name} imports {module}"
        for name, file in PROJECT.items()
        if not is_heavy(name) and not within(name, ENTRY_POINTS)
        for module in imports(file, types=False)  # the type of a result may be named anywhere
        if is_heavy(module)
    ]
    assert outside == []
    for module in [*ENTRY_POINTS, "rl.management"]:
        assert heavy_imports(module, top_level_only=True) == []


def test_interfaces_import_no_training() -> None:
    for package in (
        "rl.views rl.admin rl.api rl.api.loop rl.api.gateway rl.api.gateway rl.api.health rl.tasks "
        "feedback.rating.views feedback.admin feedback.api"
    ).split():
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
    "backend.__main__",  # names the settings module, as manage.py does, and sets what OpenMP reads before torch
    "backend.wsgi",  # Django's own two entry points name the settings module there
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


@pytest.mark.slow
def test_a_command_starts_without_the_statistics_it_may_never_need() -> None:
    code = "import sys, django; django.setup(); print('scipy.stats' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "backend.settings"},
    )
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr


@pytest.mark.slow
def test_the_training_packages_runs_without_django() -> None:
    code = (
        "import sys\n"
        # not there at all, rather than not imported: a library below us imports Django where it finds it
        "sys.modules['django'] = sys.modules['feedback.models'] = None\n"
        "import rl.training.dpo, rl.training.evaluate, rl.export.gguf, rl.export.hugging_face, rl.export.hugging_face\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_requirements_are_pinned_and_light() -> None:
    # the lightweight requirements hold no torch
    lines = (ROOT / "requirements.txt").read_text("utf-8").lower()
    assert [
        name for name in ("torch", "transformers", "trl", "peft", "llama-cpp") if f"\n{name}" in lines
    ] == []
    # every direct dependency is pinned
    loose = [
        line
        for name in (
            "requirements.txt",
            "requirements-rl.txt",
            "requirements-extras.txt",
            "requirements-dev.txt",
        )
        for line in (ROOT / name).read_text("utf-8").splitlines()
        if line.strip() and not line.startswith(("#", "-r")) and "==" not in line
    ]
    assert loose == []
