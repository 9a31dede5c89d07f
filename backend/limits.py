"""Limits of all input: bytes, values, depth, fields, rows.

A request passes three checks: its size, then its JSON, then its values. A request that is too large is never parsed.
docs/settings.md lists them; `tests/test_limits.py` tests each limit and one above it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Limit:
    subject: str
    value: int
    unit: str
    consequence: str
    """What happens above the limit."""

    @property
    def text(self) -> str:
        """The value with its unit: 10 MiB, 500,000 values."""
        if self.unit != "bytes":
            return f"{self.value:,} {self.unit}".strip()
        for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
            if self.value >= size and not self.value % size:
                return f"{self.value // size} {name}"
        return f"{self.value:,} bytes"


LIMITS: list[Limit] = []


def _limit(what: str, value: int, unit: str, above: str) -> int:
    LIMITS.append(Limit(what, value, unit, above))
    return value


# --- A request's body -------------------------------------------------------------------------------------
BODY_BYTES = _limit("JSON body of a request", 10 * MIB, "bytes", "413; the rest is not read")
BODY_VALUES = _limit(
    "members and elements in a JSON body, all levels together", 500_000, "values", "413; it is not parsed"
)
FEEDBACK_BYTES = _limit("rating sent with a token", 256 * KIB, "bytes", "413; the rest is not read")
FAULTS_NAMED = _limit("faults listed in one refusal", 20, "fields", "the others are counted")

# --- A decision, a rating, a trace ------------------------------------------------------------------------
TEXT_CHARACTERS = _limit("one text, and one JSON value such as messages", 1_000_000, "characters", "400")
JSON_DEPTH = _limit("nesting of what is stored", 64, "levels", "400")
TAGS = _limit("tags of one decision or rating", 50, "tags", "400")
TAG_CHARACTERS = _limit("one tag", 100, "characters", "400")
BULK_DECISIONS = _limit("decisions in one request", 1_000, "decisions", "400")
CANDIDATES = _limit("candidates of one decision", 1_000, "candidates", "400")

# --- The gateway ------------------------------------------------------------------------------------------
SCHEMA_CHARACTERS = _limit(
    "JSON schema of a `response_format`, or of an agent", 32_768, "characters", "400; it is not checked"
)
TOOLS = _limit("tools of one request", 128, "tools", "400")
STOP_CHARACTERS = _limit("one `stop` text", 1_000, "characters", "400")

# --- Files ------------------------------------------------------------------------------------------------
UPLOAD_BYTES = _limit("file given to the import page", 50 * MIB, "bytes", "refused; the command has no limit")
UPLOAD_ROWS = _limit(
    "rows of a file given to the page or the API", 500_000, "rows", "refused; the command has no limit"
)
UNPACKED_FREE_BYTES = _limit(
    "bytes a compressed file may unpack to whatever its size", MIB, "bytes", "refused"
)
UNPACKED_RATIO = _limit("times its size a compressed file may unpack to above that", 200, "times", "refused")
UNPACKED_BYTES = _limit("bytes a compressed file may unpack to at all", 16 * GIB, "bytes", "refused")
ARCHIVE_FILES = _limit("files in a zip archive", 1_000, "files", "refused")
ROW_CHARACTERS = _limit("one row of a file", 64 * MIB, "bytes", "refused")
ROW_VALUES = _limit("values in one row of a file, nested ones counted", 2_000_000, "values", "refused")
PARQUET_VALUES = _limit(
    "values of one column in a row group of a Parquet file", 50_000_000, "values", "refused"
)
COLUMNS = _limit("different columns of a file", 1_000, "columns", "refused")
REFUSED_ROWS = _limit(
    "refused rows, where they are most of those read", 10_000, "rows", "reading is given up"
)
REFUSED_ROWS_NAMED = _limit("refused rows listed in a report", 1_000, "rows", "the others are counted")
LICENCE_CHARACTERS = _limit("licence of an import", 200, "characters", "400")


# --- Counting ---------------------------------------------------------------------------------------------

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON string; possessive, and one without an end reaches to the end of the text, so that matching is linear."""


def values_in(raw: bytes, most: int) -> int:
    """Members and elements of a JSON text, counted without parsing it: commas and opening brackets outside strings.

    A parsed value takes up to a hundred bytes of memory however short its text is, so the bytes of a text alone bound
    little. Up to `most` the count may be that of commas and brackets within strings, too.
    """
    count = _separators(raw)
    return count if count <= most else _separators(_STRING.sub(b"", raw))


def _separators(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")
