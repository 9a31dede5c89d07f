"""LangSmith runs and the feedback on them, also pairwise feedback of comparative experiments.

Of a trace the llm runs are decisions, or its root where none of them answered. Feedback names a run: the decision of
that id, else the last decision of the trace. An annotation queue holds no verdicts and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import Format, decisions_first, has, key_of
from feedback.transfer.formats.calls import (
    answer_of,
    call_decision,
    metadata_retained,
    object_or_empty,
    plain_text,
    text_or_empty,
    whole_of,
)
from feedback.transfer.formats.disk_store import DiskMultimap
from feedback.transfer.formats.files import rows
from feedback.transfer.formats.records import (
    ImportedComparison,
    Record,
    RowError,
    RowRefused,
    RowSkipped,
    number_of,
    tags_of,
    text_of,
    time_of,
    uuid_of,
)
from feedback.transfer.formats.verdicts import NamedScore

MODEL_SOURCES = ("model", "auto_eval")
"""Types of feedback_source whose verdicts a model gave."""

VERDICTS = (
    "correction",
    "feedback_group_id",
    "feedback_source",
    "feedback_stats",
    "feedback_thread_id",
    "score",
)
"""Columns of the format that look like a verdict."""


def recognises(row: Mapping[str, Any]) -> bool:
    if has(row, "run_type", "inputs") and ("dotted_order" in row or "trace_id" in row):
        return True
    return has(row, "run_id", "key", "feedback_source") or _is_queue(row)


def _is_queue(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("queue"), Mapping) and "queue_type" in row["queue"] and "runs" in row


def read(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    model_traces, groups = DiskMultimap(), DiskMultimap()
    for file in filter(None, (path, ratings_path)):
        for item in rows(file):
            row = {} if isinstance(item, RowRefused) or not isinstance(item.value, Mapping) else item.value
            if row.get("run_type") == "llm" and row.get("outputs"):
                model_traces.add(str(row.get("trace_id")))
            elif "feedback_source" in row and row.get("feedback_group_id") is not None:
                groups.add(
                    str(row["feedback_group_id"]), {"line": item.line} | {n: row.get(n) for n in GROUP_KEYS}
                )

    def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
        if _is_queue(row):
            raise RowError(_queue_refusal(row["queue"]))
        if "run_type" in row:
            return _run(row, line, model_traces)
        if row.get("feedback_group_id") is not None:
            return _group(row, line, groups.all(str(row["feedback_group_id"])))
        return _feedback(row, line)

    return decisions_first(path, ratings_path, records, VERDICTS)


def _queue_refusal(queue: Mapping[str, Any]) -> str:
    items = queue.get("rubric_items")
    keys = (
        [str(item.get("feedback_key")) for item in items if isinstance(item, Mapping)]
        if isinstance(items, list)
        else []
    )
    return (
        "an annotation queue holds runs and questions, no verdicts: export the runs (list_runs) and their feedback "
        f"(list_feedback{', keys ' + ', '.join(keys) if keys else ''}) and import those two files"
    )


# --- Runs --------------------------------------------------------------------------------------------------


def _run(row: Mapping[str, Any], line: int, answered: DiskMultimap) -> Iterator[Record]:
    key, kind, trace = key_of(row), row.get("run_type"), text_or_empty(row.get("trace_id"))
    if not row.get("outputs"):
        yield RowSkipped(line, key, f"no response{' (error)' if row.get('error') else ''}")
        return
    if kind != "llm" and (row.get("parent_run_id") is not None or trace in answered):
        yield RowSkipped(
            line, key, f"a run of type {value_excerpt(kind)} in a trace whose decisions are its llm runs"
        )
        return
    extra = object_or_empty(row.get("extra"))
    about = object_or_empty(extra.get("metadata"))
    outputs = row["outputs"] if isinstance(row["outputs"], Mapping) else {}
    inputs = object_or_empty(row.get("inputs"))
    own = text_of(row.get("id"), "id", required=True)
    start, end = (time_of(row.get(name), name) for name in ("start_time", "end_time"))
    yield from call_decision(
        line,
        key,
        row.get("inputs"),
        row["outputs"],
        id=uuid_of(own),
        run_id=own[:200],
        policy=text_or_empty(about.get("ls_model_name") or outputs.get("model") or inputs.get("model")),
        tokens_in=whole_of(row.get("prompt_tokens")),
        tokens_out=whole_of(row.get("completion_tokens")),
        latency_ms=max((end - start).total_seconds() * 1000, 0.0) if start and end else None,
        created_at=start,
        tags=tags_of(row.get("tags"), "tags"),
        metadata=metadata_retained(
            trace_id=trace, name=row.get("name"), reference_example_id=row.get("reference_example_id")
        ),
    )


# --- Feedback ----------------------------------------------------------------------------------------------


def _source(row: Mapping[str, Any]) -> tuple[str, bool]:
    """(who gave the feedback, whether a model did)."""
    source = row.get("feedback_source")
    source = object_or_empty(source)
    kind = str(source.get("type") or "api")
    author = source.get("user_name") or source.get("user_id")
    return (author if isinstance(author, str) else kind), kind in MODEL_SOURCES


def _feedback(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    key = key_of(row)
    if row.get("run_id") is None:
        yield RowSkipped(line, key, "feedback on a project, not on a run")
        return
    author, simulated = _source(row)
    score, value, correction = row.get("score"), row.get("value"), row.get("correction")
    # beside a category's name its number says nothing: the scale stands in a configuration that is not exported
    verdict = score if score is not None and not isinstance(value, str) else value
    yield from NamedScore(
        name=text_of(row.get("key"), "key", required=True),
        value=plain_text(answer_of(verdict, "value")) if isinstance(verdict, Mapping) else verdict,
        author=author,
        simulated=simulated,
        notes=text_of(row.get("comment") or "", "comment"),
        correction=plain_text(answer_of(correction, "correction")) if correction else None,
        scored_at=time_of(row.get("created_at"), "created_at"),
    ).references(line, key, text_of(row["run_id"], "run_id"), text_or_empty(row.get("trace_id")))


GROUP_KEYS = ("id", "run_id", "score")
"""Of feedback in a group: what must be remembered until the rest of the group is read."""


def _group(row: Mapping[str, Any], line: int, group: list[dict[str, Any]]) -> Iterator[Record]:
    """Each two runs of a group compared, said in the row that comes first."""
    first = group[0] if group else {}
    if (first.get("id") or first.get("line")) != (row.get("id") or line):
        return
    key = key_of(row)
    if len(group) < 2:
        yield RowSkipped(line, key, "pairwise feedback on one run: the other half is not in the file")
        return
    author, simulated = _source(row)
    runs = [(uuid_of(item["run_id"]), number_of(_plain_number(item["score"]), "score")) for item in group]
    for index, (left, better) in enumerate(runs):
        for right, worse in runs[index + 1 :]:
            if left is None or right is None:
                raise RowError(
                    f"run_id: expected a UUID, found {value_excerpt([item['run_id'] for item in group])}"
                )
            yield ImportedComparison(
                line=line,
                key=key,
                left=left,
                right=right,
                preference="tie" if better == worse else "left" if better > worse else "right",
                ordered=False,
                rater=author,
                rater_kind="simulated" if simulated else "human",
                tags=(text_of(row.get("key") or "preference", "key")[:100],),
                notes=text_of(row.get("comment") or "", "comment"),
                created_at=time_of(row.get("created_at"), "created_at"),
            )


def _plain_number(score: Any) -> Any:
    return int(score) if isinstance(score, bool) else score


FORMAT = Format("langsmith", "LangSmith runs and feedback", recognises, read, (), two_files=True)
