"""Finding and reading decisions: by agent, policy, whether they were rated, time and text."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from datetime import datetime

from django.db import connection
from django.db.models import Exists, OuterRef, Q, QuerySet, TextField
from django.db.models.functions import Cast

from feedback.models import Decision, Outcome, Rating
from feedback.selectors import ratings_standing


def decisions_found(
    *,
    agent: str = "",
    policy: str = "",
    rated: bool | None = None,
    since: datetime | None = None,
    q: str = "",
) -> QuerySet[Decision]:
    """Decisions that match everything asked for, in no particular order.

    rated: whether a rating stands, simulated ones included. since: recorded at or after. q: text anywhere in the
    prompt or the response, upper and lower case alike.
    """
    found = Decision.objects.order_by()
    if agent:
        found = found.filter(agent=agent)
    if policy:
        found = found.filter(policy=policy)
    if since is not None:
        found = found.filter(created_at__gte=since)
    if rated is not None:
        standing = Exists(ratings_standing().order_by().filter(decision=OuterRef("pk")))
        found = found.filter(standing if rated else ~standing)
    if q:
        # as it stands in the column: PostgreSQL writes a letter as itself, Django on SQLite as \u and four digits
        within = json.dumps(q, ensure_ascii=connection.vendor != "postgresql")[1:-1]
        found = found.alias(prompt=Cast("messages", TextField())).filter(
            Q(response__icontains=q) | Q(prompt__icontains=within)
        )
    return found


@dataclass(frozen=True)
class DecisionWhole:
    """A decision with what stands of it."""

    decision: Decision
    ratings: list[Rating]
    """Those that stand, oldest first."""
    outcomes: list[Outcome]
    """In the order they happened."""


def decision_whole(pk: uuid.UUID) -> DecisionWhole | None:
    """A decision with the ratings that stand and its outcomes; None where there is no such decision."""
    decision = Decision.objects.filter(pk=pk).first()
    if decision is None:
        return None
    return DecisionWhole(
        decision,
        list(ratings_standing().filter(decision=decision)),
        list(Outcome.objects.filter(decision=decision).order_by("at", "id")),
    )
