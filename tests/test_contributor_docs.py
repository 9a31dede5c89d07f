"""The contributor's pages, the records of decisions and the site of the documentation, checked against the code."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.test_architecture import LAYERS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "docs/architecture.md", "docs/glossary.md")
]
FOLDERS = (
    "backend/ benchmarks/ clients/ docs/ feedback/ packed/ rl/ static/ templates/ tests/ tools/"
).split()


def quoted(page: Path) -> list[str]:
    """What stands in backquotes, outside of blocks of code."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```", "", page.read_text("utf-8")))


def is_there(dotted: str) -> bool:
    """Whether a dotted name is a package, a module, or a name that a module or package defines."""
    root = ROOT / "clients" / "python" / "src" if dotted.startswith("ratchet_client") else ROOT
    path = root.joinpath(*dotted.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    home = path.parent / "__init__.py" if path.parent.is_dir() else path.parent.with_suffix(".py")
    if not home.is_file():
        return False
    defined = {
        target
        for node in ast.parse(home.read_text("utf-8")).body
        for target in (
            [node.name]
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            else [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]
        )
    }
    return path.name in defined


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_and_files_named_are_there(page: Path) -> None:
    names = quoted(page)
    dotted = [name for name in names if re.fullmatch(r"(?:backend|feedback|rl)(?:\.\w+)+", name)]
    files = [name for name in names if name.startswith(tuple(FOLDERS)) and re.fullmatch(r"[\w./-]+", name)]
    assert [name for name in dotted if not is_there(name)] == []
    assert [name for name in files if not (ROOT / name).exists()] == []


LINKING = [ROOT / "README.md", *PAGES[:2], *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    broken = []
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text("utf-8")):
        file = page.parent / target if target else page
        headings = (
            re.findall(r"(?m)^#+ (.+)$", file.read_text("utf-8"))
            if file.suffix == ".md" and file.exists()
            else []
        )
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        if not file.exists() or (anchor and anchor not in anchors):
            broken.append(f"{target}#{anchor}")
    assert broken == []


@pytest.mark.parametrize("app", LAYERS)
def test_the_page_has_the_layers_that_the_code_is_held_to(app: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = page.split(f"layers of `{app}` |\n")[1].split("\n\n")[0].splitlines()[1:]
    rows = [re.findall(r"`([\w.]+)`", row) for row in table]
    assert rows == [[f"{app}.{place}" for place in line.split()] for line in LAYERS[app]]


def test_the_diagrams_are_as_their_script_draws_them_and_name_modules_that_are_there() -> None:
    spec = importlib.util.spec_from_file_location("diagrams", ROOT / "docs" / "diagrams.py")
    assert spec
    assert spec.loader
    diagrams = importlib.util.module_from_spec(spec)
    sys.modules["diagrams"] = diagrams
    spec.loader.exec_module(diagrams)
    for name, content in diagrams.pictures().items():
        assert (ROOT / "docs" / "images" / name).read_text("utf-8") == content, "run: python docs/diagrams.py"
    named = [
        part for step in (*diagrams.THUMB, *diagrams.COMPLETION) for part in re.split(r"[ ,>-]+", step.module)
    ]
    assert [name for name in named if not is_there(name)] == []


def test_hooks_before_a_commit_run_the_pinned_programs_alone() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    pins = (ROOT / "requirements-dev.txt").read_text("utf-8")
    assert [repository["repo"] for repository in hooks] == ["local"]  # nothing is fetched
    for hook in hooks[0]["hooks"]:
        program, *words = hook["entry"].split()
        assert program.startswith(".venv/bin/")
        name = program.rpartition("/")[2]
        assert f"{name}==" in pins or (name == "python" and (ROOT / words[0]).is_file())


MOST_RECORDS, MOST_LINES, MOST_CHANGES = 40, 42, 200


def test_every_docs_page_has_a_place_in_the_navigation() -> None:
    placed = re.findall(r"(?m)^ +- (?:[\w ]+: )?([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"))
    assert len(placed) == len(set(placed))
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert sorted(pages - set(placed)) == [], "give each a place below `nav` in mkdocs.yml"


@pytest.mark.slow
def test_the_site_builds_with_every_link_leading_somewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    home = (tmp_path / "site" / "index.html").read_text("utf-8")
    assert 'href="docs/gates/"' in home
    assert (tmp_path / "site" / "search" / "search_index.json").is_file()
    assert len(list((tmp_path / "site").rglob("index.html"))) > 50
    # nothing is loaded from elsewhere
    assert re.findall(r'(?:src|href)="(https?:[^"]+\.(?:js|css|woff2?|png|svg))"', home) == []
