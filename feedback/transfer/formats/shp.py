"""Stanford Human Preferences: two comments on one post, of which one got more votes though it came later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import has, key_of, row_format
from feedback.transfer.formats.calls import metadata_retained
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    Record,
    RowError,
    RowSkipped,
    messages_of,
    text_of,
)

BETTER = {"1": "left", "1.0": "left", "true": "left", "0": "right", "0.0": "right", "false": "right"}
"""`labels`: 1 says that A is the better one, 0 that B is."""


def recognises(row: Mapping[str, Any]) -> bool:
    return has(row, "history", "human_ref_A", "human_ref_B", "labels")


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    key = key_of(row)
    better = BETTER.get(str(row.get("labels")).lower())
    if better is None:
        raise RowError(
            f"labels: expected 1 (A is better) or 0 (B is), found {value_excerpt(row.get('labels'))}"
        )
    # people wrote both: there is no policy, and no single rater either
    left, right = (
        ImportedDecision(
            line=line,
            key=key,
            messages=messages_of(text_of(row.get("history"), "history"), "history"),
            response=text_of(row.get(f"human_ref_{side}"), f"human_ref_{side}", required=True),
            metadata=metadata_retained(post_id=row.get("post_id"), domain=row.get("domain")),
        )
        for side in "AB"
    )
    if left.response == right.response:
        yield RowSkipped(line, key, "both responses are the same: no preference")
        return
    yield ImportedComparison(line=line, key=key, left=left, right=right, preference=better, ordered=False)


FORMAT = row_format(
    "shp",
    "Stanford Human Preferences",
    recognises,
    records,
    (),
    verdicts=("labels", "score_A", "score_B", "score_ratio", "upvote_ratio"),
)
