"""Parts of model calls that come in several export requests."""

from __future__ import annotations

from django.db import models
from django.utils import timezone


class CallSpan(models.Model):
    """What came of a model call whose other parts may come later; kept for a while."""

    id = models.UUIDField(primary_key=True, editable=False, help_text="Id of the call's decision")
    facts = models.JSONField(
        default=dict, help_text="Of a span without messages: policy, tokens_in, tokens_out, latency_ms"
    )
    events = models.JSONField(
        default=list, help_text="Log events with a part of the call's messages, as `resourceLogs`; masked"
    )
    at = models.DateTimeField(default=timezone.now, db_index=True)

    class Meta:
        ordering = ["at"]

    def __str__(self) -> str:
        return f"span of decision {str(self.id)[:8]}"
