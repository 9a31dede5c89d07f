"""What an export is made from: views of everything that was said, read piece by piece, never all at once."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby, islice
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from django.conf import settings
from django.db import connection, transaction
from django.db.models import F, Func, Q, QuerySet, TextField
from django.db.models.functions import Cast
from django.utils.module_loading import import_string

from feedback.exported_copy import decision_texts
from feedback.formats.base import DEMONSTRATION
from feedback.formats.history import (
    JSON_COLUMNS,
    TIME_COLUMNS,
    ComparisonRow,
    DecisionRow,
    DecisionTold,
    OutcomeRow,
    RatingRow,
    TraceRow,
)
from feedback.formats.records import (
    ImportedComparison,
    ImportedDecision,
    ImportedOutcome,
    ImportedRating,
    completion_read,
)
from feedback.formats.writing import View
from feedback.models import Comparison, Decision, Outcome, Rating, Trace
from feedback.selectors import comparisons_standing, ratings_standing
from feedback.statements import among
from feedback.worth import rating_share

CHUNK = {"postgresql": 2000, "sqlite": 450}
"""Decisions held in memory at once, each with all that was said of it; SQLite takes 999 ids in one statement, two of
each pair."""

FETCH = 2000
"""Rows fetched from the database at once."""

RAW_LOW, RAW_HIGH = -2.0, 2.0
"""Range of a raw reward."""

MORE = "more"
"""What `left_out` says where there were more decisions than were asked for."""

RewardsOf = Callable[[Sequence[uuid.UUID]], Mapping[uuid.UUID, float]]
"""Decisions -> their raw rewards in [-2, 2]; one that has none is not in it."""


@dataclass(frozen=True)
class Selection:
    """Which decisions are exported."""

    agent: str | None = None
    """None: every agent's."""
    min_reward: float = RAW_LOW
    """Least raw reward; at its lowest, decisions without a reward are there too."""
    require_feedback: bool = False
    newest_first: bool = False
    decisions: int | None = None
    """Of views of decisions at most so many."""

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
            with connection.cursor() as cursor:
                cursor.execute("ROLLBACK")


def records(view: View, selection: Selection, left_out: Counter[str]) -> Generator[Any]:
    """What a view holds: records of feedback.formats.records, or of View.HISTORY the rows of feedback.formats.history.

    What the selection narrows away is counted in left_out, and MORE set where it asks for less than there is.
    """
    yield from _VIEWS[view](selection, left_out)


# --- Rows --------------------------------------------------------------------------------------------------

Row = TypeVar("Row", bound=NamedTuple)


def _rows(
    queryset: QuerySet[Any], row: Callable[[Iterable[Any]], Row], names: Sequence[str], *, stream: bool = True
) -> Iterator[Row]:
    """The columns as plain tuples: JSON, ids and times as texts. stream: through a cursor of the server's."""
    columns = [_column(name) for name in names]
    found = queryset.values_list(*columns)
    rows: Iterable[tuple[Any, ...]] = found.iterator(chunk_size=FETCH) if stream else found
    if connection.vendor != "postgresql":
        rows = (tuple(map(_text, values)) for values in rows)
    return map(row, rows)


def _column(name: str) -> Any:
    """A column as its text where it is JSON, and where PostgreSQL writes one in less time than Python makes a value."""
    if name in JSON_COLUMNS:
        return Cast(name, TextField())
    if connection.vendor == "postgresql" and name in TIME_COLUMNS:
        return Func(F(name), template=_ISO, output_field=TextField())
    if connection.vendor == "postgresql" and (name == "id" or name.endswith("_id")):
        return Cast(name, TextField())
    return name


_ISO = "to_char(%(expressions)s AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"+00:00\"')"


