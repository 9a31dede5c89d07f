"""UltraFeedback as first published: completions of several models to one instruction, each rated by a model.

The fine-grained score (the mean of four aspects, 1 to 5) is the rating; the overall score (1 to 10) was wrong in early
files and is kept as an outcome only. The system prompt of each completion is part of what its model saw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from feedback.storage.responses import Message, value_excerpt
from feedback.transfer.formats.base import each_item, has, key_of, row_format
from feedback.transfer.formats.calls import metadata_retained, text_or_empty
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedOutcome,
    ImportedRating,
    Record,
    RowError,
    RowSkipped,
    list_of,
    text_of,
)

ASPECTS = ("instruction_following", "honesty", "truthfulness", "helpfulness")


def recognises(row: Mapping[str, Any]) -> bool:
    completions = row.get("completions")
    if not isinstance(row.get("instruction"), str) or not isinstance(completions, list):
        return False
    return has(row, "models") or any(
        isinstance(item, Mapping) and "annotations" in item for item in completions
    )


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    instruction = text_of(row.get("instruction"), "instruction", required=True)
    completions = list_of(row.get("completions"), "completions")
    if not completions:
        yield RowSkipped(line, key_of(row), "a prompt without a response is no decision")
    responses = [
        item["response"]
        for item in completions
        if isinstance(item, Mapping) and isinstance(item.get("response"), str)
    ]
    metadata = metadata_retained(
        source=row.get("source"),
        correct_answers=_answers(row.get("correct_answers")),
        incorrect_answers=_answers(row.get("incorrect_answers")),
    )

    def completion(item: Mapping[str, Any], line: int) -> Iterator[Record]:
        system = text_of(item.get("custom_system_prompt") or "", "custom_system_prompt")
        messages: list[Message] = [{"role": "system", "content": system}] if system.strip() else []
        score, overall = (_number(item.get(name)) for name in ("fine-grained_score", "overall_score"))
        aspects = [outcome.value for outcome in _outcomes(item, None)]
        if score is None and aspects:
            score = fmean(aspects)  # what the fine-grained score is made of
        critique = text_of(item.get("critique") or "", "critique")[:20_000]
        if score is not None and not 1 <= score <= 5:
            raise RowError(f"fine-grained_score: expected 1 to 5, found {value_excerpt(score)}")
        rating = ImportedRating(
            rater_kind="simulated", score=None if score is None else (score - 1) / 4, notes=critique
        )
        yield ImportedDecision(
            line=line,
            key=key_of(row),
            messages=[*messages, {"role": "user", "content": instruction}],
            response=text_of(item.get("response"), "response", required=True),
            candidates=responses,
            policy=text_or_empty(item.get("model")),
            metadata=metadata,
            ratings=(rating,) if score is not None or critique.strip() else (),
            outcomes=tuple(_outcomes(item, overall)),
        )

    yield from each_item(line, completions, "completions", completion)


def _outcomes(item: Mapping[str, Any], overall: float | None) -> Iterator[ImportedOutcome]:
    if overall is not None:
        yield ImportedOutcome("overall_score", overall)
    annotations = item.get("annotations")
    for aspect in ASPECTS:
        annotation = annotations.get(aspect) if isinstance(annotations, Mapping) else None
        if isinstance(annotation, Mapping) and (rating := _number(annotation.get("Rating"))) is not None:
            yield ImportedOutcome(aspect, rating)


def _number(value: Any) -> float | None:
    """A number, or the text of one; None where the rater gave none ("N/A")."""
    try:
        number = (
            float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else None
        )
    except (ValueError, OverflowError):
        return None
    return number if number is not None and abs(number) < 1e9 else None


def _answers(value: Any) -> list[str]:
    return (
        [item for item in value if isinstance(item, str) and item != "None"]
        if isinstance(value, list)
        else []
    )


FORMAT = row_format(
    "ultrafeedback",
    "UltraFeedback: rated completions of several models",
    recognises,
    records,
    (),
    verdicts=(),
)
