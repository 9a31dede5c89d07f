from django.apps import AppConfig
from django.conf import settings
from django.core import checks


class RlConfig(AppConfig):
    name = "rl"
    verbose_name = "Policies and training"

    def ready(self) -> None:
        from backend.plugins import plugin_faults_log, plugins_check, plugins_load
        from rl import agents
        from rl.bundled_models import added_models_in
        from rl.management.method_commands import commands_enter
        from rl.models.agent_definitions import agent_defined
        from rl.registry.service import policy_promoting
        from rl.serving.files import prepare_before_promotion

        added_models_in(lambda: settings.RATCHET_HOME / "models")
        plugins_load("agents", settings.RATCHET_AGENTS)
        plugins_load("rewards", settings.RATCHET_REWARDS)
        plugins_load("exporters", settings.RATCHET_EXPORTERS)
        plugins_load("benchmarks", settings.RATCHET_BENCHMARKS)
        if agent_defined not in agents.finders:
            agents.finders.append(agent_defined)
        policy_promoting.connect(prepare_before_promotion, dispatch_uid="rl.serving.files")
        commands_enter()
        checks.register(plugins_check)
        plugin_faults_log()
