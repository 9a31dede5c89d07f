"""NVIDIA HelpSteer: ratings of five attributes (0 to 4), ratings of each rater, and preferences from -3 to 3.

HelpSteer and HelpSteer2 ratings, HelpSteer2 disagreements and preferences, HelpSteer3 preferences. Raters have no
names, and their order in a list names nobody across rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from feedback.storage.responses import Message, value_excerpt
from feedback.transfer.formats.base import NO_RATING, has, key_of, row_format
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    ImportedOutcome,
    ImportedRating,
    Record,
    RowError,
    RowSkipped,
    list_of,
    mapping_of,
    messages_of,
    number_of,
    text_of,
)

ATTRIBUTES = ("correctness", "coherence", "complexity", "verbosity")
"""Attributes beside helpfulness, which is the score: stored as outcomes, because more of them is not always
better."""

TURN = re.compile(r"\n<extra_id_1>(User|Assistant)\n")
NEITHER = -100
"""Strength of a preference that says that neither response is valid."""


def recognises(row: Mapping[str, Any]) -> bool:
    return (
        has(row, "prompt", "response", "helpfulness", "verbosity")
        or has(row, "response_1", "response_2", "preference_strength")
        or has(row, "response1", "response2", "overall_preference")
    )


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    if "helpfulness" in row and row["helpfulness"] is None:
        yield RowSkipped(line, key_of(row), NO_RATING)
    elif "helpfulness" in row:
        yield _rated_decision(row, line)
    elif "overall_preference" in row:
        votes = [
            (vote.get("score"), vote.get("reasoning"))
            for vote in _objects(row.get("individual_preference"), "individual_preference")
        ]
        yield from _comparison_records(
            row,
            line,
            messages_of(row.get("context"), "context"),
            ("response1", "response2"),
            votes or [(row["overall_preference"], "")],
        )
    else:
        votes = [
            (vote.get("strength"), vote.get("justification"))
            for vote in _objects(row.get("all_preferences_unprocessed"), "all_preferences_unprocessed")
        ]
        # the three most similar ones are among all of them: reading both would count votes twice
        yield from _comparison_records(
            row,
            line,
            turns_of_text(row.get("prompt"), "prompt"),
            ("response_1", "response_2"),
            votes or [(row.get("preference_strength"), row.get("preference_statement"))],
        )


def _objects(value: Any, what: str) -> list[Mapping[str, Any]]:
    items = list_of(value if value is not None else [], what)
    return [mapping_of(item, f"{what}[{index}]") for index, item in enumerate(items)]


def turns_of_text(value: Any, what: str) -> list[Message]:
    """A prompt of one text, whose later turns begin with a line `<extra_id_1>User` or `<extra_id_1>Assistant`."""
    first, *rest = TURN.split(text_of(value, what, required=True))
    turns: list[Message] = [{"role": "user", "content": first}]
    for speaker, text in zip(rest[::2], rest[1::2], strict=True):
        turns.append({"role": speaker.lower(), "content": text})
    return turns


def _rated_decision(row: Mapping[str, Any], line: int) -> ImportedDecision:
    helpful = row["helpfulness"]
    scores = (
        [_share(item, f"helpfulness[{i}]") for i, item in enumerate(helpful)]
        if isinstance(helpful, list)
        else [_share(helpful, "helpfulness")]
    )
    if not scores:
        raise RowError("helpfulness: expected at least one number, found none")
    return ImportedDecision(
        line=line,
        key=key_of(row),
        messages=turns_of_text(row.get("prompt"), "prompt"),
        response=text_of(row.get("response"), "response", required=True),
        ratings=tuple(ImportedRating(score=score, tags=("helpfulness",)) for score in scores),
        outcomes=tuple(
            ImportedOutcome(name, fmean(values))
            for name in ATTRIBUTES
            if (values := _numbers(row.get(name), name))
        ),
    )


def _share(value: Any, what: str) -> float:
    number = number_of(value, what)
    if not 0 <= number <= 4:
        raise RowError(f"{what}: expected 0 to 4, found {value_excerpt(value)}")
    return number / 4


def _numbers(value: Any, what: str) -> list[float]:
    items = value if isinstance(value, list) else [] if value is None else [value]
    return [number_of(item, what) for item in items]


def _comparison_records(
    row: Mapping[str, Any],
    line: int,
    messages: list[Message],
    sides: tuple[str, str],
    votes: list[tuple[Any, Any]],
) -> Iterator[Record]:
    """A comparison for each vote; below 0 the first response is better."""
    key = key_of(row)
    left, right = (
        ImportedDecision(line=line, key=key, messages=messages, response=text_of(row.get(side), side))
        for side in sides
    )
    if left.response == right.response:
        yield RowSkipped(line, key, "both responses are the same: no preference")
        return
    for strength, reason in votes:
        if strength is None:
            yield RowSkipped(line, key, "a vote without a strength")
            continue
        number = number_of(strength, "strength")
        if number != NEITHER and not -3 <= number <= 3:
            raise RowError(
                f"strength: expected -3 to 3, or {NEITHER} for neither, found {value_excerpt(strength)}"
            )
        yield ImportedComparison(
            line=line,
            key=key,
            left=left,
            right=right,
            preference=_preference(number),
            tags=(f"strength {abs(number):g}",) if number not in (0, NEITHER) else (),
            notes=text_of(reason or "", "reason")[:20_000],
        )


def _preference(strength: float) -> str:
    if strength == NEITHER:
        return "both_bad"
    return "left" if strength < 0 else "right" if strength > 0 else "tie"


VERDICTS = (
    "overall_preference", "individual_preference", "preference_strength", "preference_statement",
    "preference_elaboration",
)  # fmt: skip
"""Columns of the format that look like a verdict."""

FORMAT = row_format(
    "helpsteer",
    "HelpSteer 1 and 2 ratings, HelpSteer 2 and 3 preferences",
    recognises,
    records,
    (),
    verdicts=VERDICTS,
)
