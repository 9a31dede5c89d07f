"""Langfuse traces and observations, as its pages export them and as its blob storage integration writes them.

Of observations the generations are decisions; a trace is one where its input and output are all there is. Bring the
observations or the traces of a project, not both: they tell of the same calls. In exports of the pages every column
that is none of theirs and holds a list is a score, whose author and source are lost: prefer the export of the scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from feedback.transfer.formats import langfuse
from feedback.transfer.formats.base import EMPTY, Format, each_item, each_row, has, key_of
from feedback.transfer.formats.calls import (
    NO_RESPONSE,
    call_decision,
    json_value,
    metadata_retained,
    text_or_empty,
    whole_of,
)
from feedback.transfer.formats.disk_store import DiskMultimap
from feedback.transfer.formats.files import rows
from feedback.transfer.formats.langfuse import number_in
from feedback.transfer.formats.records import (
    Record,
    RowRefused,
    RowSkipped,
    list_of,
    mapping_of,
    number_of,
    tags_of,
    text_of,
    time_of,
)
from feedback.transfer.formats.verdicts import NamedScore, ratings_and_outcomes

TRACE = frozenset(
    """id timestamp name userId sessionId release version environment tags bookmarked public input output metadata
    comments createdAt updatedAt projectId htmlPath latency totalCost observations scores externalId user_id
    session_id project_id created_at updated_at""".split()  # noqa: SIM905
)
"""Columns of a trace that are no scores."""

OBSERVATION = frozenset(
    """id traceId projectId environment type startTime endTime name metadata parentObservationId level
    statusMessage version createdAt updatedAt model internalModelId modelParameters input output
    completionStartTime promptId promptName promptVersion latency timeToFirstToken usageDetails costDetails
    inputCost outputCost totalCost inputUsage outputUsage totalUsage traceName traceTags traceTimestamp
    userId sessionId modelId inputPrice outputPrice totalPrice comments usagePricingTierName
    usagePricingTierId toolCalls toolCallNames toolDefinitions usage unit""".split()  # noqa: SIM905
)
"""Columns of an observation that are no scores."""


OWN = (
    "bookmarked", "sessionId", "userId", "session_id", "user_id", "htmlPath", "release", "projectId", "project_id",
    "observations", "externalId", "public", "totalCost",
)  # fmt: skip
"""A row with id, timestamp, input, output and one of these columns is a trace."""

OBSERVATION_TYPES = (
    "GENERATION", "SPAN", "EVENT", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL",
)  # fmt: skip


def recognises(row: Mapping[str, Any]) -> bool:
    if isinstance(row.get("data"), list) and "meta" in row:  # a page of the API
        return any(isinstance(item, Mapping) and recognises(item) for item in row["data"])
    if has(row, "id", "input", "output", "type") and str(row["type"]) in OBSERVATION_TYPES:
        return any(name in row for name in ("traceId", "trace_id", "startTime", "start_time"))
    return has(row, "id", "timestamp", "input", "output") and any(name in row for name in OWN)


def read(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    # each period of the blob export brings rows that changed since: the latest state of one counts
    latest = DiskMultimap()
    for item in rows(path):
        if not isinstance(item, RowRefused) and isinstance(item.value, Mapping) and item.value.get("id"):
            row = item.value
            newest = latest.last(str(row["id"]))
            changed = str(row.get("updated_at") or row.get("updatedAt") or "")
            if newest is None or changed >= newest[1]:
                latest.add(str(row["id"]), [item.line, changed])

    def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
        if isinstance(row.get("data"), list) and "meta" in row:
            yield from each_item(line, row["data"], "data", records)
            return
        newest = latest.last(str(row.get("id")))
        if newest is not None and newest[0] != line:
            yield RowSkipped(line, key_of(row), "an older state of a row that comes again")
        elif row.get("type") in OBSERVATION_TYPES:
            yield from _observation(row, line)
        else:
            yield from _trace(row, line)

    yield from each_row(path, records)
    if ratings_path is not None:
        yield from langfuse.read(ratings_path, None)


def _trace(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    trace_id = text_of(row.get("id"), "id", required=True)
    call = row
    if row.get("output") in EMPTY or row.get("input") in EMPTY:
        generations = _generations(row.get("observations"))
        call = generations[-1] if generations else row
    if call.get("output") in EMPTY:
        yield RowSkipped(line, trace_id, NO_RESPONSE)
        return
    ratings, outcomes = ratings_and_outcomes([*_scores(row, TRACE), *_comments(row)])
    yield from call_decision(
        line,
        trace_id,
        call.get("input"),
        call["output"],
        run_id=trace_id[:200],
        policy="" if call is row else _model(call),
        unit=text_or_empty(row.get("userId") or row.get("user_id")),
        created_at=time_of(row.get("timestamp"), "timestamp"),
        tags=tags_of(json_value(row.get("tags")) or None, "tags"),
        metadata=metadata_retained(
            trace_id=trace_id,
            name=row.get("name"),
            session_id=row.get("sessionId") or row.get("session_id"),
            metadata=json_value(row.get("metadata")),
        ),
        ratings=ratings,
        outcomes=outcomes,
    )


def _generations(value: Any) -> list[Mapping[str, Any]]:
    """The model's calls inside a trace that answered something, the last one last."""
    listed = json_value(value)
    calls = [item for item in (listed if isinstance(listed, list) else []) if isinstance(item, Mapping)]
    answered = [
        item for item in calls if item.get("type") == "GENERATION" and item.get("output") not in EMPTY
    ]
    return sorted(answered, key=lambda item: str(item.get("startTime")))


