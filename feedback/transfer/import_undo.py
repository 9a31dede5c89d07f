"""Undo of an import: its rows are removed, what people and other imports added stays, and nothing else changes.

Rows of feedback are append-only; beside `feedback.erasure.service` this is the only place that removes any. Words of
the import that were superseded here are taken out of their chains, so that the later word stands by itself.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone

from backend.bodies import Answer
from backend.installation import PROGRAM
from feedback.erasure.withdrawals import prompts_trained_on, trained_text
from feedback.models import (
    Comparison,
    Decision,
    ImportBatch,
    Outcome,
    RaterKind,
    Rating,
    Trace,
)
from feedback.storage.sampling import policy_uncertainty, priority_update
from feedback.storage.sql import IDS, RatingProgress, chunks, decisions_remove, rows_delete

ATTEMPTS = 5
"""Tries of an undo, where somebody adds to one of its decisions at the same moment."""


class UndoRefused(ValueError):
    """An import that cannot be taken back as asked; the message says why and what to do."""

    code = "conflict"

    def __init__(self, message: str, undone: Undone | None = None) -> None:
        super().__init__(message)
        self.fields: dict[str, str] = {}
        self.undone = undone


class ImportUnknown(UndoRefused):
    """There is no import of that number."""

    code = "not_found"


class Undone(Answer):
    """Report of an undo: what was removed of an import, or with dry_run would be."""

    batch: int
    file: str
    dry_run: bool
    decisions: int = 0
    ratings: int = 0
    comparisons: int = 0
    outcomes: int = 0
    traces: int = 0
    decisions_kept: int = 0
    """Decisions of the import that people rated here, or another import added to: these stay, with what was added."""
    traces_kept: int = 0
    """Traces of the import that a decision that stays belongs to."""
    withdrawals: int = 0
    """Withdrawals of ratings of the import, which are removed with them."""
    trained_on: dict[str, list[object]] = {}
    """Artefacts trained on it: {runs, policies, labels, snapshots, evaluations}; empty lists are left out."""
    imports_since: list[int] = []
    """Later imports that found rows here already; some of these may have been this import's."""
    forced: bool = False

    @property
    def was_trained_on(self) -> bool:
        return any(self.trained_on.get(kind) for kind in ("runs", "policies", "labels"))


def import_undo(number: int, *, actor: str, dry_run: bool = False, force: bool = False) -> Undone:
    """Take an import back: all of it or nothing.

    Decisions of it that somebody rated or compared here, or that another import added to, stay with what was added and
    lose what this import said of them. Raises ImportUnknown; UndoRefused where it is undone already, or where something
    was trained on it and `force` is not given.
    """
    for attempt in range(ATTEMPTS):
        try:
            with transaction.atomic():
                undone = _undone(number, actor, dry_run, force)
                if dry_run:
                    transaction.set_rollback(True)
        except IntegrityError:
            # somebody rated one of its decisions meanwhile, and that one now stays
            if attempt == ATTEMPTS - 1:
                raise UndoRefused(
                    f"import {number}: its decisions are being changed by others; nothing was removed, "
                    "try again"
                ) from None
        else:
            return undone
    raise AssertionError("every attempt returns or raises")


def _undone(number: int, actor: str, dry_run: bool, force: bool) -> Undone:
    batch = ImportBatch.objects.select_for_update().filter(pk=number).first()
    if batch is None:
        raise ImportUnknown(f"there is no import {number}; `{PROGRAM} imports` lists them")
    if batch.undone_at is not None:
        raise UndoRefused(
            f"import {number} ({batch.file}) was undone on {batch.undone_at:%Y-%m-%d %H:%M} by {batch.undone_by}"
        )
    work = _UndoJob(batch, Undone(batch=number, file=batch.file, dry_run=dry_run, forced=force))
    report = work.done
    report.trained_on = trained_on(batch)
    if report.was_trained_on and not force and not dry_run:
        raise UndoRefused(
            f"import {number} ({batch.file}): {trained_text(report.trained_on)}. {FORCE}", report
        )
    later = ImportBatch.objects.filter(pk__gt=number, undone_at=None).only("pk", "counts", "agent")
    report.imports_since = [
        row.pk
        for row in later.order_by("pk")
        if row.counts.get("already_here") and row.agent in (batch.agent, "")
    ]
    work.remove()
    if not dry_run:
        batch.undone_at, batch.undone_by, batch.undone = timezone.now(), actor[:200], Undone.of(report)
        batch.attached = []
        batch.save(update_fields=["undone_at", "undone_by", "undone", "attached"])
    return report


