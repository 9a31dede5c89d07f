"""Check this installation: what is wrong, and what to do."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from django.conf import settings
from django.core.checks import ERROR, run_checks
from django.db import DatabaseError, connection
from django.utils import timezone

from backend.command import CommandOptions, RatchetCommand
from backend.database import NEWER_STEP, migrations_newer, migrations_waiting, newer_fault
from backend.installation import PROGRAM, disk_state
from backend.notifications import webhook_outbox
from backend.plugins import plugin_faults
from feedback.models import Decision
from feedback.recording.recorder import outbox_of, spool_folder
from rl.models import Artifact, Policy, RewardModelVersion, TrainingRun
from rl.serving.engines import adapters_here

WRONG, REMARK = "wrong", "remark"
LITTLE_DISK_BYTES = 1_000_000_000
"""Less than this left is a remark: one export of a small model takes as much."""
UNTAKEN = timedelta(minutes=2)
"""A job that waits longer than this for a worker has none."""
SKEW = timedelta(minutes=2)
"""Largest allowed difference between this machine's clock and the database's, or a recorded time."""
PROBE_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Diagnosis:
    """One thing that is wrong, or worth a remark, with the next step."""

    part: str
    level: str
    """`wrong`: something does not work, or soon will not; `remark`: it works."""
    found: str
    next_step: str


Findings = Iterator[Diagnosis]


def wrong(part: str, found: str, next_step: str) -> Diagnosis:
    return Diagnosis(part, WRONG, found, next_step)


def remark(part: str, found: str, next_step: str) -> Diagnosis:
    return Diagnosis(part, REMARK, found, next_step)


def diagnosis(host: str = "127.0.0.1", port: int = 8000) -> list[Diagnosis]:
    """All findings, the wrong ones first; empty where all is well. Reads files and the database, writes nothing."""
    findings: list[Diagnosis] = []
    here = (settings_faults, plugin_diagnoses, folder_faults, disk_faults, llama_faults)
    for check in (*here, lambda: port_faults(host, port)):
        findings += check()
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        migration_count, newer = migrations_waiting(), newer_fault()
    except DatabaseError as error:
        findings.append(
            wrong(
                "database",
                f"it does not answer: {_line(error)}",
                "start it, or correct DATABASE_URL (without it an SQLite file in RATCHET_HOME is used)",
            )
        )
    else:
        if newer:
            findings.append(wrong("migrations", newer, NEWER_STEP))
        elif migration_count:
            behind = f"the database is {migration_count} migrations behind"
            findings.append(wrong("migrations", behind, f"{PROGRAM} migrate"))
        else:
            for look in OF_THE_DATABASE:
                findings += look()
    return sorted(findings, key=lambda finding: finding.level != WRONG)


# --- Without the database -----------------------------------------------------------------------------------


def settings_faults() -> Findings:
    for message in run_checks():
        if message.level >= ERROR:
            yield wrong(
                "settings",
                _line(message.msg),
                message.hint or "correct it in .env or backend/settings.py",
            )
    if settings.DEBUG:
        yield remark(
            "settings",
            "DEBUG is on: error pages show settings and code to everyone",
            "remove DEBUG if others can reach this machine",
        )
    elif settings.HTTPS_ONLY:
        for warning in run_checks(tags=["security"], include_deployment_checks=True):
            yield remark(
                "settings",
                _line(warning.msg).split(". ")[0],
                f"docs/settings.md#in-production ({warning.id})",
            )


def plugin_diagnoses() -> Findings:
    """Plugins that were left out, and those that are used with a remark."""
    for plugin in plugin_faults():
        what = plugin.text.removesuffix(f"; {plugin.remedy}")
        yield Diagnosis("plugins", WRONG if plugin.fault else REMARK, what, plugin.remedy)


def folder_faults() -> Findings:
    home: Path = settings.RATCHET_HOME
    if not home.is_dir():
        step = f"run {PROGRAM} migrate, which creates it, or set RATCHET_HOME"
        yield wrong("data folder", f"RATCHET_HOME ({home}) does not exist", step)
        return
    if home.stat().st_mode & 0o007:
        yield wrong(
            "data folder",
            f"{home} can be read by every user of this machine (mode {home.stat().st_mode & 0o777:o})",
            f"chmod 700 {home}",
        )
    for name, use in (
        ("secret_key", "signs sessions"),
        ("upstream_key", "encrypts the API keys of upstreams"),
    ):
        key = home / name
        if key.exists() and key.stat().st_mode & 0o077:
            yield wrong("data folder", f"{key}, which {use}, can be read by other users", f"chmod 600 {key}")


def disk_faults() -> Findings:
    folders = {settings.RATCHET_HOME}
    if connection.vendor == "sqlite" and "memory" not in str(connection.settings_dict["NAME"]):
        folders.add(Path(str(connection.settings_dict["NAME"])).parent)
    for folder in sorted(folders):
        state = disk_state(folder)
        if not state.ok:
            yield wrong("disk", f"{folder} is {state.state}", state.reason)
        elif folder.is_dir() and (free := shutil.disk_usage(folder).free) < LITTLE_DISK_BYTES:
            yield remark(
                "disk",
                f"{free / 1e6:,.0f} MB are free on the disk of {folder}",
                "free some, or set RATCHET_HOME to a folder on another disk",
            )


def llama_faults() -> Findings:
    in_process = "in-process" in settings.LOCAL_BACKENDS
    if in_process and importlib.util.find_spec("llama_cpp") is None:
        alone = settings.LOCAL_BACKENDS == ["in-process"]
        yield Diagnosis(
            "llama.cpp",
            WRONG if alone else REMARK,
            "LOCAL_BACKENDS lists in-process, but llama_cpp is not installed",
            "pip install -r requirements-rl.txt, or set LOCAL_BACKENDS to the address of a server",
        )


def port_faults(host: str, port: int) -> Findings:
    try:
        with socket.create_connection((host, port), timeout=PROBE_TIMEOUT_S):
            pass
    except OSError:
        yield remark("port", f"nothing is served at {host}:{port}", f"{PROGRAM} serve --port {port}")
        return
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/healthz", timeout=PROBE_TIMEOUT_S) as answer:
            ours = answer.read(100) == b'{"status": "ok"}'
    except (OSError, ValueError):
        ours = False
    if not ours:
        yield wrong(
            "port",
            f"another program listens at {host}:{port}",
            f"stop that program, or run {PROGRAM} serve --port {port + 1}",
        )


# --- In the database ----------------------------------------------------------------------------------------


def database_faults() -> Findings:
    if newer := migrations_newer():
        yield remark(
            "migrations",
            f"a newer version added {'.'.join(newer[0])} to the database, which this one can work with",
            "replace this server by the newer version too",
        )
    if connection.vendor != "sqlite":
        return
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA quick_check(3)")
        faults = [row[0] for row in cursor.fetchall()]
    if faults != ["ok"]:
        yield wrong(
            "database",
            f"the SQLite file is damaged: {_line(faults[0])}",
            f"stop the server, then {PROGRAM} restore BACKUP --overwrite (docs/production.md#back-up)",
        )


def clock_faults() -> Findings:
    clock_time = timezone.now()
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT clock_timestamp()")
            skew = abs(cursor.fetchone()[0] - clock_time)
        if skew > SKEW:
            yield wrong(
                "clock",
                f"the clocks of this machine and of the database differ by {skew.total_seconds():.0f} s",
                "synchronise both by NTP: heartbeats and the order of ratings depend on them",
            )
    newest = Decision.objects.order_by("-created_at").values_list("created_at", flat=True).first()
    if newest is not None and newest - clock_time > SKEW:
        yield wrong(
            "clock",
            f"the newest decision is dated {newest:%Y-%m-%d %H:%M} UTC, later than this machine's clock "
            f"({clock_time:%Y-%m-%d %H:%M})",
            "synchronise the clocks by NTP, here and where decisions are recorded",
        )


def worker_faults() -> Findings:
    waiting = 0
    if "orm" in settings.Q_CLUSTER:
        from django_q.models import OrmQ

        waiting = OrmQ.objects.filter(lock__lt=timezone.now() - UNTAKEN).count()
    queued = TrainingRun.objects.filter(
        status=TrainingRun.Status.QUEUED, created_at__lt=timezone.now() - UNTAKEN
    ).count()
    running = TrainingRun.objects.filter(status=TrainingRun.Status.RUNNING).count()
    if waiting or (queued and not running):
        what = f"{waiting} jobs" if waiting else f"{queued} training runs"
        yield wrong(
            "workers",
            f"{what} have waited for more than {UNTAKEN.seconds // 60} minutes without a worker",
            f"{PROGRAM} serve, or on other machines {PROGRAM} serve --only workers and --only training",
        )
    silent = TrainingRun.objects.filter(
        status=TrainingRun.Status.RUNNING, heartbeat_at__lt=timezone.now() - timedelta(minutes=10)
    )
    for run in silent[:5]:
        yield wrong(
            "workers",
            f"run {run.pk} ({run.agent}) has sent no heartbeat since {run.heartbeat_at:%Y-%m-%d %H:%M} UTC",
            f"queue it again: {PROGRAM} online_learner tick (serve does this by itself)",
        )


def artifact_faults() -> Findings:
    """Files that rows name and that are not there, of what is served or may be: retired policies' may be swept."""
    paths: list[tuple[str, str, str]] = []
    for policy in Policy.objects.filter(stage__in=[Policy.Stage.CHAMPION, Policy.Stage.CHALLENGER]):
        paths.append(
            (
                f"{policy.stage} {policy.name}",
                policy.adapter_path,
                f"{PROGRAM} policy rollback {policy.agent}",
            )
        )
    newest = {model.agent: model for model in RewardModelVersion.objects.order_by("pk")}
    for model in newest.values():
        again = f"{PROGRAM} train_reward_model --agent {model.agent}"
        paths.append((f"reward model {model.name}", model.path, again))
    for artifact in Artifact.objects.filter(policy__stage=Policy.Stage.CHAMPION).select_related("policy"):
        again = f"{PROGRAM} export_model --policy {artifact.policy.name} --format {artifact.format}"
        paths.append((f"export of {artifact.policy.name}", artifact.path, again))
    for what, path, step in paths:
        place = settings.RATCHET_HOME / path
        if path and not place.exists():
            step = f"restore it from a backup (docs/production.md#back-up), or run {step}"
            yield wrong("artifacts", f"the file of {what} is missing: {place}", step)


