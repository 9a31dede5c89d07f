"""A database that is away: the clock waits for it in one line, and pages say that it is away to whoever asks."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import InterfaceError, OperationalError, connection
from django.test import Client
from django.urls import get_resolver

from backend import isolation
from backend.isolation import DatabaseAway, agent_isolated
from backend.rest import errors
from rl.management.commands import online_learner
from rl.online import learner
from tests.test_content_security import addresses, inline

pytestmark = pytest.mark.django_db


def away() -> list[str]:
    raise OperationalError("the connection is closed")


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is gone, as psycopg's is once the server has closed it."""
    gone = SimpleNamespace(connection=object(), is_usable=lambda: False, in_atomic_block=True)
    monkeypatch.setattr(isolation, "connection", gone)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notices of the clock."""
    texts: list[str] = []
    monkeypatch.setattr(isolation, "notify", lambda event, text, **facts: texts.append(text))
    return texts


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    monkeypatch.setattr(logging.getLogger("rl"), "propagate", True)
    isolation.quiet()
    online_learner.outage.reset()
    # it would close the connection that holds the test's transaction
    monkeypatch.setattr(online_learner, "close_old_connections", lambda: None)
    yield caplog
    isolation.quiet()


@pytest.mark.parametrize("error", [OperationalError("cut"), InterfaceError("closed")])
def test_a_database_that_is_away_ends_the_tick_and_is_no_agents_fault(
    lost: None,
    told: list[str],
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    parts: list[str] = []

    def part(name: str) -> list[str]:
        parts.append(name)
        raise error

    monkeypatch.setattr(learner, "_PARTS", (("a", lambda: part("a")), ("b", lambda: part("b"))))
    with pytest.raises(DatabaseAway) as refusal:
        learner.tick()
    assert refusal.value.__cause__ is error
    assert (parts, told, log.records) == (["a"], [], [])


def test_a_fault_of_one_statement_stays_its_agents_own(told: list[str]) -> None:
    """SQLite says OperationalError of a statement with too many values, too: the connection works on."""
    (line,) = agent_isolated("retrain", "alpha", away)
    assert "alpha" in line
    assert line.endswith("OperationalError: the connection is closed")
    assert len(told) == 1


def watch(monkeypatch: pytest.MonkeyPatch, ticks: int) -> None:
    """`online_learner watch`, ended by Ctrl-C in the pause after so many ticks, and by nothing before."""
    pauses: list[float] = []

    def slept(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == ticks:
            raise KeyboardInterrupt

    monkeypatch.setattr(online_learner, "time", SimpleNamespace(sleep=slept))
    with pytest.raises(CommandError, match="Ctrl-C"):
        call_command("online_learner", "watch", "--every", "0.5")
    assert len(pauses) == ticks


def test_watch_outlives_an_outage_and_says_it_once(
    lost: None, told: list[str], log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner, "_PARTS", (("reclaim", away),))
    watch(monkeypatch, ticks=50)
    assert told == []
    (message,) = log.messages
    assert "in 0.5 s" in message
    assert "DatabaseAway: the connection is closed" in message


def test_watch_goes_on_without_notes(log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(seconds: float) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(learner, "tick", list)
    monkeypatch.setattr(learner, "next_check_note", full)
    watch(monkeypatch, ticks=3)
    assert len(log.records) == 1
    assert "No space left on device" in log.messages[0]


def broken() -> list[str]:
    raise ZeroDivisionError("the gate is broken")


def test_a_lasting_fault_is_logged_once(told: list[str], log: pytest.LogCaptureFixture) -> None:
    for _ in range(40):
        agent_isolated("retrain", "alpha", broken)
    agent_isolated("retrain", "beta", broken)
    traced = [record for record in log.records if record.exc_info]
    assert [set(record.message.split()) & {"alpha", "beta"} for record in traced] == [{"alpha"}, {"beta"}]
    assert all(record.message.endswith("ZeroDivisionError: the gate is broken") for record in traced)
    assert len(log.records) == 3, "and one line in 60 s that it lasts"
    assert len(told) == 2


def test_full_disk(told: list[str], log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    for name in ("write_text", "unlink", "mkdir"):
        monkeypatch.setattr(Path, name, full)
    for _ in range(3):
        (line,) = agent_isolated("retrain", "alpha", broken)
        assert line.endswith("ZeroDivisionError: the gate is broken")
        assert agent_isolated("retrain", "beta", lambda: ["trained"]) == ["trained"]
    assert told == [line], "once, as on a good disk"


def test_an_outage_is_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from django_q import pusher

    def lost(error: Exception) -> None:
        queue = SimpleNamespace(
            dequeue=away if isinstance(error, OperationalError) else broken, list_key="jobs"
        )
        pusher.pusher(SimpleNamespace(), SimpleNamespace(), queue)

    monkeypatch.setattr(pusher, "sleep", lambda seconds: None)
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            lost(OperationalError())
        assert [(record.name, record.exc_info) for record in caplog.records] == [("backend.outages", None)]
        lost(ZeroDivisionError())
    assert caplog.records[-1].name == "django-q"
    assert caplog.records[-1].exc_info


NO_DATABASE = ("/static/", "/healthz", "/api/docs/", "/api/schema/", "/readyz", "/metrics")
"""Addresses that answer without the database, or say of it themselves."""


@pytest.fixture
def page_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    loggers = [logging.getLogger("backend"), logging.getLogger("django.request")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    errors.outage.reset()
    yield caplog
    for logger in loggers:
        logger.removeHandler(caplog.handler)


def database_away(*_: Any) -> Any:
    raise OperationalError("connection to server at 10.0.0.7 failed: secret-host")


@pytest.mark.slow
def test_pages_are_a_readable_503_logged_once(client: Client, page_log: pytest.LogCaptureFixture) -> None:
    client.force_login(User.objects.create_superuser("ada"))
    client.raise_request_exception = False
    client.get("/decisions/")  # content types and permissions are known from here on, as in a server at work
    page_log.clear()
    statuses: dict[str, int] = {}
    with connection.execute_wrapper(database_away):
        for address in addresses(get_resolver().url_patterns, {"slug": "widgets"}):
            if address.startswith(NO_DATABASE):
                continue
            response = client.get(address)
            statuses[address] = response.status_code
            if response.status_code != 503:
                continue
            text = response.content.decode()
            assert int(response["Retry-After"]) > 0, address
            assert "secret-host" not in text, address
            assert "Traceback" not in text, address
            if not address.startswith(errors.API_PATHS):
                assert "The database cannot be reached" in text, address
                assert inline(text) == [], address
        signing_in = Client(raise_request_exception=False).post(
            "/accounts/login/", {"username": "ada", "password": "correct horse battery"}
        )
    faults = {address: status for address, status in statuses.items() if status >= 500 and status != 503}
    assert faults == {}
    assert {"/", "/rate/", "/decisions/", "/policies/", "/problems/", "/admin/"} <= {
        address for address, status in statuses.items() if status == 503
    }
    assert signing_in.status_code == 503
    errors_logged = [record for record in page_log.records if record.levelno >= logging.ERROR]
    assert len(errors_logged) == 1, page_log.messages
    assert "the database cannot be reached" in errors_logged[0].getMessage()
    assert all(record.exc_info is None for record in page_log.records)


def test_a_fault_of_ours_is_still_a_500_with_its_cause_in_the_log(
    client: Client, page_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("ours")

    monkeypatch.setattr("feedback.explorer.views.problems", broken)
    client.force_login(User.objects.create_superuser("ada"))
    client.raise_request_exception = False
    answer = client.get("/problems/")
    assert (answer.status_code, "ours" in answer.text) == (500, False)
    assert {record.exc_info is not None for record in page_log.records} == {True}
