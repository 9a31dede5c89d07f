"""What reading a file came to, in numbers and words, and the imports there were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db.models import QuerySet

from backend import limits
from backend.installation import PROGRAM
from feedback.models import ImportBatch
from feedback.transfer.formats.records import RowRefused

COUNTS = ("decisions", "ratings", "comparisons", "corrections", "outcomes", "traces")
"""Rows made in the database."""

ROWS = ("rows", "rows_stored", "already_here", "duplicates", "skipped")
"""Rows of the file: all of them, and what became of each. Duplicates are already here, too."""

REFUSED_KEPT = limits.REFUSED_ROWS_NAMED
"""Refused rows kept with line, key and reason; the others are counted."""


@dataclass(frozen=True)
class EarlierImport:
    """The import that brought the same file before."""

    batch: int
    created_at: datetime


@dataclass
class ImportReport:
    """The outcome of reading one file."""

    file: str
    format: str
    decisions: int = 0
    ratings: int = 0
    comparisons: int = 0
    corrections: int = 0
    """Number of ratings with a better response."""
    outcomes: int = 0
    traces: int = 0
    rows: int = 0
    """Rows read; a row that holds several (a ranking, a trace with its decisions) counts once for each."""
    rows_stored: int = 0
    """Rows of which something was stored."""
    already_here: int = 0
    """Rows of which everything had been stored before, by another import or by an earlier row of the file."""
    duplicates: int = 0
    """Of these, rows that say what another row of the file says."""
    skipped: int = 0
    """Rows that say nothing that is kept."""
    skipped_because: Counter[str] = field(default_factory=Counter)
    refused: list[RowRefused] = field(default_factory=list)
    """The first REFUSED_KEPT rows that cannot be read."""
    refused_count: int = 0
    agents: set[str] = field(default_factory=set)
    """Agents whose decisions were stored."""
    demonstrations: int = 0
    """Number of decisions that show a response to imitate."""
    outcome_names: set[str] = field(default_factory=set)
    """Names of the stored outcomes."""
    notes: tuple[str, ...] = ()
    """Decisions about the file as a whole, such as the scale of its ratings."""
    left_out_columns: dict[str, int] = field(default_factory=dict)
    """Columns that nothing is kept of, and the number of rows in which each holds something."""
    batch: int | None = None
    """The import's number; None where nothing was stored, or in a dry run."""
    earlier: EarlierImport | None = None
    dry_run: bool = False

    def skip(self, reason: str) -> None:
        self.skipped += 1
        self.skipped_because[reason] += 1

    def refuse(self, row: RowRefused) -> None:
        self.refused_count += 1
        if len(self.refused) < REFUSED_KEPT:
            self.refused.append(row)

    def add(self, other: ImportReport) -> None:
        """Add the counts of a part of the file."""
        for name in (*COUNTS, *ROWS):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.skipped_because.update(other.skipped_because)
        self.agents |= other.agents
        self.demonstrations += other.demonstrations
        self.outcome_names |= other.outcome_names
        self.refused += other.refused[: REFUSED_KEPT - len(self.refused)]
        self.refused_count += other.refused_count

    @property
    def stored_rows(self) -> int:
        """Rows made in the database, of all kinds; a correction is a rating and not counted twice."""
        return sum(getattr(self, name) for name in COUNTS if name != "corrections")

    @property
    def agent(self) -> str:
        """Agent whose decisions were stored; empty where these are several agents, or none."""
        return next(iter(self.agents)) if len(self.agents) == 1 else ""

    @property
    def counts(self) -> dict[str, int]:
        return {
            **{name: getattr(self, name) for name in (*ROWS, *COUNTS)},
            "refused": self.refused_count,
        }

    @property
    def problem(self) -> str:
        """Reason why this is no import to be content with; "" where it is one.

        Nothing stored although nothing was here before, or more rows skipped and refused than stored or here before.
        """
        if not (self.stored_rows or self.rows_stored or self.already_here):
            return f"nothing could be stored of {count_text(self.rows, 'rows')}"
        left_out = self.skipped + self.refused_count
        if left_out > self.rows_stored + self.already_here:
            here = f", {self.already_here:,} here already" if self.already_here else ""
            return (
                f"more rows were left out than stored: {left_out:,} of {count_text(self.rows, 'rows')} left "
                f"out, {self.rows_stored:,} stored{here}"
            )
        return ""

    @property
    def headline(self) -> str:
        """Result of the import in one line; a problem stands first."""
        line = ""
        if self.stored_rows or self.rows_stored:
            made = ", ".join(count_text(count, name) for name in COUNTS if (count := getattr(self, name)))
            done = "would be imported" if self.dry_run else "imported"
            number = f" (import {self.batch})" if self.batch else ""
            line = f"{made or 'withdrawals of earlier ratings'} {done}{number}"
            if self.already_here:
                rows = f"{count_text(self.rows, 'rows')}: {self.rows_stored:,} stored"
                left_out = self.skipped + self.refused_count
                line += f"; {rows}, {self.already_here:,} already here"
                line += f", {left_out:,} left out" if left_out else ""
        elif self.already_here:
            before = self.earlier
            which = f" (import {before.batch} of {before.created_at:%Y-%m-%d})" if before else ""
            rows = count_text(self.rows, "rows")
            here = f"all {rows}" if self.already_here == self.rows else f"{self.already_here:,} of {rows}"
            line = f"nothing new: {here} {'was' if self.already_here == 1 else 'were'} here already{which}"
        return "; ".join(filter(None, (self.problem, line)))

    def as_dict(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "format": self.format,
            "batch": self.batch,
            **{name: getattr(self, name) for name in (*COUNTS, *ROWS)},
            "skipped_because": dict(self.skipped_because),
            "refused": [refused_row_summary(row) for row in self.refused],
            "refused_count": self.refused_count,
            "problem": self.problem,
            "notes": list(self.notes),
            "left_out_columns": self.left_out_columns,
            "earlier_import": self.earlier.batch if self.earlier else None,
            "agents": sorted(self.agents),
        }


