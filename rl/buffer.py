"""Feedback that was not learnt from yet: a query, never a list in memory."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from django.db.models import Count, Exists, OuterRef

from feedback.remembered import Believed
from feedback.selectors import comparisons_standing, ratings_standing
from rl.models import Learnt, TrainingRun

Status = TrainingRun.Status
TAKEN = (Status.QUEUED, Status.RUNNING, Status.SUCCEEDED)
"""Runs whose feedback is not in the buffer: learnt from, or just being learnt from. Any other run gives it back."""

AT_ONCE = 2000


def buffer_ids(agent: str, *, but: TrainingRun | None = None) -> list[uuid.UUID]:
    """Ids of the standing ratings and comparisons that no successful run learnt from, and none is learning from."""
    taken = Learnt.objects.filter(feedback=OuterRef("pk"), run__status__in=TAKEN)
    if but is not None:
        taken = taken.exclude(run=but)
    found: list[uuid.UUID] = []
    for standing in (ratings_standing(agent), comparisons_standing(agent)):
        found += standing.order_by().filter(~Exists(taken)).values_list("pk", flat=True)
    return found


def buffer_size(agent: str) -> int:
    """How many there are."""
    taken = Learnt.objects.filter(feedback=OuterRef("pk"), run__status__in=TAKEN)
    return sum(
        standing.order_by().filter(~Exists(taken)).count()
        for standing in (ratings_standing(agent), comparisons_standing(agent))
    )


def buffer_sizes() -> dict[str, int]:
    """How many there are of every agent, in two passes over the feedback."""
    taken = Learnt.objects.filter(feedback=OuterRef("pk"), run__status__in=TAKEN)
    found: dict[str, int] = {}
    for standing, agent in ((ratings_standing(), "decision__agent"), (comparisons_standing(), "left__agent")):
        rows = standing.order_by().filter(~Exists(taken)).values(agent).annotate(n=Count("pk"))
        for row in rows:
            found[row[agent]] = found.get(row[agent], 0) + row["n"]
    return found


_sizes: Believed[dict[str, int]] = Believed()


def buffer_sizes_lately() -> dict[str, int]:
    """`buffer_sizes`, a little old where there is much to count: for pages that are looked at often."""
    return _sizes.get("all", buffer_sizes)


def feedback_take(run: TrainingRun) -> int:
    """Note what a run learns from for the first time; called before its dataset is read, so that all of it is in there.

    Feedback that arrives while the dataset is read is learnt from now and counted with the next run: never lost.
    """
    ids = buffer_ids(run.agent, but=run)
    feedback_note(run, ids)
    return len(ids)


def feedback_note(run: TrainingRun, ids: Sequence[uuid.UUID]) -> None:
    """Note these as what the run learns from for the first time."""
    rows = [Learnt(run=run, feedback=pk) for pk in ids]
    Learnt.objects.bulk_create(rows, batch_size=AT_ONCE, ignore_conflicts=True)
