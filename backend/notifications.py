"""Notifications by webhook and e-mail, if configured. A failure is logged and stops nothing.

Webhooks follow Standard Webhooks (standardwebhooks.com): signed, with an id that stays the same however often one is
sent. An event is stored in an outbox first and deleted once the receiver has taken it.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import logging
import socket
import time
import urllib.error
import urllib.request
import uuid
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from django.conf import settings
from django.core.mail import send_mail
from django.utils.crypto import salted_hmac
from standardwebhooks import Webhook

from ratchet_client.outbox import Outbox, Record
from ratchet_client.problem_log import ProblemLog

logger = logging.getLogger("backend.notifications")

TIMEOUT_S = 5.0
RETRY_S = (30.0, 60.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 86400.0)
"""Age of an event in seconds at each try of the scheduler: the process that stored it sends it at once. After the last
try it is refused and waits for `webhook replay`."""
AT_ONCE = 50
"""Most events sent in one go."""


def notify(event: str, text: str, **facts: object) -> list[str]:
    """Tell NOTIFY_WEBHOOK and NOTIFY_EMAIL of an event; returns the channels reached at once.

    The webhook gets `{"type", "timestamp", "text", "data": facts}`.
    """
    reached = []
    if settings.NOTIFY_WEBHOOK:
        key, stamp = f"msg_{uuid.uuid4().hex}", datetime.now(UTC).isoformat()
        body = {"type": event, "timestamp": stamp, "text": text, "data": facts}
        webhook_outbox().put({"id": key, "body": json.dumps(body, default=str)}, key=key)
        if key in webhooks_send(only=key):
            reached.append("webhook")
    if settings.NOTIFY_EMAIL:
        try:
            send_mail(f"Ratchet: {text.splitlines()[0][:150]}", text, None, settings.NOTIFY_EMAIL)
            reached.append("e-mail")
        except OSError as error:  # smtplib raises OSErrors.
            logger.warning("no e-mail about %s could be sent: %s", event, error)
    return reached


def webhook_outbox() -> Outbox:
    """Events that NOTIFY_WEBHOOK has not taken."""
    return _outbox(settings.RATCHET_HOME / "spool" / "webhooks")


@cache
def _outbox(folder: Path) -> Outbox:
    return Outbox(folder, ProblemLog(logger))


def webhook_secret() -> str:
    """The secret with which receivers check signatures. A new SECRET_KEY gives a new one."""
    key = salted_hmac("backend.notifications", "webhooks", algorithm="sha256").digest()
    return f"whsec_{base64.b64encode(key).decode()}"


def webhooks_send(*, only: str = "") -> list[str]:
    """Send the events that are due, or the one with this id; returns the ids that were taken."""
    outbox, sent = webhook_outbox(), []
    if not settings.NOTIFY_WEBHOOK:
        return []
    for record in outbox.pending(AT_ONCE):
        key, tries = record.body["id"], record.tries
        if key != only if only else time.time() - record.put_at < RETRY_S[min(tries, len(RETRY_S) - 1)]:
            continue
        fault = webhook_fault() or _post(record)
        if not fault:
            outbox.settle([record.number])
            sent.append(key)
            continue
        logger.warning("NOTIFY_WEBHOOK did not take %s: %s", key, fault)
        if tries + 1 >= len(RETRY_S):
            outbox.refuse(record.number, fault)
        else:
            outbox.defer(record.number)
    return sent


def webhook_fault() -> str:
    """Why nothing is sent to NOTIFY_WEBHOOK; empty if it is. Private addresses need NOTIFY_PRIVATE."""
    parts = urlsplit(settings.NOTIFY_WEBHOOK)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        return f"{parts.hostname} is not found: {error}"
    addresses = sorted({str(one[4][0]).partition("%")[0] for one in found})
    private = [one for one in addresses if not ipaddress.ip_address(one).is_global]
    if private and not settings.NOTIFY_PRIVATE:
        return (
            f"{parts.hostname} is the private address {private[0]}; set NOTIFY_PRIVATE=true if that is meant"
        )
    return ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could lead to a private address, so it counts as a refusal."""

    def redirect_request(self, *_: object) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)


def _post(record: Record) -> str:
    """Send an event; returns why it was not taken."""
    key, body, now = record.body["id"], record.body["body"], datetime.now(UTC)
    headers = {
        "Content-Type": "application/json",
        "webhook-id": key,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(webhook_secret()).sign(key, now, body),
    }
    request = urllib.request.Request(  # noqa: S310 - the scheme is checked in the settings
        settings.NOTIFY_WEBHOOK, body.encode(), headers
    )
    try:
        with _opener.open(request, timeout=TIMEOUT_S):
            return ""
    except (OSError, ValueError) as error:
        return str(error)