def engine_faults() -> Findings:
    for row in adapters_here().exclude(fault=""):
        yield wrong(
            "engines",
            f"{row.engine} does not answer with the adapter {row.policy}: {_line(row.fault)}",
            f"{PROGRAM} online_learner tick tries again (serve does this by itself); docs/operations.md#engines",
        )


def spool_faults() -> Findings:
    folder = spool_folder()
    if not folder.is_dir():
        return
    spool = outbox_of(folder)
    if spool.pending_count():
        yield remark(
            "spool",
            f"decisions in the outbox {folder} are not in the database yet",
            f"they are replayed by {PROGRAM} serve or {PROGRAM} online_learner tick",
        )
    if refused := len(spool.refused()):
        yield remark(
            "spool",
            f"{refused} decisions in {spool.path} were refused by the database",
            "the column `refused` has the reasons; rows that you do not need can be deleted",
        )


def webhook_faults() -> Findings:
    if refused := len(webhook_outbox().refused()):
        yield remark("webhook", f"NOTIFY_WEBHOOK did not take {refused} events", f"{PROGRAM} webhook replay")


OF_THE_DATABASE: tuple[Callable[[], Findings], ...] = (
    database_faults,
    clock_faults,
    worker_faults,
    artifact_faults,
    engine_faults,
    spool_faults,
    webhook_faults,
)


