from django.apps import AppConfig
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured


class RlConfig(AppConfig):
    name = "rl"
    verbose_name = "Policies and training"

    def ready(self) -> None:
        from rl import agents
        from rl.models.agent_definitions import agent_defined
        from rl.registry.signals import policy_promoting
        from rl.serving.preparation import prepare_before_promotion

        for path in settings.RATCHET_AGENTS:
            try:
                agents.agent_register(path)
            except ValueError as error:
                raise ImproperlyConfigured(f"RATCHET_AGENTS: {error}") from error
        if agent_defined not in agents.finders:
            agents.finders.append(agent_defined)
        policy_promoting.connect(prepare_before_promotion, dispatch_uid="rl.serving.preparation")
