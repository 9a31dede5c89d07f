"""Webhooks that other programs send: Slack's buttons and Open WebUI's feedback.

The signature is the proof of the caller. A request that was sent before, or too long ago, stores nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from django.conf import settings
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from pydantic import ConfigDict, Field
from rest_framework.authentication import BaseAuthentication
from rest_framework.parsers import FormParser
from rest_framework.request import Request
from rest_framework.response import Response
from standardwebhooks import Webhook, WebhookVerificationError

from backend.bodies import Answer, Sent
from backend.rest.access import RATE_AS, Grant
from backend.rest.errors import RequestRefused
from backend.rest.reading import StrictJSONParser, body_read
from backend.rest.schema import describe
from backend.rest.views import ApiView
from feedback.accounts.authentication import KeyHolder
from feedback.accounts.feedback_tokens import token_read
from feedback.api.ratings import rater_of
from feedback.recording.recorder import recorded_or_never
from feedback.selectors import gateway_runs
from feedback.services import rating_submit
from feedback.transfer.formats.base import attempt
from feedback.transfer.formats.chats import OPEN_WEBUI, webui_feedback
from feedback.transfer.formats.declared import at
from feedback.transfer.formats.records import Record
from feedback.transfer.import_ import records_write
from feedback.transfer.import_plans import Origin

TOLERANCE_S = 300
"""Oldest signature that is taken, in seconds."""
NAMESPACE = uuid.UUID("b6a0d1b0-5c0a-4f1e-9a55-0b8f1c2d3e4f")
"""A rating's id is the UUIDv5 of its signature in this namespace: sent again it is known."""


def _refused(code: str, message: str, status: int = 403) -> RequestRefused:
    return RequestRefused(f"{message}: nothing was stored", code=code, status=status)


class _Signed(BaseAuthentication):
    """The caller is whoever knows the secret that the setting names. A request without a signature is left to keys."""

    sender: str
    setting: str
    header: str

    def authenticate(self, request: Request) -> tuple[object, Grant] | None:
        if self.header not in request.headers:
            return None
        secret = getattr(settings, self.setting)
        if not secret:
            raise _refused("forbidden", f"{self.sender} is not set up here: set {self.setting}")
        self.verify(secret, request._request.body, request.headers)
        return KeyHolder(), Grant(
            self.sender, f"webhook:{self.sender}", frozenset({"rate", RATE_AS, "ingest"}), is_person=False
        )

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"

    def verify(self, secret: str, body: bytes, headers: Mapping[str, str]) -> None:
        raise NotImplementedError


class SlackSignature(_Signed):
    sender, setting, header = "slack", "SLACK_SIGNING_SECRET", "X-Slack-Signature"

    def verify(self, secret: str, body: bytes, headers: Mapping[str, str]) -> None:
        """api.slack.com/authentication/verifying-requests-from-slack."""
        sent_at, given = (headers.get(f"X-Slack-{name}", "") for name in ("Request-Timestamp", "Signature"))
        made = hmac.new(secret.encode(), b"v0:" + sent_at.encode() + b":" + body, hashlib.sha256).hexdigest()
        if not hmac.compare_digest(f"v0={made}".encode(), given.encode()):
            raise _refused(
                "signature_invalid", "expected a signature by SLACK_SIGNING_SECRET, found another or none"
            )
        if not sent_at.isdecimal() or abs(time.time() - int(sent_at)) > TOLERANCE_S:
            raise _refused("signature_expired", f"the request was signed more than {TOLERANCE_S} s ago")


class OpenWebuiSignature(_Signed):
    sender, setting, header = "open-webui", "OPENWEBUI_WEBHOOK_SECRET", "webhook-signature"

    def verify(self, secret: str, body: bytes, headers: Mapping[str, str]) -> None:
        try:
            Webhook(secret).verify(body, dict(headers), json_parse=False)
        except ValueError:  # a header of another form, or a body that is no text
            raise _refused("signature_invalid", "expected a signature of Standard Webhooks") from None
        except WebhookVerificationError as fault:
            code = "signature_expired" if "timestamp" in str(fault).lower() else "signature_invalid"
            raise _refused(code, f"expected a signature of Standard Webhooks ({fault})") from None


