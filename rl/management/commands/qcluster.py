"""django-q2's cluster, with a sentinel that outlives the sudden death of its processes."""

from __future__ import annotations

from typing import Any

from django_q import cluster
from django_q.management.commands.qcluster import Command as QClusterCommand

from rl.jobs.sentinel import SteadySentinel


class Command(QClusterCommand):
    """The same options and meaning; `rl` stands before `django_q` in INSTALLED_APPS, so that this one is found."""

    help = (
        "Run a worker until stopped: short jobs, or with Q_CLUSTER_NAME=training the training runs, "
        "one at a time. It may be killed: its jobs are queued again. Example: Q_CLUSTER_NAME=training "
        "manage.py qcluster"
    )

    def handle(self, *args: Any, **options: Any) -> None:
        cluster.Sentinel = SteadySentinel
        super().handle(*args, **options)
