"""The program installed by pip: everything it needs is in the wheel, and `ratchet` runs from any directory."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from django.template import Context, Template

from backend import VERSION
from backend.installation import as_typed, command_arguments, default_home, dotenv_file, program_of_checkout
from tests.support.migrated_database import template_copy

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("backend", "feedback", "rl", "templates", "static")

PAGE = """
from django.contrib.auth.models import User
from django.contrib.staticfiles import finders
from django.test import Client
client = Client(HTTP_HOST="localhost")
client.force_login(User.objects.create_superuser("ada"))
import backend, json
print(json.dumps({
    "statuses": [client.get(page, follow=True).status_code for page in ("/", "/rate/", "/admin/", "/glossary/")],
    "style": bool(finders.find("ratchet.css")),
    "from": backend.__file__,
}))
"""


def run(words: list[str], cwd: Path, **environment: str) -> str:
    """Standard output of a process that is to succeed."""
    done = subprocess.run(
        words,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], **environment},
    )
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


def sources() -> list[str]:
    """Files of the project, also those that are not committed yet."""
    names = run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], ROOT).splitlines()
    return [name for name in names if (ROOT / name).is_file()]


@pytest.mark.campaign
@pytest.mark.django_db
def test_a_wheel_installs_and_runs_from_another_directory(tmp_path: Path) -> None:
    source, wheels, target, elsewhere = (
        tmp_path / name for name in ("source", "wheels", "target", "elsewhere")
    )
    elsewhere.mkdir()
    # building leaves folders behind, which are not to lie in the checkout
    for name in sources():
        if name.split("/")[0] in (*PARTS, "docs", "packed", "clients") or "/" not in name:
            copy = source / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), "."], source)
    (wheel,) = wheels.glob("*.whl")
    assert wheel.name == f"ratchet-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        about = message_from_string(archive.read(f"ratchet-{VERSION}.dist-info/METADATA").decode())
    beside = ("templates/", "static/")
    wanted = {
        f"backend/{name}" if name.startswith(beside) else name
        for name in sources()
        if name.split("/")[0] in PARTS
    }
    assert sorted(wanted - held) == []
    packages = {"backend", "feedback", "rl", "packed_forward", "ratchet_client"}
    beside = {f"ratchet-{VERSION}.dist-info", f"ratchet-{VERSION}.data"}
    assert {name.split("/")[0] for name in held} == packages | beside
    needed = about.get_all("Requires-Dist") or []
    pins = [
        line.split(";")[0].strip() for line in (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    ]
    assert [name.split(";")[0].strip() for name in needed if "extra ==" not in name] == pins[1:]
    assert any(name.startswith("torch==") and name.endswith('extra == "rl"') for name in needed)

    run([*pip, "install", "--no-deps", "--no-compile", "--target", str(target), str(wheel)], elsewhere)
    ratchet, data = str(target / "bin" / "ratchet"), tmp_path / "data"
    environment = {"PYTHONPATH": str(target), "XDG_DATA_HOME": str(data)}
    (elsewhere / ".env").write_text("DATABASE_URL=sqlite:////nowhere/of/another/app.sqlite3\n")
    home = data / "ratchet"
    home.mkdir(parents=True)
    (home / ".env").write_text("ALLOWED_HOSTS=localhost,ratchet.example\n")
    assert template_copy(home / "ratchet.sqlite3")
    # checks the settings, finds every migration applied and names its commands as they are typed here
    found = json.loads(run([ratchet, "doctor", "--port", "9", "--json"], elsewhere, **environment))
    steps = {finding["part"]: finding["next_step"] for finding in found["findings"]}
    assert steps["port"] == "ratchet serve --port 9"
    assert not {"database", "migrations", "settings", "data folder"} & set(steps)
    shown = json.loads(
        run([ratchet, "shell", "--no-imports", "-c", PAGE], elsewhere, **environment).splitlines()[-1]
    )
    assert shown == {"statuses": [200] * 4, "style": True, "from": str(target / "backend" / "__init__.py")}


def test_paths_in_the_environment_mean_the_same_to_child_processes_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "knobs.yaml").write_text("dpo:\n  seed: 3\n")
    code = (
        "import os, json; from backend import settings; os.chdir('/'); import importlib; "
        "before = (settings.RATCHET_HOME, settings.DATABASES['default']['NAME'], settings.RATCHET_CONFIG); "
        "settings = importlib.reload(settings); "
        "after = (settings.RATCHET_HOME, settings.DATABASES['default']['NAME'], settings.RATCHET_CONFIG); "
        "print(json.dumps([[str(one) for one in both] for both in (before, after)]))"
    )
    before, after = json.loads(
        run(
            [sys.executable, "-c", code],
            tmp_path,
            PYTHONPATH=str(ROOT),
            RATCHET_HOME="my data",
            DATABASE_URL="sqlite:///my%20rows.sqlite3",
            RATCHET_CONFIG="knobs.yaml",
        )
    )
    assert before == [str(tmp_path / "my data"), str(tmp_path / "my rows.sqlite3"), "{'dpo': {'seed': 3}}"]
    assert after == before


def test_a_checkout_keeps_its_data_and_settings_beside_it() -> None:
    elsewhere = {"XDG_DATA_HOME": "/elsewhere", "RATCHET_HOME": "/other"}
    assert default_home(elsewhere) == ROOT / "var"
    assert dotenv_file(elsewhere) == ROOT / ".env"
    assert command_arguments("migrate") == [str(ROOT / "manage.py"), "migrate"]
    assert as_typed("run `python manage.py migrate`") == "run `python manage.py migrate`"


def test_an_installation_keeps_them_in_the_users_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.installation.IS_INSTALLED", True)
    monkeypatch.setattr("backend.installation.PROGRAM", "ratchet")
    assert default_home({"XDG_DATA_HOME": "/data"}) == Path("/data/ratchet")
    assert default_home({}) == Path.home() / ".local/share/ratchet"
    assert dotenv_file({"RATCHET_HOME": "/other", "XDG_DATA_HOME": "/data"}) == Path("/other/.env")
    assert dotenv_file({"XDG_DATA_HOME": "/data"}) == Path("/data/ratchet/.env")
    assert command_arguments("qcluster") == ["-m", "backend", "qcluster"]
    assert as_typed("  .venv/bin/python manage.py serve") == "  ratchet serve"
    assert as_typed("run `python manage.py migrate`, Example: manage.py demo") == (
        "run `ratchet migrate`, Example: ratchet demo"
    )
    assert (
        as_typed("rate at /rate/ (make serve); make servers stays")
        == "rate at /rate/ (ratchet serve); make servers stays"
    )


def test_pages_name_the_program_that_was_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    hint = Template("<code>{% program %} demo</code>")
    assert hint.render(Context()) == f"<code>{program_of_checkout()} demo</code>"
    monkeypatch.setattr("backend.installation.PROGRAM", "ratchet")
    monkeypatch.setattr("backend.installation.IS_INSTALLED", True)
    assert hint.render(Context()) == "<code>ratchet demo</code>"


def test_no_template_writes_the_program_itself() -> None:
    texts = {path: path.read_text("utf-8") for path in (ROOT / "templates").rglob("*.html")}
    assert [str(path) for path, text in texts.items() if "manage.py" in text or "make serve" in text] == []


TYPED_LATER = (
    "backend/installation.py",
    "backend/command.py",  # as_typed goes over what commands say
    "rl/recipes/",  # pure; the help of commands
    "rl/models/learning.py",  # stands in a migration; its page in the admin goes over it
)


def test_messages_name_the_program_that_was_installed() -> None:
    """Messages reach pages and REST as they are; those of commands are gone over by `as_typed`."""
    found = []
    for folder in ("backend", "feedback", "rl"):
        for file in (ROOT / folder).rglob("*.py"):
            place = file.relative_to(ROOT).as_posix()
            if "/management/" in place or "/migrations/" in place or place.startswith(TYPED_LATER):
                continue
            tree = ast.parse(file.read_text("utf-8"))
            docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            found += [
                f"{place}:{node.lineno}"
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in docstrings
                and re.search(r"`(python )?manage\.py|python manage\.py|manage\.py [a-z_]+", node.value)
            ]
    assert found == []