class SlackScheme(OpenApiAuthenticationExtension):
    target_class = "feedback.api.webhooks.SlackSignature"
    name = "slackSignature"

    def get_security_definition(self, auto_schema: object) -> dict[str, object]:
        return {"type": "apiKey", "in": "header", "name": SlackSignature.header}


class OpenWebuiScheme(OpenApiAuthenticationExtension):
    target_class = "feedback.api.webhooks.OpenWebuiSignature"
    name = "standardWebhooks"

    def get_security_definition(self, auto_schema: object) -> dict[str, object]:
        return {"type": "apiKey", "in": "header", "name": OpenWebuiSignature.header}


class SlackSent(Sent):
    """Part of Slack's payload: what is not read is ignored."""

    model_config = ConfigDict(extra="ignore")


class SlackAction(SlackSent):
    action_id: Literal["ratchet_up", "ratchet_down"]
    value: Annotated[str, Field(max_length=500)]
    """Feedback token of the answer."""


class SlackUser(SlackSent):
    id: Annotated[str, Field(max_length=100)]


class SlackInteraction(SlackSent):
    type: Literal["block_actions"]
    user: SlackUser
    actions: Annotated[list[SlackAction], Field(min_length=1, max_length=1)]


class Rated(Answer):
    ratings: int
    """New ratings."""
    decisions: int
    """New decisions."""


class SlackInteractions(ApiView):
    """A button that was pressed below an answer in Slack rates the answer."""

    scopes = {"POST": "rate"}
    authentication_classes = [SlackSignature, *ApiView.authentication_classes]
    parser_classes = [FormParser, StrictJSONParser]  # JSON: for the refusal of a session without CSRF token

    @describe(
        "Rate from Slack", {200: ("Stored", Rated)}, refusals=(404, 409), tag="ratings", operation="slack"
    )
    def post(self, request: Request) -> Response:
        try:
            payload = json.loads(request._request.POST.get("payload", ""))
        except ValueError:
            raise RequestRefused("payload: expected JSON as Slack sends it") from None
        sent = body_read(SlackInteraction, payload)
        (action,) = sent.actions
        decision = token_read(action.value)
        rater = rater_of(request, {"rater": f"slack:{sent.user.id}"})
        key = uuid.uuid5(NAMESPACE, request.headers.get("X-Slack-Signature") or json.dumps(payload))
        thumb = action.action_id.removeprefix("ratchet_")
        rate = partial(rating_submit, decision=decision, rater=rater, id=key, thumb=thumb)
        if not recorded_or_never(decision, then=rate).created:
            raise _refused("replayed", "this request was taken before", status=409)
        return Response(Rated.of({"ratings": 1, "decisions": 0}))


class OpenWebuiFeedback(ApiView):
    """Feedback as Open WebUI's API gives it, one or a list: the rated answers and their ratings."""

    scopes = {"POST": "ingest"}
    authentication_classes = [OpenWebuiSignature, *ApiView.authentication_classes]
    parser_classes = [StrictJSONParser]

    @describe("Take feedback of Open WebUI", {200: ("Stored", Rated)}, tag="ratings", operation="open_webui")
    def post(self, request: Request) -> Response:
        rows: Any = request.data if isinstance(request.data, list) else [request.data]
        records: list[Record] = []
        if not all(isinstance(row, dict) for row in rows):
            raise RequestRefused("expected feedback of Open WebUI, an object or a list of objects")
        recorded = gateway_runs({str(at(row, "meta.message_id")) for row in rows})
        for line, row in enumerate(rows, 1):
            records += attempt(line, "", partial(webui_feedback, row, line, recorded))
        report = records_write(records, Origin(OPEN_WEBUI.name, None), {}).report
        if report.refused:
            first = report.refused[0]
            raise RequestRefused(f"{first.key or f'row {first.line}'}: {first.reason}")
        return Response(Rated.of(report))
