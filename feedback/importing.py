"""Files of other programs become decisions, ratings and comparisons: whole or not at all, and never twice."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from django.db import transaction

from feedback import formats, services
from feedback.formats.records import (
    FormatRefused,
    ImportedComparison,
    ImportedDecision,
    ImportedOutcome,
    ImportedRating,
    ImportedReference,
    ImportedTrace,
    Record,
    RowRefused,
    RowSkipped,
    completion_stored,
)
from feedback.models import Comparison, Decision, Outcome, RaterKind, Rating, Trace
from feedback.traces import trace_build

NAMESPACE = uuid.UUID("c0b84a52-94a1-4b0e-8f5b-2d4f4d3a7a11")
"""Ids of rows that bring none of their own are UUIDv5 of their content in this namespace: the same row is the same
row, in whichever file and on whichever line it stands."""

DEFAULT_AGENT = "assistant"
"""Whose decisions they become where neither the file nor the caller says so."""

BATCH = 500
"""Records written together."""

Progress = Callable[[int, int], None]
"""Called with records done and records in all."""


@dataclass
class ImportReport:
    """What a file brought: rows made, rows that brought nothing, rows that could not be read."""

    file: str
    format: str
    decisions: int = 0
    ratings: int = 0
    comparisons: int = 0
    corrections: int = 0
    """Those of the ratings that hold a better response."""
    outcomes: int = 0
    traces: int = 0
    skipped: int = 0
    skipped_because: Counter[str] = field(default_factory=Counter)
    refused: list[RowRefused] = field(default_factory=list)

    def skip(self, reason: str) -> None:
        self.skipped += 1
        self.skipped_because[reason] += 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "format": self.format,
            "decisions": self.decisions,
            "ratings": self.ratings,
            "comparisons": self.comparisons,
            "corrections": self.corrections,
            "outcomes": self.outcomes,
            "traces": self.traces,
            "skipped": self.skipped,
            "skipped_because": dict(self.skipped_because),
            "refused": [{"line": r.line, "key": r.key, "reason": r.reason} for r in self.refused],
        }


class ImportRefused(ValueError):
    """A file with rows that cannot be read; nothing of it was kept. `report` lists the rows."""

    def __init__(self, message: str, report: ImportReport) -> None:
        super().__init__(message)
        self.report = report


def file_import(
    path: str | Path,
    *,
    format: str = "auto",
    agent: str | None = None,
    ratings_path: str | Path | None = None,
    simulated: bool = False,
    skip_bad: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Read a file of any known format into the database, in one transaction.

    agent: whose decisions they are (default: what the file says, else DEFAULT_AGENT). simulated: the verdicts were
    given by a model or a script, and are marked so whatever the file says. skip_bad: leave out rows that
    cannot be read instead of refusing the file. dry_run: do it all and take it back. Reading a file again adds
    nothing. Raises FormatRefused for a file that cannot be read, ImportRefused for rows that cannot.
    """
    path = Path(path)
    name = formats.named(formats.detect(path) if format == "auto" else format).name
    report = ImportReport(str(path), name)

    def records() -> Iterator[Record]:
        found = formats.read(path, name, ratings_path)
        return map(_by_a_machine, found) if simulated else found

    # Read once without the database, so that a bad file holds no lock that others wait for
    total = 0
    for record in records():
        total += 1
        if isinstance(record, RowRefused):
            report.refused.append(record)
    if not total:
        raise FormatRefused(f"{path}: expected rows, found none")
    if not skip_bad:
        _check(report, total)
    report.refused.clear()
    with transaction.atomic():
        _Import(report, agent, name == "ratchet").run(
            records(), lambda done: progress and progress(done, total)
        )
        report.refused.sort(key=lambda row: row.line)
        if not skip_bad:
            _check(report, total)
        if dry_run:
            transaction.set_rollback(True)
    return report


def _by_a_machine(record: Record) -> Record:
    """The record with its verdicts marked as simulated."""
    if isinstance(record, ImportedDecision):
        ratings = tuple(replace(rating, rater_kind=RaterKind.SIMULATED) for rating in record.ratings)
        return replace(record, ratings=ratings)
    if isinstance(record, ImportedComparison):
        return replace(record, rater_kind=RaterKind.SIMULATED)
    if isinstance(record, ImportedReference):
        return replace(record, rating=replace(record.rating, rater_kind=RaterKind.SIMULATED))
    return record


def _check(report: ImportReport, total: int) -> None:
    if report.refused:
        first = min(report.refused, key=lambda row: row.line)
        raise ImportRefused(
            f"{report.file}: {len(report.refused)} of {total} rows refused, nothing was imported; line {first.line}"
            f"{f' ({first.key})' if first.key else ''}: {first.reason}. "
            "Correct them, or leave them out with --skip-bad",
            # what had been counted until then was taken back
            ImportReport(report.file, report.format, refused=report.refused),
        )


