"""Commands `train_<slug>`, one per method, plugins included, without files of their own."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from django.core.management import get_commands

from rl.recipes.methods import METHODS

PACKAGE = "rl.management.commands"


class MethodModule(ModuleType):
    """Module `rl.management.commands.train_<slug>`; creates its Command on first access."""

    def __init__(self, slug: str) -> None:
        super().__init__(f"{PACKAGE}.train_{slug}", METHODS[slug].help)
        self.slug = slug

    def __getattr__(self, name: str) -> Any:
        if name != "Command":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        from rl.management.training import TrainCommand

        facts = {"method": self.slug, "help": METHODS[self.slug].help, "__module__": self.__name__}
        self.Command = type("Command", (TrainCommand,), facts)
        return self.Command


def commands_enter() -> None:
    """Register the commands with Django, which finds commands by file.

    Django's table maps a name to the app with the module `management.commands.<name>`.
    """
    table = get_commands()
    for slug in METHODS:
        sys.modules.setdefault(f"{PACKAGE}.train_{slug}", MethodModule(slug))
        table.setdefault(f"train_{slug}", "rl")