def _line(text: object) -> str:
    return " ".join(str(text).split())


class Options(CommandOptions):
    host: str = "127.0.0.1"
    """Address where the server listens (default 127.0.0.1). Example: 10.0.0.4"""
    port: int = 8000
    """Port of the server (default 8000). Example: --port 8001"""


@dataclass(frozen=True)
class Checkup:
    wrong: int
    findings: list[Diagnosis]


class Command(RatchetCommand[Options, Checkup]):
    writes = False
    help = (
        "Check settings, plugins, data folder, disk, database, migrations, workers, clocks, port, "
        "llama.cpp and the files of policies; report each problem with its remedy. Exits with 1 if "
        "anything is wrong. Example: manage.py doctor --port 8000"
    )

    def work(self, options: Options) -> Checkup:
        findings = diagnosis(options.host, options.port)
        wrong = [finding for finding in findings if finding.level == WRONG]
        self.failed = bool(wrong)
        return Checkup(len(wrong), findings)

    def show(self, result: Checkup) -> None:
        for finding in result.findings:
            self.stdout.write(f"{finding.level:<7} {finding.part}: {finding.found}")
            self.stdout.write(f"        -> {finding.next_step}")
        if not result.wrong:
            self.stdout.write("nothing is wrong")

    def next_step(self, result: Checkup) -> str:
        return next((f.next_step for f in result.findings), "")
