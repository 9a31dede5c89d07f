"""Plans of an import: each record is validated and built into rows before the database is asked what it has."""

from __future__ import annotations

import json
import uuid
from collections import ChainMap
from collections.abc import Hashable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeAlias

from django.db.models import Q, QuerySet

from feedback.models import Comparison, Decision, Outcome, Rating, Trace
from feedback.recording.ingest import trace_build
from feedback.storage.factories import Subject, comparison_build, decision_build, outcome_build, rating_build
from feedback.storage.facts import COMPARISON, DECISION, OUTCOME, RATING, TRACE
from feedback.storage.responses import completion_stored
from feedback.storage.sql import rows_in
from feedback.storage.tombstones import (
    ERASURE_REASON,
    ErasedConflict,
    decisions_erased,
    erased_refusal,
    ids_erased,
    traces_erased,
)
from feedback.storage.validation import DecisionUnknown, FeedbackRefused
from feedback.transfer import formats
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    ImportedOutcome,
    ImportedRating,
    ImportedReference,
    ImportedTrace,
    OutcomeReference,
    Record,
    RowRefused,
    RowSkipped,
)
from feedback.transfer.import_report import ImportReport

NAMESPACE = uuid.UUID("c0b84a52-94a1-4b0e-8f5b-2d4f4d3a7a11")
"""Ids of rows that bring none of their own are UUIDv5 of their content in this namespace: the same row is the same
row, in whichever file and on whichever line it stands."""

DEFAULT_AGENT = "assistant"
"""Agent of decisions where neither the file nor the caller names one."""

RATING_ID_FIELDS = ("thumb", "stars", "score", "correction", "tags", "notes", "rater_kind")
"""Fields from which the id of a rating that brings none is made, in this order; later fields count where given."""

TRACE_KEYS = ("trace_id", "root_id", "span_id")
"""In the metadata of a decision that another tool recorded: the names of its trace and of the trace's first span."""

Raters: TypeAlias = MutableMapping[int, int]
"""Hash of a subject -> how many raters without a name spoke of it."""


@dataclass(frozen=True)
class Origin:
    """Facts of a file beside its rows."""

    format: str
    agent: str | None
    """Agent that the caller chose for the decisions."""
    batch: int | None = None
    """The import that the rows are of."""

    @property
    def agent_in_file(self) -> bool:
        """True if the agent named in the file is binding, and no mere suggestion."""
        return self.format == "ratchet"


Word: TypeAlias = Rating | Comparison
Chain: TypeAlias = tuple[Hashable, ...]


@dataclass
class PlannedFeedback:
    """A rating or comparison that a record brings."""

    row: Word
    chain: Chain
    own_id: bool
    """True if the file gave it its id; another body under it is then a conflict."""
    withdrawn: bool
    """Withdrawal of the same rater's last rating; the row is made once that is known."""


@dataclass
class ImportPlan:
    """Rows of one record, checked and built, before the database is asked what it has."""

    record: Record
    decisions: list[Decision] = field(default_factory=list)
    feedback: list[PlannedFeedback] = field(default_factory=list)
    outcomes: list[tuple[Outcome, bool]] = field(default_factory=list)
    """With whether the file says when it happened."""
    trace: Trace | None = None
    needs: list[uuid.UUID] = field(default_factory=list)
    """Decisions it speaks of and does not bring."""
    skip_reason: str = ""
    """Reason why it holds nothing beside the decisions it brings."""


