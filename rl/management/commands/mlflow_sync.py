"""Log runs, evaluations and champions to MLflow now, rather than at the next tick."""

from __future__ import annotations

from dataclasses import asdict

from django.conf import settings
from django.core.management.base import CommandError

from backend.command import CommandOptions, RatchetCommand, Result
from rl import tracking
from rl.checksums import FileDamaged


class Command(RatchetCommand[CommandOptions, Result]):
    help = (
        "Log runs, evaluations and champions to the MLflow server of MLFLOW_TRACKING_URI. What is there already is "
        "not logged again; workers do the same every minute. Example: manage.py mlflow_sync"
    )

    def work(self, options: CommandOptions) -> Result:
        if not settings.MLFLOW_TRACKING_URI:
            raise CommandError("MLFLOW_TRACKING_URI is not set: there is no server to log to")
        from mlflow.exceptions import MlflowException

        try:
            return asdict(tracking.sync())
        except (MlflowException, FileDamaged, OSError) as error:
            raise CommandError(f"MLflow did not take it: {error}") from error
