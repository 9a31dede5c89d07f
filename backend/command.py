"""Base of every management command: --json, one-line refusals, exit codes, progress on stderr, the next step."""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import IO, Any, Generic, Literal, TypeAlias, TypeVar, Union, cast, get_args, get_origin

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, OperationalError, connection
from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from backend.database import NEWER_STEP, migrations_waiting, newer_fault
from backend.installation import PROGRAM, as_typed, disk_fault

SHOWN_AFTER_S = 3.0
"""Seconds before the rate is shown, because the first steps are slower."""


@dataclass
class Pace:
    """Measures from the first report; restarts when the count falls or the total changes."""

    total: int = 0
    done: int = 0
    first: int = 0
    start_s: float = 0.0

    def words(self, done: int, total: int) -> str:
        """Such as `1.2 s each, 4 min left`; empty before there is a rate and at the end."""
        now = time.monotonic()
        if total != self.total or done < self.done:
            self.total, self.first, self.start_s = total, done, now
        self.done = done
        elapsed, count = now - self.start_s, done - self.first
        if count < 1 or elapsed < SHOWN_AFTER_S or done >= total:
            return ""
        each_s = elapsed / count
        rate = f"{each_s:.1f} s each" if each_s >= 1 else f"{1 / each_s:.0f} a second"
        return f"{rate}, {_duration(each_s * (total - done))} left"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


logger = logging.getLogger("rl.command")

LINES_PER_BAR = 10
"""Progress lines per piece of work if stderr is not a terminal."""

HELP = re.compile(r"(?:([A-Z_=:|,.]+): )?(.*)")
"""An option's docstring: METAVAR, where it has one, and help."""

QUIET_S = 8.0
"""Seconds of silence after which a line says that the work goes on, if stderr is not a terminal."""

STANDARD_OPTIONS = {
    "help",
    "version",
    "verbosity",
    "settings",
    "pythonpath",
    "traceback",
    "no_color",
    "force_color",
}
STANDARD_OPTIONS |= {"json", "skip_checks"}
"""Options that `command_line` leaves out."""
TRAINING_PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "safetensors", "gguf")
"""Packages of requirements-rl.txt, which the web image does not contain."""


class ProgressBar:
    """Progress of one piece of work: a bar on a terminal, otherwise a line per phase and at most LINES_PER_BAR within.

    Without a terminal it also writes a line after QUIET_S seconds of silence.
    """

    def __init__(self, label: str, stream: Any) -> None:
        self.label = label
        self.total = 0
        self._stream = stream
        self._lines = 0
        self._state = "begun"
        """The newest state, written or not."""
        self._began = self._spoke = time.monotonic()
        self._over = threading.Event()
        self._writing = threading.Lock()
        self._live: Progress | None = None
        self._suffix = ""
        self._pace = Pace()
        if stream.isatty():
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[suffix]}"),
                console=Console(file=stream),
                transient=True,
            )
            self._task = self._live.add_task(label, total=None, suffix="")

    def update(self, done: int, total: int, suffix: str = "") -> None:
        """Set the progress; `suffix` is a short figure that stays until the next one.

        With `total` 0, `suffix` names a phase of unknown length.
        """
        if not total:
            self._phase(suffix)
            return
        if total != self.total:
            self.total, self._lines = total, 0  # Next stage of the work.
        self._suffix = suffix or self._suffix
        pace = self._pace.words(done, total)
        self._state = ", ".join(filter(None, (f"{done} of {total} {self._suffix}".rstrip(), pace)))
        if self._live is not None:
            self._live.update(
                self._task, description=self.label, completed=done, total=total, suffix=self._suffix
            )
        elif done * LINES_PER_BAR // total > self._lines:
            self._lines = done * LINES_PER_BAR // total
            self._line(self._state)

    def _phase(self, name: str) -> None:
        if not name or name == self._state:
            return
        self._state, self._suffix, self.total, self._pace = name, "", 0, Pace()
        if self._live is not None:
            described = f"{self.label}: {name}"
            self._live.update(self._task, description=described, completed=0, total=None, suffix="")
        else:
            self._line(name)

    def _line(self, text: str) -> None:
        with self._writing:
            self._spoke = time.monotonic()
            self._stream.write(f"{self.label}: {text}\n")
            self._stream.flush()

    def _speak(self) -> None:
        while not self._over.wait(QUIET_S / 8):
            now = time.monotonic()
            if now - self._spoke >= QUIET_S:
                self._line(f"{self._state}, {now - self._began:.0f} s so far")

    def __enter__(self) -> ProgressBar:
        if self._live is not None:
            # Log lines would break the bar.
            logging.disable(logging.INFO)
            self._live.start()
        else:
            threading.Thread(target=self._speak, name=f"progress of {self.label}", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._live is not None:
            self._live.stop()
            logging.disable(logging.NOTSET)


def migrations_applied() -> None:
    """Raises CommandError if migrations are missing, DatabaseError without a database."""
    if waiting := migrations_waiting():
        raise CommandError(f"the database is {waiting} migrations behind: run `{PROGRAM} migrate` first")


NEEDED, BY_HAND = object(), object()
"""Annotations of options; see `CommandOptions`."""


class CommandOptions(BaseModel):
    """Options of a command: a field is one, and its docstring the help (after the METAVAR and a colon).

    A field without a default, or annotated with "?" or "*", is an argument without dashes. A tuple in the annotation
    holds the choices, as a Literal does. A tuple as value: the option is repeatable. NEEDED: an option that must be
    given. BY_HAND: the command adds it itself.
    """

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())