def _model(row: Mapping[str, Any]) -> str:
    return text_or_empty(row.get("model") or row.get("provided_model_name"))


def _observation(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    observation_id = text_of(row.get("id"), "id", required=True)
    if row.get("type") != "GENERATION":
        yield RowSkipped(
            line, observation_id, f"an observation of type {row.get('type')!s:.40}: decisions are generations"
        )
        return
    if row.get("output") in EMPTY:
        yield RowSkipped(line, observation_id, NO_RESPONSE)
        return
    usages = (json_value(row.get(name)) for name in ("usageDetails", "usage_details", "usage"))
    usage = next((usage for usage in usages if isinstance(usage, Mapping) and usage), {})
    latency = number_in(row.get("latency"))
    ratings, outcomes = ratings_and_outcomes(
        [*_scores(row, OBSERVATION), *_comments(row)] if "traceId" in row else []
    )
    yield from call_decision(
        line,
        observation_id,
        row.get("input"),
        row["output"],
        run_id=observation_id[:200],
        policy=_model(row),
        unit=text_or_empty(row.get("userId") or row.get("user_id")),
        tokens_in=whole_of(usage.get("input")),
        tokens_out=whole_of(usage.get("output")),
        latency_ms=number_of(latency, "latency") * 1000 if isinstance(latency, (int, float)) else None,
        created_at=time_of(row.get("startTime") or row.get("start_time"), "startTime"),
        tags=tags_of(json_value(row.get("traceTags")) or None, "traceTags"),
        metadata=metadata_retained(
            trace_id=row.get("traceId") or row.get("trace_id"),
            name=row.get("name"),
            session_id=row.get("sessionId") or row.get("session_id"),
            parameters=json_value(row.get("modelParameters", row.get("model_parameters"))),
            metadata=json_value(row.get("metadata")),
        ),
        ratings=ratings,
        outcomes=outcomes,
    )


def _scores(row: Mapping[str, Any], columns: frozenset[str]) -> Iterator[NamedScore]:
    """A rating for each value of each score column; nobody knows whose they are."""
    yield from _named_scores(row.get("scores"))
    if "project_id" in row:  # the tables of the blob storage have no scores
        return
    for name, cell in row.items():
        values = json_value(cell)
        if name in columns or not isinstance(values, list):
            continue
        for number, value in enumerate(values, 1):
            if isinstance(value, (bool, int, float, str)):
                yield NamedScore(name, value, f"langfuse #{number}" if number > 1 else "langfuse")


def _named_scores(value: Any) -> Iterator[NamedScore]:
    """The scores of a trace as the API lists them: objects with a name, a value and who gave it."""
    items = json_value(value)
    for index, item in enumerate(items if isinstance(items, list) else []):
        if not isinstance(item, Mapping) or not isinstance(item.get("name"), str):
            continue
        source = str(item.get("source") or "API")
        label = item.get("stringValue")
        yield NamedScore(
            item["name"],
            number_in(item.get("value")) if item.get("value") is not None else label,
            text_or_empty(item.get("authorUserId")) or source.lower(),
            simulated=source == "EVAL",
            label=label,
            notes=text_of(item.get("comment") or "", f"scores[{index}].comment")[:20_000],
            scored_at=time_of(item.get("timestamp"), f"scores[{index}].timestamp"),
            binary=item.get("dataType") == "BOOLEAN",
        )


def _comments(row: Mapping[str, Any]) -> Iterator[NamedScore]:
    comments = json_value(row.get("comments"))
    for index, item in enumerate(list_of(comments if comments else [], "comments")):
        comment = mapping_of(item, f"comments[{index}]")
        if isinstance(comment.get("content"), str) and comment["content"].strip():
            yield NamedScore(
                "comment" if index == 0 else f"comment {index + 1}",
                None,
                text_or_empty(comment.get("author_email") or comment.get("author_name")) or "langfuse",
                notes=text_of(comment["content"], "comment")[:20_000],
                scored_at=time_of(comment.get("created_at"), f"comments[{index}].created_at"),
            )


FORMAT = Format(
    "langfuse_traces",
    "Langfuse traces and observations",
    recognises,
    read,
    (),
    two_files=True,
    ratings_row=langfuse.recognises,
    untested_parts="columns of observations exported from the pages are from the program's types",
)
