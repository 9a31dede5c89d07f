"""The documents are run: the loop in a shell of docs/start.md word by word; on all pages every command is parsed,
every import resolved, every JSON and YAML read. What cannot run here is listed, with the reason."""

import ast
import contextlib
import importlib
import io
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.management import call_command, get_commands, load_command_class
from django.core.management.base import CommandError

from feedback.models import Decision, Rating
from rl.models import Policy, PromptSplit

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELLS = ("sh", "bash", "console")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [
        Block(page.name, text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for found in FENCE.finditer(text)
    ]


ALL = [block for page in PAGES for block in blocks(page)]


def shell_lines(block: Block) -> Iterator[str]:
    """The commands of a shell block: continued lines joined, comments, prompts and output left out."""
    whole = ""
    for line in block.text.replace("\\\n", " ").splitlines():
        if whole or line.count("'") % 2:  # a body in quotes goes on over several lines
            whole += f"{line}\n"
            if whole.count("'") % 2:
                continue
            line, whole = whole, ""
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_found(page: Path) -> None:
    fences = [line for line in page.read_text("utf-8").splitlines() if line.lstrip().startswith("```")]
    assert len(fences) == 2 * len(blocks(page))


def test_every_language_of_a_block_is_known_here() -> None:
    known = {*SHELLS, "python", "json", "yaml", "toml", "nginx", "mermaid", "html", "js", "text", ""}
    assert [str(block) for block in ALL if block.language not in known] == []


def test_the_readme_is_short_and_has_the_two_commands() -> None:
    page = ROOT / "README.md"
    assert len(page.read_text("utf-8").splitlines()) <= 150
    assert [line.split("#")[0].strip() for block in blocks(page) for line in shell_lines(block)] == [
        "make demo",
        "make serve",
    ]


EXPECTED = {
    "import_feedback": ["150 decisions, 150 ratings, 100 corrections imported"],
    "train_sft --dry-run": ["estimate", "held-out prompts"],
    "train_sft": [
        "mailroom-v89",
        "Next: python manage.py evaluate_model --policy mailroom-v89 --compare mailroom-app",
    ],
    "evaluate_model": ["Ready to promote.", "Next: python manage.py policy promote mailroom-v89"],
    "policy": ["stage: champion", '"model": "mailroom"'],
    "api_key": ["rk_"],
    "export_model": [".gguf", "Next: llama-server -m "],
}
"""Command -> what it must have said."""


@pytest.mark.campaign
@pytest.mark.training
@pytest.mark.prepares
@pytest.mark.django_db(transaction=True)
def test_the_page_goes_from_a_file_to_a_promoted_policy_that_answers(
    live_server: Any, ratchet_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "RATCHET_HOME", str(ratchet_home)
    )  # of the child that writes what a champion is served from
    monkeypatch.setenv("KEY", "")
    told: dict[str, str] = {}
    page = ROOT / "docs" / "start.md"
    guided = page.read_text("utf-8").partition("\n## The loop in a shell\n")[0].count("\n")
    for block in blocks(page):
        if block.line <= guided:
            continue  # the guided start is walked by tests/test_browser_start.py
        if block.language == "sh":
            for line in shell_lines(block):
                command = line.split("#")[0].strip()
                if command.startswith("curl"):
                    told["curl"] = _curl(command.replace("http://localhost:8000", live_server.url))
                    continue
                _managed(command, told)
                if command.startswith("python manage.py api_key"):
                    key = re.search(r"rk_\S+", told["api_key"])
                    assert key, told["api_key"]
                    monkeypatch.setenv("KEY", key[0])
        elif block.language == "python":
            code = block.text.replace("http://localhost:8000", live_server.url).replace(
                "rk_...", os.environ["KEY"]
            )
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, str(block), "exec"), {"__name__": "__main__"})
            told.setdefault("python", "")
            told["python"] += out.getvalue()
        else:
            assert block.language == "json", f"{block}: what is this block?"
            file = tmp_path / "example.jsonl"
            file.write_text(block.text)
            out = io.StringIO()
            call_command("import_feedback", str(file), agent="support-bot", dry_run=True, stdout=out)
            assert "2 decisions, 2 ratings, 1 correction would be imported" in out.getvalue()
    for command, words in EXPECTED.items():
        for word in words:
            assert word in told[command], (command, told[command])
    champion = Policy.objects.get(agent="mailroom", kind="adapter")
    assert champion.stage == Policy.Stage.CHAMPION
    assert PromptSplit.objects.filter(agent="mailroom", split="holdout").count() >= 30
    # the champion answered what the page asked, both ways, and the answers are decisions
    response, pk = told["python"].split("} ")[0] + "}", told["python"].split()[-1]
    assert json.loads(response) == {"folder": "Invoices/2025"}
    assert Decision.objects.get(pk=pk).policy == champion.name
    assert json.loads(told["curl"])["ratchet"]["policy"] == champion.name
    assert Rating.objects.filter(decision__agent="mailroom").count() == 151


