"""PandaLM's test set: two answers to an instruction, judged by three annotators (0 tie, 1 first, 2 second)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from feedback.formats.base import has, key_of, row_format
from feedback.formats.records import (
    ImportedComparison,
    ImportedDecision,
    Record,
    RowError,
    shown,
    text_of,
)

VERDICTS = {0: "tie", 1: "left", 2: "right"}


def recognises(row: Mapping[str, Any]) -> bool:
    return has(row, "instruction", "response1", "response2", "annotator1")


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    parts = [text_of(row.get(name) or "", name) for name in ("instruction", "input")]
    prompt = "\n".join(part for part in parts if part)
    if not prompt.strip():
        raise RowError("instruction and input are empty: no prompt to answer")
    key = key_of(row)
    left, right = (
        ImportedDecision(
            line=line,
            key=key,
            messages=[{"role": "user", "content": prompt}],
            response=text_of(row.get(side), side),
        )
        for side in ("response1", "response2")
    )
    for annotator in (name for name in row if name.startswith("annotator")):
        verdict = row[annotator]
        if isinstance(verdict, bool) or not isinstance(verdict, int) or verdict not in VERDICTS:
            raise RowError(f"{annotator}: expected 0, 1 or 2, found {shown(verdict)}")
        yield ImportedComparison(
            line=line,
            key=key,
            left=left,
            right=right,
            preference=VERDICTS[verdict],
            rater=annotator,
        )


FORMAT = row_format("pandalm", "PandaLM pairs with three annotators", recognises, records)
