"""Fault-tolerant reading of many rows: one that cannot be read is skipped, counted, named and listed on `/problems/`.

Whatever reads many decisions reads each of them inside `RowReader.row`:

    rows = RowReader("filer", "dataset")
    for fact in facts:
        with rows.row(fact.id):
            yield prepared(fact)
    rows.save()
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from types import TracebackType

from django.db import Error as DjangoDatabaseError
from django.db.models import QuerySet
from django.utils import timezone

from feedback.models import ProblemRow
from feedback.storage.sql import chunks

logger = logging.getLogger("feedback.problems")

READERS: dict[str, str] = {
    "dataset": "datasets of training runs and evaluations",
    "rewards": "calculation of rewards",
    "export": "exports",
    "off-policy": "figures of logged decisions",
}
"""Reader of many rows -> where it reads."""
MAX_REPORT_ROWS = 20
"""Rows that a report names; the page has all of them."""
REASON = 500
"""Longest reason kept, in characters."""


class RowReader:
    """One reader's pass over an agent's decisions."""

    def __init__(self, agent: str, reader: str, fatal: tuple[type[Exception], ...] = ()) -> None:
        """agent: empty for a pass over all agents'. reader: one of READERS. fatal: errors that are no row's fault and
        end the pass, beside those of the database and of the disk."""
        if reader not in READERS:
            raise ValueError(f"a reader is one of {', '.join(READERS)}; found {reader!r}")
        self.agent, self.reader = agent, reader
        self.unreadable: dict[uuid.UUID, str] = {}
        """Decision -> why it was skipped."""
        self._agents: dict[uuid.UUID, str] = {}
        self._fatal: tuple[type[Exception], ...] = (DjangoDatabaseError, OSError, *fatal)

    def row(self, decision: uuid.UUID | str, agent: str = "") -> AbstractContextManager[None]:
        """Read one decision inside: an error there skips the decision, and nothing else. agent: whose it is, in a pass
        over all agents'."""
        return _Row(self, decision, agent)

    def skip(self, decision: uuid.UUID | str, error: Exception, agent: str = "") -> None:
        """Note a decision that cannot be read. Raises the error again where it is no row's fault."""
        if isinstance(error, self._fatal):
            raise error
        pk = decision if isinstance(decision, uuid.UUID) else uuid.UUID(decision)
        if not self.unreadable:
            logger.warning(
                "%s of %s skips decision %s: %s (the first of this pass; /problems/ lists all)",
                self.reader,
                agent or self.agent,
                pk,
                error,
            )
        logger.debug("skipped decision %s", pk, exc_info=error)
        self._agents[pk] = agent or self.agent
        kind = "" if isinstance(error, ValueError) and str(error) else f"{type(error).__name__}: "
        self.unreadable[pk] = f"{kind}{error}".replace("\x00", "\ufffd")[:REASON]

    def save(self, looked_at: Collection[uuid.UUID] | None = None) -> None:
        """Store skipped rows for the page; rows that are readable again are removed from it.

        looked_at: the decisions of this pass, where it was not over all of the agent's.
        """
        known = problems(self.agent, self.reader).order_by()
        before = set(known.values_list("decision", flat=True))
        mended = (before if looked_at is None else before & set(looked_at)) - set(self.unreadable)
        for chunk in chunks(mended):
            known.filter(decision__in=chunk).delete()
        now = timezone.now()
        ProblemRow.objects.bulk_create(
            [
                ProblemRow(
                    decision=pk,
                    agent=self._agents[pk],
                    reader=self.reader,
                    reason=why,
                    first_at=now,
                    last_at=now,
                )
                for pk, why in self.unreadable.items()
            ],
            batch_size=100,
            update_conflicts=True,
            unique_fields=["decision", "reader"],
            update_fields=["reason", "last_at", "agent"],
        )


class _Row(AbstractContextManager[None]):
    """A class rather than a generator: it is entered once a row, a million times."""

    __slots__ = ("_agent", "_decision", "_reader")

    def __init__(self, reader: RowReader, decision: uuid.UUID | str, agent: str) -> None:
        self._reader, self._decision, self._agent = reader, decision, agent

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._reader.skip(self._decision, error, self._agent)
        return True


def unreadable_summary(unreadable: dict[uuid.UUID, str]) -> dict[str, str]:
    """The first MAX_REPORT_ROWS of what was skipped, as a report lists it: id -> why."""
    return {str(pk): why for pk, why in list(unreadable.items())[:MAX_REPORT_ROWS]}


def problems(agent: str = "", reader: str = "") -> QuerySet[ProblemRow]:
    """Rows that readers skipped, newest first."""
    found = ProblemRow.objects.all()
    if agent:
        found = found.filter(agent=agent)
    return found.filter(reader=reader) if reader else found


def problem_ids(agent: str, reader: str) -> set[uuid.UUID]:
    """Decisions of an agent that a reader skipped when it last came to them."""
    return set(problems(agent, reader).order_by().values_list("decision", flat=True))


def problems_remove(decisions: Iterable[uuid.UUID]) -> int:
    """Remove the problems of these decisions; how many there were."""
    return sum(ProblemRow.objects.filter(decision__in=chunk).delete()[0] for chunk in chunks(decisions))