Result: TypeAlias = dict[str, Any]
"""JSON object that a command prints, where it has no type of its own."""
Opts = TypeVar("Opts", bound=CommandOptions)
R = TypeVar("R")


def options_add(parser: CommandParser, options: type[CommandOptions]) -> None:
    """Add the fields of `options` to a parser."""
    for name, field in options.model_fields.items():
        if BY_HAND in field.metadata:
            continue
        nargs = next((one for one in field.metadata if isinstance(one, str)), None)
        is_needed = NEEDED in field.metadata
        is_bare = nargs or (field.is_required() and not is_needed)
        flag = name if is_bare else f"--{name.replace('_', '-')}"
        more: dict[str, Any] = {"required": True} if is_needed else {}
        parser.add_argument(flag, **_argument(field, nargs), **more)


def _argument(field: FieldInfo, nargs: str | None) -> dict[str, Any]:
    """An option as keywords of `add_argument`."""
    metavar, text = cast(re.Match[str], HELP.match(" ".join((field.description or "").split()))).groups()
    if field.annotation is bool:
        return {"action": "store_true", "help": text}
    options = {"help": text, "metavar": metavar, "nargs": nargs}
    if not field.is_required():
        options["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
    kind: object = field.annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is tuple:
        options["action"] = "append"
    choices = next((one for one in field.metadata if isinstance(one, tuple)), None)
    if get_origin(kind) is Literal:
        kind, choices = str, get_args(kind)
    elif get_args(kind):
        kind = get_args(kind)[0]
    return {
        key: value
        for key, value in (options | {"choices": choices, "type": kind}).items()
        if value is not None
    }


class RatchetCommand(BaseCommand, Generic[Opts, R]):
    """Parses options, calls one service, shows its result.

    A subclass names the types of its options and its result. It implements `work(options)`, which returns what `--json`
    prints, `show(result)` for people, and `next_step(result)`, the last line. `work` returns None in a process of a
    launch that prints nothing. Any failure is one line on stderr and exit code 1; --traceback prints its traceback.
    """

    Options: type[CommandOptions] = CommandOptions
    requires_system_checks: list[str] = []
    as_json = False
    """The result is printed as JSON."""
    failed = False
    """`work` sets it to show its result and still exit with code 1."""
    writes = True
    """The command is refused if a newer version migrated the database."""

    def __init_subclass__(cls) -> None:
        for base in getattr(cls, "__orig_bases__", ()):
            options = next(iter(get_args(base)), None)
            if isinstance(options, type) and issubclass(options, CommandOptions):
                cls.Options = options

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--json", action="store_true", help="Print one JSON object on stdout and nothing else there."
        )
        options_add(parser, self.Options)

    def work(self, options: Opts) -> R | None:
        raise NotImplementedError

    def show(self, result: R) -> None:
        raise NotImplementedError

    def next_step(self, result: R) -> str:
        """Next step for the user: the last line printed, `next` in JSON; empty for none."""
        return ""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: object) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parser.description = as_typed(parser.description or "")
        return parser

    def handle(self, *args: object, **options: Any) -> None:
        # FutureWarnings of libraries: users cannot act on them.
        warnings.filterwarnings("ignore", category=FutureWarning)
        if isinstance(agent := options.get("agent"), str):
            options["agent"] = agent.lower()  # Slugs have no capitals.
        self.as_json = bool(options["json"])
        try:
            self._database_check()
            result = self.work(cast(Opts, self.Options.model_construct(**options)))
        except CommandError as refusal:
            refusal.args = (as_typed(str(refusal)),)
            raise
        except KeyboardInterrupt:
            raise CommandError("stopped by Ctrl-C") from None
        except Exception as error:
            if options.get("traceback"):
                raise
            raise CommandError(as_typed(self._one_line(error))) from error
        if result is None:
            return
        step = as_typed(self.next_step(result))
        if self.as_json:
            found = result if isinstance(result, dict) else to_jsonable_python(result, fallback=str)
            found = {**found, "next": step} if step else found
            self.stdout.write(json.dumps(found, ensure_ascii=False, default=str))
        else:
            self.show(result)
            if step:
                self.stdout.write(f"Next: {step}")
        if self.failed:
            raise SystemExit(1)

    def _database_check(self) -> None:
        """Raises CommandError for a database of a newer version. One that does not answer is left to `work`."""
        try:
            fault = newer_fault() if self.writes else ""
        except DatabaseError:
            return
        if fault:
            raise CommandError(f"{fault}: {NEWER_STEP}")

    def command_line(self, options: Mapping[str, object], without: Collection[str] = ()) -> str:
        """The command line with every option that differs from its default, except STANDARD_OPTIONS and `without`."""
        name = type(self).__module__.rpartition(".")[2]
        words, seen = [*PROGRAM.split(), name], {*without, *STANDARD_OPTIONS}
        for action in self.create_parser("manage.py", name)._actions:
            value = options.get(action.dest, action.default)
            if action.dest in seen or not action.option_strings or value == action.default:
                continue
            seen.add(action.dest)
            option = next((text for text in action.option_strings if text.startswith("--")), "")
            if action.nargs == 0:
                words.append(option)
            else:
                for one in value if isinstance(value, list) else [value]:
                    words += [option, str(one)]
        return shlex.join(words)

    def _one_line(self, error: Exception) -> str:
        text = " ".join(str(error).split()) or type(error).__name__
        name = connection.settings_dict["NAME"] if connection.vendor == "sqlite" else ""
        if fault := disk_fault(error, str(name)):
            return fault
        if (isinstance(error, DatabaseError) and "no such table" in text) or (
            "does not exist" in text and "relation" in text
        ):
            return f"the database has no tables yet ({text}): run `python manage.py migrate` first"
        if isinstance(error, OperationalError) and "connect" in text:
            return (
                f"the database does not answer ({text}): start it, or correct DATABASE_URL; without DATABASE_URL "
                "an SQLite file in RATCHET_HOME is used"
            )
        if isinstance(error, ModuleNotFoundError) and error.name in TRAINING_PACKAGES:
            return (
                f"this command loads models, and {error.name} is not installed here: install requirements-rl.txt "
                "(`pip install '.[rl]'`), or run it where trainings run (`docker compose exec trainer ...`)"
            )
        if isinstance(error, (ValueError, OSError)):
            return text
        return f"{type(error).__name__}: {text} (run again with --traceback for the details)"

    def note(self, text: str) -> None:
        """Write a line to stderr."""
        self.stderr.write(text, self.style.NOTICE)

    @property
    def console(self) -> Console:
        stream = cast(IO[str], getattr(self.stdout, "_out", self.stdout))
        return Console(file=stream, highlight=False, width=None if stream.isatty() else 120)

    def table(self, rows: Iterable[Sequence[str]], columns: Sequence[str] = ()) -> None:
        """Print rows as a table on stdout, under a header if `columns` are given."""
        table = Table(*columns, show_header=bool(columns), box=None, padding=(0, 2, 0, 0))
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    @contextmanager
    def bar(self, label: str) -> Iterator[ProgressBar]:
        with ProgressBar(label, sys.stderr) as bar:
            yield bar


