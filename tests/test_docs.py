"""The documentation is tested: every command, option, setting and address stands in it; its links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from django.urls import URLPattern, URLResolver, get_resolver

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def everything() -> str:
    return "\n".join(page.read_text("utf-8") for page in PAGES)


def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "commands.md").read_text("utf-8") == reference().text(), (
        "run: python docs/reference.py"
    )


def test_every_option_of_every_command_explains_itself() -> None:
    module = reference()
    silent = [
        f"{name} {typed}"
        for name, parser in module.commands().items()
        for typed, text in module.options(parser)
        if len(text) < 8
    ]
    assert silent == []


def test_every_command_says_what_it_does_with_an_example() -> None:
    assert [n for n, p in reference().commands().items() if len(p.description or "") < 20] == []


def test_every_environment_variable_is_documented() -> None:
    source = (ROOT / "backend" / "settings.py").read_text("utf-8")
    read = set(re.findall(r'(?:environ\.get\(|environ\[|_flag\(|_[a-z]+\()"([A-Z][A-Z_]+)"', source))
    assert {"DATABASE_URL", "RATCHET_HOME", "DEBUG"} <= read
    page = (ROOT / "docs" / "settings.md").read_text("utf-8")
    assert [name for name in sorted(read) if f"`{name}`" not in page] == []


def addresses(patterns: list[URLPattern | URLResolver], before: str = "/") -> list[str]:
    found: list[str] = []
    for pattern in patterns:
        here = (before + str(pattern.pattern)).replace("^", "")
        if here.startswith("/admin/"):
            continue
        if isinstance(pattern, URLResolver):
            found += addresses(pattern.url_patterns, here)
        else:
            found.append(re.sub(r"<(?:\w+:)?(\w+)>", "{}", here).replace("$", ""))
    return found


def test_every_address_is_documented() -> None:
    text = re.sub(r"[{<][\w:]+[}>]", "{}", everything())
    undocumented = [
        a for a in addresses(get_resolver().url_patterns) if a not in text and a.rstrip("/") not in text
    ]
    assert undocumented == []


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "clients" / "python" / "README.md"],
    ids=lambda page: f"{page.parent.name}/{page.name}",
)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_each_picture_of_the_docs_is_shown_and_together_they_are_light() -> None:
    named = set().union(
        *(re.findall(r"!\[[^\]]+\]\((?:docs/)?images/([^)]+)\)", page.read_text("utf-8")) for page in PAGES)
    )
    pictures = list((ROOT / "docs" / "images").iterdir())
    assert {picture.name for picture in pictures} == named
    assert sum(picture.stat().st_size for picture in pictures) < 1_500_000


def test_commands_named_in_the_docs_exist() -> None:
    from django.core.management import get_commands

    named = set(re.findall(r"manage\.py ([a-z_]+)", everything()))
    assert sorted(named - set(get_commands()) - OF_THE_EXAMPLE) == []


OF_THE_EXAMPLE = {"train_preferred"}
"""Commands of the package in examples/plugins, which docs/extending.md walks through (tests/test_extending.py)."""


def test_every_docs_page_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert [page.name for page in PAGES[1:] if f"docs/{page.name}" not in readme] == []


def test_no_workplace_path_is_in_the_project() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    pattern = re.compile(r"(^|[^A-Za-z0-9_./])/(?:root|home)/")
    text_files = [
        f for f in listed if Path(f).suffix in (".py", ".md", ".toml", ".txt", ".html", ".css", ".js", "")
    ]
    found = [
        f
        for f in text_files
        if (ROOT / f).is_file() and pattern.search((ROOT / f).read_text("utf-8", "replace"))
    ]
    assert [f for f in found if f != "tests/test_docs.py"] == []
