"""The record of one import: which file, by whom, what it brought, and whether it was taken back."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import Q
from django.utils import timezone


class ImportBatch(models.Model):
    """One file that was imported. Its row stays when the import is undone: what happened is a fact."""

    file = models.CharField(max_length=255, help_text="Name of the file, without its folder")
    sha256 = models.CharField(max_length=64, help_text="Of the file as it was read")
    bytes = models.PositiveBigIntegerField(help_text="Of the file as it was read")
    ratings_file = models.CharField(
        max_length=255, blank=True, help_text="Name of the second file, of formats that have two"
    )
    format = models.CharField(max_length=40)
    agent = models.CharField(
        max_length=64, blank=True, help_text="Whose decisions it brought; empty: several"
    )
    counts = models.JSONField(
        default=dict,
        help_text="rows, rows_stored, already_here, skipped, refused, and rows made: decisions, ratings, ...",
    )
    skipped_because = models.JSONField(default=dict, blank=True, help_text="Rows skipped: {reason: count}")
    refused = models.JSONField(
        default=list, blank=True, help_text="The first refused rows: [{line, key, reason}]"
    )
    notes = models.JSONField(default=list, blank=True, help_text="What the reader of the format wants known")
    licence = models.CharField(
        max_length=200, blank=True, help_text="Licence of the data, where it was stated"
    )
    options = models.JSONField(
        default=dict, blank=True, help_text="How it was read: column map, agent, simulated"
    )
    attached = models.JSONField(
        default=list, blank=True, editable=False, help_text="Ids of earlier decisions that it gave a trace"
    )
    actor = models.CharField(max_length=200, help_text="A person, a key, or the command")
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    undone_at = models.DateTimeField(null=True, blank=True, editable=False)
    undone_by = models.CharField(max_length=200, blank=True)
    undone = models.JSONField(
        default=dict, blank=True, help_text="What was removed and kept, and what had been trained on it"
    )

    class Meta:
        ordering = ["-id"]
        verbose_name_plural = "import batches"
        indexes = [models.Index(fields=["sha256"]), models.Index(fields=["agent", "-id"])]
        constraints = [
            models.CheckConstraint(
                condition=Q(undone_at__isnull=True, undone_by="") | Q(undone_at__isnull=False),
                name="import_undone_has_time",
            ),
        ]

    def __str__(self) -> str:
        return f"import {self.pk}: {self.file}"

    @property
    def is_undone(self) -> bool:
        return self.undone_at is not None


def batch_link(related_name: str) -> Any:
    """Foreign key of a row of feedback to the import that brought it. Each model indexes it for imported rows alone."""
    return models.ForeignKey(
        ImportBatch,
        null=True,
        blank=True,
        editable=False,
        db_index=False,
        on_delete=models.PROTECT,
        related_name=related_name,
        help_text="The import that brought it; empty: it was recorded here",
    )


def batch_index(name: str, *fields: str) -> models.Index:
    """Index of a model's imported rows by their import."""
    return models.Index(fields=["import_batch", *fields], condition=Q(import_batch__isnull=False), name=name)
