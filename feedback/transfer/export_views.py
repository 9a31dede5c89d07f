"""Views of what was said, as the formats ask for it, over a selection of decisions; read piece by piece."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import groupby, islice
from statistics import fmean
from typing import Any, NamedTuple

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Q
from django.utils.module_loading import import_string

from feedback.models import Comparison, Decision, Trace
from feedback.selectors import comparisons_standing, ratings_standing
from feedback.storage.facts import COMPARISON, DECISION, OUTCOME, RATING, Body, rating_share
from feedback.storage.problem_rows import RowReader
from feedback.storage.responses import completion_read
from feedback.storage.sql import rows_in
from feedback.transfer.export_rows import (
    FETCH,
    decision_exports,
    decision_texts,
    in_chains,
    only_standing,
    pieces,
    rows_of,
    with_feedback,
)
from feedback.transfer.formats.base import DEMONSTRATION
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    ImportedOutcome,
    ImportedRating,
)
from feedback.transfer.formats.writers import (
    ComparisonRow,
    DecisionExport,
    DecisionRow,
    RatingRow,
    TraceRow,
    View,
)

# --- Selection ---------------------------------------------------------------------------------------------

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
    return rows_of(rows.order_by(*order), DecisionRow)


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


# --- Everything, in an order in which it can be read back --------------------------------------------------


def history(selection: Selection, left_out: Counter[str]) -> Iterator[object]:
    """Traces, decisions, comparisons; of a narrowed selection the traces and comparisons of its decisions alone."""
    if selection.narrows or selection.decisions is not None:
        yield from _history_of(selected_exports(selection, left_out), selection.agent)
        return
    yield from _trace_rows(selection.agent)
    if connection.vendor == "postgresql":
        yield from decision_texts(selection.agent)
    else:
        yield from selected_exports(selection, left_out)
    yield from _comparison_rows(selection.agent)


def _history_of(told: Iterable[DecisionExport], agent: str | None) -> Iterator[object]:
    decision_ids: set[str] = set()
    trace_ids: set[str] = set()
    for piece in pieces(told):
        named = {one.decision.trace_id for one in piece if one.decision.trace_id} - trace_ids
        rows = rows_of(rows_in(Trace.objects.all(), "id", named), TraceRow, stream=False)
        traces = {row.id: row for row in rows}
        for one in piece:
            trace = one.decision.trace_id
            decision_ids.add(one.decision.id)
            if trace and trace not in trace_ids:
                trace_ids.add(trace)
                yield traces[trace]
            yield one
    for comparison in _comparison_rows(agent):
        if comparison.left_id in decision_ids and comparison.right_id in decision_ids:
            yield comparison


def _trace_rows(agent: str | None) -> Iterator[TraceRow]:
    # a decision may have been taken in another agent's trace: what it names must be there
    traces = Trace.objects.all()
    if agent is not None:
        traces = traces.filter(
            Q(agent=agent) | Q(pk__in=Decision.objects.filter(agent=agent).values("trace"))
        )
    return rows_of(traces.order_by("created_at", "id"), TraceRow)


def _comparison_rows(agent: str | None) -> Iterator[ComparisonRow]:
    """Each after the one it supersedes."""
    comparisons = Comparison.objects.filter(left__withdrawal=None, right__withdrawal=None)
    if agent is not None:
        comparisons = comparisons.filter(left__agent=agent)
    rows = comparisons.order_by("created_at", "id")
    yield from rows_of(rows.filter(supersedes__isnull=True), ComparisonRow)
    # few people change their mind: these fit into memory
    later = rows.filter(supersedes__isnull=False)
    changed = list(rows_of(later, ComparisonRow))
    own = {row.id for row in changed}
    yield from in_chains(changed, lambda row: row.supersedes_id not in own)


# --- Views of decisions and comparisons --------------------------------------------------------------------


def records(view: View, selection: Selection, left_out: Counter[str]) -> Generator[object]:
    """Records of a view (`transfer.formats.records`), or of View.HISTORY its rows (`transfer.formats.history`).

    What the selection narrows away is counted in left_out, and MORE set where it asks for less than there is.
    """
    yield from _VIEWS[view](selection, left_out)


def _decisions(selection: Selection, left_out: Counter[str]) -> Iterator[ImportedDecision]:
    for export in selected_exports(selection, left_out):
        with selection.reader.row(export.decision.id, export.decision.agent):
            yield _record(export)


def _decisions_with_ratings(selection: Selection, left_out: Counter[str]) -> Iterator[ImportedDecision]:
    return (decision for decision in _decisions(selection, left_out) if decision.ratings)


def _record(told: DecisionExport) -> ImportedDecision:
    row = told.decision
    facts = facts_of(row, DECISION)
    facts["response"] = completion_read(row.response, facts["metadata"])
    facts["metadata"].pop("response_is", None)
    return ImportedDecision(
        line=0,
        key=row.id,
        id=uuid.UUID(row.id),
        **facts,
        created_at=_time(row.created_at),
        trace=None if row.trace_id is None else uuid.UUID(row.trace_id),
        ratings=tuple(
            ImportedRating(
                **facts_of(rating, RATING), created_at=_time(rating.created_at), id=uuid.UUID(rating.id)
            )
            for rating in only_standing(told.ratings)
        ),
        outcomes=tuple(
            ImportedOutcome(
                **facts_of(outcome, OUTCOME), created_at=_time(outcome.created_at), id=uuid.UUID(outcome.id)
            )
            for outcome in told.outcomes
        ),
    )


def facts_of(row: object, body: Body) -> dict[str, Any]:
    """The declared fields of a row, its JSON and times no longer as texts."""
    facts = body.read(row)
    for one in body.encoded:
        if (text := facts[one.name]) is not None:
            facts[one.name] = _time(text) if one.kind is datetime else json.loads(text)
        if one.kind is tuple:
            facts[one.name] = tuple(facts[one.name])
    return facts


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _by_id(told: Iterable[DecisionExport], selection: Selection) -> dict[str, ImportedDecision]:
    found: dict[str, ImportedDecision] = {}
    for one in told:
        with selection.reader.row(one.decision.id, one.decision.agent):
            found[one.decision.id] = _record(one)
    return found


class _Pair(NamedTuple):
    left: str
    right: str
    comparison: ComparisonRow | None
    """None: the left one is better by what raters said of each."""


def _comparisons_with_decisions(
    pairs: Iterable[_Pair], selection: Selection, left_out: Counter[str]
) -> Iterator[ImportedComparison]:
    """Comparisons with their decisions; those left out whose better side has too small a reward."""
    floor = selection.min_reward > RAW_LOW
    for piece in pieces(pairs):
        exports = decision_exports((side for pair in piece for side in (pair.left, pair.right)), said=floor)
        decisions, rewards = _by_id(exports, selection), raw_rewards(exports) if floor else {}
        for pair in piece:
            if not decisions.keys() >= {pair.left, pair.right}:
                continue  # skipped as unreadable
            preference = pair.comparison.preference if pair.comparison else "left"
            better = pair.right if preference == "right" else pair.left
            if floor and rewards.get(better, RAW_LOW - 1) < selection.min_reward:
                left_out["below_min_reward"] += 1
                continue
            left, right = decisions[pair.left], decisions[pair.right]
            if pair.comparison is None:
                yield ImportedComparison(
                    0, f"{pair.left}~{pair.right}", left, right, preference="left", ordered=False
                )
            else:
                yield ImportedComparison(
                    line=0,
                    key=pair.comparison.id,
                    left=left,
                    right=right,
                    **facts_of(pair.comparison, COMPARISON),
                    created_at=_time(pair.comparison.created_at),
                    id=uuid.UUID(pair.comparison.id),
                )


def _comparisons(selection: Selection, left_out: Counter[str]) -> Iterator[ImportedComparison]:
    order = ("left_id", "right_id", "created_at", "id")
    return _comparisons_with_decisions(_pairs_by_comparison(selection, order), selection, left_out)


def _pairs_by_comparison(selection: Selection, order: Sequence[str]) -> Iterator[_Pair]:
    rows = comparisons_standing(selection.agent).order_by(*order)
    for row in rows_of(rows, ComparisonRow):
        yield _Pair(row.left_id, row.right_id, row)


def _preferences(selection: Selection, left_out: Counter[str]) -> Iterator[ImportedComparison]:
    order = ("-created_at", "-id") if selection.newest_first else ("created_at", "id")
    yield from _comparisons_with_decisions(_pairs_by_comparison(selection, order), selection, left_out)
    yield from _correction_pairs(selection, order)
    yield from _comparisons_with_decisions(_best_and_worst(selection), selection, left_out)


def _correction_pairs(selection: Selection, order: Sequence[str]) -> Iterator[ImportedComparison]:
    """A correction over what it corrects."""
    corrections = ratings_standing(selection.agent).filter(correction__isnull=False).order_by(*order)
    for piece in pieces(rows_of(corrections, RatingRow)):
        decisions = _by_id(decision_exports((rating.decision_id for rating in piece), said=False), selection)
        for rating in piece:
            assert rating.correction is not None
            worse = decisions.get(rating.decision_id)
            if worse is None:
                continue  # skipped as unreadable
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
    ratings = (
        ratings_standing(selection.agent)
        .order_by("decision__agent", "decision__prompt_hash", "decision_id")
        .values_list("decision__agent", "decision__prompt_hash", "decision_id", "thumb", "stars", "score")
    )
    for _, verdicts in groupby(ratings.iterator(chunk_size=FETCH), lambda row: row[:2]):
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
    rows = Decision.objects.filter(withdrawal=None)
    if selection.agent is not None:
        rows = rows.filter(agent=selection.agent)
    keys = rows.order_by("agent", "prompt_hash", "id").values_list("agent", "prompt_hash", "id")
    first = (str(next(same)[2]) for _, same in groupby(keys.iterator(chunk_size=FETCH), lambda row: row[:2]))
    for piece in pieces(first):
        decisions = _by_id(decision_exports(piece, said=False), selection)
        yield from (decisions[pk] for pk in piece if pk in decisions)


_VIEWS: dict[View, Callable[[Selection, Counter[str]], Iterator[object]]] = {
    View.HISTORY: history,
    View.DECISIONS: _decisions,
    View.RATED: _decisions_with_ratings,
    View.COMPARISONS: _comparisons,
    View.PREFERENCES: _preferences,
    View.DEMONSTRATIONS: _demonstrations,
    View.PROMPTS: _prompts,
}
