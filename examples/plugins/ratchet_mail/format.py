"""Format `mails`: mails, the drafts of a model, and what became of each draft: sent, rewritten or thrown away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from feedback.transfer.formats.base import row_format
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedRating,
    Record,
    RowError,
    text_of,
)
from feedback.transfer.formats.writers import (
    Line,
    RowShape,
    View,
    each_rating,
    good,
    question,
    words,
    writer_by_record,
)

COLUMNS = ("mail", "draft", "fate")
FATES = ("sent", "rewritten", "thrown away")


def recognises(row: Mapping[str, Any]) -> bool:
    """True if a row has our columns. Rows of every other format come by here too."""
    return all(name in row for name in COLUMNS)


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    """A decision for each row, with the rating that its fate stands for."""
    fate = row["fate"]
    if fate not in FATES:
        raise RowError(f"fate: expected one of {', '.join(FATES)}; found {fate!r}")
    rewritten = text_of(row.get("rewrite") or "", "rewrite")
    if (fate == "rewritten") != bool(rewritten):
        raise RowError("rewrite: expected a text where the fate is rewritten, and there alone")
    rating = ImportedRating(
        rater=text_of(row.get("by") or "", "by"),
        thumb="up" if fate == "sent" else "down",
        correction=rewritten or None,
    )
    yield ImportedDecision(
        line=line,
        key=text_of(row.get("number") or "", "number"),
        messages=[{"role": "user", "content": text_of(row["mail"], "mail")}],
        response=text_of(row["draft"], "draft"),
        ratings=(rating,),
    )


def rows(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    """A row for each rating; what the format has no words for is counted by its reason."""
    mail, draft = question(record.messages), words(record.response)

    def row(rating: ImportedRating) -> Line:
        fate = "rewritten" if rating.correction else "sent" if good(rating) else "thrown away"
        return {
            "mail": mail,
            "draft": draft,
            "fate": fate,
            "rewrite": rating.correction or "",
            "by": rating.rater,
        }

    yield from each_rating(record, left_out, row)


FORMAT = row_format(
    "mails",
    "Mails with drafts and their fate",
    recognises,
    records,
    (RowShape("mails", "a row for each draft that was judged", (View.RATED,), writer_by_record(rows)),),
)
