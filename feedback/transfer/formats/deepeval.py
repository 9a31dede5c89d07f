"""DeepEval test runs: answers and what each metric said of them, also of the last answer of a conversation.

A metric's direction is its own (of toxicity less is better): its `success` is the thumb, its score an outcome. The
expected output is a golden answer: a demonstration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from feedback.storage.responses import Message
from feedback.transfer.formats.base import demonstration, each_item, has, key_of, row_format
from feedback.transfer.formats.calls import chat_of, metadata_retained, text_or_empty
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedOutcome,
    ImportedRating,
    Record,
    RowSkipped,
    completion_of,
    list_of,
    mapping_of,
    messages_of,
    number_of,
    text_of,
)
from feedback.transfer.formats.verdicts import outcome_name

CASES = ("testCases", "conversationalTestCases")


def recognises(row: Mapping[str, Any]) -> bool:
    if any(isinstance(_run(row).get(name), list) for name in CASES):
        return True
    return has(row, "input", "actualOutput") or has(row, "turns", "metricsData")


def _run(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The test run; the latest one that deepeval keeps stands in an object of its own."""
    inside = row.get("testRunData")
    return inside if isinstance(inside, Mapping) else row


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    row = _run(row)
    if not any(name in row for name in CASES):
        yield from _case(row, line)
    for name in CASES:
        if name in row:
            yield from each_item(line, row[name] or [], name, _case)


def _case(case: Mapping[str, Any], line: int) -> Iterator[Record]:
    key = text_or_empty(case.get("name")) or key_of(case)
    metadata = metadata_retained(
        context=case.get("context"),
        retrieval_context=case.get("retrievalContext"),
        scenario=case.get("scenario"),
    )
    messages: list[Message]
    if "turns" in case:
        turns = chat_of(_sort_turns(case["turns"]), "turns")
        last = next((i for i in range(len(turns) - 1, -1, -1) if turns[i]["role"] == "assistant"), 0)
        if not last:
            yield RowSkipped(line, key, "no response")
            return
        messages, response = turns[:last], completion_of([turns[last]], "turns", required=True)
    else:
        messages = messages_of(text_of(case.get("input"), "input"), "input")
        output = case.get("actualOutput", case.get("actual_output"))
        response = "" if output is None else text_of(output, "actualOutput")
    if not response:
        yield RowSkipped(line, key, "no response")
    else:
        metrics = list_of(case.get("metricsData") or [], "metricsData")
        measurements = [
            _metric(mapping_of(item, f"metricsData[{i}]"), f"metricsData[{i}]")
            for i, item in enumerate(metrics)
        ]
        yield ImportedDecision(
            line=line,
            key=key,
            messages=messages,
            response=response,
            metadata=metadata,
            ratings=tuple(rating for rating, _ in measurements if rating is not None),
            outcomes=tuple(outcome for _, outcome in measurements if outcome is not None),
        )
    expected = case.get("expectedOutput")
    if isinstance(expected, str) and expected.strip() and expected != response:
        golden = text_of(expected, "expectedOutput")
        yield demonstration(line, key, messages, golden, metadata=metadata)


def _sort_turns(turns: Any) -> Any:
    if isinstance(turns, list) and all(
        isinstance(turn, Mapping) and isinstance(turn.get("order"), int) for turn in turns
    ):
        return sorted(turns, key=lambda turn: turn["order"])
    return turns


def _metric(metric: Mapping[str, Any], what: str) -> tuple[ImportedRating | None, ImportedOutcome | None]:
    name = text_of(metric.get("name"), f"{what}.name", required=True)
    success, score = metric.get("success"), metric.get("score")
    judge = text_or_empty(metric.get("evaluationModel"))
    rating = None
    if isinstance(success, bool) and not metric.get("error"):
        rating = ImportedRating(
            rater=(f"{judge}: {name}" if judge else name)[:200],
            rater_kind="simulated",
            thumb="up" if success else "down",
            tags=(name[:100],),
            notes=text_of(metric.get("reason") or "", f"{what}.reason")[:20_000],
        )
    return rating, None if score is None else ImportedOutcome(
        outcome_name(name), number_of(score, f"{what}.score")
    )


FORMAT = row_format(
    "deepeval",
    "DeepEval test runs",
    recognises,
    records,
    (),
    verdicts=("evaluationCost", "metricsScores"),
)