def _text(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds")
    return str(value) if isinstance(value, uuid.UUID) else value


T = TypeVar("T")


def _pieces(items: Iterable[T]) -> Iterator[list[T]]:
    iterator, size = iter(items), CHUNK[connection.vendor]
    while piece := list(islice(iterator, size)):
        yield piece


Said = TypeVar("Said", RatingRow, ComparisonRow)


def _in_chains(rows: Sequence[Said], begun: Callable[[Said], bool]) -> Iterator[Said]:
    """Rows in their order, but each after the one it supersedes: their times are what clients say."""
    successors = {row.supersedes_id: row for row in rows if row.supersedes_id}
    for row in rows:
        if begun(row):
            following: Said | None = row
            while following is not None:
                yield following
                following = successors.get(following.id)


def _decision_rows(selection: Selection) -> Iterator[DecisionRow]:
    rows = Decision.objects.all()
    if selection.agent is not None:
        rows = rows.filter(agent=selection.agent)
    order = ("-created_at", "-id") if selection.newest_first else ("created_at", "id")
    return _rows(rows.order_by(*order), DecisionRow._make, DecisionRow._fields)


def _told(rows: Sequence[DecisionRow]) -> list[DecisionTold]:
    """Decisions with everything said of them."""
    ids = [row.id for row in rows]
    ratings: dict[str, list[RatingRow]] = {}
    said = among(Rating.objects.order_by("created_at", "id"), "decision_id", ids)
    for rating in _rows(said, RatingRow._make, RatingRow._fields, stream=False):
        ratings.setdefault(rating.decision_id, []).append(rating)
    outcomes: dict[str, list[OutcomeRow]] = {}
    measured = among(Outcome.objects.order_by("created_at", "id"), "decision_id", ids)
    for outcome in _rows(measured, OutcomeRow._make, OutcomeRow._fields, stream=False):
        outcomes.setdefault(outcome.decision_id, []).append(outcome)
    return [
        DecisionTold(row, _chained(ratings[row.id]) if row.id in ratings else (), outcomes.get(row.id, ()))
        for row in rows
    ]


def _chained(ratings: list[RatingRow]) -> Sequence[RatingRow]:
    if len(ratings) == 1:
        return ratings
    return list(_in_chains(ratings, lambda rating: rating.supersedes_id is None))


def _standing(ratings: Sequence[RatingRow]) -> list[RatingRow]:
    superseded = {rating.supersedes_id for rating in ratings}
    return [rating for rating in ratings if not rating.withdrawn and rating.id not in superseded]


def _told_selected(selection: Selection, left_out: Counter[str]) -> Iterator[DecisionTold]:
    told = (
        one
        for rows in _pieces(_decision_rows(selection))
        for one in _narrowed(_told(rows), selection, left_out)
    )
    yield from islice(told, selection.decisions)
    if selection.decisions is not None and next(told, None) is not None:
        left_out[MORE] = 1


def _narrowed(
    told: list[DecisionTold], selection: Selection, left_out: Counter[str]
) -> Sequence[DecisionTold]:
    if not selection.narrows:
        return told
    kept = told
    if selection.require_feedback:
        ids = [one.decision.id for one in told]
        compared: set[str] = set()
        for side in ("left_id", "right_id"):
            standing = among(comparisons_standing().order_by(), side, ids)
            compared.update(str(pk) for pk in standing.values_list(side, flat=True))
        kept = [one for one in told if _standing(one.ratings) or one.outcomes or one.decision.id in compared]
        left_out["no_feedback"] += len(told) - len(kept)
    if selection.min_reward > RAW_LOW:
        rewards = _rewards(kept)
        enough = [one for one in kept if rewards.get(one.decision.id, RAW_LOW - 1) >= selection.min_reward]
        left_out["below_min_reward"] += len(kept) - len(enough)
        kept = enough
    return kept


def _rewards(told: Sequence[DecisionTold]) -> Mapping[str, float]:
    """Raw rewards: as they were calculated, else the mean of what raters say (good 2, bad -2)."""
    found: dict[str, float] = {}
    for one in told:
        shares = [rating_share(r.thumb, r.stars, r.score) for r in _standing(one.ratings)]
        if known := [share for share in shares if share is not None]:
            found[one.decision.id] = RAW_LOW + (RAW_HIGH - RAW_LOW) * fmean(known)
    if settings.FEEDBACK_REWARDS:
        calculated: RewardsOf = import_string(settings.FEEDBACK_REWARDS)
        rewards = calculated([uuid.UUID(one.decision.id) for one in told])
        found |= {str(pk): raw for pk, raw in rewards.items()}
    return found


# --- Everything --------------------------------------------------------------------------------------------


def _history(selection: Selection, left_out: Counter[str]) -> Iterator[Any]:
    """Traces, decisions, comparisons; of a narrowed selection the traces and comparisons of its decisions alone."""
    if selection.narrows or selection.decisions is not None:
        yield from _history_of(_told_selected(selection, left_out), selection.agent)
        return
    yield from _trace_rows(selection.agent)
    if connection.vendor == "postgresql":
        yield from decision_texts(selection.agent)
    else:
        yield from _told_selected(selection, left_out)
    yield from _comparison_rows(selection.agent)


def _history_of(told: Iterable[DecisionTold], agent: str | None) -> Iterator[Any]:
    written: set[str] = set()
    traced: set[str] = set()
    for piece in _pieces(told):
        named = {one.decision.trace_id for one in piece if one.decision.trace_id} - traced
        rows = _rows(among(Trace.objects.all(), "id", named), TraceRow._make, TraceRow._fields, stream=False)
        traces = {row.id: row for row in rows}
        for one in piece:
            trace = one.decision.trace_id
            written.add(one.decision.id)
            if trace and trace not in traced:
                traced.add(trace)
                yield traces[trace]
            yield one
    for comparison in _comparison_rows(agent):
        if comparison.left_id in written and comparison.right_id in written:
            yield comparison


def _trace_rows(agent: str | None) -> Iterator[TraceRow]:
    # a decision may have been taken in another agent's trace: what it names must be there
    traces = Trace.objects.all()
    if agent is not None:
        traces = traces.filter(
            Q(agent=agent) | Q(pk__in=Decision.objects.filter(agent=agent).values("trace"))
        )
    return _rows(traces.order_by("created_at", "id"), TraceRow._make, TraceRow._fields)


def _comparison_rows(agent: str | None) -> Iterator[ComparisonRow]:
    """Each after the one it supersedes."""
    comparisons = Comparison.objects.all() if agent is None else Comparison.objects.filter(left__agent=agent)
    rows = comparisons.order_by("created_at", "id")
    yield from _rows(rows.filter(supersedes__isnull=True), ComparisonRow._make, ComparisonRow._fields)
    # few people change their mind: these fit into memory
    later = rows.filter(supersedes__isnull=False)
    changed = list(_rows(later, ComparisonRow._make, ComparisonRow._fields))
    own = {row.id for row in changed}
    yield from _in_chains(changed, lambda row: row.supersedes_id not in own)


# --- Views that other formats are written from -------------------------------------------------------------


def _decisions(selection: Selection, left_out: Counter[str]) -> Iterator[ImportedDecision]:
    return map(_record, _told_selected(selection, left_out))


def _rated(selection: Selection, left_out: Counter[str]) -> Iterator[ImportedDecision]:
    return (decision for decision in _decisions(selection, left_out) if decision.ratings)


def _record(told: DecisionTold) -> ImportedDecision:
    row = told.decision
    metadata = json.loads(row.metadata)
    response = completion_read(row.response, metadata)
    metadata.pop("response_is", None)
    return ImportedDecision(
        line=0,
        key=row.id,
        id=uuid.UUID(row.id),
        agent=row.agent,
        messages=json.loads(row.messages),
        response=response,
        state=None if row.state is None else json.loads(row.state),
        candidates=None if row.candidates is None else json.loads(row.candidates),
        policy=row.policy,
        unit=row.unit,
        arm=row.arm,
        propensity=row.propensity,
        run_id=row.run_id,
        latency_ms=row.latency_ms,
        tokens_in=row.tokens_in,
        tokens_out=row.tokens_out,
        tags=tuple(json.loads(row.tags)),
        metadata=metadata,
        created_at=_time(row.created_at),
        source=row.source,
        trace=None if row.trace_id is None else uuid.UUID(row.trace_id),
        ratings=tuple(
            ImportedRating(
                rater=rating.rater,
                thumb=rating.thumb,
                stars=rating.stars,
                score=rating.score,
                correction=rating.correction,
                tags=tuple(json.loads(rating.tags)),
                notes=rating.notes,
                rater_kind=rating.rater_kind,
                created_at=_time(rating.created_at),
                id=uuid.UUID(rating.id),
            )
            for rating in _standing(told.ratings)
        ),
        outcomes=tuple(
            ImportedOutcome(
                outcome.name,
                outcome.value,
                _time(outcome.at),
                _time(outcome.created_at),
                uuid.UUID(outcome.id),
            )
            for outcome in told.outcomes
        ),
    )


def _told_of(ids: Iterable[str], *, said: bool) -> list[DecisionTold]:
    """Decisions with these ids; with what was said of them where that is asked for."""
    wanted = among(Decision.objects.order_by(), "id", list(dict.fromkeys(ids)))
    rows = list(_rows(wanted, DecisionRow._make, DecisionRow._fields, stream=False))
    return _told(rows) if said else [DecisionTold(row, (), ()) for row in rows]


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _by_id(told: Iterable[DecisionTold]) -> dict[str, ImportedDecision]:
    return {one.decision.id: _record(one) for one in told}


class _Pair(NamedTuple):
    left: str
    right: str
    said: ComparisonRow | None
    """None: the left one is better by what raters said of each."""


def _paired(
    pairs: Iterable[_Pair], selection: Selection, left_out: Counter[str]
) -> Iterator[ImportedComparison]:
    """Comparisons with their decisions; those left out whose better side has too small a reward."""
    floor = selection.min_reward > RAW_LOW
    for piece in _pieces(pairs):
        told = _told_of((side for pair in piece for side in (pair.left, pair.right)), said=floor)
        decisions, rewards = _by_id(told), _rewards(told) if floor else {}
        for pair in piece:
            preference = pair.said.preference if pair.said else "left"
            better = pair.right if preference == "right" else pair.left
            if floor and rewards.get(better, RAW_LOW - 1) < selection.min_reward:
                left_out["below_min_reward"] += 1
                continue
            left, right = decisions[pair.left], decisions[pair.right]
            if pair.said is None:
                yield ImportedComparison(0, f"{pair.left}~{pair.right}", left, right, "left", ordered=False)
            else:
                yield ImportedComparison(
                    line=0,
                    key=pair.said.id,
                    left=left,
                    right=right,
                    preference=preference,
                    rater=pair.said.rater,
                    tags=tuple(json.loads(pair.said.tags)),
                    notes=pair.said.notes,
                    rater_kind=pair.said.rater_kind,
                    created_at=_time(pair.said.created_at),
                    id=uuid.UUID(pair.said.id),
                )


def _comparisons(selection: Selection, left_out: Counter[str]) -> Iterator[ImportedComparison]:
    order = ("left_id", "right_id", "created_at", "id")
    return _paired(_compared(selection, order), selection, left_out)


def _compared(selection: Selection, order: Sequence[str]) -> Iterator[_Pair]:
    rows = comparisons_standing(selection.agent).order_by(*order)
    for row in _rows(rows, ComparisonRow._make, ComparisonRow._fields):
        yield _Pair(row.left_id, row.right_id, row)


def _preferences(selection: Selection, left_out: Counter[str]) -> Iterator[ImportedComparison]:
    order = ("-created_at", "-id") if selection.newest_first else ("created_at", "id")
    yield from _paired(_compared(selection, order), selection, left_out)
    yield from _corrected(selection, order)
    yield from _paired(_best_and_worst(selection), selection, left_out)


def _corrected(selection: Selection, order: Sequence[str]) -> Iterator[ImportedComparison]:
    """A correction over what it corrects."""
    said = ratings_standing(selection.agent).filter(correction__isnull=False).order_by(*order)
    for piece in _pieces(_rows(said, RatingRow._make, RatingRow._fields)):
        decisions = _by_id(_told_of((rating.decision_id for rating in piece), said=False))
        for rating in piece:
            assert rating.correction is not None
            worse = decisions[rating.decision_id]
            better = replace(worse, response=rating.correction, id=None, policy="")
            yield ImportedComparison(
                line=0,
                key=rating.id,
                left=better,
                right=worse,
                preference="left",
                ordered=False,
                rater=rating.rater,
                rater_kind=rating.rater_kind,
                created_at=_time(rating.created_at),
            )


def _best_and_worst(selection: Selection) -> Iterator[_Pair]:
    """Of each prompt the response raters like best and the one they like least, by the mean of their verdicts."""
    said = (
        ratings_standing(selection.agent)
        .order_by("decision__agent", "decision__prompt_hash", "decision_id")
        .values_list("decision__agent", "decision__prompt_hash", "decision_id", "thumb", "stars", "score")
    )
    for _, verdicts in groupby(said.iterator(chunk_size=FETCH), lambda row: row[:2]):
        means: list[tuple[float, str]] = []
        for decision, rows in groupby(verdicts, lambda row: row[2]):
            shares = [rating_share(*row[3:]) for row in rows]
            if known := [share for share in shares if share is not None]:
                means.append((fmean(known), str(decision)))
        if means and (best := max(means))[0] > (worst := min(means))[0]:
            yield _Pair(best[1], worst[1], None)


def _demonstrations(selection: Selection, left_out: Counter[str]) -> Iterator[ImportedDecision]:
    """Decisions with the response to imitate: the newest correction, or their own where raters call it good."""
    for decision in _decisions(selection, left_out):
        corrections = [r.correction for r in decision.ratings if r.correction is not None]
        shares = [rating_share(r.thumb, r.stars, r.score) for r in decision.ratings]
        known = [share for share in shares if share is not None]
        if corrections:
            yield replace(decision, response=corrections[-1])
        elif (known and fmean(known) > 0.5) or (not known and DEMONSTRATION in decision.tags):
            yield decision
        else:
            left_out["not_good"] += 1


def _prompts(selection: Selection, left_out: Counter[str]) -> Iterator[ImportedDecision]:
    rows = (
        Decision.objects.all() if selection.agent is None else Decision.objects.filter(agent=selection.agent)
    )
    keys = rows.order_by("agent", "prompt_hash", "id").values_list("agent", "prompt_hash", "id")
    first = (str(next(same)[2]) for _, same in groupby(keys.iterator(chunk_size=FETCH), lambda row: row[:2]))
    for piece in _pieces(first):
        decisions = _by_id(_told_of(piece, said=False))
        yield from (decisions[pk] for pk in piece)


_VIEWS: dict[View, Callable[[Selection, Counter[str]], Iterator[Any]]] = {
    View.HISTORY: _history,
    View.DECISIONS: _decisions,
    View.RATED: _rated,
    View.COMPARISONS: _comparisons,
    View.PREFERENCES: _preferences,
    View.DEMONSTRATIONS: _demonstrations,
    View.PROMPTS: _prompts,
}