# --- The next step after each command: its last line, and `next` in --json ---


def after_training(policy: str, champion: str = "") -> str:
    """champion: the policy to beat; empty for the base model."""
    return f"{PROGRAM} evaluate_model --policy {policy} {f'--compare {champion}' if champion else '--compare-base'}"


def after_reward_model(agent: str, run: int) -> str:
    return f"{PROGRAM} train_ppo --agent {agent} --reward model:{run}"


def after_gate_opens(policy: str) -> str:
    return f"{PROGRAM} policy promote {policy}"


def after_gate_stays_closed(agent: str, further: int = 0) -> str:
    """further: prompts to rate until enough are held out."""
    more = f"about {further} more prompts" if further else "more prompts"
    return f"rate {more} at /rate/?agent={agent}, then train again"


def after_harm(policy: str, agent: str, reason: str) -> str:
    return (
        f"it did not pass the gate ({reason}): train again with other knobs (--learning-rate, --epochs) or "
        f"more ratings (/rate/?agent={agent}); to promote it anyway, on record: {PROGRAM} policy promote "
        f"{policy} --force --reason WHY"
    )


def after_rejection(agent: str, reason: str) -> str:
    return (
        f"it did not pass the gate ({reason}) and is rejected: train a new one with other knobs (--learning-rate, "
        f"--epochs) or more ratings (/rate/?agent={agent})"
    )