FORCE = "Undo it anyway with --force; trained policies are not changed"


def trained_on(batch: ImportBatch) -> dict[str, list[object]]:
    """Artefacts trained since on the prompts that an import brought or referred to."""
    prompts: dict[str, set[str]] = {}
    spoken = (
        Decision.objects.filter(import_batch=batch).values_list("agent", "prompt_hash"),
        Rating.objects.filter(import_batch=batch).values_list("decision__agent", "decision__prompt_hash"),
        Outcome.objects.filter(import_batch=batch).values_list("decision__agent", "decision__prompt_hash"),
        Comparison.objects.filter(import_batch=batch).values_list("left__agent", "left__prompt_hash"),
    )
    for rows in spoken:
        for agent, prompt in rows.order_by().distinct().iterator():
            prompts.setdefault(agent, set()).add(prompt)
    return prompts_trained_on(prompts, batch.created_at)


class _UndoJob:
    """The removal of one import, inside a transaction."""

    def __init__(self, batch: ImportBatch, done: Undone) -> None:
        self.batch, self.done = batch, done
        self._traces_left: set[uuid.UUID] = set()
        """Traces that lost a decision; they may be of an import undone before, and kept for that decision."""

    def remove(self) -> None:
        touched = self._decisions_touched()
        self._detach()
        self._remove_words(Rating, ("decision_id", "rater"))
        self._remove_words(Comparison, ("left_id", "right_id", "rater"))
        self.done.outcomes = rows_delete(Outcome.objects.filter(import_batch=self.batch))
        self._remove_decisions(touched)
        self._remove_traces()
        self._recount(touched)

    def _decisions_touched(self) -> list[uuid.UUID]:
        """Decisions that the import spoke of and did not bring."""
        others = ~Q(decision__import_batch=self.batch) | Q(decision__import_batch=None)
        found: set[uuid.UUID] = set()
        for model in (Rating, Outcome):
            rows = model._default_manager.filter(others, import_batch=self.batch).order_by()
            found.update(rows.values_list("decision_id", flat=True).distinct())
        for side in ("left", "right"):
            others = ~Q(**{f"{side}__import_batch": self.batch}) | Q(**{f"{side}__import_batch": None})
            compared = Comparison.objects.filter(others, import_batch=self.batch).order_by()
            found.update(compared.values_list(f"{side}_id", flat=True).distinct())
        return list(found)

    def _detach(self) -> None:
        """Decisions that were here before the import lose the trace it gave them."""
        attached = [uuid.UUID(pk) for pk in self.batch.attached]
        for chunk in chunks(attached):
            self._note_traces(chunk)
            Decision.objects.filter(pk__in=chunk).update(trace=None)

    # --- Ratings and comparisons ---------------------------------------------------------------------------------

    def _remove_words(self, model: type[Rating] | type[Comparison], chain: tuple[str, ...]) -> None:
        """Remove the import's words; a later word of the same rater then supersedes what stood before the import."""
        rows: Any = model._default_manager
        followers = rows.filter(~_subject_condition(self.batch), supersedes__import_batch=self.batch)
        chains = set(followers.order_by().values_list(*chain))
        dropped: list[uuid.UUID] = []
        links: dict[uuid.UUID, uuid.UUID | None] = {}
        for key in chains:
            gone, relinked = _chain_without(
                list(rows.filter(**dict(zip(chain, key, strict=True)))), self.batch.pk
            )
            dropped += gone
            links |= relinked
        self.done.withdrawals += len(dropped)
        removed = rows_delete(rows.filter(import_batch=self.batch))
        for chunk in chunks(dropped):
            rows_delete(rows.filter(pk__in=chunk))
        for pk, before in links.items():
            rows.filter(pk=pk).update(supersedes=before)
        if model is Rating:
            self.done.ratings = removed
        else:
            self.done.comparisons = removed

    # --- Decisions and traces ------------------------------------------------------------------------------------

    def _remove_decisions(self, touched: Collection[uuid.UUID]) -> None:
        """Remove the import's decisions of which nothing else is known; and those of imports undone before that had
        been kept for what this one said of them."""
        mine = Decision.objects.filter(import_batch=self.batch).order_by()
        self.done.decisions_kept = mine.filter(_added_to()).count()
        removable = mine.filter(~_added_to())
        while ids := list(removable.values_list("pk", flat=True)[:IDS]):
            self.done.decisions += self._remove_chunk(ids)
        for chunk in chunks(touched):
            left = Decision.objects.filter(~_added_to(), pk__in=chunk, import_batch__undone_at__isnull=False)
            self.done.decisions += self._remove_chunk(list(left.order_by().values_list("pk", flat=True)))

    def _remove_chunk(self, ids: Sequence[uuid.UUID]) -> int:
        self._note_traces(ids)
        return decisions_remove(ids)

    def _note_traces(self, ids: Sequence[uuid.UUID]) -> None:
        traced = Decision.objects.filter(pk__in=ids, trace__isnull=False).order_by()
        self._traces_left.update(filter(None, traced.values_list("trace_id", flat=True).distinct()))

    def _remove_traces(self) -> None:
        used = Exists(Decision.objects.filter(trace=OuterRef("pk")).order_by())
        mine = Trace.objects.filter(import_batch=self.batch).order_by()
        self.done.traces_kept = mine.filter(used).count()
        self.done.traces = rows_delete(mine.filter(~used))
        for chunk in chunks(self._traces_left):
            left = Trace.objects.filter(~used, pk__in=chunk, import_batch__undone_at__isnull=False)
            self.done.traces += rows_delete(left.order_by())

    def _recount(self, touched: Iterable[uuid.UUID]) -> None:
        """Count anew how many people rated the decisions that stay."""
        remaining_ids = (
            Decision.objects.filter(import_batch=self.batch).order_by().values_list("pk", flat=True)
        )
        for chunk in chunks([*touched, *remaining_ids]):
            ratings_recount(chunk)


