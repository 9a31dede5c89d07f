"""The clock while its database or its disk is away: it goes on, says so once per interval, and blames no agent."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import InterfaceError, OperationalError

from backend import isolation
from backend.isolation import DatabaseAway, agent_isolated
from rl.jobs import queue_broker, sentinel
from rl.management.commands import online_learner
from rl.online import learner

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
    for module in (online_learner, sentinel):
        module.outage.reset()
        # it would close the connection that holds the test's transaction
        monkeypatch.setattr(module, "close_old_connections", lambda: None)
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


def test_watch_outlives_an_outage_and_says_it_once(
    lost: None, told: list[str], log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks: list[int] = []

    def slept(seconds: float) -> None:
        ticks.append(len(ticks))
        if len(ticks) == 50:
            raise KeyboardInterrupt

    monkeypatch.setattr(learner, "_PARTS", (("reclaim", away),))
    monkeypatch.setattr(online_learner, "time", SimpleNamespace(sleep=slept))
    with pytest.raises(CommandError, match="Ctrl-C"):
        call_command("online_learner", "watch", "--every", "0.5")
    assert len(ticks) == 50
    assert told == []
    (message,) = log.messages
    assert "in 0.5 s" in message
    assert "DatabaseAway: the connection is closed" in message


def test_watch_goes_on_where_its_next_look_cannot_be_noted(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks: list[float] = []

    def slept(seconds: float) -> None:
        ticks.append(seconds)
        if len(ticks) == 3:
            raise KeyboardInterrupt

    def full(seconds: float) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(learner, "tick", list)
    monkeypatch.setattr(learner, "next_check_note", full)
    monkeypatch.setattr(online_learner, "time", SimpleNamespace(sleep=slept))
    with pytest.raises(CommandError, match="Ctrl-C"):
        call_command("online_learner", "watch", "--every", "0.5")
    assert len(ticks) == 3
    assert len(log.records) == 1
    assert "No space left on device" in log.messages[0]


def broken() -> list[str]:
    raise ZeroDivisionError("the gate is broken")


def test_a_fault_that_lasts_is_logged_with_its_traceback_once(
    told: list[str], log: pytest.LogCaptureFixture
) -> None:
    for _ in range(40):
        agent_isolated("retrain", "alpha", broken)
    agent_isolated("retrain", "beta", broken)
    traced = [record for record in log.records if record.exc_info]
    assert [set(record.message.split()) & {"alpha", "beta"} for record in traced] == [{"alpha"}, {"beta"}]
    assert all(record.message.endswith("ZeroDivisionError: the gate is broken") for record in traced)
    assert len(log.records) == 3, "and one line in 60 s that it lasts"
    assert len(told) == 2


def test_where_the_fault_cannot_be_noted_on_disk_the_others_go_on(
    told: list[str], log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    for name in ("write_text", "unlink", "mkdir"):
        monkeypatch.setattr(Path, name, full)
    for _ in range(3):
        (line,) = agent_isolated("retrain", "alpha", broken)
        assert line.endswith("ZeroDivisionError: the gate is broken")
        assert agent_isolated("retrain", "beta", lambda: ["trained"]) == ["trained"]
    assert told == [line], "once, as on a good disk"


def test_the_workers_queue_waits_for_its_database(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django_q.brokers import get_broker

    pauses: list[float] = []
    monkeypatch.setattr(queue_broker, "time", SimpleNamespace(sleep=pauses.append))
    monkeypatch.setattr(queue_broker.ORM, "dequeue", lambda self: away())
    queue_broker.outage.reset()
    broker = get_broker()
    assert [broker.dequeue() for _ in range(30)] == [None] * 30
    assert pauses == [queue_broker.PAUSE_S] * 30
    assert len(log.records) == 1
    assert log.records[0].exc_info is None
    monkeypatch.undo()
    broker.enqueue("a task")
    assert [payload for _, payload in broker.dequeue()] == ["a task"]


def test_nothing_is_scheduled_while_the_database_is_away(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduled: list[str] = []
    monkeypatch.setattr(sentinel, "scheduler", lambda broker: scheduled.append(broker))
    timer = SimpleNamespace(broker="the broker")
    sentinel.SteadySentinel._schedule(timer)
    assert scheduled == ["the broker"]
    monkeypatch.setattr(sentinel, "connection", SimpleNamespace(cursor=away))
    for _ in range(3):
        sentinel.SteadySentinel._schedule(timer)
    assert scheduled == ["the broker"]
    assert len(log.records) == 1
    assert log.records[0].exc_info is None