def after_challenge(policy: str, agent: str) -> str:
    return f"{PROGRAM} experiment start {policy} --agent {agent} --challenger {policy}"


def after_promotion(policy: str, agent: str, kind: str = "adapter") -> str:
    if kind == "recorded":
        return f"have the app ask its own model again: this server answers for {agent} with the base model"
    form = "" if kind == "linear" else " --format gguf --quantization q4_k_m"
    return (
        f'ask it: POST /v1/chat/completions with "model": "{agent}" (make serve, docs/gateway.md); or export it '
        f"for another server: {PROGRAM} export_model --policy {policy}{form}"
    )


def after_export(format: str, path: str, base: str = "BASE.gguf") -> str:
    where = Path(path)
    folder = where if not where.suffix else where.parent
    return {
        "gguf": f"llama-server -m {path} --port 8080   (or export again with --register, for Ollama)",
        "gguf-lora": f"llama-server -m {base} --lora {path} --port 8080",
        "merged": f"python -m rl.checksums {folder} && vllm serve {folder}   (or another program)",
        "lora": f"peft.PeftModel.from_pretrained(base_model, '{folder}')   (or vllm serve BASE --enable-lora)",
        "linear": f"python -m json.tool {path}   (docs/training-reference.md explains the file)",
        "onnx": f"rl.export.onnx.session_open('{folder}')   (or onnxruntime.InferenceSession('{path}'))",
    }.get(format, "docs/export.md names programs that read it")


def after_benchmark(policy: str, agent: str, *, asked: bool) -> str:
    """asked: the agent's gate requires these tasks."""
    if asked:
        return f"{PROGRAM} policy promote {policy}"
    return (
        f"see /policies/{policy}/; to make the gate require these tasks, list them for {agent} at "
        "/admin/rl/gatesettings/ (benchmarks)"
    )
