"""Webhooks of Slack and Open WebUI: signed, fresh and taken once, or nothing is stored."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from django.test import Client
from slack_sdk.signature import SignatureVerifier
from standardwebhooks import Webhook

from backend import limits
from feedback.accounts.authentication import key_create
from feedback.accounts.feedback_tokens import token_sign
from feedback.models import Decision, Rating
from feedback.services import decision_record

pytestmark = pytest.mark.django_db

SLACK_SECRET, WEBUI_SECRET = "8f742231b10e8888abcd99yyyzzz85a5", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
EXPORT = Path(__file__).parent / "formats" / "open_webui_feedback_export.json"


@pytest.fixture(autouse=True)
def secrets(settings: Any) -> None:
    settings.SLACK_SIGNING_SECRET, settings.OPENWEBUI_WEBHOOK_SECRET = SLACK_SECRET, WEBUI_SECRET


@pytest.fixture
def token() -> str:
    return token_sign(decision_record(agent="support-bot", messages="Where?", response="There").row.pk)


def pressed(token: str, thumb: str = "up", **more: Any) -> bytes:
    """A button's request as Slack sends it."""
    action = {"type": "button", "action_id": f"ratchet_{thumb}", "block_id": "x", "value": token}
    payload = {
        "type": "block_actions",
        "user": {"id": "U1", "username": "ada"},
        "team": {},
        "actions": [action],
    }
    return urlencode({"payload": json.dumps(payload | more)}).encode()


def slack(
    body: bytes, *, secret: str = SLACK_SECRET, at: float | None = None, signed: bytes | None = None
) -> Any:
    """The answer to a request signed by Slack's own library. signed: another body than the one sent."""
    sent_at = str(int(at or time.time()))
    signature = SignatureVerifier(secret).generate_signature(timestamp=sent_at, body=signed or body)
    assert signature is not None
    headers = {"X-Slack-Request-Timestamp": sent_at, "X-Slack-Signature": signature}
    kind = "application/x-www-form-urlencoded"
    return Client().post("/api/webhooks/slack/", body, content_type=kind, headers=headers)


def code_of(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_button_in_slack_rates_and_a_later_press_replaces(token: str) -> None:
    assert slack(pressed(token)).json() == {"ratings": 1, "decisions": 0}
    assert slack(pressed(token, "down")).status_code == 200
    rows = Rating.objects.order_by("created_at")
    assert [(row.thumb, row.rater) for row in rows] == [("up", "slack:U1"), ("down", "slack:U1")]
    assert rows[1].supersedes_id == rows[0].pk


def test_slack_requests_that_are_forged_old_or_replayed_store_nothing(token: str) -> None:
    body, now = pressed(token), time.time()
    assert code_of(slack(body, secret="another")) == (403, "signature_invalid")
    assert code_of(slack(body, signed=pressed(token, "down"))) == (403, "signature_invalid")
    assert code_of(slack(body, at=now - 301)) == (403, "signature_expired")
    assert code_of(slack(body, at=now + 900)) == (403, "signature_expired")
    unsigned = Client().post("/api/webhooks/slack/", body, content_type="application/x-www-form-urlencoded")
    assert code_of(unsigned) == (401, "unauthorized")
    assert not Rating.objects.exists()
    assert slack(body, at=now).status_code == 200
    assert code_of(slack(body, at=now)) == (409, "replayed")
    assert Rating.objects.count() == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"payload=%7B", 400),
        (b"", 400),
        (pressed("x"), 403),
        (pressed("x", "sideways"), 400),
        (pressed("x", type="view_submission"), 400),
        (pressed("x", user={}), 400),
        (b"payload=" + b"x" * limits.BODY_BYTES, 413),
    ],
)
def test_slack_requests_that_cannot_be_read_are_refused(body: bytes, status: int, token: str) -> None:
    assert slack(body).status_code == status
    assert not Rating.objects.exists()


def test_a_token_that_expired_is_refused(token: str, settings: Any) -> None:
    settings.FEEDBACK_TOKEN_DAYS = -1
    assert code_of(slack(pressed(token))) == (403, "token_expired")


def webui(body: bytes, *, secret: str = WEBUI_SECRET, age: timedelta = timedelta(), signed: str = "") -> Any:
    sent_at = datetime.now(UTC) - age
    signature = Webhook(secret).sign("msg_1", sent_at, signed or body.decode())
    headers = {"webhook-id": "msg_1", "webhook-timestamp": str(int(sent_at.timestamp()))}
    headers["webhook-signature"] = signature
    return Client().post("/api/webhooks/open-webui/", body, content_type="application/json", headers=headers)