class Planner:
    """Builds the rows of some records together. Afterwards `raters` says what anonymous raters were numbered."""

    def __init__(self, origin: Origin, raters: Raters, report: ImportReport) -> None:
        self.origin = origin
        self.report = report
        self.raters: ChainMap[int, int] = ChainMap({}, raters)
        self.built: dict[int, Decision | FeedbackRefused] = {}
        """Identity of a record -> its decision."""
        self.stored: set[uuid.UUID] = set()
        """Decisions that records name, of those that are in the database."""

    def plans(self, records: Sequence[Record]) -> list[ImportPlan]:
        """Plans of the records; one that cannot be built is reported as refused."""
        self._build_decisions(records)
        self._leave_out_erased(records)
        self._look_up_references(records)
        return list(self._plans(records))

    def refuse(self, record: Record, error: FeedbackRefused) -> None:
        if isinstance(error, ErasedConflict):
            self.report.skip(ERASURE_REASON)
            return
        self.report.refuse(RowRefused(record.line, record.key, str(error)))

    def agents_of(self, ratings: Iterable[Rating], comparisons: Iterable[Comparison]) -> set[str]:
        """Agents of the decisions that these refer to."""
        spoken_of = {row.decision_id for row in ratings} | {row.left_id for row in comparisons}
        by_run = {pk: subject for found in self._by_run.values() for pk, subject in found.items()}
        known = ChainMap(self._by_id, by_run)
        return {known[pk].agent for pk in spoken_of if pk in known}

    def _build_decisions(self, records: Sequence[Record]) -> None:
        traces = self._build_traces(records)
        for record in _decisions_in(records):
            try:
                if record.trace is not None and record.trace not in traces:
                    raise FeedbackRefused(
                        f"trace: no trace {record.trace}: it is neither before this row nor recorded"
                    )
                self.built[id(record)] = self._decision(record)
            except FeedbackRefused as error:
                self.built[id(record)] = error

    def _leave_out_erased(self, records: Sequence[Record]) -> None:
        """Decisions and traces that were erased here are not brought back, nor what is said of them."""
        untimed = set()
        rows = []
        for record in _decisions_in(records):
            if isinstance(built := self.built[id(record)], Decision):
                rows.append(built)
                if record.created_at is None:
                    untimed.add(built.pk)
        gone = decisions_erased(rows, untimed)
        for key, built in self.built.items():
            if isinstance(built, Decision) and built.pk in gone:
                self.built[key] = erased_refusal("decision", built.pk)
        traces = [record.id for record in records if isinstance(record, ImportedTrace) and record.id]
        self._traces_erased = traces_erased(traces)
        named = {own for record in records for name in _names_of(record) if (own := formats.uuid_of(name))}
        self._ids_erased = gone | ids_erased(named)

    def _build_traces(self, records: Sequence[Record]) -> set[uuid.UUID]:
        """Ids of the traces that decisions of this batch may name."""
        named = {record.trace for record in _decisions_in(records) if record.trace is not None}
        own = {record.id for record in records if isinstance(record, ImportedTrace) and record.id}
        return own | set(rows_in(Trace.objects.order_by(), "id", named).values_list("pk", flat=True))

    def _decision(self, record: ImportedDecision) -> Decision:
        """The record as a decision, under an id that is made from its content where it has none."""
        agent = self.origin.agent
        if self.origin.agent_in_file and agent and record.agent != agent:
            raise FeedbackRefused(f"a decision of agent {record.agent!r}, but --agent says {agent!r}")
        if not record.messages:
            raise FeedbackRefused(
                "expected a prompt (`messages` or `prompt`) and a `response`, found neither; an entry that "
                "only names a scenario cannot be imported, but trained on with --source file"
            )
        response, metadata = completion_stored(record.response, record.metadata)
        facts = DECISION.read(record) | {
            "agent": self._agent(record.agent),
            "response": response,
            "metadata": metadata,
            "source": record.source or self.origin.format,
        }
        identity = DECISION.hash_values(facts)
        if record.event is not None:
            identity["event"] = record.event
        return decision_build(
            **facts,
            id=record.id or _content_id(identity),
            created_at=record.created_at,
            reserved=True,
            trace=None if record.trace is None else Trace(pk=record.trace),
        )

    def _agent(self, named: str) -> str:
        """The agent of a record that names this one, or none."""
        return (named if self.origin.agent_in_file else self.origin.agent or named) or DEFAULT_AGENT

    def _look_up_references(self, records: Sequence[Record]) -> None:
        """Decisions that records name and do not bring: by id, or by the app's own name for its run."""
        names = {name for record in records for name in _names_of(record)}
        ids = {decision_id for name in names if (decision_id := formats.uuid_of(name))}
        agents = {} if self.origin.agent is None else {"agent": self.origin.agent}
        columns = ("pk", "agent", "prompt_hash", "run_id")
        decisions = Decision.objects.filter(**agents).order_by()
        by_id = rows_in(decisions, "id", ids).values_list(*columns) if ids else ()
        runs = [name for name in names if len(name) <= 200]
        by_run = rows_in(decisions, "run_id", runs).values_list(*columns) if runs else ()
        self._by_id: dict[uuid.UUID, Subject] = {row[0]: Subject(*row[:3]) for row in by_id}
        self._by_run: dict[str, dict[uuid.UUID, Subject]] = {}
        for row in by_run:
            self._by_run.setdefault(row[3], {})[row[0]] = Subject(*row[:3])
        self.stored = {*self._by_id, *(pk for pks in self._by_run.values() for pk in pks)}
        for built in self.built.values():
            if isinstance(built, Decision):
                subject = _subject(built)
                self._by_id.setdefault(built.pk, subject)
                if built.run_id in names:
                    self._by_run.setdefault(built.run_id, {})[built.pk] = subject
        self._by_trace = self._last_of_traces(
            {
                name
                for name in names
                if len(self._by_run.get(name, ())) != 1 and formats.uuid_of(name) not in self._by_id
            },
            decisions,
        )

    def _last_of_traces(self, names: set[str], decisions: QuerySet[Decision]) -> dict[str, Subject]:
        """The last decision of each trace that another tool recorded: what is said of a trace is said of its answer."""
        last: dict[str, tuple[datetime, Subject]] = {}
        ids: set[uuid.UUID] = set()

        def take(name: object, at: datetime, subject: Subject) -> None:
            if name in names and (name not in last or (at, subject.pk) >= (last[name][0], last[name][1].pk)):
                last[name] = (at, subject)

        if names:
            columns = (
                "pk",
                "agent",
                "prompt_hash",
                "created_at",
                *(f"metadata__{key}" for key in TRACE_KEYS),
            )
            of_trace = Q()
            for key in TRACE_KEYS:
                of_trace |= Q(**{f"metadata__{key}__in": sorted(names)})
            for row in decisions.filter(of_trace).values_list(*columns):
                ids.add(row[0])
                for name in row[4:]:
                    take(name, row[3], Subject(*row[:3]))
            for built in self.built.values():
                if isinstance(built, Decision):
                    for key in TRACE_KEYS:
                        take(built.metadata.get(key), built.created_at, _subject(built))
        self.stored |= ids
        return {name: subject for name, (_, subject) in last.items()}

    def _reference_subject(self, *references: str) -> Subject:
        """The first reference that is known. Raises FeedbackRefused."""
        for reference in filter(None, references):
            decision_id = formats.uuid_of(reference)
            if decision_id and decision_id in self._by_id:
                return self._by_id[decision_id]
            same_run = list(self._by_run.get(reference, {}).values())
            if len(same_run) == 1:
                return same_run[0]
            if reference in self._by_trace:
                return self._by_trace[reference]
            if same_run:
                raise FeedbackRefused(f"run {reference!r} has several decisions; give the id of the decision")
            if decision_id and decision_id in self._ids_erased:
                raise erased_refusal("decision", decision_id)
        raise DecisionUnknown(
            f"no decision has the id, run_id or trace_id {references[0]!r}; import the decisions first (the runs, "
            "traces or calls this feedback was given on), then this file again"
        )

    def _plans(self, records: Sequence[Record]) -> Iterator[ImportPlan]:
        for record in records:
            if isinstance(record, RowRefused):
                self.report.refuse(record)
            elif isinstance(record, RowSkipped):
                self.report.skip(record.reason)
            else:
                try:
                    yield self._plan(record)
                except FeedbackRefused as error:
                    reason = ""
                    if isinstance(record, (ImportedReference, OutcomeReference)):
                        reason = record.unknown
                    if reason and isinstance(error, DecisionUnknown):
                        self.report.skip(reason)
                    else:
                        self.refuse(record, error)

    def _plan(self, record: Record) -> ImportPlan:
        plan = ImportPlan(record)
        if isinstance(record, ImportedTrace):
            if record.id in self._traces_erased:
                raise erased_refusal("trace", record.id)
            facts = TRACE.read(record) | {"agent": self._agent(record.agent)}
            plan.trace = trace_build(id=record.id, created_at=record.created_at, **facts)
        elif isinstance(record, ImportedReference):
            subject = self._reference_subject(record.reference, *record.also)
            plan.needs.append(subject.pk)
            plan.feedback.append(self._rating(subject, record.rating))
        elif isinstance(record, OutcomeReference):
            subject = self._reference_subject(record.reference, *record.also)
            plan.needs.append(subject.pk)
            plan.outcomes.append((_outcome(subject.pk, record.outcome), record.outcome.at is not None))
        elif isinstance(record, ImportedComparison):
            self._plan_comparison(plan, record)
        elif isinstance(record, ImportedDecision):
            decision = self._decision_of(record)
            subject = _subject(decision)
            plan.decisions.append(decision)
            plan.feedback += [self._rating(subject, rating) for rating in record.ratings]
            plan.outcomes += [(_outcome(decision.pk, one), one.at is not None) for one in record.outcomes]
        return plan

    def _decision_of(self, record: ImportedDecision) -> Decision:
        built = self.built[id(record)]
        if isinstance(built, FeedbackRefused):
            raise built
        return built

    def _plan_comparison(self, plan: ImportPlan, record: ImportedComparison) -> None:
        sides: list[Subject] = []
        for side in (record.left, record.right):
            if isinstance(side, ImportedDecision):
                plan.decisions.append(self._decision_of(side))
                sides.append(_subject(plan.decisions[-1]))
            else:
                sides.append(self._reference_subject(str(side)))
                plan.needs.append(sides[-1].pk)
        left, right = sides
        if left.pk == right.pk:
            plan.skip_reason = "both responses are the same: no preference"
            return
        preference = record.preference
        if not record.ordered and left.pk > right.pk:
            left, right = right, left
            preference = {"left": "right", "right": "left"}.get(preference, preference)
        rater = record.rater or self._anonymous_rater(*sorted((left.pk, right.pk)))
        key = record.id or _content_id([left.pk, right.pk, rater, preference, record.created_at])
        row = (
            Comparison(id=key, left_id=left.pk, right_id=right.pk, rater=rater, **_creation_values(record))
            if record.withdrawn
            else comparison_build(
                left=left,
                right=right,
                id=key,
                created_at=record.created_at,
                **{**COMPARISON.read(record), "preference": preference, "rater": rater},
            )
        )
        chain = (left.pk, right.pk, rater)
        plan.feedback.append(PlannedFeedback(row, chain, record.id is not None, record.withdrawn))

    def _rating(self, decision: Subject, rating: ImportedRating) -> PlannedFeedback:
        rater = rating.rater or self._anonymous_rater(decision.pk)
        facts = RATING.read(rating) | {"rater": rater}
        content = [decision.pk, rater, *(facts[name] for name in RATING_ID_FIELDS), rating.created_at]
        key = rating.id or _content_id([*content, *filter(None, [RATING.later_values(facts)])])
        row = (
            Rating(id=key, decision_id=decision.pk, rater=rater, **_creation_values(rating))
            if rating.withdrawn
            else rating_build(
                decision=decision.pk, agent=decision.agent, id=key, created_at=rating.created_at, **facts
            )
        )
        return PlannedFeedback(row, (decision.pk, rater), rating.id is not None, rating.withdrawn)

    def _anonymous_rater(self, *subject: uuid.UUID) -> str:
        """The format's name stands for raters the file does not name, numbered per subject: three anonymous verdicts
        on one response are three raters, and the same three when the file is read again."""
        key = hash(subject)
        number = self.raters[key] = self.raters.get(key, 0) + 1
        return self.origin.format if number == 1 else f"{self.origin.format} #{number}"


