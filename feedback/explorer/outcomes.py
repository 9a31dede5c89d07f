"""The readers of outcomes: measured facts about decisions, of which the newest of a name stands."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import NamedTuple

from django.db.models import Exists, OuterRef, Q, QuerySet

from feedback.models import Outcome
from feedback.selectors import CHUNK


def outcomes_standing(agent: str | None = None) -> QuerySet[Outcome]:
    """The newest measurement of each name on each decision: what was measured again stands in its newer value. Those of
    withdrawn decisions are left out."""
    newer = Outcome.objects.filter(
        Q(at__gt=OuterRef("at")) | Q(at=OuterRef("at"), pk__gt=OuterRef("pk")),
        decision=OuterRef("decision"),
        name=OuterRef("name"),
    ).order_by()
    found = Outcome.objects.filter(~Exists(newer), decision__withdrawal=None)
    if agent is not None:
        found = found.filter(decision__agent=agent)
    return found.order_by("at", "id")


class OutcomeFact(NamedTuple):
    """A standing outcome, without its decision."""

    id: uuid.UUID
    decision: uuid.UUID
    name: str
    value: float


def outcome_facts(agent: str) -> Iterator[OutcomeFact]:
    """Every standing outcome of an agent's decisions, in no particular order."""
    rows = outcomes_standing(agent).order_by().values_list("id", "decision_id", "name", "value")
    yield from map(OutcomeFact._make, rows.iterator(chunk_size=CHUNK))
