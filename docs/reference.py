"""Writes docs/commands.md from the commands' own --help. Run it after changing an option: python docs/reference.py"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = ("feedback", "rl")
DJANGOS = {
    "--version", "--verbosity", "--settings", "--pythonpath", "--traceback", "--no-color", "--force-color",
    "--skip-checks", "--help",
}  # fmt: skip


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
    value = (
        "\\|".join(map(str, action.choices)) if action.choices else str(action.metavar or action.dest.upper())
    )
    return f"{name} {value}"


def text() -> str:
    lines = [
        "# Every command",
        "",
        "Written by `python docs/reference.py` from the commands themselves; do not edit by hand.",
        "",
        "All run as `python manage.py NAME`. `--json` prints one JSON object on stdout and nothing else there.",
        "Exit code 0: done; 1: refused or failed, with one line on stderr; 2: wrong usage. `--traceback` shows where a",
        "failure came from.",
        "",
    ]
    for name, parser in commands().items():
        description = " ".join((parser.description or "").split())
        lines += [f"## {name}", "", description, ""]
        if found := options(parser):
            lines += ["| option | what it does |", "| --- | --- |"]
            lines += [f"| `{typed}` | {' '.join(help_text.split())} |" for typed, help_text in found]
            lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "backend.settings")
    import django

    django.setup()
    (ROOT / "docs" / "commands.md").write_text(text(), "utf-8")
