"""What a file brought: rows made, rows that brought nothing, rows that could not be read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from feedback.formats.records import RowRefused

COUNTS = ("decisions", "ratings", "comparisons", "corrections", "outcomes", "traces", "skipped")


@dataclass
class ImportReport:
    """What a file brought: rows made, rows that brought nothing, rows that could not be read."""

    file: str
    format: str
    decisions: int = 0
    ratings: int = 0
    comparisons: int = 0
    corrections: int = 0
    """Those of the ratings that hold a better response."""
    outcomes: int = 0
    traces: int = 0
    skipped: int = 0
    skipped_because: Counter[str] = field(default_factory=Counter)
    refused: list[RowRefused] = field(default_factory=list)

    def skip(self, reason: str) -> None:
        self.skipped += 1
        self.skipped_because[reason] += 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "format": self.format,
            "decisions": self.decisions,
            "ratings": self.ratings,
            "comparisons": self.comparisons,
            "corrections": self.corrections,
            "outcomes": self.outcomes,
            "traces": self.traces,
            "skipped": self.skipped,
            "skipped_because": dict(self.skipped_because),
            "refused": [{"line": r.line, "key": r.key, "reason": r.reason} for r in self.refused],
        }

    def add(self, other: ImportReport) -> None:
        """What a part of the file brought."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.skipped_because.update(other.skipped_because)
        self.refused += other.refused
