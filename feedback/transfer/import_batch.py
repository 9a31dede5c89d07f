"""Bulk insert of some thousand imported records, in a handful of statements."""

from __future__ import annotations

import uuid
from collections import ChainMap, Counter
from collections.abc import Collection, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from django.db.models import Model, QuerySet

from feedback.models import Comparison, Decision, Outcome, Rating, Trace
from feedback.services import counts_in_progress, is_unrecorded, rating_change
from feedback.storage.factories import withdrawal_build
from feedback.storage.sampling import priority_update
from feedback.storage.sql import RatingProgress, ratings_human_changes, rows_in, rows_insert
from feedback.storage.validation import DecisionUnknown, FeedbackRefused
from feedback.transfer.formats.base import DEMONSTRATION
from feedback.transfer.formats.records import Record
from feedback.transfer.import_plans import Chain, ImportPlan, Origin, PlannedFeedback, Planner, Raters, Word
from feedback.transfer.import_report import ImportReport


@dataclass
class _New:
    """Rows to be inserted; of a record that is refused in the end, nothing."""

    decisions: dict[uuid.UUID, Decision] = field(default_factory=dict)
    ratings: list[Rating] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    changes: Counter[uuid.UUID] = field(default_factory=Counter)
    """Decision -> what is added to its number of standing ratings by people."""


