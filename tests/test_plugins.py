"""Plugins: found by setting and entry point, registered once, and named and left out where they cannot be used."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from django.core.management import get_commands, load_command_class

from backend import plugins
from backend.operator_file import OperatorFileError, operator_settings
from backend.plugins import KINDS, Plugin, object_at, plugins_check, plugins_load
from feedback.transfer.formats.order import FORMATS, ORDER, READ_AS, SHAPES
from feedback.transfer.formats.readers import format_of_row
from rl import doctor
from rl.agents import AGENTS
from rl.export.exporters import EXPORTERS, Exporter, exporters_of
from rl.export.service import ExportOrder, ExportOrderRefused, export
from rl.management.method_commands import PACKAGE, commands_enter
from rl.models import Snapshot
from rl.recipes import RecipeError, recipe_named
from rl.recipes.base import DATASET_KINDS
from rl.recipes.benchmark_tasks import BENCHMARKS, task_folder, task_names
from rl.recipes.methods import METHODS, RECIPES, method_named, policy_methods
from rl.rewards.base import RewardSample
from rl.rewards.catalogue import REWARDS, RewardRefused, reward_names, rewards_named

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


TABLES: list[dict[str, Any]] = [
    AGENTS,
    REWARDS,
    FORMATS,
    SHAPES,
    READ_AS,
    METHODS,
    RECIPES,
    EXPORTERS,
    BENCHMARKS,
]


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No plugin of this machine is seen, and none of a test outlives it."""
    monkeypatch.setattr(plugins, "plugins", {})
    monkeypatch.setattr(plugins, "_entry_points", dict)
    before, order = [dict(table) for table in TABLES], [*ORDER]
    yield
    ORDER[:] = order
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
    assert broken.text.startswith("RATCHET_AGENTS: mail ")
    assert said in broken.text


def test_a_package_that_is_broken_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "agents", ("own", "nowhere_at_all:AGENT"))
    plugins_load("agents")
    text = only_plugin().text
    assert "ratchet.agents own = nowhere_at_all:AGENT" in text
    assert "(ModuleNotFoundError: No module named 'nowhere_at_all')" in text
    assert "uninstall" in text


def test_check_and_doctor_say_what_was_left_out_and_let_the_site_start() -> None:
    plugins_load("agents", ["nowhere_at_all"])
    (warning,) = plugins_check()
    assert warning.id == "ratchet.W001"
    assert not warning.is_serious()
    assert "RATCHET_AGENTS: nowhere_at_all was left out" in warning.msg
    (diagnosis,) = doctor.plugin_diagnoses()
    assert (diagnosis.part, diagnosis.level) == ("plugins", doctor.WRONG)
    assert "RATCHET_AGENTS" in diagnosis.next_step


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


# --- Formats ------------------------------------------------------------------------------------------------

FORMAT = """
from feedback.transfer.formats.base import TaughtPrompt, row_format
from feedback.transfer.formats.writers import RowShape, View, writer_by_record

def recognises(row):
    return row["mailbox"] == "help"

def records(row, line):
    asked = TaughtPrompt(line, "", [{"role": "user", "content": row["mail"]}])
    yield asked.judgement(row["reply"], row["liked"], "liked")

SHAPE = RowShape("mails", "a mail a row", (View.RATED,), writer_by_record(lambda record, left_out: []))
FORMAT = row_format("mails", "Mails", recognises, records, (SHAPE,))
"""


def test_a_format_from_outside_is_asked_before_tables_and_after_those_with_names_of_their_own(
    module: Module,
) -> None:
    module("mail", FORMAT)
    plugins_load("formats", ["mail", "mail:FORMAT"])
    assert [plugin.fault for plugin in plugins.plugins.values()] == ["", ""]
    place = [format.name for format in ORDER].index("mails")
    assert place < [format.name for format in ORDER].index("pandalm")
    assert place > [format.name for format in ORDER].index("scored_pairs")
    assert {"mails"} <= {*FORMATS, *SHAPES, *READ_AS}
    known = format_of_row(
        {"mailbox": "help", "mail": "?", "reply": "!", "liked": 1, "prompt": "?", "response": "!"}
    )
    assert known is FORMATS["mails"]


