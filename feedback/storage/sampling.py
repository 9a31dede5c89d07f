"""Sampling of an agent's decisions, and the number of ratings each should get: functions of a hash of the id."""

from __future__ import annotations

import hashlib
import uuid
from collections import defaultdict

from django.conf import settings

from feedback.cache import TTLCache
from feedback.models import AgentSettings, Decision
from feedback.storage.sql import rows_in

BATCH = 5_000
"""Decisions that are given their new numbers together."""

_settings: TTLCache[AgentSettings] = TTLCache()


def agent_settings(agent: str) -> AgentSettings:
    """An agent's settings, or the defaults where it has no row; a change is seen within FEEDBACK_REMEMBER_S seconds."""
    return _settings.get(
        agent,
        lambda: (
            AgentSettings.objects.filter(agent=agent).first()
            or AgentSettings(agent=agent, **settings.FEEDBACK_AGENT_DEFAULTS)
        ),
    )


def is_collected(agent: str, id: uuid.UUID) -> bool:
    """True if a decision is kept under the agent's `collection_rate`.

    A function of the id alone, so that a retry, another server and another day agree; and of a rate, so that what is
    kept at 10 % is kept at 20 % too.
    """
    rate = agent_settings(agent).collection_rate
    return rate >= 1.0 or _fraction("collect", id) < rate


def rating_target(agent: str, id: uuid.UUID) -> int:
    """Ratings by people a decision waits for: more for the share that is to show how far raters agree."""
    return _target_count(agent_settings(agent), id)


def _target_count(wanted: AgentSettings, id: uuid.UUID) -> int:
    if wanted.overlap_share > 0 and _fraction("overlap", id) < wanted.overlap_share:
        return max(wanted.ratings_wanted, wanted.overlap_ratings)
    return wanted.ratings_wanted


def ratings_wanted_refresh(agent: str) -> int:
    """Give an agent's decisions recorded before the number of ratings that its settings ask for now, some thousand at a
    time: those that have enough of them leave the queue, those that lack some come back. Returns how many it changed.

    What another process records meanwhile may still get the number from before, for FEEDBACK_REMEMBER_S seconds.
    """
    _settings.clear()
    settings = agent_settings(agent)
    rows = (
        Decision.objects.filter(agent=agent, withdrawal=None)
        .order_by("pk")
        .values_list("pk", "ratings_wanted")
    )
    changed, some = 0, list(rows[:BATCH])
    while some:
        apart: dict[int, list[uuid.UUID]] = defaultdict(list)
        for pk, before in some:
            if (wanted := _target_count(settings, pk)) != before:
                apart[wanted].append(pk)
        for wanted, ids in apart.items():
            changed += rows_in(Decision.objects.order_by(), "id", ids).update(ratings_wanted=wanted)
        some = list(rows.filter(pk__gt=some[-1][0])[:BATCH])
    return changed


def _fraction(purpose: str, id: uuid.UUID) -> float:
    """A number in [0, 1), uniform over ids; the purpose keeps the two shares independent of each other."""
    digest = hashlib.sha256(purpose.encode() + id.bytes).digest()
    return int.from_bytes(digest[:7]) / 2**56