@pytest.mark.parametrize("signature", ["x", "v1", "v1,a", "v1,a,b", "v1,", "v1,é"])
def test_a_header_that_is_no_signature_is_refused(signature: str) -> None:
    headers = {"webhook-id": "1", "webhook-timestamp": str(int(time.time())), "webhook-signature": signature}
    for body in (EXPORT.read_bytes(), b"\xff"):
        answer = Client().post(
            "/api/webhooks/open-webui/", body, content_type="application/json", headers=headers
        )
        assert code_of(answer) == (403, "signature_invalid")
    assert not Rating.objects.exists()


def test_a_key_names_people_of_slack_only_with_rate_as(token: str) -> None:
    kind = "application/x-www-form-urlencoded"
    for scopes, status in ((["rate"], 403), (["rate", "rate_as"], 200)):
        _, key = key_create(f"bot {status}", scopes)
        headers = {"Authorization": f"Bearer {key}"}
        answer = Client().post("/api/webhooks/slack/", pressed(token), content_type=kind, headers=headers)
        assert answer.status_code == status
    assert Rating.objects.get().rater == "slack:U1"


def test_feedback_of_open_webui_is_stored_once() -> None:
    body = EXPORT.read_bytes()
    first = webui(body).json()
    assert first["ratings"] == Rating.objects.count() > 0
    assert first["decisions"] == Decision.objects.count() > 0
    assert webui(json.dumps(json.loads(body)[0]).encode()).json() == {"ratings": 0, "decisions": 0}


def test_feedback_of_open_webui_rates_the_answer_that_the_gateway_recorded() -> None:
    row = json.loads(EXPORT.read_bytes())[0]
    given = decision_record(
        agent="support-bot",
        messages="Where?",
        response="There",
        run_id=row["meta"]["message_id"],
        source="gateway",
    ).row
    for sent, ratings in ((row, 1), (row, 0), (row | {"snapshot": None}, 0)):
        assert webui(json.dumps(sent).encode()).json() == {"ratings": ratings, "decisions": 0}
    assert Rating.objects.get().decision == given


def test_names_of_people_in_a_chat_of_open_webui_are_not_in_its_prompt() -> None:
    row = json.loads(EXPORT.read_bytes())[0]
    person = {"user": {"id": "u1", "name": "Ada"}, "user_id": "u1", "meta": {"task_id": "t"}, "output": [{}]}
    for message in row["snapshot"]["chat"]["chat"]["history"]["messages"].values():
        message |= person  # Open WebUI 0.12 adds these
    webui(json.dumps(row).encode())
    decision = Rating.objects.get().decision
    assert all(set(message) <= {"role", "content"} for message in decision.messages)
    assert "Ada" not in json.dumps(decision.metadata)


def test_feedback_of_open_webui_that_is_forged_old_or_unreadable_stores_nothing() -> None:
    body = EXPORT.read_bytes()
    other = "whsec_" + "A" * 32
    assert code_of(webui(body, secret=other)) == (403, "signature_invalid")
    assert code_of(webui(body, signed="[]")) == (403, "signature_invalid")
    assert code_of(webui(body, age=timedelta(minutes=6))) == (403, "signature_expired")
    unsigned = Client().post("/api/webhooks/open-webui/", body, content_type="application/json")
    assert code_of(unsigned) == (401, "unauthorized")
    assert webui(b"[1]").status_code == 400
    assert webui(b'[{"type": "rating", "data": {"rating": 1}, "meta": {}}]').status_code == 400
    assert not Decision.objects.exists()
    assert not Rating.objects.exists()


@pytest.mark.parametrize("path", ["/api/webhooks/slack/", "/api/webhooks/open-webui/"])
def test_without_a_secret_there_is_no_receiver(path: str, settings: Any) -> None:
    settings.SLACK_SIGNING_SECRET = settings.OPENWEBUI_WEBHOOK_SECRET = ""
    signed = {"X-Slack-Signature": "v0=1", "webhook-signature": "v1,x"}
    answer = Client().post(path, b"{}", content_type="application/json", headers=signed)
    assert code_of(answer) == (403, "forbidden")
