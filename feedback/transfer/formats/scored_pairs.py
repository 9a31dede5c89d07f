"""Pairs with a score for each side: ultrafeedback_binarized (scores 1 to 10) and Capybara (ratings 1 to 5).

The scores were given by a model. Sides with the same score are a tie: the file sells them as a preference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import has, key_of, row_format, text_only
from feedback.transfer.formats.cells import Cell, number_in
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    ImportedRating,
    Record,
    RowError,
    RowSkipped,
    number_of,
    text_of,
)
from feedback.transfer.formats.trl import preference_parts

SCALES = {"score": (1.0, 10.0), "rating": (1.0, 5.0)}
"""Beginning of the two columns -> lowest and highest value, as the data sets' cards state them."""


def recognises(row: Mapping[str, Any]) -> bool:
    return has(row, "chosen", "rejected") and any(f"{what}_chosen" in row for what in SCALES)


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    text_only(row)
    key = str(row.get("prompt_id") or "")[:200] or key_of(row)
    conversations = isinstance(row.get("chosen"), list) and isinstance(row.get("rejected"), list)
    if conversations and row["chosen"] == row["rejected"]:
        yield RowSkipped(line, key, "chosen and rejected are the same: no preference")
        return
    # beside whole conversations the prompt is a text made with some model's template, or repeats their first turn
    messages, chosen, rejected = preference_parts({**row, "prompt": None} if conversations else row)
    if chosen == rejected:
        yield RowSkipped(line, key, "chosen and rejected are the same: no preference")
        return
    ratings = {side: _rating(row, side) for side in ("chosen", "rejected")}
    left, right = (
        ImportedDecision(
            line=line,
            key=key,
            messages=messages,
            response=response,
            policy=text_of(row.get(f"{side}_model") or "", f"{side}_model"),
            ratings=() if (rating := ratings[side]) is None else (rating,),
        )
        for side, response in (("chosen", chosen), ("rejected", rejected))
    )
    yield from (left, right)
    tie = ratings["chosen"] is not None and ratings["chosen"] == ratings["rejected"]
    yield ImportedComparison(
        line=line,
        key=key,
        left=replace(left, ratings=()),
        right=replace(right, ratings=()),
        preference="tie" if tie else "left",
        ordered=False,
        rater_kind="simulated",
    )


def _rating(row: Mapping[str, Any], side: str) -> ImportedRating | None:
    for scale, (low, high) in SCALES.items():
        value = row.get(f"{scale}_{side}")
        if isinstance(value, Cell):
            value = number_in(value)
        if value is None:
            continue
        number = number_of(value, f"{scale}_{side}")
        if not low <= number <= high:
            raise RowError(
                f"{scale}_{side}: expected {low:g} to {high:g}, found {value_excerpt(value)}; of another scale, "
                f"leave the two out with --map ignore={scale}_chosen+{scale}_rejected"
            )
        if scale == "rating" and number == int(number):
            return ImportedRating(stars=int(number), rater_kind="simulated")
        return ImportedRating(score=(number - low) / (high - low), rater_kind="simulated")
    return None


FORMAT = row_format(
    "scored_pairs",
    "Pairs with a score for each side: ultrafeedback_binarized, Capybara",
    recognises,
    records,
    (),
    verdicts=("chosen", "rejected", "score_chosen", "score_rejected"),
)
