"""Every command, option, setting and address is documented, links work, and the quickstart notebook runs."""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import nbformat
import pytest
from django.urls import URLPattern, URLResolver, get_resolver
from nbclient import NotebookClient

from backend.rest.errors import STATUSES
from tests.support.api_client import ApiClient
from tests.support.migrated_database import template_copy
from tests.test_api_access import OPEN, api_views

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


def test_commands_explain_themselves() -> None:
    # every option of every command explains itself
    module = reference()
    silent = [
        f"{name} {typed}"
        for name, parser in module.commands().items()
        for typed, text in module.options(parser)
        if len(text) < 8
    ]
    assert silent == []
    # every command says what it does with an example
    assert [n for n, p in reference().commands().items() if len(p.description or "") < 20] == []


def test_settings_and_addresses_are_documented() -> None:
    # every environment variable is documented
    source = (ROOT / "backend" / "settings.py").read_text("utf-8")
    read = set(re.findall(r'(?:environ\.get\(|environ\[|_flag\(|_[a-z]+\()"([A-Z][A-Z_]+)"', source))
    assert {"DATABASE_URL", "RATCHET_HOME", "DEBUG"} <= read
    page = (ROOT / "docs" / "settings.md").read_text("utf-8")
    assert [name for name in sorted(read) if f"`{name}`" not in page] == []
    # every address is documented
    text = re.sub(r"[{<][\w:]+[}>]", "{}", everything())
    undocumented = [
        a for a in addresses(get_resolver().url_patterns) if a not in text and a.rstrip("/") not in text
    ]
    assert undocumented == []


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


def test_pictures_and_pages_are_linked() -> None:
    # each picture of the docs is shown and together they are light
    named = set().union(
        *(re.findall(r"!\[[^\]]+\]\((?:docs/)?images/([^)]+)\)", page.read_text("utf-8")) for page in PAGES)
    )
    pictures = list((ROOT / "docs" / "images").iterdir())
    assert {picture.name for picture in pictures} == named
    assert sum(picture.stat().st_size for picture in pictures) < 1_500_000
    # every docs page is linked from the index
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    pages = [page.name for page in PAGES[1:] if page.name != "index.md"]
    assert [name for name in pages if f"]({name}" not in index] == []
    assert "docs/index.md" in PAGES[0].read_text("utf-8")


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


NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "quickstart.ipynb"


def printed(cell: Any) -> str:
    """Text a cell printed; tables come as rich shows them in a notebook."""
    shown = [
        output.get("text", "") if output.output_type == "stream" else output.data["text/plain"]
        for output in cell.outputs
        if output.get("name") != "stderr"
    ]
    return "".join(shown)


@pytest.mark.campaign
@pytest.mark.training
@pytest.mark.django_db
def test_the_notebook_ends_with_an_answer(ratchet_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template_copy(ratchet_home / "ratchet.sqlite3")
    monkeypatch.setenv("RATCHET_HOME", str(ratchet_home))
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    recorded, planned, promoted, judged, answered, rated = [
        printed(cell) for cell in notebook.cells if cell.cell_type == "code"
    ][-6:]
    assert "135 decisions, 135 ratings, 90 corrections imported" in recorded
    assert re.search(r"gate needs 30|30 held-out", planned)
    assert "is champion" in promoted
    champion = judged.splitlines()[-1].split()[0]
    assert answered.split() == ["delivery", "by", champion]
    assert rated.split() == ["201", "up"]


def test_the_notebook_is_kept_without_what_a_run_of_it_printed() -> None:
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    assert [cell.outputs for cell in notebook.cells if cell.cell_type == "code" and cell.outputs] == []


PAGE = (Path(__file__).resolve().parent.parent / "docs" / "api.md").read_text("utf-8")


def examples() -> list[tuple[str, int]]:
    """(curl command, status promised behind it) of every block that has one."""
    blocks = re.findall(r"```sh\n(curl .*?)```", PAGE, re.DOTALL)
    found = [re.fullmatch(r"(.*?)\s+# (\d{3})\b.*", block.strip(), re.DOTALL) for block in blocks]
    assert all(found), [block for block, match in zip(blocks, found, strict=True) if not match]
    return [(match[1], int(match[2])) for match in found if match]


@pytest.mark.django_db
def test_every_example_runs_and_answers_as_promised() -> None:
    app = ApiClient("ingest", "rate", "rate_as", "read", "operate")
    shown = examples()
    assert len(shown) >= 12
    for command, status in shown:
        words = shlex.split(command)
        address = urlsplit(next(word for word in words if word.startswith("http")))
        assert "Authorization: Bearer $KEY" in words
        if "-d" in words:
            assert "Content-Type: application/json" in words
            response = app.post(address.path, words[words.index("-d") + 1])
        else:
            response = app.client.get(f"{address.path}?{address.query}")
        assert response.status_code == status, (command, getattr(response, "content", ""))


def test_every_endpoint_has_a_heading() -> None:
    missing = []
    for address, view in api_views(get_resolver().url_patterns):
        if address in OPEN:
            continue
        shown = re.sub(
            r"<(?:\w+:)?(\w+)>", lambda match: "{id}" if match[1] == "pk" else f"{{{match[1]}}}", address
        )
        missing += [f"{method} {shown}" for method in view.scopes if f"### {method} {shown}\n" not in PAGE]
    assert missing == []


def test_the_codes_of_refusals_are_listed() -> None:
    assert all(f"`{code}`" in PAGE for code in STATUSES)
