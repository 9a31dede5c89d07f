"""Langfuse: scores on traces that stand elsewhere, and traces and observations, of its pages and its blob storage.

A score names a decision by its id or run_id, or as the last one of its trace: import the observations or traces first,
or record the trace's id with the decision. Of observations the generations are decisions; a trace is one where its
input and output are all there is. Bring the observations or the traces of a project, not both: they tell of the same
calls. In exports of the pages every column that is none of theirs and holds a list is a score, whose author and source
are lost: prefer the export of the scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import (
    EMPTY,
    Format,
    each_row,
    holds,
    key_of,
    objects_in,
    row_format,
    rows_in_page,
)
from feedback.transfer.formats.calls import NO_RESPONSE, json_value, text_or_empty
from feedback.transfer.formats.cells import JsonObject, listed
from feedback.transfer.formats.declared import Call, NamedScore, Scores, at, ratings_and_outcomes
from feedback.transfer.formats.files import DiskMultimap
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedRating,
    ImportedReference,
    Record,
    RowError,
    RowLeftOut,
    text_of,
    time_of,
)
from feedback.transfer.formats.writers import Line, View, iso, shape, share_of

TYPES = ("NUMERIC", "BOOLEAN", "CATEGORICAL", "CORRECTION", "TEXT")
CAMEL = {
    "trace_id": "traceId",
    "observation_id": "observationId",
    "session_id": "sessionId",
    "data_type": "dataType",
    "string_value": "stringValue",
}
"""A column of the blob storage's tables -> the name it has in the API and in the exports of the pages."""

_is_table_score = holds("traceId name dataType", "trace_id name data_type string_value")
_is_listed_score = holds("name value")


def _is_score(row: JsonObject) -> bool:
    if isinstance(row.get("data"), list) and "meta" in row:  # a page of the API
        return not row["data"] or any(map(_is_listed_score, rows_in_page(row)))
    return _is_table_score(row)


def _score(row: JsonObject, line: int) -> Iterator[Record]:
    if "data_type" in row:
        row = {CAMEL.get(name, name): value for name, value in row.items()}
    if row.get("dataType") not in TYPES:
        found = value_excerpt(row.get("dataType"))
        raise RowError(f"dataType: expected one of {', '.join(TYPES)}; found {found}")
    if not row.get("traceId") and not row.get("observationId"):
        raise RowLeftOut("a score on a session or an experiment, not on a trace")
    if row.get("value") in (None, "") and row.get("stringValue") in (None, "") and not row.get("comment"):
        raise RowLeftOut("a score without a value")
    name = text_of(row.get("name"), "name", required=True)
    author = row.get("authorUserId") or row.get("authorUserName")
    source = text_of(row.get("source") or "API", "source")
    # scores of different names by one author are different questions, and none supersedes the other
    rater = f"{author if isinstance(author, str) and author else source.lower()}: {name}"
    rating = ImportedRating(
        rater=rater[:200],
        rater_kind="simulated" if source == "EVAL" else "human",
        created_at=time_of(row.get("timestamp"), "timestamp"),
        **{
            "tags": (name[:100],),
            "notes": text_of(row.get("comment") or "", "comment"),
            **_verdict(row, name),
        },
    )
    target = text_of(row.get("observationId") or row.get("traceId"), "traceId", required=True)
    also = (text_of(row.get("traceId") or "", "traceId"),)
    yield ImportedReference(line, key_of(row), target, rating, also=also)


def _verdict(row: JsonObject, name: str) -> dict[str, Any]:
    """What a score says, by its type. Raises RowError."""
    kind, value = row.get("dataType"), number_in(row.get("value"))
    if kind == "NUMERIC":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise RowError(
                f"value: expected a score in [0, 1], found {value_excerpt(value)} of unknown scale"
            )
        return {"score": float(value)}
    if kind == "BOOLEAN":
        if value not in (0, 1):
            raise RowError(f"value: expected 0 or 1, found {value_excerpt(value)}")
        return {"thumb": "up" if value else "down"}
    stated = row.get("stringValue") or (None if kind == "CATEGORICAL" else value)
    text = text_of(stated, "stringValue", required=True)
    if kind == "CATEGORICAL":
        return {"tags": (f"{name}: {text}"[:100],)}
    return {"correction" if kind == "CORRECTION" else "notes": text}


