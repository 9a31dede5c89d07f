"""Nectar: up to seven answers to one conversation, put in order by a model. Each two answers are a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from feedback.transfer.formats.base import has, key_of, row_format
from feedback.transfer.formats.calls import metadata_retained, text_or_empty
from feedback.transfer.formats.hh import LAST, turns_of_text
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    Record,
    RowError,
    RowSkipped,
    list_of,
    mapping_of,
    number_of,
    text_of,
)


def recognises(row: Mapping[str, Any]) -> bool:
    answers = row.get("answers")
    return (
        has(row, "prompt")
        and isinstance(answers, list)
        and bool(answers)
        and isinstance(answers[0], Mapping)
        and has(answers[0], "answer", "rank")
    )


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    key = key_of(row)
    prompt, found, rest = text_of(row.get("prompt"), "prompt").rpartition(LAST)
    if not found or rest.strip():
        raise RowError("prompt: expected it to end with a blank line and 'Assistant:'")
    messages = turns_of_text(prompt)
    metadata = metadata_retained(source=row.get("source"))
    answers_by_rank: list[tuple[float, ImportedDecision]] = []
    for index, item in enumerate(list_of(row.get("answers"), "answers")):
        answer, where = mapping_of(item, f"answers[{index}]"), f"answers[{index}]"
        decision = ImportedDecision(
            line=line,
            key=key,
            messages=messages,
            response=text_of(answer.get("answer"), f"{where}.answer"),
            policy=text_or_empty(answer.get("model")),
            metadata=metadata,
        )
        answers_by_rank.append((number_of(answer.get("rank"), f"{where}.rank"), decision))
    for (first, left), (second, right) in combinations(answers_by_rank, 2):
        if left.response == right.response:
            yield RowSkipped(line, key, "both responses are the same: no preference")
            continue
        yield ImportedComparison(
            line=line,
            key=key,
            left=left,
            right=right,
            # rank 1 is the best
            preference="tie" if first == second else "left" if first < second else "right",
            ordered=False,
            rater_kind="simulated",
        )


FORMAT = row_format("nectar", "Nectar: ranked answers", recognises, records, (), verdicts=("good_natured",))
