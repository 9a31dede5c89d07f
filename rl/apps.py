from django.apps import AppConfig
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured


class RlConfig(AppConfig):
    name = "rl"
    verbose_name = "Policies and training"

    def ready(self) -> None:
        from rl import agents
        from rl.agent_definitions import agent_defined

        for path in settings.RATCHET_AGENTS:
            try:
                agents.agent_register(path)
            except ValueError as error:
                raise ImproperlyConfigured(f"RATCHET_AGENTS: {error}") from error
        if agent_defined not in agents.finders:
            agents.finders.append(agent_defined)
