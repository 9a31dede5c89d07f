"""What is kept of an agent's decisions, and how many ratings each should get: decided by hash of the id."""

from __future__ import annotations

import hashlib
import uuid

from feedback.models import AgentSettings
from feedback.remembered import Remembered

_settings: Remembered[AgentSettings] = Remembered()


def agent_settings(agent: str) -> AgentSettings:
    """An agent's settings, or the defaults where it has no row; a change is seen within FEEDBACK_REMEMBER_S seconds."""
    return _settings.get(
        agent, lambda: AgentSettings.objects.filter(agent=agent).first() or AgentSettings(agent=agent)
    )


def is_collected(agent: str, id: uuid.UUID) -> bool:
    """Whether a decision is kept under the agent's `collection_rate`.

    A function of the id alone, so that a retry, another server and another day agree; and of a rate, so that what is
    kept at 10 % is kept at 20 % too.
    """
    rate = agent_settings(agent).collection_rate
    return rate >= 1.0 or _fraction("collect", id) < rate


def ratings_wanted(agent: str, id: uuid.UUID) -> int:
    """Ratings by people a decision waits for: more for the share that is to show how far raters agree."""
    wanted = agent_settings(agent)
    if wanted.overlap_share > 0 and _fraction("overlap", id) < wanted.overlap_share:
        return max(wanted.ratings_wanted, wanted.overlap_ratings)
    return wanted.ratings_wanted


def _fraction(purpose: str, id: uuid.UUID) -> float:
    """A number in [0, 1), uniform over ids; the purpose keeps the two shares independent of each other."""
    digest = hashlib.sha256(purpose.encode() + id.bytes).digest()
    return int.from_bytes(digest[:7]) / 2**56
