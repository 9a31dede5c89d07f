"""Argilla's distilabel-capybara: pairs and single answers, each with a model's rating from 1 to 5.

The conversations are whole: what both begin with is the prompt. The templated `prompt` of a pair is not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.arena import split_turns
from feedback.transfer.formats.base import has, key_of, row_format
from feedback.transfer.formats.calls import chat_of, metadata_retained, text_or_empty
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    ImportedRating,
    Record,
    RowError,
    RowSkipped,
    completion_of,
)


def recognises(row: Mapping[str, Any]) -> bool:
    if has(row, "chosen", "rejected", "rating_chosen", "rating_rejected"):
        return isinstance(row["chosen"], list)
    turns = row.get("completion")
    if not has(row, "prompt", "label", "rating", "model") or not isinstance(turns, list) or not turns:
        return False
    # of TRL's own rows the completion begins with the response
    return isinstance(turns[0], Mapping) and turns[0].get("role") in ("user", "system")


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    key, metadata = key_of(row), metadata_retained(source=row.get("source"))
    if "chosen" not in row:
        yield _labelled_decision(row, line, metadata)
        return
    chosen, rejected = (chat_of(row.get(side), side) for side in ("chosen", "rejected"))
    prompt, responses = split_turns(chosen, rejected)
    if responses[0] == responses[1]:
        yield RowSkipped(line, key, "chosen and rejected are the same: no preference")
        return
    sides = [
        ImportedDecision(
            line=line,
            key=key,
            messages=prompt,
            response=response,
            policy=text_or_empty(row.get(f"{side}_model")),
            metadata=metadata,
            ratings=_stars(row.get(f"rating_{side}"), f"rating_{side}"),
        )
        for side, response in zip(("chosen", "rejected"), responses, strict=True)
    ]
    # of the decisions in a comparison the words alone are read: their ratings come with records of their own
    yield from (side for side in sides if side.ratings)
    equal = row.get("rating_chosen") is not None and row.get("rating_chosen") == row.get("rating_rejected")
    yield ImportedComparison(
        line=line,
        key=key,
        left=sides[0],
        right=sides[1],
        preference="tie" if equal else "left",
        ordered=False,
        rater_kind="simulated",
    )


def _stars(value: Any, what: str, thumb: str = "") -> tuple[ImportedRating, ...]:
    if value is None:
        return (ImportedRating(thumb=thumb, rater_kind="simulated"),) if thumb else ()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value not in (1, 2, 3, 4, 5):
        raise RowError(f"{what}: expected 1 to 5, found {value_excerpt(value)}")
    return (ImportedRating(thumb=thumb, stars=int(value), rater_kind="simulated"),)


def _labelled_decision(row: Mapping[str, Any], line: int, metadata: dict[str, Any]) -> ImportedDecision:
    """A labelled answer, whose completion repeats the prompt."""
    turns = chat_of(row.get("completion"), "completion")
    last = next((i for i in range(len(turns) - 1, -1, -1) if turns[i]["role"] != "assistant"), -1)
    if last < 0 or last + 1 == len(turns):
        raise RowError("completion: expected the prompt and an answer to it")
    label = row.get("label")
    if not isinstance(label, bool) and label not in (0, 1):
        raise RowError(f"label: expected true or false, found {value_excerpt(label)}")
    return ImportedDecision(
        line=line,
        key=key_of(row),
        messages=turns[: last + 1],
        response=completion_of(turns[last + 1 :], "completion", required=True),
        policy=text_or_empty(row.get("model")),
        metadata=metadata,
        ratings=_stars(row.get("rating"), "rating", "up" if label else "down"),
    )


FORMAT = row_format(
    "capybara",
    "Capybara pairs and labels with ratings",
    recognises,
    records,
    (),
    verdicts=("label", "rating", "rating_chosen", "rating_rejected"),
)
