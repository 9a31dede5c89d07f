"""What rl adds to pages of others: the guided start in the navigation, a decision's reward and policy."""

from __future__ import annotations

import uuid
from typing import Any

from django.http import HttpRequest
from django.urls import reverse

from feedback.cache import TTLCache
from feedback.explorer.decision_facts import Link, LinkedFacts, RewardComponent
from rl.models import Policy, RewardRecord
from rl.selectors import loop_closed

_closed_cache: TTLCache[bool] = TTLCache()


def guided_start(request: HttpRequest) -> dict[str, Any]:
    """`loop_open`, asked of the database only where a template reads it: true until an agent has had a champion."""
    return {"loop_open": lambda: not _closed_cache.get("closed", loop_closed)}


def facts_of(decision: uuid.UUID, policy: str) -> LinkedFacts:
    """FEEDBACK_DECISION_FACTS: asked by the page of a decision."""
    golden = Link(
        words="Make it a golden case",
        url=f"{reverse('admin:rl_goldencase_add')}?decision={decision}",
        permission="rl.add_goldencase",
    )
    facts: LinkedFacts = {"policy_url": "", "reward": None, "links": [golden]}
    if policy and Policy.objects.filter(name=policy).exists():
        facts["policy_url"] = reverse("policy", args=[policy])
    record = RewardRecord.objects.filter(decision=decision).order_by("-id").first()
    if record is not None and record.raw is not None and record.value is not None:
        facts["reward"] = {
            "value": record.value,
            "raw": record.raw,
            "components": [_component(name, found) for name, found in record.components.items()],
            "calculated_at": record.created_at,
        }
    return facts


def _component(name: str, found: dict[str, Any]) -> RewardComponent:
    return {
        "name": name,
        "raw": found["raw"],
        "weight": found["weight"],
        "detail": {part: _words(detail) for part, detail in found["parts"].items()},
    }


def _words(part: dict[str, Any]) -> str:
    text = part["detail"].get("fault") or part["detail"].get("n") or ""
    return f"{part['raw']:+.2f}{f' ({text})' if text else ''}"
