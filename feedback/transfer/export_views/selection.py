"""Selection of the decisions to export, by agent, by reward, by whether anybody rated them."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean

from django.conf import settings
from django.db import connection, transaction
from django.utils.module_loading import import_string

from feedback.models import Decision
from feedback.selectors import comparisons_standing
from feedback.storage.annotation_priority import rating_share
from feedback.storage.problem_rows import RowReader
from feedback.storage.sql import rows_in
from feedback.transfer.export_views.rows import only_standing, pieces, rows_of, with_feedback
from feedback.transfer.formats.history import DecisionExport, DecisionRow

RAW_LOW, RAW_HIGH = -2.0, 2.0
"""Range of a raw reward."""


BEYOND_LIMIT = "more"
"""Key of `left_out` for decisions beyond the limit."""


RewardsOf = Callable[[Sequence[uuid.UUID]], Mapping[uuid.UUID, float]]
"""Decisions -> their raw rewards in [-2, 2]; one that has none is not in it."""


@dataclass(frozen=True)
class Selection:
    """Selection of the decisions to export."""

    agent: str | None = None
    """None: every agent's."""
    min_reward: float = RAW_LOW
    """Least raw reward; at its lowest, decisions without a reward are there too."""
    require_feedback: bool = False
    newest_first: bool = False
    decisions: int | None = None
    """Of views of decisions at most so many."""
    reader: RowReader = field(default_factory=lambda: RowReader("", "export"), compare=False, repr=False)
    """Reader that counts rows which could not be read."""

    @property
    def narrows(self) -> bool:
        return self.require_feedback or self.min_reward > RAW_LOW


@contextmanager
def one_moment() -> Iterator[None]:
    """Everything read inside is of one moment, whatever is written meanwhile, and nobody is kept waiting."""
    if connection.in_atomic_block:
        yield
    elif connection.vendor == "postgresql":
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            yield
    else:
        # a transaction of Django's takes SQLite's one write lock at once; this one only reads
        with connection.cursor() as cursor:
            cursor.execute("BEGIN DEFERRED")
        try:
            yield
        finally:
            # SQLite ends it by itself where the disk fails
            if connection.connection is not None and connection.connection.in_transaction:
                with connection.cursor() as cursor:
                    cursor.execute("ROLLBACK")


def _decision_rows(selection: Selection) -> Iterator[DecisionRow]:
    rows = Decision.objects.filter(withdrawal=None)
    if selection.agent is not None:
        rows = rows.filter(agent=selection.agent)
    order = ("-created_at", "-id") if selection.newest_first else ("created_at", "id")
    return rows_of(rows.order_by(*order), DecisionRow._make, DecisionRow._fields)


def selected_exports(selection: Selection, left_out: Counter[str]) -> Iterator[DecisionExport]:
    exports = (
        one
        for rows in pieces(_decision_rows(selection))
        for one in _narrow(with_feedback(rows), selection, left_out)
    )
    yield from islice(exports, selection.decisions)
    if selection.decisions is not None and next(exports, None) is not None:
        left_out[BEYOND_LIMIT] = 1


def _narrow(
    told: list[DecisionExport], selection: Selection, left_out: Counter[str]
) -> Sequence[DecisionExport]:
    if not selection.narrows:
        return told
    rows = told
    if selection.require_feedback:
        ids = [one.decision.id for one in told]
        compared: set[str] = set()
        for side in ("left_id", "right_id"):
            standing = rows_in(comparisons_standing().order_by(), side, ids)
            compared.update(str(pk) for pk in standing.values_list(side, flat=True))
        rows = [
            one for one in told if only_standing(one.ratings) or one.outcomes or one.decision.id in compared
        ]
        left_out["no_feedback"] += len(told) - len(rows)
    if selection.min_reward > RAW_LOW:
        rewards = raw_rewards(rows)
        enough = [one for one in rows if rewards.get(one.decision.id, RAW_LOW - 1) >= selection.min_reward]
        left_out["below_min_reward"] += len(rows) - len(enough)
        rows = enough
    return rows


def raw_rewards(told: Sequence[DecisionExport]) -> Mapping[str, float]:
    """Raw rewards: as they were calculated, else the mean of what raters say (good 2, bad -2)."""
    found: dict[str, float] = {}
    for one in told:
        shares = [rating_share(r.thumb, r.stars, r.score) for r in only_standing(one.ratings)]
        if known := [share for share in shares if share is not None]:
            found[one.decision.id] = RAW_LOW + (RAW_HIGH - RAW_LOW) * fmean(known)
    if settings.FEEDBACK_REWARDS:
        calculated: RewardsOf = import_string(settings.FEEDBACK_REWARDS)
        rewards = calculated([uuid.UUID(one.decision.id) for one in told])
        found |= {str(pk): raw for pk, raw in rewards.items()}
    return found
