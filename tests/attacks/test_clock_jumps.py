"""Jumps of the clock, forwards and back: nothing fails, nothing is stored twice, the later word stands."""

import datetime as datetimes
import json
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from django.utils import timezone

from feedback.models import Decision
from feedback.selectors import ratings_standing
from rl.tasks import tick
from tests.support.api_client import ApiClient, decision_body
from tests.support.campaign_scale import scaled
from tests.support.serving import Parrot, parrot_only, support_bot_allowed, written_by_the_asking_thread  # noqa: F401

JUMPS = (0, 1, -1, 400, -400, 30, -3650, 0)
"""Days from now, one after the other."""
PAGES = (
    "/ /rate/ /rate/pairs/ /decisions/ /runs/ /policies/ /experiments/ /agreement/ /problems/ /imports/"
).split()
ROUNDS = scaled("JUMPS", 1)


class Clock:
    """The wall clock, which can be set; what counts time that passed (`time.monotonic`) goes on, as in the kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offset = timedelta(0)
        clock, real_time = self, time.time

        class Shifted(datetimes.datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return datetimes.datetime.now(tz) + clock.offset

        monkeypatch.setattr(timezone, "datetime", Shifted)
        monkeypatch.setattr(time, "time", lambda: real_time() + clock.offset.total_seconds())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.django_db
def test_nothing_fails_and_nothing_is_lost_whatever_the_clock_says(
    clock: Clock,
    parrot: Parrot,
    written_at_once: None,
    support_bot: None,
    ratchet_home: Path,
    record_property: Callable[[str, object], None],
) -> None:
    api = ApiClient("ingest", "rate", "rate_as", "read", "operate")
    chief = Client(raise_request_exception=False)
    tried, faults, sent = 0, [], {}
    chat = {"model": "support-bot", "messages": [{"role": "user", "content": "hello"}]}
    user = User.objects.create_superuser("ada", password="correct horse battery")
    first = str(uuid.uuid4())

    def told(what: str, response: Any, *statuses: int) -> Any:
        nonlocal tried
        tried += 1
        if response.status_code not in statuses:
            faults.append((what, clock.offset.days, response.status_code, response.content[:200]))
        return response

    for turn in range(ROUNDS):
        for number, days in enumerate(JUMPS):
            clock.offset = timedelta(days=days)
            chief.force_login(user)
            decision, thumb = str(uuid.uuid4()), ("up", "down")[number % 2]
            body = decision_body(id=decision)
            told("record", api.post("/api/decisions/", body), 201)
            told("record again", api.post("/api/decisions/", body), 200, 201)
            if not sent:
                told("record", api.post("/api/decisions/", decision_body(id=first)), 201)
            sent[decision] = thumb
            for pk in (decision, first):
                rating = {"thumb": thumb, "rater": "ann"}
                told("rate", api.post(f"/api/decisions/{pk}/ratings/", rating), 201)
            key = {"Idempotency-Key": f"{turn}-{number}"}
            one = told("chat", api.post("/v1/chat/completions", chat, headers=key), 200)
            two = told("chat again", api.post("/v1/chat/completions", chat, headers=key), 200)
            if json.loads(one.content)["id"] != json.loads(two.content)["id"]:
                faults.append(("chat again", days, "another decision", b""))
            for page in (*PAGES, f"/decisions/{decision}/"):
                told(page, chief.get(page), 200)
            told(
                "sign in",
                Client().post("/accounts/login/", {"username": "ada", "password": "wrong"}),
                200,
                429,
            )
            tick()
            call_command("calculate_rewards", "--all", stdout=(ratchet_home / "out").open("w"))
            # the later word stands, whatever time it bears
            standing = {
                str(pk): thumb
                for pk, thumb in ratings_standing().filter(rater="ann").values_list("decision", "thumb")
            }
            if standing != {**sent, first: thumb}:
                faults.append(("standing", days, 0, str(standing).encode()))
    record_property("tried", tried)
    assert faults == []
    assert Decision.objects.filter(source="gateway").count() == ROUNDS * len(JUMPS)
    times = Decision.objects.order_by("created_at").values_list("created_at", flat=True)
    assert times[len(times) - 1] - times[0] > timedelta(days=4000), "the clock jumped"
