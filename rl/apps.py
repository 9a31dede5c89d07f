from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.management import get_commands

from rl.recipes.methods import METHODS

if TYPE_CHECKING:
    from rl.rewards.graders import Sampling

PACKAGE = "rl.management.commands"


class MethodModule(ModuleType):
    """Module `rl.management.commands.train_<slug>`; creates its Command on first access."""

    def __init__(self, slug: str) -> None:
        super().__init__(f"{PACKAGE}.train_{slug}", METHODS[slug].help)
        self.slug = slug

    def __getattr__(self, name: str) -> object:
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


def score_model_ask(model: str, messages: Sequence[Mapping[str, str]], sampling: Sampling) -> str:
    """`rl.reward_models.service.score_model_ask`, imported when a grader first asks."""
    from rl.reward_models import service

    return service.score_model_ask(model, messages, sampling)


class RlConfig(AppConfig):
    name = "rl"
    verbose_name = "Policies and training"

    def ready(self) -> None:
        from backend.plugins import plugin_faults_log, plugins_check, plugins_load
        from rl import agents
        from rl.bundled_models import added_models_in
        from rl.models.agent_definitions import agent_defined
        from rl.registry.service import policy_moved, policy_promoting
        from rl.rewards.graders import model_asked
        from rl.serving.engines import reconcile_soon
        from rl.serving.files import prepare_before_promotion
        from rl.serving.publication import reconcile_before_promotion

        added_models_in(lambda: settings.RATCHET_HOME / "models")
        plugins_load("agents", settings.RATCHET_AGENTS)
        plugins_load("rewards", settings.RATCHET_REWARDS)
        plugins_load("exporters", settings.RATCHET_EXPORTERS)
        plugins_load("benchmarks", settings.RATCHET_BENCHMARKS)
        if agent_defined not in agents.finders:
            agents.finders.append(agent_defined)
        model_asked[:] = [score_model_ask]
        policy_promoting.connect(prepare_before_promotion, dispatch_uid="rl.serving.files")
        policy_promoting.connect(reconcile_before_promotion, dispatch_uid="rl.serving.publication")
        policy_moved.connect(reconcile_soon, dispatch_uid="rl.serving.engines")
        commands_enter()
        checks.register(plugins_check)
        plugin_faults_log()
