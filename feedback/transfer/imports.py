"""The imports there were: read for the command, the pages and the REST API."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from feedback.models import ImportBatch


def batches(agent: str = "") -> QuerySet[ImportBatch]:
    """Imports, newest first; of one agent alone, or of all."""
    rows = ImportBatch.objects.order_by("-pk")
    return rows.filter(agent=agent) if agent else rows


def batch_get(number: int) -> ImportBatch | None:
    return ImportBatch.objects.filter(pk=number).first()


def import_summary(row: ImportBatch, *, whole: bool = False) -> dict[str, Any]:
    """An import as the command and the API show it; whole: with the refused rows and what an undo came to."""
    summary: dict[str, Any] = {
        "batch": row.pk,
        "file": row.file,
        "ratings_file": row.ratings_file,
        "sha256": row.sha256,
        "bytes": row.bytes,
        "format": row.format,
        "agent": row.agent,
        "licence": row.licence,
        "options": row.options,
        "counts": row.counts,
        "actor": row.actor,
        "created_at": row.created_at,
        "undone_at": row.undone_at,
        "undone_by": row.undone_by,
    }
    if whole:
        summary |= {
            "skipped_because": row.skipped_because,
            "refused": row.refused,
            "notes": row.notes,
            "undone": row.undone,
        }
    return summary


def rows_remaining(row: ImportBatch) -> dict[str, int]:
    """Rows of an import that are in the database now, by kind: without what was forgotten, deleted or undone since."""
    return {
        name: getattr(row, name).count()
        for name in ("decisions", "ratings", "comparisons", "outcomes", "traces")
    }
