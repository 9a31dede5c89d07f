"""OpenAI eval output items: a sampled response to an item of a data source, and what each grader said of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from feedback.transfer.formats.base import each_item, key_of, row_format
from feedback.transfer.formats.calls import (
    call_decision,
    metadata_retained,
    object_or_empty,
    text_or_empty,
    whole_of,
)
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedOutcome,
    ImportedRating,
    Record,
    RowSkipped,
    list_of,
    mapping_of,
    text_of,
    time_of,
)
from feedback.transfer.formats.verdicts import NamedScore, outcome_name

ITEM = "eval.run.output_item"


def recognises(row: Mapping[str, Any]) -> bool:
    if row.get("object") == "list" and isinstance(row.get("data"), list):
        return any(isinstance(item, Mapping) and item.get("object") == ITEM for item in row["data"])
    return row.get("object") == ITEM


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    if isinstance(row.get("data"), list):
        yield from each_item(line, row["data"], "data", records)
        return
    key, sample = key_of(row), mapping_of(row.get("sample"), "sample")
    if not sample.get("output"):
        yield RowSkipped(line, key, f"no response{' (error)' if sample.get('error') else ''}")
        return
    usage = object_or_empty(sample.get("usage"))
    created_at = time_of(row.get("created_at"), "created_at")
    results = list_of(row.get("results") or [], "results")
    grades = [
        _grade(mapping_of(result, f"results[{i}]"), f"results[{i}]") for i, result in enumerate(results)
    ]
    for record in call_decision(
        line,
        key,
        {"messages": sample.get("input")},
        sample["output"],
        run_id=text_of(row.get("id"), "id", required=True)[:200],
        policy=text_or_empty(sample.get("model")),
        tokens_in=whole_of(usage.get("prompt_tokens")),
        tokens_out=whole_of(usage.get("completion_tokens")),
        created_at=created_at,
        metadata=metadata_retained(
            eval_id=row.get("eval_id"),
            eval_run_id=row.get("run_id"),
            datasource_item=row.get("datasource_item"),
        ),
    ):
        if isinstance(record, ImportedDecision):
            ratings = tuple(
                replace(rating, created_at=created_at) for rating, _ in grades if rating is not None
            )
            outcomes = tuple(replace(outcome, at=created_at) for _, outcome in grades if outcome is not None)
            record = replace(record, ratings=ratings, outcomes=outcomes)
        yield record


def _grade(result: Mapping[str, Any], what: str) -> tuple[ImportedRating | None, ImportedOutcome | None]:
    """A grader's verdict; its score beside it where it is in [0, 1], else as an outcome: each grader has its range."""
    name = text_of(result.get("name") or result.get("type") or "grader", f"{what}.name", required=True)
    score, passed = result.get("score"), result.get("passed")
    rating, outcome = NamedScore(name, passed if passed is not None else score, simulated=True).facts()
    if passed is None or isinstance(score, bool) or not isinstance(score, (int, float)):
        return rating, outcome
    if rating is not None and rating.thumb and 0 <= score <= 1:
        return replace(rating, score=float(score)), outcome
    _, outcome = NamedScore(name, score, binary=False).facts()
    return rating, outcome or ImportedOutcome(outcome_name(name), float(score))


FORMAT = row_format("openai_evals", "OpenAI eval output items", recognises, records, (), verdicts=())