def test_a_format_that_fails_on_rows_of_others_knows_them_not(
    module: Module, caplog: pytest.LogCaptureFixture
) -> None:
    module("mail", FORMAT)
    plugins_load("formats", ["mail"])
    for _ in range(3):
        known = format_of_row({"prompt": "?", "response": "!", "rating": 5})
        assert known is not None
        assert known.name == "table"
    said = [record.message for record in caplog.records]
    (warning,) = said
    assert "mails" in warning
    assert "(KeyError: 'mailbox')" in warning


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("FORMAT = {}", "expected a Format (feedback.transfer.formats.base), found {}"),
        ("FORMAT = replace(FORMAT, name='trl', shapes=())", "the name 'trl' is taken by another format"),
        ("FORMAT = replace(FORMAT, name='auto', shapes=())", "the name 'auto' is taken by another format"),
        ("FORMAT = replace(FORMAT, name='a b', shapes=())", "expected a name of small letters"),
        ("FORMAT = replace(FORMAT, shapes=(3,))", "expected shapes of RowShape with views of View, found 3"),
        (
            "FORMAT = replace(FORMAT, name='other')",
            "expected the first shape to have the name 'other', found 'mails'",
        ),
    ],
)
def test_what_is_no_format_is_left_out(module: Module, change: str, said: str) -> None:
    module("mail", f"{FORMAT}from dataclasses import replace\n{change}\n")
    before = [*ORDER]
    plugins_load("formats", ["mail"])
    assert said in only_plugin().fault
    assert before == ORDER


# --- Methods ------------------------------------------------------------------------------------------------

METHOD = """
from dataclasses import dataclass
from rl.recipes.base import BasicRecipe, Method, Recipe

@dataclass(frozen=True)
class MailRecipe(Recipe):
    gamma: float = 0.5

METHOD = Method("mail_po", "pairs", {"default": MailRecipe()}, "nowhere:Trainer", "nowhere:estimate",
                help="Learn from mails. Example: manage.py train_mail_po", options={"gamma": "Margin."})
"""


def test_a_method_from_outside_has_recipe_section_and_command(module: Module) -> None:
    module("mail", METHOD)
    plugins_load("methods", ["mail"])
    assert not only_plugin().fault
    assert recipe_named("mail_po", "default", {"gamma": "0.7"}).gamma == 0.7
    assert "mail_po" in policy_methods()
    assert method_named("mail_po").preset("cpu") == "default"
    assert operator_settings({"mail_po": {"gamma": 0.9}}).sections == {"mail_po": {"gamma": 0.9}}
    with pytest.raises(OperatorFileError, match="no knob 'gama'"):
        operator_settings({"mail_po": {"gama": 0.9}})
    table = get_commands()
    try:
        commands_enter()
        parser = load_command_class(table["train_mail_po"], "train_mail_po").create_parser(
            "manage.py", "train_mail_po"
        )
        options = vars(parser.parse_args(["--gamma", "0.25", "--agent", "own"]))
        assert options["gamma"] == 0.25
        assert "Learn from mails" in parser.format_help()
    finally:
        table.pop("train_mail_po", None)
        sys.modules.pop(f"{PACKAGE}.train_mail_po", None)


def test_the_section_of_a_method_that_was_left_out_stops_nothing() -> None:
    found = {"mail_po": {"gamma": 0.9}, "dpo": {"beta": 0.2}}
    with pytest.raises(OperatorFileError, match="no section 'mail_po'"):
        operator_settings(found)
    assert operator_settings(found, methods_missing=True).sections == {"dpo": {"beta": 0.2}}


def test_a_method_nobody_knows_is_named_with_those_there_are() -> None:
    with pytest.raises(RecipeError, match="no method 'mail_po'; known are dpo, grpo"):
        method_named("mail_po")


def test_the_kinds_of_datasets_are_those_of_snapshots() -> None:
    assert set(DATASET_KINDS) == set(Snapshot.Kind.values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("METHOD = 3", "expected a Method (rl.recipes.base), found 3"),
        ("METHOD = replace(METHOD, slug='dpo')", "the slug 'dpo' is taken by another method"),
        ("METHOD = replace(METHOD, slug='rlhf')", "the slug 'rlhf' is taken by another method"),
        (
            "METHOD = replace(METHOD, slug='Mail-PO')",
            "expected a slug of small letters, digits and _, found 'Mail-PO'",
        ),
        ("METHOD = replace(METHOD, kind='mails')", "expected a kind of dataset, one of pairs, labels"),
        (
            "METHOD = replace(METHOD, presets={'cpu': MailRecipe()})",
            "expected presets with `default`, a Recipe",
        ),
        ("METHOD = replace(METHOD, presets={'default': BasicRecipe()})", "found default: BasicRecipe"),
        ("METHOD = replace(METHOD, presets=METHOD.presets | {'cpu': Recipe()})", "found another: cpu"),
        ("METHOD = replace(METHOD, trainer='nowhere.Trainer')", "expected trainer as `module:name`"),
        ("METHOD = replace(METHOD, policy=False)", "expected policy and adapter to be true"),
        (
            "METHOD = replace(METHOD, options={'delta': ''})",
            "knobs of MailRecipe, found 'delta'",
        ),
        (
            "METHOD = replace(METHOD, rewarded=True)",
            "knobs of MailRecipe, found 'reward', ''",
        ),
        ("METHOD = replace(METHOD, help='')", "expected help"),
    ],
)
def test_what_is_no_method_is_left_out(module: Module, change: str, said: str) -> None:
    module("mail", f"{METHOD}from dataclasses import replace\n{change}\n")
    before = {*METHODS}
    plugins_load("methods", ["mail"])
    assert said in only_plugin().fault
    assert set(METHODS) == before


