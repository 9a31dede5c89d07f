"""AlpacaEval: outputs of one model (demonstrations), and an annotator model's preferences between two outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import demonstration, has, key_of, row_format
from feedback.transfer.formats.calls import metadata_retained, text_or_empty
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    Record,
    RowError,
    RowSkipped,
    messages_of,
    number_of,
    text_of,
)


def recognises(row: Mapping[str, Any]) -> bool:
    return has(row, "instruction", "output_1", "output_2", "preference", "generator_1") or has(
        row, "instruction", "output", "generator"
    )


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    key = key_of(row)
    messages = messages_of(text_of(row.get("instruction"), "instruction"), "instruction")
    metadata = metadata_retained(dataset=row.get("dataset"))
    if "output_1" not in row:
        output = text_of(row.get("output"), "output")
        if not output.strip():
            yield RowSkipped(line, key, "no response")
            return
        policy = text_or_empty(row.get("generator"))
        yield demonstration(line, key, messages, output, policy=policy, metadata=metadata)
        return
    preference = row.get("preference")
    if preference is None:
        yield RowSkipped(line, key, "the annotator's words could not be read")
        return
    left, right = (
        ImportedDecision(
            line=line,
            key=key,
            messages=messages,
            response=text_of(row.get(f"output_{side}"), f"output_{side}"),
            policy=text_or_empty(row.get(f"generator_{side}")),
            metadata=metadata,
        )
        for side in "12"
    )
    if left.response == right.response:
        yield RowSkipped(line, key, "both responses are the same: no preference")
        return
    yield ImportedComparison(
        line=line,
        key=key,
        left=left,
        right=right,
        preference=_preference(preference),
        rater=text_or_empty(row.get("annotator")),
        rater_kind="simulated",
    )


def _preference(value: Any) -> str:
    """1 prefers the first output, 2 the second; weighted annotators give fractions, and older files 0 for a draw."""
    number = number_of(value, "preference")
    if number != 0 and not 1 <= number <= 2:
        raise RowError(f"preference: expected 1 to 2, or 0 for a draw, found {value_excerpt(value)}")
    return "tie" if number in (0, 1.5) else "left" if number < 1.5 else "right"


FORMAT = row_format(
    "alpacaeval",
    "AlpacaEval outputs and annotations",
    recognises,
    records,
    (),
    verdicts=("annotator", "preference"),
)
