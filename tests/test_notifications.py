"""Webhooks out: signed as Standard Webhooks asks, kept until they are taken, and never sent to a private address."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from standardwebhooks import Webhook, WebhookVerificationError

from backend import notifications
from rl.management.commands.doctor import webhook_faults
from rl.online.learner import tick
from tests.support.stub_openai import ModelServer

pytestmark = pytest.mark.django_db


@pytest.fixture
def receiver(settings: Any, ratchet_home: Path) -> ModelServer:
    stub = ModelServer()
    settings.NOTIFY_WEBHOOK, settings.NOTIFY_PRIVATE = f"http://127.0.0.1:{stub.port}/hook", True
    return stub


def verified(stub: ModelServer, number: int = -1) -> Any:
    raw, headers = stub.requests[number]
    return Webhook(notifications.webhook_secret()).verify(raw, headers)


def test_an_event_is_signed_as_the_standard_says(receiver: ModelServer) -> None:
    assert notifications.notify("run_failed", "run 7 failed", run=7) == ["webhook"]
    event = verified(receiver)
    assert (event["type"], event["text"], event["data"]) == ("run_failed", "run 7 failed", {"run": 7})
    raw, headers = receiver.requests[0]
    for changed in (raw.replace("7", "8"), raw):
        other = headers | ({"webhook-id": "msg_other"} if changed == raw else {})
        with pytest.raises(WebhookVerificationError):
            Webhook(notifications.webhook_secret()).verify(changed, other)
    assert notifications.webhook_outbox().pending_count() == 0


def test_what_failed_is_sent_again_when_due(receiver: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver.statuses = [500, 0]
    assert notifications.notify("run_failed", "run 7 failed") == []
    assert notifications.webhooks_send() == [], "a minute has not passed"
    now = time.time()
    monkeypatch.setattr(notifications.time, "time", lambda: now + 61)
    tick()
    assert notifications.webhook_outbox().pending_count() == 1, "the connection was cut"
    monkeypatch.setattr(notifications.time, "time", lambda: now + 301)
    assert any("taken by NOTIFY_WEBHOOK" in line for line in tick())
    assert len({headers["webhook-id"] for _, headers in receiver.requests}) == 1
    assert notifications.webhook_outbox().pending_count() == 0


def test_after_a_day_it_is_refused_and_can_be_sent_again(
    receiver: ModelServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    receiver.statuses = [503] * len(notifications.RETRY_S)
    now = time.time()
    notifications.notify("run_failed", "run 7 failed")
    for age in notifications.RETRY_S[1:]:
        monkeypatch.setattr(notifications.time, "time", lambda age=age: now + age + 1)
        notifications.webhooks_send()
    assert len(receiver.requests) == len(notifications.RETRY_S)
    assert notifications.webhook_outbox().pending_count() == 0
    (finding,) = webhook_faults()
    assert (finding.part, finding.level, "1 events" in finding.found) == ("webhook", "remark", True)
    monkeypatch.setattr(notifications.time, "time", time.time)
    call_command("webhook", "list", "--json")
    (listed,) = json.loads(capsys.readouterr().out)["refused"]
    assert "503" in listed["reason"]
    call_command("webhook", "replay", "--json")
    assert json.loads(capsys.readouterr().out) == {"sent": 1, "waiting": 0}
    assert verified(receiver)["type"] == "run_failed"
    assert list(webhook_faults()) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.0.0.8", "169.254.169.254", "[::1]"])
def test_a_private_address_gets_nothing(receiver: ModelServer, settings: Any, host: str) -> None:
    settings.NOTIFY_WEBHOOK, settings.NOTIFY_PRIVATE = f"http://{host}:{receiver.port}/", False
    assert notifications.notify("run_failed", "run 7 failed") == []
    assert "private address" in notifications.webhook_fault()
    with pytest.raises(CommandError, match="NOTIFY_PRIVATE"):
        call_command("webhook", "test")
    assert receiver.requests == []
    assert notifications.webhook_outbox().pending_count() == 2


def test_a_redirect_is_not_followed(receiver: ModelServer) -> None:
    receiver.statuses, receiver.headers = [302], {"Location": f"http://127.0.0.1:{receiver.port}/other"}
    assert notifications.notify("run_failed", "run 7 failed") == []
    assert receiver.paths == ["/hook"]


def test_the_secret_and_a_test_by_command(receiver: ModelServer, capsys: pytest.CaptureFixture[str]) -> None:
    call_command("webhook", "secret", "--json")
    assert json.loads(capsys.readouterr().out)["secret"] == notifications.webhook_secret()
    call_command("webhook", "test", "--json")
    assert json.loads(capsys.readouterr().out) == {"sent": 1, "waiting": 0}
    assert verified(receiver)["type"] == "test"
