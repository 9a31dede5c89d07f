"""Spans of model calls whose messages come apart from them."""

from __future__ import annotations

from django.db import models
from django.utils import timezone


class CallSpan(models.Model):
    """Facts of a model call's span without messages, kept for a while: its log events may come later."""

    id = models.UUIDField(primary_key=True, editable=False, help_text="Id of the call's decision")
    facts = models.JSONField(help_text="policy, tokens_in, tokens_out, latency_ms")
    at = models.DateTimeField(default=timezone.now, db_index=True)

    class Meta:
        ordering = ["at"]

    def __str__(self) -> str:
        return f"span of decision {str(self.id)[:8]}"
