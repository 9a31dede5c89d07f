"""Plugins: found by setting and entry point, registered once, and named and left out where they cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from backend import plugins
from backend.plugins import KINDS, Plugin, object_at, plugins_check, plugins_load
from rl import doctor
from rl.agents import AGENTS
from rl.rewards.base import RewardSample
from rl.rewards.named import REWARDS, RewardRefused, reward_names, rewards_named

ROOT = Path(__file__).resolve().parent.parent
Module = Callable[[str, str], str]
AGENT = "from rl.agents.template import TemplateAgent\nAGENT = TemplateAgent(slug='own', title='Own', description='')\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """Writes a module that can be imported until the test is over, and gives its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    written: list[str] = []

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source, "utf-8")
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


TABLES: list[dict[str, Any]] = [AGENTS, REWARDS]


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No plugin of this machine is seen, and none of a test outlives it."""
    monkeypatch.setattr(plugins, "plugins", {})
    monkeypatch.setattr(plugins, "_entry_points", dict)
    before = [dict(table) for table in TABLES]
    yield
    for table, entries in zip(TABLES, before, strict=True):
        table.clear()
        table.update(entries)


def only_plugin() -> Plugin:
    found = list(plugins.plugins.values())
    assert len(found) == 1
    return found[0]


def installed(monkeypatch: pytest.MonkeyPatch, kind: str, *named: tuple[str, str]) -> None:
    """Entry points of a package, by (name, value)."""
    group = f"ratchet.{kind}"
    points = [EntryPoint(name, value, group) for name, value in named]
    monkeypatch.setattr(plugins, "_entry_points", lambda: {group: points})


@pytest.mark.parametrize("path", ["mail", "mail:AGENT", "mail.AGENT"])
def test_a_path_names_a_module_or_an_object_in_it(module: Module, path: str) -> None:
    module("mail", AGENT)
    plugins_load("agents", [path])
    assert AGENTS["own"].title == "Own"
    assert not only_plugin().fault


def test_an_entry_point_names_one_too(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    module("mail", AGENT)
    installed(monkeypatch, "agents", ("own", "mail:AGENT"))
    plugins_load("agents")
    assert AGENTS["own"].title == "Own"


def test_one_that_is_named_twice_is_registered_once(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    module("mail", AGENT)
    installed(monkeypatch, "agents", ("own", "mail:AGENT"))
    plugins_load("agents", ["mail"])
    plugins_load("agents", ["mail"])
    assert [plugin.fault for plugin in plugins.plugins.values()] == ["", ""]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "import nowhere_at_all",
            "cannot be imported (ModuleNotFoundError: No module named 'nowhere_at_all')",
        ),
        ("AGENT = 3", "expected an Agent (rl.agents.base), found 3"),
        ("OTHER = 3", "cannot be imported (AttributeError: module 'mail' has no attribute 'AGENT')"),
        ("import sys; sys.exit('gone')", "cannot be imported (SystemExit: gone)"),
        ("def (", "cannot be imported (SyntaxError: invalid syntax (mail.py, line 1))"),
        (
            AGENT.replace("own", "filer"),
            "the slug 'filer' is taken by another agent, 'Filer': choose another slug",
        ),
    ],
)
def test_one_that_cannot_be_used_is_named_and_left_out(module: Module, source: str, said: str) -> None:
    module("mail", source)
    module("sound", AGENT)
    before = set(AGENTS)
    plugins_load("agents", ["mail", "sound"])
    assert set(AGENTS) == before | {"own"}
    broken, sound = plugins.plugins.values()
    assert broken.fault == said
    assert not sound.fault
    assert (
        broken.text
        == f"RATCHET_AGENTS: mail was left out: {said}; correct it, or take it out of RATCHET_AGENTS"
    )


def test_a_package_that_is_broken_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "agents", ("own", "nowhere_at_all:AGENT"))
    plugins_load("agents")
    assert only_plugin().text == (
        "a package without a name: ratchet.agents own = nowhere_at_all:AGENT was left out: cannot be imported "
        "(ModuleNotFoundError: No module named 'nowhere_at_all'); uninstall it"
    )


def test_check_and_doctor_say_what_was_left_out_and_let_the_site_start() -> None:
    plugins_load("agents", ["nowhere_at_all"])
    (warning,) = plugins_check()
    assert warning.id == "ratchet.W001"
    assert not warning.is_serious()
    assert "RATCHET_AGENTS: nowhere_at_all was left out" in warning.msg
    (diagnosis,) = doctor.plugin_diagnoses()
    assert (diagnosis.part, diagnosis.level) == ("plugins", doctor.WRONG)
    assert diagnosis.next_step == "correct it, or take it out of RATCHET_AGENTS"


def test_a_plugin_that_brings_torch_into_every_process_is_used_and_named(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = sys.modules.pop("torch", None)
    try:
        module("mail", f"import sys; sys.modules['torch'] = sys\n{AGENT}")
        plugins_load("agents", ["mail"])
    finally:
        del sys.modules["torch"]
        if torch is not None:
            sys.modules["torch"] = torch
    assert "own" in AGENTS
    assert "imports torch" in only_plugin().text
    (diagnosis,) = doctor.plugin_diagnoses()
    assert diagnosis.level == doctor.REMARK


def test_every_kind_has_its_setting_and_its_registry(settings: Any) -> None:
    for kind, facts in KINDS.items():
        assert isinstance(getattr(settings, f"RATCHET_{kind.upper()}"), list)
        assert callable(object_at(facts.register, ""))


# --- Rewards ------------------------------------------------------------------------------------------------


def test_a_reward_from_outside_is_known_by_its_name(module: Module) -> None:
    module("mail", "def brevity(sample):\n    return 2.0 - len(sample.response) / 10\n")
    plugins_load("rewards", ["mail.brevity"])
    (reward,) = rewards_named(["brevity"])
    assert [value.raw for value in reward.score([RewardSample([], "x" * 10, "own")])] == [1.0]
    assert "brevity" in reward_names()
    with pytest.raises(RewardRefused, match="brevity, learned"):
        rewards_named(["brevty"])


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("mail.THREE", "expected a function of a sample, or an object with name and score; found 3"),
        ("mail.agent", "the name 'agent' is taken by another reward: choose another name"),
        ("mail.LOUD", "expected a name of small letters, digits, _ and -, found 'Loud one'"),
    ],
)
def test_what_is_no_reward_is_left_out(module: Module, path: str, said: str) -> None:
    module(
        "mail",
        "THREE = 3\ndef agent(sample): return 1\n"
        "class LOUD:\n    name = 'Loud one'\n    def score(self, samples): return []\n",
    )
    plugins_load("rewards", [path])
    assert only_plugin().fault.endswith(said)
    assert REWARDS == {}


# --- As the program starts ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_setting_is_read_when_the_program_starts_and_a_broken_one_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine_own.py").write_text(AGENT)
    code = "import django; django.setup(); from rl.agents import get_agent; print(get_agent('own').title)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "backend.settings", "RATCHET_AGENTS": "no_such_module,mine_own",
             "PYTHONPATH": str(tmp_path), "RATCHET_HOME": str(tmp_path)},
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == ("Own", 0), done.stderr
    assert "plugin RATCHET_AGENTS: no_such_module was left out: cannot be imported" in done.stderr