COLUMNS_NAMED = 30
"""Columns named in the sentence about what was left out; `left_out_columns` has all."""


def left_out_note(columns: Mapping[str, int]) -> str:
    """The sentence that names the columns nothing is kept of."""
    named = [f"{name} ({count_text(rows, 'rows')})" for name, rows in list(columns.items())[:COLUMNS_NAMED]]
    return f"left out: {', '.join(named)}{', ...' if len(columns) > COLUMNS_NAMED else ''}"


def refused_row_summary(row: RowRefused) -> dict[str, object]:
    return {"line": row.line, "key": row.key, "reason": row.reason}


def next_steps(report: ImportReport) -> list[str]:
    """Recommended actions after an import: rate, train, or look at why nothing came in."""
    if not report.stored_rows and not report.rows_stored:
        if report.already_here:
            return []
        if report.refused_count:
            return ["Correct the refused rows and import the file again; nothing is imported twice"]
        return [
            "docs/formats.md describes the rows of each format; give --format NAME, or map columns with --map"
            " prompt=COLUMN,response=COLUMN,rating=COLUMN"
        ]
    agent = report.agent or next(iter(sorted(report.agents)), "")
    of_agent = f"?agent={agent}" if agent else ""
    steps = []
    if report.dry_run:
        return ["Import it: the same command without --dry-run"]
    verdict_count = report.ratings or report.comparisons
    if report.outcomes and not verdict_count and agent:
        unknown = sorted(report.outcome_names - {"reward"})  # an outcome of that name is its own worth
        option = f" --outcome {unknown[0]}=GOOD:BAD" if unknown else ""
        what = f"Define the reward of {unknown[0]}" if unknown else "Turn outcomes into rewards"
        steps.append(f"{what}: {PROGRAM} calculate_rewards --agent {agent}{option}")
    if report.decisions and not (verdict_count or report.outcomes or report.demonstrations):
        steps.append(f"Rate them: /rate/{of_agent}")
    method = _method(report)
    if method and agent:
        steps.append(f"See what can be trained: {PROGRAM} {method} --agent {agent} --dry-run")
    if report.batch and report.problem:
        steps.append(f"Undo it: {PROGRAM} undo_import {report.batch}")
    return steps


def _method(report: ImportReport) -> str:
    """The training command that what was stored is for."""
    if report.comparisons:
        return "train_dpo"
    if report.corrections and 2 * report.corrections >= report.ratings:
        return "train_sft"  # as `auto` takes it: at least as many answers were written as liked
    if report.ratings:
        return "train_kto"
    return "train_sft" if report.demonstrations else ""


def total_of(reports: Iterable[ImportReport]) -> dict[str, object]:
    """One object over all files: counts added up, and each file on its own."""
    reports = list(reports)
    files = [report.as_dict() for report in reports]
    kinds = {report.format for report in reports}
    return {
        "format": kinds.pop() if len(kinds) == 1 else "several",
        "batch": files[0]["batch"] if len(files) == 1 else None,
        **{name: sum(file[name] for file in files) for name in (*COUNTS, *ROWS, "refused_count")},
        "refused": [row for file in files for row in file["refused"]],
        "notes": [note for file in files for note in file["notes"]],
        "left_out_columns": dict(sum((Counter(file["left_out_columns"]) for file in files), Counter())),
        "files": files,
    }


def count_text(count: int, name: str) -> str:
    """A count with its noun, which is given in the plural: `1 decision`, `1,200 ratings`."""
    return f"{count:,} {name.removesuffix('s') if count == 1 else name}"


# --- The imports there were --------------------------------------------------------------------------------


def batches(agent: str = "") -> QuerySet[ImportBatch]:
    """Imports, newest first; of one agent alone, or of all."""
    rows = ImportBatch.objects.order_by("-pk")
    return rows.filter(agent=agent) if agent else rows


def batch_get(number: int) -> ImportBatch | None:
    return ImportBatch.objects.filter(pk=number).first()


def rows_remaining(row: ImportBatch) -> dict[str, int]:
    """Rows of an import that are in the database now, by kind: without what was forgotten, deleted or undone since."""
    return {
        name: getattr(row, name).count()
        for name in ("decisions", "ratings", "comparisons", "outcomes", "traces")
    }
