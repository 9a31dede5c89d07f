"""Notifications by webhook and e-mail, if configured. A failure is logged and stops nothing."""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from typing import Any

from django.conf import settings
from django.core.mail import send_mail

logger = logging.getLogger("backend.notifications")

TIMEOUT_S = 5.0


def notify(event: str, text: str, **facts: Any) -> list[str]:
    """Send `{"event", "text", ...facts}` to NOTIFY_WEBHOOK and the text to NOTIFY_EMAIL; returns channels reached."""
    reached = []
    if settings.NOTIFY_WEBHOOK and _post(settings.NOTIFY_WEBHOOK, {"event": event, "text": text, **facts}):
        reached.append("webhook")
    if settings.NOTIFY_EMAIL:
        try:
            send_mail(f"Ratchet: {text.splitlines()[0][:150]}", text, None, settings.NOTIFY_EMAIL)
            reached.append("e-mail")
        except OSError as error:  # smtplib raises OSErrors.
            logger.warning("no e-mail about %s could be sent: %s", event, error)
    return reached


def _post(address: str, body: dict[str, Any]) -> bool:
    request = urllib.request.Request(  # noqa: S310 - the scheme is checked in the settings
        address, json.dumps(body, default=str).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):  # noqa: S310
            return True
    except (OSError, ValueError) as error:
        logger.warning("the webhook refused the notification of %s: %s", body["event"], error)
        return False
