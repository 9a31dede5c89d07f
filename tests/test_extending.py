"""The example package, installed as a user installs one: all that it brings shows up and works, no file changed."""

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command, get_commands

from backend import plugins
from backend.plugins import KINDS, plugins_load
from feedback.explorer.previews import preview_of
from feedback.models import Decision, Rating
from feedback.transfer.formats.order import ORDER
from rl.agents import AGENTS, agent_facts
from rl.apps import PACKAGE, commands_enter
from rl.models import Artifact, Policy, TrainingRun
from tests.support.said import command
from tests.test_plugins import TABLES

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_FOLDER = ROOT / "examples" / "plugins"
PAGE = ROOT / "docs" / "extending.md"

LISTED = """
import json, django
django.setup()
from django.core.management import get_commands, load_command_class
from backend.plugins import plugins
from feedback.transfer.formats import SHAPES
from rl.agents import AGENTS
from rl.rewards.catalogue import reward_names

def choices(command, option):
    parser = load_command_class(get_commands()[command], command).create_parser("manage.py", command)
    return next(action for action in parser._actions if option in action.option_strings)

import sys
print(json.dumps({
    "formats": choices("import_feedback", "--format").choices,
    "written": choices("export_training_data", "--format").choices,
    "methods": choices("train", "--method").choices,
    "exporters": choices("export_model", "--format").choices,
    "tasks": choices("benchmark_model", "--tasks").help,
    "commands": [name for name in get_commands() if name.startswith("train")],
    "agents": list(AGENTS), "rewards": reward_names(),
    "faults": [one.text for one in plugins.values() if one.fault or one.remark],
    "torch": "torch" in sys.modules,
}))
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with the example in it, put there by pip."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for file in PACKAGE_FOLDER.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:  # pip leaves its build folder where it builds
            place = source / file.relative_to(PACKAGE_FOLDER)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_bytes())
    subprocess.run(
        [
            sys.executable,
            *"-m pip install --quiet --no-index --no-deps --no-build-isolation --target".split(),
            str(target),
            str(source),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    return target


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example's plugins in this process, until the test is over."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(plugins, "plugins", {})
    before, order, commands = [dict(table) for table in TABLES], [*ORDER], dict(get_commands())
    plugins._entry_points.cache_clear()
    for kind in KINDS:
        plugins_load(kind)
    commands_enter()
    assert [one.text for one in plugins.plugins.values() if one.fault] == []
    yield
    plugins._entry_points.cache_clear()
    ORDER[:] = order
    for table, entries in zip([*TABLES, get_commands()], [*before, commands], strict=True):
        table.clear()
        table.update(entries)
    for name in [name for name in sys.modules if name.partition(".")[0] == "ratchet_mail"]:
        del sys.modules[name]
    sys.modules.pop(f"{PACKAGE}.train_preferred", None)


def test_the_page_and_the_package_agree() -> None:
    # every example of the page stands in the package: So that what the page shows is what the tests below
    # run.
    sources = [
        file.read_text("utf-8") for file in PACKAGE_FOLDER.rglob("*") if file.suffix in (".py", ".toml")
    ]
    blocks = re.findall(r"(?ms)^```(?:python|toml)\n(.*?)^```", PAGE.read_text("utf-8"))
    assert len(blocks) >= 7
    assert [block for block in blocks if not any(block in source for source in sources)] == []
    # every file of the package is named on the page
    page = PAGE.read_text("utf-8")
    files = [
        file.name for file in (PACKAGE_FOLDER / "ratchet_mail").glob("*.py") if file.name != "__init__.py"
    ]
    assert [name for name in files if f"ratchet_mail/{name}" not in page] == []


@pytest.mark.slow
def test_all_of_it_shows_up_when_the_program_starts(site: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LISTED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "backend.settings",
            "PYTHONPATH": str(site),
            "RATCHET_HOME": str(tmp_path),
        },
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "mails" in found["formats"]
    assert "mails" in found["written"]
    assert "preferred" in found["methods"]
    assert {"train", "train_preferred", "train_dpo"} <= set(found["commands"])
    assert "adapter-zip" in found["exporters"]
    assert "mail_tone" in found["tasks"]
    assert "mail-desk" in found["agents"]
    assert "brief" in found["rewards"]
    assert found["faults"] == []
    assert not found["torch"]


@pytest.mark.slow
@pytest.mark.django_db
@pytest.mark.usefixtures("installed")
def test_its_format_is_recognised_read_and_written(tmp_path: Path) -> None:
    (tmp_path / "mails.csv").write_text(
        "number,mail,draft,fate,rewrite,by\n"
        "1,Where is my lamp?,On its way.,sent,,ada\n"
        "2,Where is my rug?,No idea.,rewritten,It leaves today.,ada\n"
        "3,Do you sell tents?,Nope.,thrown away,,ben\n",
        "utf-8",
    )
    found = command("import_feedback", str(tmp_path / "mails.csv"), "--agent", "mail-desk")
    assert found["files"][0]["format"] == "mails"
    assert Decision.objects.count() == Rating.objects.count() == 3
    assert Rating.objects.get(correction="It leaves today.").rater == "ada"
    call_command(
        *"export_training_data --format mails --output".split(),
        str(tmp_path / "out.jsonl"),
        stdout=StringIO(),
    )
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert {(row["mail"], row["fate"]) for row in rows} == {
        ("Where is my lamp?", "sent"),
        ("Where is my rug?", "rewritten"),
        ("Do you sell tents?", "thrown away"),
    }


@pytest.mark.slow
@pytest.mark.django_db
@pytest.mark.usefixtures("installed")
def test_its_agent_is_simulated_with_every_taste_and_draws_its_choices() -> None:
    for taste in ("team", "situation"):
        made = command("simulate", "mail-desk", "--scenarios", "6", "--taste", taste, "--rate", "simulated")
        assert made["decisions"] == 18
    agent = AGENTS["mail-desk"]
    (right,) = agent.ground_truth(agent.scenarios()[0].state) or ()
    assert agent.parse(right) == {"desk": "returns"}
    facts = agent_facts("mail-desk")
    assert facts.draw is not None
    decision = Decision.objects.filter(response=right).first()
    assert decision is not None
    preview = preview_of(decision, facts)
    assert "returns</text>" in (preview.drawing or "")
    assert len(preview.options) == 3
    facts_shown: dict[str, Any] = {"asked": "", "description": "", "context": {}, "seed": ""}
    assert "returns</text>" in (facts.draw("returns", **facts_shown) or "")
    assert facts.draw("cellar", **facts_shown) is None


@pytest.mark.campaign
@pytest.mark.training
@pytest.mark.django_db
@pytest.mark.usefixtures("installed", "ratchet_home")
def test_its_method_trains_its_exporter_writes_and_its_benchmark_asks() -> None:
    command("simulate", "mail-desk", "--rate", "simulated")
    knobs = "--agent mail-desk --config cpu --max-steps 2 --batch-size 4 --set lora_r=4".split()
    assert command("train", "--method", "preferred", *knobs[:-2], "--dry-run")["estimated_steps"] == 2
    done = command("train_preferred", *knobs, "--once", "false")
    run, policy = TrainingRun.objects.get(), Policy.objects.get()
    assert (run.method, run.recipe["once"], run.status) == ("preferred", False, "succeeded")
    assert any("responses shown, of" in note for note in done["notes"])
    exported = command("export_model", "--policy", policy.name, "--format", "adapter-zip")
    assert Artifact.objects.get().format == "adapter-zip"
    with zipfile.ZipFile(exported["files"][0]["path"]) as archive:
        assert "adapter_model.safetensors" in archive.namelist()
    measured = command("benchmark_model", "--policy", policy.name, "--tasks", "mail_tone")
    assert measured["benchmarks"][0]["n"] == 12
    assert measured["benchmarks"][0]["source"] == "installed"