def _decisions_in(records: Iterable[Record]) -> Iterator[ImportedDecision]:
    for record in records:
        if isinstance(record, ImportedDecision):
            yield record
        elif isinstance(record, ImportedComparison):
            yield from (side for side in (record.left, record.right) if isinstance(side, ImportedDecision))


def _subject(row: Decision) -> Subject:
    return Subject(row.pk, row.agent, row.prompt_hash)


def _outcome(decision: uuid.UUID, outcome: ImportedOutcome) -> Outcome:
    return outcome_build(
        decision=decision,
        id=outcome.id or _content_id([decision, outcome.name, outcome.value, outcome.at]),
        created_at=outcome.created_at,
        **OUTCOME.read(outcome),
    )


def _creation_values(record: ImportedRating | ImportedComparison) -> dict[str, object]:
    return {} if record.created_at is None else {"created_at": record.created_at}


def _content_id(content: object) -> uuid.UUID:
    # escaped, so that text no database takes gets as far as being refused
    return uuid.uuid5(NAMESPACE, json.dumps(content, sort_keys=True, default=str))


def _names_of(record: Record) -> Iterator[str]:
    """Names by which a record refers to decisions that it does not bring."""
    if isinstance(record, (ImportedReference, OutcomeReference)):
        yield from filter(None, (record.reference, *record.also))
    elif isinstance(record, ImportedComparison):
        yield from (str(side) for side in (record.left, record.right) if isinstance(side, uuid.UUID))