def _managed(command: str, told: dict[str, str]) -> None:
    """Run `python manage.py ...` in this process and keep what it said, by its name."""
    words = shlex.split(command)
    assert words[:2] == ["python", "manage.py"], f"what is {command!r}?"
    out = io.StringIO()
    call_command(words[2], *words[3:], stdout=out, stderr=io.StringIO())
    told[f"{words[2]} --dry-run" if "--dry-run" in words else words[2]] = " ".join(out.getvalue().split())


def _curl(command: str) -> str:
    done = subprocess.run(
        ["bash", "-c", f"{command} --silent"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


OTHER_PROGRAMS = {
    "accelerate": "starts several processes of train_*; tests/test_launch.py runs it",
    "torchrun": "starts several processes of train_*; tests/test_launch.py runs it",
    "curl": "asks a running server; tests/test_docs.py runs those of docs/api.md",
    "docker": "not installed here",
    "python3": "checks a folder elsewhere; tests/test_export_command.py and tests/test_integrity.py run it",
    "llama-server": "not installed here",
    "vllm": "needs a GPU",
    "ollama": "needs an Ollama server",
    "make": "installs a virtual environment",
    "pip": "installs",
    "git": "fetches from a hub",
    "huggingface-cli": "fetches from a hub",
    "gunicorn": "serves for ever; tests/support/server.py starts it",
    "psql": "needs a PostgreSQL server",
    "sqlite3": "not installed everywhere",
    "crontab": "changes the machine",
    "sudo": "changes the machine",
    "mkdocs": "serves for ever; tests/test_contributor_docs.py builds the site",
    "mike": "commits to a branch",
    "cp": "copies a file that is filled in then",
    "cd": "goes to a folder",
    "for": "a loop around a request",
    "cat": "shows a file",
    "echo": "shows a text",
    "export": "sets a variable",
}
"""First words of shell lines that are no command of this project, and why they are not run."""

DOCS_SHELL = [
    pytest.param(line, id=f"{block}:{number}")
    for block in ALL
    if block.language in SHELLS
    for number, line in enumerate(shell_lines(block))
]


# the method of the example package in docs/extending.md is known where that is installed: tests/test_extending.py
@pytest.mark.parametrize(
    "line", [one for one in DOCS_SHELL if "--method preferred" not in str(one.values[0])]
)
def test_every_command_of_the_docs_is_one_and_takes_its_options(line: str) -> None:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z][A-Z_]+=.*", words[0]):
        words = words[1:]  # variables set for one command
    program = next((word for word in words if word == "manage.py" or word == words[0] == "ratchet"), "")
    if program:
        words = words[words.index(program) + 1 :]
        words = words[
            : next(
                (at for at, word in enumerate(words) if word in ("|", ">", "<", "&&", "&", ";")), len(words)
            )
        ]
        app = get_commands()[words[0]]
        command = load_command_class(app, words[0]) if isinstance(app, str) else app
        try:
            command.create_parser("manage.py", words[0]).parse_args(words[1:])
        except CommandError as error:
            pytest.fail(f"{line}: {error}")
    elif words and words[0] in ("python", ".venv/bin/python") and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file(), line
    elif words[:2] == ["python", "-m"]:
        module = ROOT / words[2].replace(".", "/")
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), line
    elif words:  # else it only sets a variable
        assert words[0].removeprefix(".venv/bin/") in OTHER_PROGRAMS, line


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "python"], ids=str)
def test_what_the_python_of_the_docs_imports_is_there(block: Block) -> None:
    tree = ast.parse(block.text, str(block))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            if _ours(node.module):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{block}: {node.module} has no {alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _ours(alias.name):
                    importlib.import_module(alias.name)


def _ours(module: str) -> bool:
    return module.split(".")[0] in ("rl", "feedback", "backend")


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "json"], ids=str)
def test_the_json_of_the_docs_is_json(block: Block) -> None:
    text, reader = block.text.strip(), json.JSONDecoder()
    while text:  # one object after the other, as in a file of lines
        _, end = reader.raw_decode(text)
        text = text[end:].strip()


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "yaml"], ids=str)
def test_the_yaml_of_the_docs_is_yaml(block: Block) -> None:
    assert isinstance(yaml.safe_load(block.text), dict)
