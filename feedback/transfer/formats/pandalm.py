"""PandaLM's test set: two answers to an instruction, judged by three annotators (0 tie, 1 first, 2 second)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import has, key_of, row_format
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    Record,
    RowError,
    system_in,
    text_of,
    with_system,
)
from feedback.transfer.formats.writers import Line, NotSaid, RowShape, View, question, sides, words

VERDICTS = {0: "tie", 1: "left", 2: "right"}


def recognises(row: Mapping[str, Any]) -> bool:
    return has(row, "instruction", "response1", "response2", "annotator1")


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    parts = [text_of(row.get(name) or "", name) for name in ("instruction", "input")]
    prompt = "\n".join(part for part in parts if part)
    if not prompt.strip():
        raise RowError("instruction and input are empty: no prompt to answer")
    key = key_of(row)
    # two pairs of models may answer in the same words: whose answers they are keeps their votes apart
    pair = text_of(row.get("cmp_key") or "", "cmp_key")
    models = pair.split("_") if pair.count("_") == 1 else ["", ""]
    left, right = (
        ImportedDecision(
            line=line,
            key=key,
            messages=with_system(system_in(row), [{"role": "user", "content": prompt}], "instruction"),
            response=text_of(row.get(side), side),
            policy=model,
            event=pair if pair and not any(models) else None,
        )
        for side, model in zip(("response1", "response2"), models, strict=True)
    )
    for annotator in (name for name in row if name.startswith("annotator")):
        verdict = row[annotator]
        if isinstance(verdict, bool) or not isinstance(verdict, int) or verdict not in VERDICTS:
            raise RowError(f"{annotator}: expected 0, 1 or 2, found {value_excerpt(verdict)}")
        yield ImportedComparison(
            line=line,
            key=key,
            left=left,
            right=right,
            preference=VERDICTS[verdict],
            rater=annotator,
        )


# --- Writing -----------------------------------------------------------------------------------------------


NUMBERS = {verdict: number for number, verdict in VERDICTS.items()}


def _write(records: Iterable[ImportedComparison], left_out: Counter[str]) -> Iterator[Line]:
    """A row for each pair, with an annotator for each of its comparisons."""

    def pair(record: ImportedComparison) -> tuple[Any, ...]:
        left, right = sides(record)
        return left.id, right.id

    number = 0
    for _, same in groupby(records, pair):
        verdicts: list[int] = []
        for record in same:
            left, right = sides(record)
            if record.preference in NUMBERS:
                verdicts.append(NUMBERS[record.preference])
            else:
                left_out[record.preference] += 1
        try:
            row = {
                "idx": number,
                "cmp_key": f"{left.policy}_{right.policy}",
                "instruction": question(left.messages),
                "input": "",
                "response1": words(left.response),
                "response2": words(right.response),
            }
        except NotSaid as reason:
            left_out[str(reason)] += len(verdicts)
            continue
        if verdicts:
            yield row | {f"annotator{n}": verdict for n, verdict in enumerate(verdicts, start=1)}
            number += 1


SHAPES = (RowShape("pandalm", "pairs with their annotators", (View.COMPARISONS,), _write, "array"),)

FORMAT = row_format(
    "pandalm", "PandaLM pairs with three annotators", recognises, records, SHAPES, verdicts=()
)