class Batch:
    """Records that are written together. `write` is called once, inside a transaction; afterwards `report` says what
    was new, and `raters` what anonymous raters were numbered."""

    def __init__(self, origin: Origin, raters: Raters) -> None:
        self.report = ImportReport("", origin.format)
        self._planner = Planner(origin, raters, self.report)
        self.attached: list[uuid.UUID] = []
        """Decisions that were here before without their trace, and have it now."""
        self._origin = origin
        self._traces: dict[uuid.UUID, Trace] = {}
        self._new = _New()

    @property
    def raters(self) -> Raters:
        return self._planner.raters.maps[0]

    def write(self, records: Sequence[Record]) -> None:
        """Raises IntegrityError where somebody else wrote one of the rows meanwhile; try again then."""
        self.report.rows = len(records)
        plans = self._planner.plans(records)
        self._look_up(plans)
        # what speaks of a decision may stand before it
        for plan in sorted(plans, key=lambda plan: bool(plan.needs)):
            try:
                added = self._take(plan)
            except FeedbackRefused as error:
                self._planner.refuse(plan.record, error)
            else:
                self._count_row(plan, added)
        self._insert()

    def _count_row(self, plan: ImportPlan, added: bool) -> None:
        """Count the row of a plan as stored, as skipped, or as here already: before this file, or by a row above."""
        if plan.skip_reason:
            self.report.skip(plan.skip_reason)
        elif added:
            self.report.rows_stored += 1
        else:
            self.report.already_here += 1
            self.report.duplicates += self._is_repeated(plan)

    def _is_repeated(self, plan: ImportPlan) -> bool:
        """True if a row that adds nothing says what another row of this file said, rather than what was here
        before."""
        if plan.trace is not None:
            return self._is_from_this_import(Trace, plan.trace.pk)
        words: list[tuple[type[Model], uuid.UUID]] = [(type(one.row), one.row.pk) for one in plan.feedback]
        rows = words or [(Decision, row.pk) for row in plan.decisions]
        return bool(rows) and all(self._is_from_this_import(model, pk) for model, pk in rows)

    def _is_from_this_import(self, model: type[Model], pk: uuid.UUID) -> bool:
        before = self._here[model].get(pk)
        return before is None or (before.batch is not None and before.batch == self._origin.batch)

    # --- What is there already -------------------------------------------------------------------------------

    def _look_up(self, plans: Sequence[ImportPlan]) -> None:
        feedback_rows = [one.row for plan in plans for one in plan.feedback]
        decisions = {row.pk for plan in plans for row in plan.decisions}
        self._here: dict[type[Model], dict[uuid.UUID, _StoredRow]] = {
            model: _stored_rows(model, ids)
            for model, ids in (
                (Decision, decisions),
                (Trace, {plan.trace.pk for plan in plans if plan.trace}),
                (Rating, {row.pk for row in feedback_rows if isinstance(row, Rating)}),
                (Comparison, {row.pk for row in feedback_rows if isinstance(row, Comparison)}),
            )
        }
        self._bodies: dict[type[Model], dict[uuid.UUID, str]] = {
            model: {pk: row.body_hash for pk, row in rows.items()} for model, rows in self._here.items()
        }
        known = self._bodies[Decision]
        outcomes = {row.pk for plan in plans for row, _ in plan.outcomes}
        before = rows_in(Outcome.objects.order_by(), "id", outcomes) if outcomes else ()
        self._outcomes: dict[uuid.UUID, Outcome] = {row.pk: row for row in before}
        # only decisions that were here before can have been spoken of before
        rated = {row.decision_id for row in feedback_rows if isinstance(row, Rating)}
        compared = {row.left_id for row in feedback_rows if isinstance(row, Comparison)}
        here = {pk for pk in rated | compared if pk in known or pk not in decisions}
        self._heads: dict[Chain, Word] = {}
        for rating in _heads(Rating.objects.defer("notes", "correction"), "decision_id", rated & here):
            self._heads[rating.decision_id, rating.rater] = rating
        for comparison in _heads(Comparison.objects.defer("notes"), "left_id", compared & here):
            self._heads[comparison.left_id, comparison.right_id, comparison.rater] = comparison

    # --- What is new -----------------------------------------------------------------------------------------

    def _take(self, plan: ImportPlan) -> bool:
        """Add what is new of a plan to the rows to be written; whether anything was. Raises FeedbackRefused, and then
        nothing was added."""
        if plan.trace is not None:
            return self._take_trace(plan.trace)
        for pk in plan.needs:
            if pk not in self._planner.stored and pk not in self._new.decisions:
                raise DecisionUnknown(f"no decision has the id {pk}: its row was refused")
        new = [row for row in plan.decisions if self._is_new(row)]
        heads: ChainMap[Chain, Word] = ChainMap({}, self._heads)
        bodies: dict[uuid.UUID, str] = {}
        words = [(one, word) for one in plan.feedback if (word := self._word(one, heads, bodies)) is not None]
        outcomes: dict[uuid.UUID, Outcome] = {}
        for outcome, timed in plan.outcomes:
            if self._is_new_outcome(outcome, timed, outcomes):
                outcomes[outcome.pk] = outcome
        # from here on nothing is refused
        for row in new:
            self._new.decisions.setdefault(row.pk, row)
        for one, word in words:
            self._add(word, self._heads.get(one.chain))
            self._heads[one.chain] = word
        self._outcomes |= outcomes
        self._new.outcomes += outcomes.values()
        self.report.outcomes += len(outcomes)
        self.report.outcome_names |= {row.name for row in outcomes.values()}
        return bool(new or words or outcomes)

    def _take_trace(self, row: Trace) -> bool:
        before = self._bodies[Trace].get(row.pk) or (
            self._traces[row.pk].body_hash if row.pk in self._traces else None
        )
        if before is None:
            self._traces[row.pk] = row
        return is_unrecorded(row, before)

    def _is_new(self, row: Decision) -> bool:
        made = self._new.decisions.get(row.pk)
        return is_unrecorded(row, made.body_hash if made else self._bodies[Decision].get(row.pk))

    def _is_new_outcome(self, row: Outcome, timed: bool, fresh: dict[uuid.UUID, Outcome]) -> bool:
        before = fresh.get(row.pk) or self._outcomes.get(row.pk)
        if before is None:
            return True
        same = ("decision_id", "name", "value", "at")
        # an app that gave no time is told one in the export, which a body hash would take for another write
        if timed and all(getattr(before, name) == getattr(row, name) for name in same):
            return False
        return is_unrecorded(row, before.body_hash)

    def _word(
        self, one: PlannedFeedback, heads: MutableMapping[Chain, Word], fresh: dict[uuid.UUID, str]
    ) -> Word | None:
        """The row in its chain; None where it is here already. Raises FeedbackRefused."""
        row = one.row
        before = fresh.get(row.pk) or self._bodies[type(row)].get(row.pk)
        if before is not None:
            if one.own_id and not one.withdrawn:
                is_unrecorded(row, before)
            return None
        head = heads.get(one.chain)
        if head is not None and not one.own_id and not one.withdrawn and head.body_hash == row.body_hash:
            return None  # the same rater says the same again, in another export of the same tool
        if one.withdrawn:
            if head is None:
                raise FeedbackRefused("withdraws a rating that does not exist")
            row = withdrawal_build(head, row.pk, row.created_at)
        elif head is not None:
            row.supersedes_id = head.pk
        heads[one.chain] = row
        fresh[row.pk] = row.body_hash
        return row

    def _add(self, row: Word, before: Word | None) -> None:
        self._bodies[type(row)][row.pk] = row.body_hash
        if isinstance(row, Comparison):
            self._new.comparisons.append(row)
            self.report.comparisons += not row.withdrawn
            return
        self._new.ratings.append(row)
        self.report.ratings += not row.withdrawn
        self.report.corrections += row.correction is not None
        change = rating_change(row, isinstance(before, Rating) and counts_in_progress(before))
        if (decision := self._new.decisions.get(row.decision_id)) is not None:
            decision.ratings_human += change
        elif change:
            self._new.changes[row.decision_id] += change

    # --- Writing ---------------------------------------------------------------------------------------------

    def _insert(self) -> None:
        decisions = list(self._new.decisions.values())
        self.report.decisions, self.report.traces = len(decisions), len(self._traces)
        self.report.demonstrations = sum(DEMONSTRATION in row.tags for row in decisions)
        self.report.agents = {row.agent for row in decisions} | {row.agent for row in self._traces.values()}
        self.report.agents |= self._planner.agents_of(self._new.ratings, self._new.comparisons)
        self._link()
        rows_insert(list(self._traces.values()))
        rows_insert(decisions)
        rows_insert(self._new.ratings)
        rows_insert(self._new.comparisons)
        rows_insert(self._new.outcomes)
        self._attach()
        for row in decisions:
            priority_update(row.pk, RatingProgress(row.ratings_human, row.ratings_wanted))
        self._count()

    def _link(self) -> None:
        """Every new row knows the import that brought it."""
        new = self._new
        made = (self._traces.values(), new.decisions.values(), new.ratings, new.comparisons, new.outcomes)
        for rows in made:
            for row in rows:
                row.import_batch_id = self._origin.batch

    def _attach(self) -> None:
        """A decision that was here before without its trace is now known to be of one."""
        traced = {
            built.pk: built.trace_id
            for built in self._planner.built.values()
            if isinstance(built, Decision) and built.trace_id and built.pk in self._bodies[Decision]
        }
        alone = rows_in(Decision.objects.filter(trace=None), "id", traced).values_list("pk", flat=True)
        self.attached = list(alone)
        for pk in self.attached:
            Decision.objects.filter(pk=pk, trace=None).update(trace=traced[pk])

    def _count(self) -> None:
        by_change: dict[int, list[uuid.UUID]] = {}
        for pk, change in self._new.changes.items():
            by_change.setdefault(change, []).append(pk)
        for change, ids in by_change.items():
            for pk, standing in ratings_human_changes(ids, change):
                priority_update(pk, standing)


M = TypeVar("M", Rating, Comparison)


def _heads(rows: QuerySet[M], column: str, ids: Collection[uuid.UUID]) -> Iterable[M]:
    """The newest row of each chain on these decisions."""
    return rows_in(rows.filter(superseded_by__isnull=True).order_by(), column, ids) if ids else ()


class _StoredRow(NamedTuple):
    """A row that is in the database: its content hash, and the import that brought it."""

    body_hash: str
    batch: int | None


def _stored_rows(model: type[Model], ids: Collection[uuid.UUID]) -> dict[uuid.UUID, _StoredRow]:
    """Of these ids those that rows have."""
    if not ids:
        return {}
    rows = rows_in(model._default_manager.order_by(), "id", ids)
    return {
        pk: _StoredRow(body, batch)
        for pk, body, batch in rows.values_list("pk", "body_hash", "import_batch_id")
    }
