"""Hook by which another app adds facts about a decision: its reward, the page of its policy."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypedDict

from django.conf import settings
from django.db.models import QuerySet
from django.utils.module_loading import import_string

from feedback.models import Decision
from feedback.storage.validation import FeedbackRefused


class RewardComponent(TypedDict):
    """One part of a reward. `raw` in [-2, 2], None where the part does not apply; `detail` says why it is so."""

    name: str
    raw: float | None
    weight: float
    detail: Mapping[str, Any]


class Reward(TypedDict):
    """`value` in [0, 1], `raw` in [-2, 2]; components in the order in which they are shown."""

    value: float
    raw: float
    components: Sequence[RewardComponent]
    calculated_at: Any
    """datetime, or None where it is calculated as it is shown."""


class Link(TypedDict):
    """Something that can be done with a decision elsewhere, for who has the permission."""

    words: str
    url: str
    permission: str


class LinkedFacts(TypedDict, total=False):
    """All of it may be missing."""

    reward: Reward | None
    policy_url: str
    """Address of the page of the policy that decided; empty where there is none."""
    links: Sequence[Link]


FactsSource = Callable[[uuid.UUID, str], LinkedFacts]
"""A decision's id and the name of its policy, to what is known."""


def decision_facts(decision: uuid.UUID, policy: str) -> LinkedFacts:
    """Facts about a decision, by the function of FEEDBACK_DECISION_FACTS; none where that is not set."""
    if not settings.FEEDBACK_DECISION_FACTS:
        return {}
    return _source(settings.FEEDBACK_DECISION_FACTS)(decision, policy)


def rewarded_at_least(decisions: QuerySet[Decision], least: float) -> QuerySet[Decision]:
    """Decisions with a raw reward, in [-2, 2], that is known and at least `least`, by the function of
    FEEDBACK_REWARDED.

    None of them where that is not set: nothing is known of rewards then.
    """
    if not settings.FEEDBACK_REWARDED:
        return decisions.none()
    narrow: Callable[[QuerySet[Decision], float], QuerySet[Decision]] = import_string(
        settings.FEEDBACK_REWARDED
    )
    return narrow(decisions, least)


def reward_query(text: str) -> float | None:
    """A least reward as it stands in an address; None where it is empty. Raises FeedbackRefused."""
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


@cache
def _source(path: str) -> FactsSource:
    source: FactsSource = import_string(path)
    return source
