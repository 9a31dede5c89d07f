"""Comet Opik traces, a file per trace of its export: the last llm span is the decision, else the trace.

Of a score that several people gave, `value` is the mean: each of them is read instead. Scores carry no scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from feedback.transfer.formats.base import has, row_format
from feedback.transfer.formats.calls import (
    call_decision,
    metadata_retained,
    object_or_empty,
    text_or_empty,
    whole_of,
)
from feedback.transfer.formats.records import (
    Record,
    RowSkipped,
    list_of,
    mapping_of,
    tags_of,
    text_of,
    time_of,
    uuid_of,
)
from feedback.transfer.formats.tensorzero import slug
from feedback.transfer.formats.verdicts import NamedScore, ratings_and_outcomes

MODEL_SOURCE = "online_scoring"


def recognises(row: Mapping[str, Any]) -> bool:
    trace = row.get("trace")
    return "spans" in row and isinstance(trace, Mapping) and has(trace, "id", "start_time")


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    trace = mapping_of(row.get("trace"), "trace")
    trace_id = text_of(trace.get("id"), "trace.id", required=True)
    spans = [span for span in list_of(row.get("spans") or [], "spans") if isinstance(span, Mapping)]
    models = [span for span in spans if span.get("type") == "llm" and span.get("output")]
    # the last one by its start, whatever their order in the file
    call = max(models, key=lambda span: str(span.get("start_time"))) if models else trace
    if not call.get("output"):
        yield RowSkipped(line, trace_id, f"no response{' (error)' if trace.get('error_info') else ''}")
        return
    usage = object_or_empty(call.get("usage"))
    start, end = (time_of(call.get(name), name) for name in ("start_time", "end_time"))
    scores = [*_scores(trace, "trace"), *_comments(trace)]
    if call is not trace:
        scores += _scores(call, "span")
    ratings, outcomes = ratings_and_outcomes(scores)
    yield from call_decision(
        line,
        trace_id,
        call.get("input"),
        call["output"],
        agent=slug(text_or_empty(row.get("project_name"))),
        id=uuid_of(trace_id),
        run_id=trace_id[:200],
        unit=text_or_empty(trace.get("thread_id")),
        policy=text_or_empty(call.get("model")),
        tokens_in=whole_of(usage.get("prompt_tokens")),
        tokens_out=whole_of(usage.get("completion_tokens")),
        latency_ms=max((end - start).total_seconds() * 1000, 0.0) if start and end else None,
        created_at=start,
        tags=tags_of(trace.get("tags"), "trace.tags"),
        metadata=metadata_retained(trace_id=trace_id, span_id=None if call is trace else call.get("id")),
        ratings=ratings,
        outcomes=outcomes,
    )


def _scores(owner: Mapping[str, Any], what: str) -> Iterator[NamedScore]:
    for index, item in enumerate(list_of(owner.get("feedback_scores") or [], f"{what}.feedback_scores")):
        score = mapping_of(item, f"{what}.feedback_scores[{index}]")
        name = text_of(score.get("name"), f"{what}.feedback_scores[{index}].name", required=True)
        by_author = score.get("value_by_author")
        if isinstance(by_author, Mapping) and by_author:
            for author, entry in by_author.items():
                yield _score(name, text_or_empty(author), mapping_of(entry, f"value_by_author.{author}"))
        else:
            yield _score(name, text_or_empty(score.get("created_by")), score)


def _score(name: str, author: str, entry: Mapping[str, Any]) -> NamedScore:
    return NamedScore(
        name=name,
        value=entry.get("value"),
        label=entry.get("category_name"),
        author=author,
        simulated=entry.get("source") == MODEL_SOURCE,
        notes=text_of(entry.get("reason") or "", f"{name}.reason")[:20_000],
        scored_at=time_of(entry.get("last_updated_at") or entry.get("created_at"), f"{name}.last_updated_at"),
        binary=False,
    )


def _comments(trace: Mapping[str, Any]) -> Iterator[NamedScore]:
    for index, item in enumerate(list_of(trace.get("comments") or [], "trace.comments")):
        comment = mapping_of(item, f"trace.comments[{index}]")
        if isinstance(comment.get("text"), str) and comment["text"].strip():
            yield NamedScore(
                "comment" if index == 0 else f"comment {index + 1}",
                None,
                text_or_empty(comment.get("created_by")),
                notes=text_of(comment["text"], "comment")[:20_000],
                scored_at=time_of(comment.get("created_at"), "comment.created_at"),
            )


FORMAT = row_format(
    "opik",
    "Opik traces with feedback scores",
    recognises,
    records,
    (),
    verdicts=("feedback_scores", "span_feedback_scores", "comments"),
    untested_parts="keys from the program's own types; no file that Opik wrote was seen",
)
