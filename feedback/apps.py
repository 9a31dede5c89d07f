from django.apps import AppConfig
from django.conf import settings


class FeedbackConfig(AppConfig):
    name = "feedback"
    verbose_name = "Feedback"

    def ready(self) -> None:
        from backend.plugins import plugin_faults_log, plugins_load

        plugins_load("formats", settings.RATCHET_FORMATS)
        plugin_faults_log()
