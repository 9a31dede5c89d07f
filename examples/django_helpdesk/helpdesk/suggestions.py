"""Suggested replies and their ratings: all that the help desk needs of Ratchet."""

from __future__ import annotations

from functools import cache
from typing import Literal

from django.conf import settings

from helpdesk.models import Ticket
from ratchet_client import Client

REPLIES = (
    "Sorry about that! We have refunded the second charge; you will see it within three days.",
    "Your parcel is on its way. I have asked the carrier and will write as soon as I know more.",
    "Please send it back with the label in your account; we refund it when it arrives.",
)
"""Answers the clerks give most; without `candidates` below, the policy writes an answer of its own."""


@cache
def client() -> Client:
    """One client for the whole process: it keeps its connections, and its outbox keeps thumbs while Ratchet is away."""
    return Client(
        settings.RATCHET_AGENT,
        settings.RATCHET_URL,
        settings.RATCHET_KEY,
        settings.HELPDESK_HOME / "outbox",
        timeout_s=settings.RATCHET_TIMEOUT_S,
    )


def suggestion_fetch(ticket: Ticket) -> None:
    """Ask for a reply and keep it with the ticket. Raises RatchetError where there is none to be had."""
    decision = client().decide(ticket.question, candidates=REPLIES, unit=ticket.customer)
    ticket.suggestion, ticket.decision_id = decision.response, decision.id
    ticket.save(update_fields=["suggestion", "decision_id"])


def suggestion_rate(ticket: Ticket, thumb: Literal["up", "down"], clerk: str) -> None:
    """Send the clerk's thumb. It waits in the outbox where Ratchet does not answer, and is sent once."""
    client().rate(str(ticket.decision_id), thumb=thumb, rater=clerk)
    ticket.thumb = thumb
    ticket.save(update_fields=["thumb"])
