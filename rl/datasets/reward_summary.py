"""Mean rewards of an agent's decisions, and how they are made, for its page."""

from __future__ import annotations

from typing import Any

from django.db.models import Avg, Count, Q

from feedback.cache import CostAwareCache
from rl.datasets.reward_records import RewardsRefused, reward_plan
from rl.models import RewardRecord

_means: CostAwareCache[dict[str, Any]] = CostAwareCache()


def reward_summary(slug: str) -> dict[str, Any]:
    """Mean rewards of an agent's decisions, a little old where there are many, and how they are made."""
    newest = RewardRecord.objects.filter(agent=slug, superseded_by__isnull=True)
    means = _means.get(
        slug,
        lambda: newest.order_by().aggregate(
            n=Count("raw"),
            raw=Avg("raw"),
            immediate=Avg("immediate"),
            delayed=Avg("delayed"),
            strategic=Avg("strategic"),
            simulated=Count("pk", filter=Q(simulated=True)),
        ),
    )
    try:
        facts = reward_plan(slug).facts
    except RewardsRefused as refusal:
        return {**means, "fault": str(refusal)}
    horizons = [(name, weight, means[name]) for name, weight in facts.weights.items()]
    return {**means, "horizons": horizons, "functions": facts.functions, "outcomes": facts.outcomes}