def _subject_condition(batch: ImportBatch) -> Q:
    return Q(import_batch=batch, import_batch__isnull=False)


def _added_to() -> Any:
    """Condition on a decision: something is still said or measured of it."""
    return (
        Exists(Rating.objects.filter(decision=OuterRef("pk")).order_by())
        | Exists(Comparison.objects.filter(left=OuterRef("pk")).order_by())
        | Exists(Comparison.objects.filter(right=OuterRef("pk")).order_by())
        | Exists(Outcome.objects.filter(decision=OuterRef("pk")).order_by())
    )


def _chain_without(
    rows: Sequence[Rating] | Sequence[Comparison], batch: int
) -> tuple[list[uuid.UUID], dict[uuid.UUID, uuid.UUID | None]]:
    """One rater's words on one subject without those of an import: rows that go with them, and new predecessors.

    A withdrawal of nothing but the import's words goes too: what it takes back was never said.
    """
    following = {row.supersedes_id: row for row in rows}
    removals: list[uuid.UUID] = []
    links: dict[uuid.UUID, uuid.UUID | None] = {}
    last: Rating | Comparison | None = None
    row = following.get(None)
    while row is not None:
        if row.import_batch_id != batch:
            if row.withdrawn and (last is None or last.withdrawn):
                removals.append(row.pk)
            else:
                before = None if last is None else last.pk
                if row.supersedes_id != before:
                    links[row.pk] = before
                last = row
        row = following.get(row.pk)
    return removals, links


def ratings_recount(ids: Sequence[uuid.UUID]) -> None:
    """Set each decision's number of standing ratings by people, and its place in the queue, from the ratings."""
    counts: dict[uuid.UUID, int] = dict.fromkeys(ids, 0)
    standing = Rating.objects.filter(
        decision__in=ids, superseded_by__isnull=True, withdrawn=False, rater_kind=RaterKind.HUMAN
    )
    for pk in standing.order_by().values_list("decision_id", flat=True):
        counts[pk] += 1
    rows = Decision.objects.filter(pk__in=ids).order_by()
    columns = ("pk", "ratings_human", "ratings_wanted", "candidates", "propensity")
    for pk, before, wanted, candidates, propensity in rows.values_list(*columns):
        count = counts[pk]
        if count == before:
            continue
        Decision.objects.filter(pk=pk).update(ratings_human=count)
        if count < 2:
            Decision.objects.filter(pk=pk).update(
                annotation_priority=policy_uncertainty(candidates, propensity)
            )
        else:
            priority_update(pk, RatingProgress(count, wanted))
