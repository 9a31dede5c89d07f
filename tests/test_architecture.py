"""The house: who may import whom, torch outside the web process, no file without a subject."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    "rl.bundled",
    "rl.rewards",
    "rl.recipes",
    "rl.checksums",
    "rl.curriculum",
    "rl.statistics",
    "rl.benchmark_tasks",
    "rl.evidence_kinds",
    "rl.gate_answers",
    "rl.gate_benchmarks",
    "rl.gate_clusters",
    "rl.gate_effects",
    "rl.gate_sheets",
    "rl.gates",
    "rl.judgements",
    "rl.linear",
    "rl.holdout",
    "rl.pairs",
    "rl.examples",
    "rl.replay",
    "rl.experiments.allocation",
    "rl.experiments.metrics",
    "rl.experiments.verdicts",
]
FURNACE = ["rl.training", "rl.export"]


def modules(room: str) -> list[Path]:
    path = ROOT / room.replace(".", "/")
    found = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return [file for file in found if file.exists() and "migrations" not in file.parts]


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(file: Path, *, top_level_only: bool = False, types: bool = True) -> Iterator[str]:
    """Every module a file imports, absolute; with top_level_only not those inside functions, and without `types` not
    those that only a type checker sees."""
    yield from _walk(ast.parse(file.read_text("utf-8")), file, top_level_only, types and not top_level_only)


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


def within(module: str, rooms: list[str] | set[str]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def offences(
    room: str, forbidden: list[str] | set[str], *, but: list[str] | None = None, top_level_only: bool = False
) -> list[str]:
    return [
        f"{name_of(file)} imports {module}"
        for file in modules(room)
        for module in imports(file, top_level_only=top_level_only)
        if within(module, forbidden) and not within(module, but or [])
    ]


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


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_know_neither_django_nor_torch(room: str) -> None:
    assert offences(room, {*DJANGO, *TORCH, "feedback", "backend"}) == []
    assert offences(room, ["rl"], but=PURE) == []


@pytest.mark.parametrize("room", FURNACE)
def test_the_furnace_knows_no_django_and_no_feedback(room: str) -> None:
    assert offences(room, {*DJANGO, "feedback", "backend"}) == []
    assert offences(room, ["rl"], but=[*PURE, *FURNACE]) == []


def test_no_process_that_serves_loads_scikit_learn() -> None:
    outside = offences("rl", {"sklearn"}, top_level_only=True)
    assert [one for one in outside if not one.startswith("rl.training.")] == []


def test_training_does_not_know_export() -> None:
    assert offences("rl.training", ["rl.export"]) == []


@pytest.mark.parametrize(
    "room",
    [
        "rl.datasets",
        "rl.registry",
        "rl.jobs",
        "rl.models",
        "rl.simulation",
        "rl.views",
        "rl.admin",
        "rl.selectors",
        "rl.experiments",
        "rl.apps",
    ],
)
def test_the_rest_of_rl_has_no_torch(room: str) -> None:
    assert offences(room, {*TORCH, "rl.training", "rl.export"}) == []


def test_serving_knows_neither_torch_nor_runs() -> None:
    assert offences("rl.serving", {*TORCH, "rl.training", "rl.export", "rl.runs"}) == []


DOORS = [
    "rl.runs",
    "rl.linear_runs",
    "rl.benchmark_runs",
    "rl.evaluations",
    "rl.exports",
    "rl.labelling",
    "rl.reward_models",
    "rl.reward_specs",
    "rl.scorer_process",
    "rl.answer_checks",
]


def test_only_the_doors_open_the_furnace_and_only_inside_functions() -> None:
    outside = [
        f"{name_of(file)} imports {module}"
        for file in modules("rl")
        if not within(name_of(file), [*FURNACE, *DOORS, "rl.management.commands.build_base_model"])
        for module in imports(file, types=False)  # naming the type of what came out opens nothing
        if within(module, FURNACE)
    ]
    assert outside == []
    for door in [*DOORS, "rl.management"]:
        assert offences(door, {*TORCH, *FURNACE}, top_level_only=True) == []


def test_interfaces_open_no_furnace() -> None:
    for room in (
        "rl.views",
        "rl.admin",
        "rl.api",
        "rl.api.loop",
        "rl.api.gateway",
        "rl.api.decide",
        "rl.api.health",
        "rl.tasks",
        "feedback.views",
        "feedback.admin",
        "feedback.api",
    ):
        assert offences(room, {*TORCH, *FURNACE}) == []


def test_only_settings_read_the_environment() -> None:
    readers = [
        name_of(file)
        for room in ("backend", "feedback", "rl")
        for file in modules(room)
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


def test_rl_has_an_empty_front_door() -> None:
    assert (ROOT / "rl" / "__init__.py").read_text("utf-8").strip() == ""


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        name_of(file)
        for room in ("backend", "feedback", "rl")
        for file in modules(room)
        if file.read_text("utf-8").strip()
        and file.name != "apps.py"
        and not ast.get_docstring(ast.parse(file.read_text("utf-8")))
    ]
    assert silent == []


def test_no_rooms_without_a_name() -> None:
    nameless = [
        str(p.relative_to(ROOT))
        for r in ("backend", "feedback", "rl")
        for p in (ROOT / r).rglob("*")
        if p.stem in ("utils", "core", "helpers", "common")
    ]
    assert nameless == []


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


def test_a_command_starts_without_the_statistics_it_may_never_need() -> None:
    code = "import sys, django; django.setup(); print('scipy.stats' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "backend.settings"},
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr


def test_the_furnace_runs_without_django() -> None:
    code = (
        "import sys\n"
        # not there at all, rather than not imported: a library below us imports Django where it finds it
        "sys.modules['django'] = sys.modules['feedback'] = None\n"
        "import rl.training.dpo, rl.training.evaluate, rl.export.gguf, rl.export.merged, rl.export.lora\n"
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
