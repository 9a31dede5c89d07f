"""Brings the adapters on the servers of LOCAL_BACKENDS in line with the registry: at promotions and every tick."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta

from django.db.models import F, Q
from django.utils import timezone

from rl.models import EngineAdapter, Policy, ServingSettings
from rl.registry.service import champions_before
from rl.serving.base import BackendFailed
from rl.serving.engines import Engine, EngineFailed
from rl.serving.fallback import local_engines

logger = logging.getLogger("rl.serving")

LEASE = timedelta(minutes=10)
"""Time after which a process that began to publish an adapter counts as dead."""
FIRST_PAUSE, LONGEST_PAUSE = timedelta(seconds=30), timedelta(minutes=30)
"""Pause after the first failure, doubled after each further one, and its limit."""


def reconcile(*promoted: Policy) -> list[str]:
    """Load and prove what each engine should hold and unload what it should not. Returns a line per change.

    promoted: policies about to be promoted; they are tried at once. A failure is logged and kept in
    the adapter's row. Two processes may run at once: an adapter is leased by the one that publishes it.
    """
    names = [policy.name for policy in promoted if policy.kind == Policy.Kind.ADAPTER]
    EngineAdapter.objects.filter(policy__in=names, tries__gt=0).update(try_after=timezone.now())
    engines = local_engines()
    wanted = _wanted(names) if engines else []
    return [line for engine in engines for line in _reconciled(engine, wanted)]


def reconcile_before_promotion(sender: object, policy: Policy, **_: object) -> None:
    """Receiver of `policy_promoting`. An engine that fails gets no traffic for the policy; the promotion goes on."""
    reconcile(policy)


def _wanted(promoted: Sequence[str]) -> list[Policy]:
    """Adapters that may be asked: champions and the last ones before them, challengers, and named stand-ins."""
    stages = (Policy.Stage.CHAMPION, Policy.Stage.CHALLENGER)
    named = {*promoted}
    for row in ServingSettings.objects.all():
        named |= {row.route_policy, *row.fallbacks}
    adapters = Policy.objects.filter(kind=Policy.Kind.ADAPTER).exclude(stage=Policy.Stage.REJECTED)
    found = list(adapters.filter(Q(stage__in=stages) | Q(name__in=named)))
    for agent in {policy.agent for policy in found if policy.stage == Policy.Stage.CHAMPION}:
        found += [policy for policy in champions_before(agent) if policy.kind == Policy.Kind.ADAPTER]
    # champions first: after a restart of the server they have the traffic
    return sorted(set(found), key=lambda policy: (policy.stage != Policy.Stage.CHAMPION, policy.pk))


def _reconciled(engine: Engine, wanted: Sequence[Policy]) -> list[str]:
    rows = EngineAdapter.objects.filter(engine=engine.name)
    try:
        engine.refresh()
        mine = [policy for policy in wanted if engine.wants(policy)]
        done = _unloaded(engine, mine)
        for policy in mine:
            row, _ = rows.get_or_create(policy=policy.name, defaults={"engine": engine.name})
            if row.proved_at is None or not engine.holds(policy):
                done += _published(engine, policy, row, mine)
            elif row.fault:
                rows.filter(pk=row.pk).update(fault="", tries=0)
    except BackendFailed as failure:
        logger.warning("%s is not brought up to date: %s", engine.name, failure)
        rows.update(fault=str(failure))
        return []
    return done


def _published(engine: Engine, policy: Policy, row: EngineAdapter, mine: Sequence[Policy]) -> list[str]:
    now = timezone.now()
    held = EngineAdapter.objects.filter(pk=row.pk)
    # Compare-and-swap: only one process publishes it.
    if not held.filter(try_after__lte=now).update(
        try_after=now + LEASE, tries=F("tries") + 1, proved_at=None
    ):
        return []
    try:
        engine.publish(policy, mine)
    except (EngineFailed, BackendFailed) as failure:
        pause = timedelta(0)
        if getattr(failure, "backs_off", True):
            pause = min(FIRST_PAUSE * 2 ** min(row.tries, 10), LONGEST_PAUSE)
        held.update(fault=str(failure), try_after=timezone.now() + pause)
        if str(failure) != row.fault:
            logger.warning("%s does not answer for %s: %s", engine.name, policy.name, failure)
        return []
    held.update(fault="", tries=0, proved_at=timezone.now(), try_after=timezone.now())
    return [f"{engine.name} answers for {policy.name}"]


def _unloaded(engine: Engine, mine: Sequence[Policy]) -> list[str]:
    done = []
    spare = EngineAdapter.objects.filter(engine=engine.name, try_after__lte=timezone.now())
    for row in spare.exclude(policy__in=[policy.name for policy in mine]):
        try:
            engine.unload(row.policy)
        except EngineFailed as failure:
            logger.warning("%s keeps %s: %s", engine.name, row.policy, failure)
            continue
        row.delete()
        done.append(f"{engine.name} no longer has {row.policy}")
    return done
