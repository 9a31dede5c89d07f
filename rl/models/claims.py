"""Ids of decisions that clients choose, held by the request that is answered under them."""

from __future__ import annotations

from django.db import models


class AnswerClaim(models.Model):
    """A request that is answered under an id of its client's choice. It outlives the answer for a while: the decision
    is in the database only a moment later."""

    decision = models.UUIDField(primary_key=True, editable=False)
    request = models.CharField(max_length=64, help_text="Hash of the request")
    attempt = models.UUIDField(help_text="The attempt that answers it")
    until = models.DateTimeField(db_index=True, help_text="Another attempt may answer from then on")

    class Meta:
        ordering = ["until"]

    def __str__(self) -> str:
        return f"{self.decision} until {self.until:%H:%M}"