def number_in(value: object) -> object:
    """A number, also where a table holds the text of it; anything else as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


# --- Traces and observations -----------------------------------------------------------------------------------

TRACE = frozenset(
    listed("""id timestamp name userId sessionId release version environment tags bookmarked public input output
    metadata comments createdAt updatedAt projectId htmlPath latency totalCost observations scores
    externalId user_id session_id project_id created_at updated_at""")
)
"""Columns of a trace that are no scores."""

OBSERVATION = frozenset(
    listed("""id traceId projectId environment type startTime endTime name metadata parentObservationId level
    statusMessage version createdAt updatedAt model internalModelId modelParameters input output
    completionStartTime promptId promptName promptVersion latency timeToFirstToken usageDetails costDetails
    inputCost outputCost totalCost inputUsage outputUsage totalUsage traceName traceTags traceTimestamp
    userId sessionId modelId inputPrice outputPrice totalPrice comments usagePricingTierName
    usagePricingTierId toolCalls toolCallNames toolDefinitions usage unit scores""")
)
"""Columns of an observation that are no scores."""

OWN = listed("""bookmarked sessionId userId session_id user_id htmlPath release projectId project_id observations
    externalId public totalCost""")
"""A row with id, timestamp, input, output and one of these columns is a trace."""

OBSERVATION_TYPES = listed("GENERATION SPAN EVENT AGENT TOOL CHAIN RETRIEVER EVALUATOR EMBEDDING GUARDRAIL")

_comments = Scores(
    items="comments",
    name="'comment'",
    notes="content",
    author="author_email || author_name || 'langfuse'",
    scored_at="created_at",
    comments=True,
)
_trace_scores = Scores(
    items="json(scores)[?name]",
    name="name",
    value="not_null(value, stringValue)",
    label="stringValue",
    author="authorUserId || source || 'API'",
    notes="comment",
    scored_at="timestamp",
    simulated="source == 'EVAL'",
)
_SHARED = {"name": "name", "session_id": "sessionId || session_id", "metadata": "json(metadata)"}
_trace_call = Call(
    own="id",
    fields={
        "unit": "userId || user_id",
        "created_at": "timestamp",
        "tags": "tags",
    },
    metadata={"trace_id": "id", **_SHARED},
)
_observation_call = Call(
    request="input",
    answer="output",
    own="id",
    fields={
        "policy": "model || provided_model_name",
        "unit": "userId || user_id",
        "tokens_in": "(json(usageDetails) || json(usage_details) || json(usage)).input",
        "tokens_out": "(json(usageDetails) || json(usage_details) || json(usage)).output",
        "latency_s": "to_number(latency)",
        "created_at": "startTime || start_time",
        "tags": "traceTags",
    },
    metadata={
        "trace_id": "traceId || trace_id",
        **_SHARED,
        "parameters": "json(not_null(modelParameters, model_parameters))",
    },
)


def _is_trace(row: JsonObject) -> bool:
    if isinstance(row.get("data"), list) and "meta" in row:
        return any(map(_is_trace, rows_in_page(row)))
    if not {"id", "input", "output"} <= row.keys():
        return False
    if str(row.get("type")) in OBSERVATION_TYPES:
        return bool({"traceId", "trace_id", "startTime", "start_time"} & row.keys())
    return "timestamp" in row and any(name in row for name in OWN)


def _read_traces(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    # each period of the blob export brings rows that changed since: the latest state of one counts
    latest = DiskMultimap()
    for row, line in objects_in(path):
        if row.get("id"):
            newest = latest.last(str(row["id"]))
            changed = str(row.get("updated_at") or row.get("updatedAt") or "")
            if newest is None or changed >= newest[1]:
                latest.add(str(row["id"]), [line, changed])

    def records(row: JsonObject, line: int) -> Iterator[Record]:
        newest = latest.last(str(row.get("id")))
        if newest is not None and newest[0] != line:
            raise RowLeftOut("an older state of a row that comes again")
        return _observation(row, line) if row.get("type") in OBSERVATION_TYPES else _trace(row, line)

    yield from each_row(path, records, pages=True, own_unit=True)
    if ratings_path is not None:
        yield from LANGFUSE.read(ratings_path, None)


def _trace(row: JsonObject, line: int) -> Iterator[Record]:
    call = row
    if row.get("output") in EMPTY or row.get("input") in EMPTY:
        # the last of the model's calls inside a trace that answered something
        listed = json_value(row.get("observations"))
        answered = [
            one for one in at(listed, "[?type == 'GENERATION']") or [] if one.get("output") not in EMPTY
        ]
        call = max(answered, key=lambda one: str(one.get("startTime")), default=row)
    if call.get("output") in EMPTY:
        raise RowLeftOut(NO_RESPONSE)
    ratings, outcomes = ratings_and_outcomes([*_scores(row, TRACE), *_comments.read(row)])
    policy = text_or_empty(at(call, "model || provided_model_name")) if call is not row else ""
    yield _trace_call.decision(
        row,
        line,
        request=call.get("input"),
        answer=call["output"],
        policy=policy,
        ratings=ratings,
        outcomes=outcomes,
    )


def _observation(row: JsonObject, line: int) -> Iterator[Record]:
    if row.get("type") != "GENERATION":
        raise RowLeftOut(f"an observation of type {row.get('type')!s:.40}: decisions are generations")
    if row.get("output") in EMPTY:
        raise RowLeftOut(NO_RESPONSE)
    said = [*_scores(row, OBSERVATION), *_comments.read(row)] if "traceId" in row else []
    ratings, outcomes = ratings_and_outcomes(said)
    yield _observation_call.decision(row, line, ratings=ratings, outcomes=outcomes)


def _scores(row: JsonObject, columns: frozenset[str]) -> Iterator[NamedScore]:
    """The scores that the API lists, and a rating for each value of each score column; nobody knows whose they are."""
    for score, item in zip(_trace_scores.read(row), at(row, _trace_scores.items) or (), strict=True):
        author, is_truth = score.author, item.get("dataType") == "BOOLEAN"
        yield replace(
            score,
            value=number_in(score.value),
            author=author.lower() if not item.get("authorUserId") else author,
            binary=is_truth,
        )
    if "project_id" in row:  # the tables of the blob storage have no scores
        return
    for name, cell in row.items():
        values = json_value(cell)
        if name in columns or not isinstance(values, list):
            continue
        for number, value in enumerate(values, 1):
            if isinstance(value, (bool, int, float, str)):
                yield NamedScore(name, value, f"langfuse #{number}" if number > 1 else "langfuse")


LANGFUSE_TRACES = Format(
    "langfuse_traces",
    "Langfuse traces and observations",
    _is_trace,
    _read_traces,
    two_files=True,
    ratings_row=_is_score,
    untested_parts="columns of observations exported from the pages are from the program's types",
)

# --- Writing scores ----------------------------------------------------------------------------------------------


def _score_lines(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    """A score for each thing a rating says, on the trace that has the decision's own id."""
    for rating in record.ratings:
        for number, (name, values) in enumerate(_values(rating)):
            yield {
                "id": f"{rating.id}-{name}",
                "traceId": str(record.id),
                "name": name,
                **values,
                "source": "EVAL" if rating.rater_kind == "simulated" else "ANNOTATION",
                "comment": rating.notes if number == 0 and rating.notes else None,
                "authorUserId": rating.rater,
                "timestamp": iso(rating.created_at),
            }


def _values(rating: ImportedRating) -> Iterator[tuple[str, Line]]:
    """(name of the score, its type and value); notes alone are a text, beside a verdict its comment."""
    if rating.thumb:
        up = rating.thumb == "up"
        yield "thumb", {"dataType": "BOOLEAN", "value": int(up), "stringValue": str(up)}
    if (share := share_of(replace(rating, thumb=""))) is not None:
        yield "score", {"dataType": "NUMERIC", "value": share}
    if rating.correction is not None:
        yield "correction", {"dataType": "CORRECTION", "value": 0, "stringValue": rating.correction}
    for tag in rating.tags:
        yield tag, {"dataType": "CATEGORICAL", "value": 1, "stringValue": tag}
    if rating.notes.strip() and not (rating.thumb or share is not None or rating.correction or rating.tags):
        yield "notes", {"dataType": "TEXT", "value": 0, "stringValue": rating.notes}


LANGFUSE = row_format(
    "langfuse",
    "Langfuse scores",
    _is_score,
    _score,
    (shape("langfuse", "scores on traces with the decisions' ids", View.RATED, _score_lines, "array"),),
    verdicts=(),
    pages=True,
)