class _Import:
    """One file's way into the database."""

    def __init__(self, report: ImportReport, agent: str | None, agent_in_file: bool) -> None:
        self.report = report
        self.agent = agent
        self.agent_in_file = agent_in_file
        # the format's name stands for raters the file does not name, numbered per subject: three anonymous verdicts
        # on one response are three raters, and the same three when the file is read again
        self.anonymous: Counter[tuple[uuid.UUID, ...]] = Counter()

    def run(self, records: Iterable[Record], progress: Callable[[int], Any]) -> None:
        iterator, done = iter(records), 0
        while batch := list(islice(iterator, BATCH)):
            self._write(batch)
            done += len(batch)
            progress(done)

    def _write(self, batch: list[Record]) -> None:
        for record in batch:
            if isinstance(record, ImportedTrace):
                self._trace(record)
        stored = self._decisions(batch)
        for record in batch:
            if isinstance(record, RowRefused):
                self.report.refused.append(record)
            elif isinstance(record, RowSkipped):
                self.report.skip(record.reason)
            elif not isinstance(record, ImportedTrace):
                try:
                    with transaction.atomic():
                        added = self._one(record, stored)
                except services.FeedbackRefused as error:
                    self.report.refused.append(RowRefused(record.line, record.key, str(error)))
                else:
                    if not added:
                        self.report.skip("already here")

    def _trace(self, record: ImportedTrace) -> None:
        try:
            made = services.row_write(
                trace_build(
                    id=record.id,
                    agent=record.agent,
                    run_id=record.run_id,
                    steps=record.steps,
                    metadata=record.metadata,
                    started_at=record.started_at,
                    finished_at=record.finished_at,
                    created_at=record.created_at,
                )
            )
        except services.FeedbackRefused as error:
            self.report.refused.append(RowRefused(record.line, record.key, str(error)))
        else:
            self.report.traces += made.created
            if not made.created:
                self.report.skip("already here")

    def _decisions(self, batch: list[Record]) -> dict[int, services.Written | services.FeedbackRefused]:
        """Write the decisions of a batch together; by the identity of their records."""
        wanted: list[ImportedDecision] = []
        for record in batch:
            if isinstance(record, ImportedDecision):
                wanted.append(record)
            elif isinstance(record, ImportedComparison):
                wanted += [side for side in (record.left, record.right) if isinstance(side, ImportedDecision)]
        stored: dict[int, services.Written | services.FeedbackRefused] = {}
        facts: list[tuple[int, dict[str, Any]]] = []
        for decision in wanted:
            try:
                facts.append((id(decision), self._facts(decision)))
            except services.FeedbackRefused as error:
                stored[id(decision)] = error
        try:
            written = services.decisions_record(fact for _, fact in facts)
        except services.FeedbackRefused:
            # one of them is wrong: find out which, and keep the others
            for key, fact in facts:
                try:
                    stored[key] = services.decision_record(**fact)
                except services.FeedbackRefused as error:
                    stored[key] = error
        else:
            stored |= {key: row for (key, _), row in zip(facts, written, strict=True)}
        # of two rows that bring the same decision the first one made it
        new = {row.row.pk for row in stored.values() if isinstance(row, services.Written) and row.created}
        self.report.decisions += len(new)
        return stored

    def _facts(self, record: ImportedDecision) -> dict[str, Any]:
        """The record as services take it, under an id that is made from its content where it has none."""
        if self.agent_in_file and self.agent and record.agent != self.agent:
            raise services.FeedbackRefused(
                f"a decision of agent {record.agent!r}, but --agent says {self.agent!r}"
            )
        if not record.messages:
            raise services.FeedbackRefused(
                "expected a prompt (`messages` or `prompt`) and a `response`, found neither; an entry that only names "
                "a scenario can be trained on with --source file"
            )
        response, metadata = completion_stored(record.response, record.metadata)
        facts: dict[str, Any] = {
            "agent": (record.agent if self.agent_in_file else self.agent or record.agent) or DEFAULT_AGENT,
            "messages": record.messages,
            "response": response,
            "state": record.state,
            "candidates": record.candidates,
            "policy": record.policy,
            "unit": record.unit,
            "arm": record.arm,
            "propensity": record.propensity,
            "run_id": record.run_id,
            "latency_ms": record.latency_ms,
            "tokens_in": record.tokens_in,
            "tokens_out": record.tokens_out,
            "tags": list(record.tags),
            "metadata": metadata,
            "source": record.source or self.report.format,
        }
        facts |= {"id": record.id or _content_id(facts), "created_at": record.created_at}
        if record.trace is not None:
            if not Trace.objects.filter(pk=record.trace).exists():
                raise services.FeedbackRefused(
                    f"trace: no trace {record.trace}: it is neither before this row nor recorded"
                )
            facts["trace"] = Trace(pk=record.trace)
        return facts

    def _one(
        self,
        record: ImportedDecision | ImportedComparison | ImportedReference,
        stored: dict[int, services.Written | services.FeedbackRefused],
    ) -> bool:
        """Write what a record says; whether anything was new."""
        if isinstance(record, ImportedReference):
            return self._rating(self._referred(record.reference, *record.also), record.rating)
        if isinstance(record, ImportedComparison):
            left, right = self._side(record.left, stored), self._side(record.right, stored)
            return self._comparison(record, left, right)
        written = stored[id(record)]
        if isinstance(written, services.FeedbackRefused):
            raise written
        added = written.created
        for rating in record.ratings:
            added |= self._rating(written.row, rating)
        for outcome in record.outcomes:
            added |= self._outcome(written.row, outcome)
        return added

    def _outcome(self, decision: Decision, outcome: ImportedOutcome) -> bool:
        key = outcome.id or _content_id([decision.pk, outcome.name, outcome.value, outcome.at])
        same = {"pk": key, "decision": decision, "name": outcome.name, "value": outcome.value}
        # an app that gave no time is told one in the export, which a body hash would take for another write
        if outcome.at is not None and Outcome.objects.filter(**same, at=outcome.at).exists():
            return False
        made = services.outcome_record(
            decision=decision,
            name=outcome.name,
            value=outcome.value,
            at=outcome.at,
            id=key,
            created_at=outcome.created_at,
        ).created
        self.report.outcomes += made
        return made

    def _side(
        self,
        side: ImportedDecision | uuid.UUID,
        stored: dict[int, services.Written | services.FeedbackRefused],
    ) -> Decision:
        if isinstance(side, uuid.UUID):
            return self._referred(str(side))
        written = stored[id(side)]
        if isinstance(written, services.FeedbackRefused):
            raise written
        decision: Decision = written.row
        return decision

    def _referred(self, *references: str) -> Decision:
        """The decision a rating in another file speaks of: by its id, or by the app's own name for its run; the first
        reference that is known."""
        decisions = (
            Decision.objects.all() if self.agent is None else Decision.objects.filter(agent=self.agent)
        )
        for reference in filter(None, references):
            own = formats.uuid_of(reference)
            if own and (found := decisions.filter(pk=own).first()):
                return found
            same_run = list(decisions.filter(run_id=reference)[:2])
            if len(same_run) > 1:
                raise services.FeedbackRefused(
                    f"run {reference!r} holds several decisions: which one is meant cannot be told"
                )
            if same_run:
                return same_run[0]
        raise services.DecisionUnknown(
            f"no decision has the id or run_id {references[0]!r}; import the decisions first"
        )

    def _rating(self, decision: Decision, rating: ImportedRating) -> bool:
        rater = rating.rater or self._nobody(decision.pk)
        said = [getattr(rating, name) for name in SAID]
        key = rating.id or _content_id([decision.pk, rater, *said, rating.created_at])
        if not rating.id and Rating.objects.filter(pk=key).exists():
            return False  # an id made from the content: the same content is here
        if rating.withdrawn:
            return self._withdrawn(Rating, {"decision": decision, "rater": rater}, key, rating)
        made = services.rating_submit(
            decision=decision,
            rater=rater,
            id=key,
            **dict(zip(SAID, said, strict=True)),
            created_at=rating.created_at,
        ).created
        self.report.ratings += made
        self.report.corrections += made and rating.correction is not None
        return made

    def _comparison(self, record: ImportedComparison, left: Decision, right: Decision) -> bool:
        if left.pk == right.pk:
            self.report.skip("both responses are the same: no preference")
            return True
        preference = record.preference
        if not record.ordered and left.pk > right.pk:
            left, right = right, left
            preference = {"left": "right", "right": "left"}.get(preference, preference)
        rater = record.rater or self._nobody(*sorted((left.pk, right.pk)))
        key = record.id or _content_id([left.pk, right.pk, rater, preference, record.created_at])
        if not record.id and Comparison.objects.filter(pk=key).exists():
            return False
        if record.withdrawn:
            return self._withdrawn(Comparison, {"left": left, "right": right, "rater": rater}, key, record)
        made = services.comparison_submit(
            left=left,
            right=right,
            preference=preference,
            rater=rater,
            id=key,
            tags=record.tags,
            notes=record.notes,
            rater_kind=record.rater_kind,
            created_at=record.created_at,
        ).created
        self.report.comparisons += made
        return made

    def _withdrawn(
        self,
        model: type[Rating] | type[Comparison],
        chain: dict[str, Any],
        key: uuid.UUID,
        record: ImportedRating | ImportedComparison,
    ) -> bool:
        """Take back what the same rater said last, unless that was done before."""
        if model._default_manager.filter(pk=key).exists():
            return False
        standing = model._default_manager.filter(**chain, superseded_by__isnull=True).first()
        if standing is None:
            raise services.FeedbackRefused("takes back what was never said")
        if isinstance(standing, Rating):
            services.rating_withdraw(standing, id=key, created_at=record.created_at)
        else:
            services.comparison_withdraw(standing, id=key, created_at=record.created_at)
        return True

    def _nobody(self, *subject: uuid.UUID) -> str:
        self.anonymous[subject] += 1
        number = self.anonymous[subject]
        return self.report.format if number == 1 else f"{self.report.format} #{number}"


SAID = ("thumb", "stars", "score", "correction", "tags", "notes", "rater_kind")


def _content_id(content: Any) -> uuid.UUID:
    # escaped, so that text no database takes gets as far as being refused
    return uuid.uuid5(NAMESPACE, json.dumps(content, sort_keys=True, default=str))
