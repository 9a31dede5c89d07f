"""Tickets, and the reply suggested for each."""

from __future__ import annotations

from django.db import models


class Ticket(models.Model):
    """A customer's question with the suggested reply, the decision it is, and the clerk's thumb."""

    class Thumb(models.TextChoices):
        UP = "up", "Good"
        DOWN = "down", "Bad"

    customer = models.CharField(max_length=80)
    question = models.TextField()
    suggestion = models.TextField(blank=True)
    decision_id = models.UUIDField(null=True, help_text="Ratchet's id of the suggestion, to rate it by")
    thumb = models.CharField(max_length=4, choices=Thumb.choices, blank=True)

    def __str__(self) -> str:
        return f"{self.customer}: {self.question[:40]}"
