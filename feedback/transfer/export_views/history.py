"""Export of all feedback in an order in which it can be read back: traces, decisions, comparisons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from django.db import connection
from django.db.models import Q

from feedback.models import Comparison, Decision, Trace
from feedback.storage.sql import rows_in
from feedback.transfer.export_views.copy_stream import decision_texts
from feedback.transfer.export_views.rows import in_chains, pieces, rows_of
from feedback.transfer.export_views.selection import Selection, selected_exports
from feedback.transfer.formats.history import ComparisonRow, DecisionExport, TraceRow


def history(selection: Selection, left_out: Counter[str]) -> Iterator[Any]:
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


def _history_of(told: Iterable[DecisionExport], agent: str | None) -> Iterator[Any]:
    decision_ids: set[str] = set()
    trace_ids: set[str] = set()
    for piece in pieces(told):
        named = {one.decision.trace_id for one in piece if one.decision.trace_id} - trace_ids
        rows = rows_of(
            rows_in(Trace.objects.all(), "id", named), TraceRow._make, TraceRow._fields, stream=False
        )
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
    return rows_of(traces.order_by("created_at", "id"), TraceRow._make, TraceRow._fields)


def _comparison_rows(agent: str | None) -> Iterator[ComparisonRow]:
    """Each after the one it supersedes."""
    comparisons = Comparison.objects.filter(left__withdrawal=None, right__withdrawal=None)
    if agent is not None:
        comparisons = comparisons.filter(left__agent=agent)
    rows = comparisons.order_by("created_at", "id")
    yield from rows_of(rows.filter(supersedes__isnull=True), ComparisonRow._make, ComparisonRow._fields)
    # few people change their mind: these fit into memory
    later = rows.filter(supersedes__isnull=False)
    changed = list(rows_of(later, ComparisonRow._make, ComparisonRow._fields))
    own = {row.id for row in changed}
    yield from in_chains(changed, lambda row: row.supersedes_id not in own)
