"""Hook for another app to add facts about a decision: its reward, its policy's page, links."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TypedDict

from django.conf import settings
from django.db.models import QuerySet
from django.utils.module_loading import import_string

from feedback.models import Decision
from feedback.storage.validation import FeedbackRefused


class RewardComponent(TypedDict):
    """One component of a reward. `raw` is in [-2, 2], or None if the component does not apply; `detail` explains it."""

    name: str
    raw: float | None
    weight: float
    detail: Mapping[str, object]


class Reward(TypedDict):
    """`value` is in [0, 1], `raw` in [-2, 2]."""

    value: float
    raw: float
    components: Sequence[RewardComponent]
    calculated_at: datetime | None
    """None: calculated for this page, not stored."""


class Link(TypedDict):
    """An action on a decision on another page, shown to users with `permission`."""

    words: str
    url: str
    permission: str


class LinkedFacts(TypedDict, total=False):
    reward: Reward | None
    policy_url: str
    """The policy's page; empty if it has none."""
    links: Sequence[Link]


FactsSource = Callable[[uuid.UUID, str], LinkedFacts]
"""(decision id, policy name) -> facts."""


def decision_facts(decision: uuid.UUID, policy: str) -> LinkedFacts:
    """Facts about a decision from FEEDBACK_DECISION_FACTS; none if that is not set."""
    if not settings.FEEDBACK_DECISION_FACTS:
        return {}
    source: FactsSource = import_string(settings.FEEDBACK_DECISION_FACTS)
    return source(decision, policy)


def rewarded_at_least(decisions: QuerySet[Decision], least: float) -> QuerySet[Decision]:
    """Decisions whose stored raw reward is at least `least` (in [-2, 2]), by FEEDBACK_REWARDED.

    Empty if that is not set.
    """
    if not settings.FEEDBACK_REWARDED:
        return decisions.none()
    narrow: Callable[[QuerySet[Decision], float], QuerySet[Decision]] = import_string(
        settings.FEEDBACK_REWARDED
    )
    return narrow(decisions, least)


def reward_query(text: str) -> float | None:
    """`min_reward` from an address; None if it is empty. Raises FeedbackRefused."""
    if not text.strip():
        return None
    try:
        least = float(text)
    except ValueError:
        least = math.nan
    if not -2 <= least <= 2:
        fault = "expected a number from -2 to 2"
        raise FeedbackRefused(f"min_reward: {fault}", {"min_reward": fault})
    return least
