"""Tables beside the facts: imports, rows that a reader could not read, withdrawals, tombstones of what was erased."""

from __future__ import annotations

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


def batch_link(related_name: str) -> object:
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


class ProblemRow(models.Model):
    """A decision that a reader of many rows could not read and skipped. One row per decision and reader; it goes away
    when that reader reads the decision again, or the decision is withdrawn or erased."""

    decision = models.UUIDField(help_text="Id of the decision; it may be gone since")
    agent = models.CharField(max_length=64)
    reader = models.CharField(
        max_length=40, help_text="The reader that skipped it: dataset, rewards, export, ..."
    )
    reason = models.CharField(max_length=500, help_text="The error, as a line")
    first_at = models.DateTimeField(default=timezone.now, editable=False)
    last_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-last_at", "-id"]
        indexes = [models.Index(fields=["agent", "reader"], name="problem_by_reader")]
        constraints = [models.UniqueConstraint(fields=["decision", "reader"], name="problem_once_per_reader")]

    def __str__(self) -> str:
        return f"{self.reader}: {str(self.decision)[:8]}"


class Withdrawal(models.Model):
    """Decisions taken out of everything that learns, counts and asks. They stay on record, and can be restored."""

    selection = models.JSONField(
        default=dict, help_text="How they were chosen: ids, batch, agent, unit, since, until, source"
    )
    reason = models.CharField(max_length=500, blank=True)
    actor = models.CharField(max_length=200, help_text="A person, a key, or the command")
    decisions_count = models.PositiveIntegerField(help_text="Decisions withdrawn by it")
    trained_on = models.JSONField(
        default=dict,
        blank=True,
        help_text="Runs, policies, snapshots, ... that had read them: names and numbers",
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    restored_at = models.DateTimeField(null=True, blank=True, editable=False)
    restored_by = models.CharField(max_length=200, blank=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(
                condition=Q(restored_at__isnull=True, restored_by="") | Q(restored_at__isnull=False),
                name="withdrawal_restored_has_time",
            ),
        ]

    def __str__(self) -> str:
        return f"withdrawal {self.pk}: {self.decisions_count} decisions"


class Tombstone(models.Model):
    """A salted hash of something that was erased, by which it is known when a file or a spool brings it back."""

    class Kind(models.TextChoices):
        SALT = "salt"
        DECISION = "decision"
        TRACE = "trace"
        UNIT = "unit"

    kind = models.CharField(max_length=8, choices=Kind)
    digest = models.CharField(
        max_length=64, help_text="HMAC-SHA-256 under this installation's salt; the salt itself"
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(fields=["kind", "digest"], name="tombstone_once"),
            models.UniqueConstraint(fields=["kind"], condition=Q(kind="salt"), name="tombstone_one_salt"),
            models.CheckConstraint(
                condition=Q(kind__in=["salt", "decision", "trace", "unit"]), name="tombstone_kind_known"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.digest[:8]}"