# --- Exporters ----------------------------------------------------------------------------------------------

EXPORTER = """
from rl.export.exporters import Exporter
EXPORTER = Exporter("mail-zip", "nowhere_at_all:export_zip", "a zip")
"""


def test_an_exporter_from_outside_is_listed(module: Module) -> None:
    module("mail", EXPORTER)
    plugins_load("exporters", ["mail"])
    assert exporters_of("adapter")[-1] == "mail-zip"
    assert exporters_of("linear") == ["linear"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("EXPORTER = 3", "expected an Exporter (rl.export.exporters), found 3"),
        ("EXPORTER = replace(EXPORTER, name='gguf')", "the name 'gguf' is taken by another exporter"),
        ("EXPORTER = replace(EXPORTER, name='a' * 17)", "expected a name of up to 16 small letters"),
        ("EXPORTER = replace(EXPORTER, writer='nowhere')", "expected its writer as `module:function`"),
        (
            "EXPORTER = replace(EXPORTER, policy_kind='model')",
            "expected `policy_kind` as adapter or linear, found 'model'",
        ),
        ("EXPORTER = replace(EXPORTER, options=('colour',))", "expected options of quantization, model_name"),
    ],
)
def test_what_is_no_exporter_is_left_out(module: Module, change: str, said: str) -> None:
    module("mail", f"{EXPORTER}from dataclasses import replace\n{change}\n")
    before = {*EXPORTERS}
    plugins_load("exporters", ["mail"])
    assert said in only_plugin().fault
    assert set(EXPORTERS) == before


@pytest.mark.parametrize(
    ("writer", "said"),
    [
        ("nowhere_at_all:write", "expected its writer nowhere_at_all:write, which cannot be imported"),
        ("mail:gone", "expected its writer mail:gone, which cannot be imported"),
        ("mail:nothing", "expected an ExportResult with files of mail:nothing, found None"),
        ("mail:absent", "expected the files that it names, found none at"),
    ],
)
def test_a_writer_that_does_not_write_is_refused_by_name(
    module: Module, tmp_path: Path, writer: str, said: str
) -> None:
    module(
        "mail",
        "from pathlib import Path\nfrom rl.export.artifact import ExportedFile, ExportResult\n"
        "def nothing(base_model, adapter, output, *, progress): pass\n"
        "def absent(base_model, adapter, output, *, progress):\n"
        "    return ExportResult('mail', [ExportedFile(Path(output) / 'x', 1, '')], {})\n",
    )
    EXPORTERS["mail"] = Exporter("mail", writer, "a mail")
    (tmp_path / "adapter").mkdir()
    order = ExportOrder(
        checkpoint=tmp_path / "adapter", format="mail", base_model="bundled", output=tmp_path / "out"
    )
    with pytest.raises(ExportOrderRefused, match=re.escape(said)):
        export(order)


# --- Benchmarks ---------------------------------------------------------------------------------------------


def task(folder: Path, name: str = "mail_tone") -> Path:
    folder.mkdir()
    (folder / "items.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    (folder / "task.yaml").write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: items.jsonl}}}}\ntest_split: test\n"
        "doc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\nmetric_list: [{metric: exact_match}]\n"
    )
    return folder


def test_a_benchmark_from_outside_is_known_by_the_name_in_its_file(module: Module, tmp_path: Path) -> None:
    module("mail", f"BENCHMARK = {str(task(tmp_path / 'tone'))!r}")
    plugins_load("benchmarks", ["mail"])
    assert task_names()[-1] == "mail_tone"
    found = task_folder("mail_tone")
    assert found is not None
    assert (found.name, found.source) == ("mail_tone", "installed")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("BENCHMARK = 3", "expected the path of a task folder (docs/benchmarks.md), found 3"),
        ("BENCHMARK = 'nowhere/at/all'", "expected a task folder at"),
        ("BENCHMARK = __file__.rpartition('/')[0] + '/empty'", "expected one YAML file in the task folder"),
        (
            "BENCHMARK = __file__.rpartition('/')[0] + '/taken'",
            "the name 'ratchet_format' is taken by another benchmark",
        ),
    ],
)
def test_what_is_no_benchmark_is_left_out(module: Module, tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    task(tmp_path / "taken", "ratchet_format")
    module("mail", source)
    plugins_load("benchmarks", ["mail"])
    assert said in only_plugin().fault
    assert BENCHMARKS == {}


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
