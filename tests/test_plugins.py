"""Plugins: found by setting and entry point, registered once, and named and left out where they cannot be used."""

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
from feedback.transfer.formats.records import FormatRefused
from rl.agents import AGENTS
from rl.apps import PACKAGE, commands_enter
from rl.export.artifact import EXPORTERS, Exporter, exporters_of
from rl.export.service import ExportOrder, ExportOrderRefused, export
from rl.management.commands import doctor
from rl.models import Snapshot
from rl.recipes import RecipeError, recipe_named
from rl.recipes.base import DATASET_KINDS
from rl.recipes.benchmark_tasks import BENCHMARKS, task_names
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


@pytest.mark.parametrize("path", ["mail", "mail:AGENT", "mail.AGENT", ""])
def test_names_of_modules_and_objects(module: Module, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    module("mail", AGENT)
    if not path:
        installed(monkeypatch, "agents", ("own", "mail:AGENT"))
    plugins_load("agents", [path] if path else [])
    assert AGENTS["own"].title == "Own"
    assert not only_plugin().fault
    # named twice, it is registered once
    installed(monkeypatch, "agents", ("own", "mail:AGENT"))
    plugins_load("agents", ["mail"])
    assert {plugin.fault for plugin in plugins.plugins.values()} == {""}


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


def test_a_plugin_with_torch_is_used_and_named(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_reward_from_outside_is_known_by_its_name(module: Module) -> None:
    module("mail", "def brevity(sample):\n    return 2.0 - len(sample.response) / 10\n")
    plugins_load("rewards", ["mail.brevity"])
    (reward,) = rewards_named(["brevity"])
    assert [value.raw for value in reward.score([RewardSample([], "x" * 10, "own")])] == [1.0]
    assert "brevity" in reward_names()
    with pytest.raises(RewardRefused, match="brevity, learned"):
        rewards_named(["brevty"])


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


def test_a_format_from_outside_has_its_place_in_the_order(module: Module) -> None:
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


def test_a_failing_format_knows_no_rows(module: Module, caplog: pytest.LogCaptureFixture) -> None:
    module("mail", FORMAT)
    plugins_load("formats", ["mail"])
    for _ in range(3):
        assert format_of_row({"prompt": "?", "response": "!", "rating": 5}).name == "table"
    (warning,) = [record.message for record in caplog.records]
    assert "mails" in warning
    assert "(KeyError: 'mailbox')" in warning


def test_a_format_from_outside_that_makes_a_mistake_refuses_the_file(module: Module, tmp_path: Path) -> None:
    """A row without `reply` is the mail's own, and its reader asks for it."""
    module("mail", FORMAT)
    plugins_load("formats", ["mail"])
    path = tmp_path / "x.jsonl"
    path.write_text('{"mailbox": "help", "mail": "?", "liked": 1}\n')
    with pytest.raises(
        FormatRefused, match=r"the plugin that reads mails made a mistake \(KeyError: 'reply'\)"
    ):
        list(FORMATS["mails"].read(path, None))


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
        assert vars(parser.parse_args(["--gamma", "0.25", "--agent", "own"]))["gamma"] == 0.25
        assert "Learn from mails" in parser.format_help()
    finally:
        table.pop("train_mail_po", None)
        sys.modules.pop(f"{PACKAGE}.train_mail_po", None)


def test_unknown_methods_and_kinds() -> None:
    # the section of a method that was left out stops nothing
    found = {"mail_po": {"gamma": 0.9}, "dpo": {"beta": 0.2}}
    with pytest.raises(OperatorFileError, match="no section 'mail_po'"):
        operator_settings(found)
    assert operator_settings(found, methods_missing=True).sections == {"dpo": {"beta": 0.2}}
    # a method nobody knows is named with those there are
    with pytest.raises(RecipeError, match="no method 'mail_po'; known are dpo, grpo"):
        method_named("mail_po")
    # the kinds of datasets are those of snapshots
    assert set(DATASET_KINDS) == set(Snapshot.Kind.values)


EXPORTER = """
from rl.export.artifact import Exporter
EXPORTER = Exporter("mail-zip", "nowhere_at_all:export_zip", "a zip")
"""


@pytest.mark.parametrize(
    ("writer", "said"),
    [
        ("nowhere_at_all:write", "expected its writer nowhere_at_all:write, which cannot be imported"),
        ("mail:gone", "expected its writer mail:gone, which cannot be imported"),
        ("mail:nothing", "expected an ExportResult with files of mail:nothing, found None"),
        ("mail:absent", "expected the files that it names, found none at"),
    ],
)
def test_a_bad_writer_is_refused(module: Module, tmp_path: Path, writer: str, said: str) -> None:
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


def task(folder: Path, name: str = "mail_tone") -> Path:
    folder.mkdir()
    (folder / "items.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    (folder / "task.yaml").write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: items.jsonl}}}}\ntest_split: test\n"
        "doc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\nmetric_list: [{metric: exact_match}]\n"
    )
    return folder


REPLACED = "from dataclasses import replace\n"
HERE = "__file__.rpartition('/')[0]"
UNUSABLE: dict[str, tuple[str, dict[str, str]]] = {
    "agents": (
        "",
        {
            "import nowhere_at_all": "ModuleNotFoundError",
            "AGENT = 3": "expected an Agent",
            "OTHER = 3": "AttributeError",
            "import sys; sys.exit('gone')": "SystemExit",
            "def (": "SyntaxError",
            AGENT.replace("own", "filer"): "'filer' is taken",
        },
    ),
    "rewards": (
        "",
        {
            "THREE = 3": "found 3",
            "def agent(sample): return 1": "'agent' is taken",
            "class LOUD:\n    name = 'Loud one'\n    def score(self, samples): return []": "'Loud one'",
        },
    ),
    "formats": (
        FORMAT + REPLACED,
        {
            "FORMAT = {}": "expected a Format",
            "FORMAT = replace(FORMAT, name='trl', shapes=())": "'trl' is taken",
            "FORMAT = replace(FORMAT, name='auto', shapes=())": "'auto' is taken",
            "FORMAT = replace(FORMAT, name='a b', shapes=())": "expected a name",
            "FORMAT = replace(FORMAT, shapes=(3,))": "expected shapes",
            "FORMAT = replace(FORMAT, name='other')": "the first shape",
        },
    ),
    "methods": (
        METHOD + REPLACED,
        {
            "METHOD = 3": "expected a Method",
            "METHOD = replace(METHOD, slug='dpo')": "'dpo' is taken",
            "METHOD = replace(METHOD, slug='rlhf')": "'rlhf' is taken",
            "METHOD = replace(METHOD, slug='Mail-PO')": "'Mail-PO'",
            "METHOD = replace(METHOD, kind='mails')": "a kind of dataset",
            "METHOD = replace(METHOD, presets={'cpu': MailRecipe()})": "`default`",
            "METHOD = replace(METHOD, presets={'default': BasicRecipe()})": "BasicRecipe",
            "METHOD = replace(METHOD, presets=METHOD.presets | {'cpu': Recipe()})": "another: cpu",
            "METHOD = replace(METHOD, trainer='nowhere.Trainer')": "expected trainer",
            "METHOD = replace(METHOD, policy=False)": "policy and adapter",
            "METHOD = replace(METHOD, options={'delta': ''})": "'delta'",
            "METHOD = replace(METHOD, rewarded=True)": "'reward'",
            "METHOD = replace(METHOD, help='')": "expected help",
        },
    ),
    "exporters": (
        EXPORTER + REPLACED,
        {
            "EXPORTER = 3": "expected an Exporter",
            "EXPORTER = replace(EXPORTER, name='gguf')": "'gguf' is taken",
            "EXPORTER = replace(EXPORTER, name='a' * 17)": "expected a name",
            "EXPORTER = replace(EXPORTER, writer='nowhere')": "`module:function`",
            "EXPORTER = replace(EXPORTER, policy_kind='model')": "`policy_kind`",
            "EXPORTER = replace(EXPORTER, options=('colour',))": "expected options",
        },
    ),
    "benchmarks": (
        "",
        {
            "BENCHMARK = 3": "found 3",
            "BENCHMARK = 'nowhere/at/all'": "expected a task folder",
            f"BENCHMARK = {HERE} + '/empty'": "one YAML file",
            f"BENCHMARK = {HERE} + '/taken'": "'ratchet_format' is taken",
        },
    ),
}
"""Kind -> start of a module, and its end -> what the fault names."""


@pytest.mark.parametrize("kind", UNUSABLE)
def test_what_cannot_be_used_is_named_and_left_out(module: Module, tmp_path: Path, kind: str) -> None:
    (tmp_path / "empty").mkdir()
    task(tmp_path / "taken", "ratchet_format")
    module("sound", AGENT)
    before = [dict(table) for table in TABLES[1:]], [*ORDER]
    start, ends = UNUSABLE[kind]
    for number, (end, fault) in enumerate(ends.items()):
        plugins.plugins.clear()
        name = module(f"mail{number}", f"{start}{end}\n")
        rewards = {"THREE": ".THREE", "def a": ".agent", "class": ".LOUD"} if kind == "rewards" else {}
        plugins_load(
            kind, [name + next((path for word, path in rewards.items() if end.startswith(word)), "")]
        )
        plugins_load("agents", ["sound"])
        broken, sound = plugins.plugins.values()
        assert fault in broken.fault, end
        assert f"RATCHET_{kind.upper()}: {name}" in broken.text
        assert not sound.fault
    assert before == ([dict(table) for table in TABLES[1:]], [*ORDER])
    assert AGENTS["filer"].title == "Filer"


@pytest.mark.slow
def test_the_setting_is_read_when_the_program_starts_and_a_broken_one_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine_own.py").write_text(AGENT)
    code = "import django; django.setup(); from rl.agents import get_agent; print(get_agent('own').title)"
    ours = {"DJANGO_SETTINGS_MODULE": "backend.settings", "RATCHET_AGENTS": "no_such_module,mine_own"}
    env = {**os.environ, **ours, "PYTHONPATH": str(tmp_path), "RATCHET_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT, env=env
    )
    assert (done.stdout.strip(), done.returncode) == ("Own", 0), done.stderr
    assert "plugin RATCHET_AGENTS: no_such_module was left out: cannot be imported" in done.stderr


def test_exporters_and_benchmarks_from_outside_are_listed(module: Module, tmp_path: Path) -> None:
    module("mail", f"{EXPORTER}\nBENCHMARK = {str(task(tmp_path / 'tone'))!r}")
    plugins_load("exporters", ["mail"])
    plugins_load("benchmarks", ["mail"])
    assert (exporters_of("adapter")[-1], exporters_of("linear")) == ("mail-zip", ["linear"])
    assert task_names()[-1] == "mail_tone"
