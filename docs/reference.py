"""Writes docs/commands.md from the commands' own --help. Run it after changing an option: python docs/reference.py"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OURS = ("feedback", "rl")
DJANGOS = set(
    (
        "--version --verbosity --settings --pythonpath --traceback --no-color --force-color --skip-checks "
        "--help"
    ).split()
)
TRAINING = ("train_sft", "train_dpo", "train_grpo", "train_kto", "train_ppo", "train_reward_model")
SHARED = "Options of every training command"


def commands() -> dict[str, argparse.ArgumentParser]:
    """Our commands' parsers by name, in alphabetical order."""
    from django.core.management import get_commands, load_command_class

    return {
        name: load_command_class(app, name).create_parser("manage.py", name)
        for name, app in sorted(get_commands().items())
        if app in OURS
    }


def options(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """(how it is typed, what it does) of each argument that is our own, subcommands' arguments included."""
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                summary = next((a.help for a in action._choices_actions if a.dest == name), "") or ""
                rows.append((name, summary))
                rows += [(f"{name} {typed}", text) for typed, text in options(sub)]
        elif not DJANGOS & set(action.option_strings):
            rows.append((_typed(action), parser._get_formatter()._expand_help(action) if action.help else ""))
    return rows


def _typed(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest).upper() + ("..." if action.nargs in ("+", "*") else "")
    name = max(action.option_strings, key=len)
    if action.nargs == 0:
        return name
    few = action.choices if action.choices and len(list(action.choices)) <= MANY else None
    value = "\\|".join(map(str, few)) if few else str(action.metavar or action.dest.upper())
    return f"{name} {value}"


class Option(NamedTuple):
    """An argument as the page shows it; `presets` are the values that presets of recipes give it."""

    typed: str
    text: str
    presets: tuple[str, ...] = ()


PLAIN_EXAMPLE = re.compile(r" Example: (?:--[\w-]+ )?[\w./-]+$")
"""Example that shows only how a plain value is typed; `--help` has it."""

MANY = 12
"""Choices above which the page shows the argument's name instead; the page of formats lists them."""

SOURCES = "a folder, a Hugging Face name, a GGUF file, ollama:NAME, package:NAME or smollm2"
"""What every option for a base model accepts, explained once on the page of models."""


def _described(rows: list[tuple[str, str]]) -> list[Option]:
    found = []
    for typed, text in rows:
        if typed.endswith("--json"):
            continue  # explained once, above
        text, _, presets = text.partition(" (presets: ")
        found.append(Option(typed, text, tuple(presets.rstrip(")").split(", ")) if presets else ()))
    return found


def _table(rows: list[Option]) -> list[str]:
    texts = [" ".join(row.text.split()).replace(SOURCES, "[any source](models.md)") for row in rows]
    cells = [
        f"| `{row.typed}` | {PLAIN_EXAMPLE.sub('', text)} |" for row, text in zip(rows, texts, strict=True)
    ]
    return ["| option | what it does |", "| --- | --- |", *cells, ""] if rows else []


def _preset_table(rows: list[Option]) -> list[str]:
    """Values of the presets, a column for each preset; what all have in common stands below."""
    rows = [row for row in rows if row.presets]
    names = [value.split(" ", 1)[0] for value in rows[0].presets]
    cells = [[row.typed.split()[0], *(value.split(" ", 1)[1] for value in row.presets)] for row in rows]
    lines = [f"| `{typed}` | {' | '.join(values)} |" for typed, *values in cells if len(set(values)) > 1]
    same = [f"`{typed}` {values[0]}" for typed, *values in cells if len(set(values)) == 1]
    table = [f"| preset | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|", *lines, ""]
    return [*table, f"In every preset: {', '.join(same)}.", ""] if same else table


def text() -> str:
    lines = [
        "# Every command",
        "",
        "Written by `python docs/reference.py` from the commands themselves; do not edit by hand.",
        "",
        "All run as `python manage.py NAME`. `--json` prints one JSON object on stdout and nothing else there;",
        "`--help` has an example of every option.",
        "Exit code 0: done; 1: refused or failed, with one line on stderr; 2: wrong usage. `--traceback` shows where a",
        "failure came from.",
        "",
    ]
    listed = {name: _described(options(parser)) for name, parser in commands().items()}
    told = [{(row.typed, row.text) for row in listed[name]} for name in TRAINING]
    shared = [row for row in listed[TRAINING[0]] if all((row.typed, row.text) in rows for rows in told)]
    known = {(row.typed, row.text) for row in shared}
    for name, parser in commands().items():
        if name == "train":
            lines += [
                f"## {SHARED}",
                "",
                "Each method's presets stand in its own section.",
                "",
                *_table(shared),
            ]
        description = " ".join((parser.description or "").split())
        lines += [f"## {name}", "", description, ""]
        if name in (*TRAINING, "train"):
            lines += [f"[{SHARED}](#{SHARED.lower().replace(' ', '-')}), and:", ""]
            lines += _table([row for row in listed[name] if (row.typed, row.text) not in known])
        else:
            lines += _table(listed[name])
        if name in TRAINING:
            lines += _preset_table(listed[name])
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "backend.settings")
    import django

    django.setup()
    (ROOT / "docs" / "commands.md").write_text(text(), "utf-8")
