"""Is the program alive, can it answer, what has it counted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.http import require_safe
from django_q.brokers import get_broker
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from backend.bodies import Query
from backend.database import migrations_complete, newer_fault
from backend.installation import disk_state
from backend.logs import OutageLog
from backend.rest.reading import query_read
from backend.rest.views import ApiView
from rl import artifacts
from rl.base_models.service import base_model_default
from rl.models import Policy, TrainingRun
from rl.serving import metrics
from rl.serving.base import BASE, BackendFailed, Model
from rl.serving.endpoint import EndpointBackend
from rl.serving.engines import adapters_here
from rl.serving.fallback import backends, upstream_backend
from rl.serving.files import endpoint_of, files_of, policies_ready
from rl.serving.gateway import recorder, refuses

logger = logging.getLogger("rl.health")
database_outage, queue_outage = OutageLog(logger), OutageLog(logger)


@require_safe
def healthz(request: HttpRequest) -> HttpResponse:
    """The process answers. Open to everyone: it tells nothing else."""
    return JsonResponse({"status": "ok"})


@require_safe
def readyz(request: HttpRequest) -> HttpResponse:
    """State of each part; 503 where one is missing that answers depend on. Open to everyone: it names parts alone.

    A disk that is full or read-only makes it `degraded`: answers are given all the same, unless
    GATEWAY_WITHOUT_RECORDING is `refuse` and the database takes no decision either. So does a server that lacks a
    champion's adapter: others answer.
    """
    database = _database()
    parts = {
        "database": "ok" if database else "away",
        "migrations": _migrations() if database else "unknown",
        "queue": "ok" if _queue() else "away",
        "model": "ok" if (database and _upstream()) or _model() else "away",
    }
    if artifacts.store() is not None:
        parts["files"] = "ok" if database and policies_ready() else "away"
    disks = {"data": _disks(_data_folders()), "spool": _disks([recorder.outbox.folder])}
    disks |= {"adapters": "missing"} if database and _adapters_missing() else {}
    ready = all(state == "ok" for state in parts.values()) and (recorder.recordable() or not refuses())
    status = "not ready" if not ready else "ready" if set(disks.values()) == {"ok"} else "degraded"
    body = {"status": status, **parts, **disks}
    response = JsonResponse(body, status=200 if ready else 503, headers={} if ready else {"Retry-After": "5"})
    response._has_been_logged = True  # type: ignore[attr-defined]  # or Django adds a line for each probe
    return response


def _adapters_missing() -> bool:
    """True if a server of LOCAL_BACKENDS does not answer with a champion's adapter: `doctor` says what to do."""
    champions = Policy.objects.filter(stage=Policy.Stage.CHAMPION).values("name")
    return adapters_here().exclude(fault="").filter(policy__in=champions).exists()


def _data_folders() -> list[Path]:
    """RATCHET_HOME, and where an SQLite database lies."""
    database = settings.DATABASES["default"]
    lite = database["ENGINE"] == "django.db.backends.sqlite3" and "memory" not in str(database["NAME"])
    return [settings.RATCHET_HOME, *([Path(str(database["NAME"])).parent] if lite else [])]


def _disks(folders: list[Path]) -> str:
    """`ok`, or the state of the first that is not."""
    for state in map(disk_state, folders):
        if not state.ok:
            logger.warning("%s", state.reason)
            return state.state
    return "ok"


def _migrations() -> str:
    try:
        if newer := newer_fault():
            logger.warning("%s", newer)
            return "newer"
        return "ok" if migrations_complete() else "missing"
    except DatabaseError as error:
        logger.warning("the database's migrations cannot be read: %s", error)
        return "unknown"


def _database() -> bool:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError as error:
        database_outage.report("the database does not answer", error)
        return False
    return True


def _queue() -> bool:
    try:
        return bool(get_broker().ping())
    except Exception as error:  # a broker's own kinds of failure are as many as there are brokers
        queue_outage.report("the queue does not answer", error)
        return False


def _upstream() -> bool:
    """True if a hosted champion's upstream can be connected to, as far as this process knows: a probe asks nobody."""
    champions = Policy.objects.filter(kind=Policy.Kind.HOSTED, stage=Policy.Stage.CHAMPION)
    endpoints = [endpoint_of(one.upstream) for one in champions.select_related("upstream") if one.upstream]
    return any(not one.fault and not upstream_backend(one).breaker.is_open for one in endpoints)


def _model() -> bool:
    """True if a local backend could answer with the base model."""
    for backend in backends():
        if isinstance(backend, EndpointBackend):
            if backend.reachable():
                return True
            continue
        try:
            files_of(Model(BASE, base_model_default().name))
        except BackendFailed:
            continue
        return True
    return False


@extend_schema(exclude=True)
class Metrics(ApiView):
    """Prometheus text, for a key that may read."""

    scopes = {"GET": "read"}

    def get(self, request: Request) -> HttpResponse:
        query_read(Query, request)
        return HttpResponse(
            metrics.exposition(_gauges()), content_type="text/plain; version=0.0.4; charset=utf-8"
        )


def _gauges() -> dict[str, tuple[str, float]]:
    spool = recorder.outbox
    counts: dict[str, Any] = {
        "ratchet_spool_bytes": (
            "Bytes of decisions in the outbox, not in the database yet",
            spool.pending_bytes(),
        ),
        "ratchet_spool_lost": (
            "Decisions lost because neither the database nor the disk could store them",
            spool.lost,
        ),
    }
    for status in (TrainingRun.Status.QUEUED, TrainingRun.Status.RUNNING):
        number = TrainingRun.objects.filter(status=status).count()
        counts[f"ratchet_runs_{status.value}"] = (f"Training runs that are {status.value}", number)
    return counts
