from django.apps import AppConfig


class RlConfig(AppConfig):
    name = "rl"
    verbose_name = "Policies and training"
