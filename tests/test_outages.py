"""Outages in the log: once per interval, with how often they were met since."""

from __future__ import annotations

import logging

import pytest
from django.db import OperationalError

from backend import logs
from backend.logs import OutageLog
from feedback import cache
from feedback.cache import TTLCache


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    return now


def test_an_outage_is_said_once_per_interval(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    log = OutageLog(logging.getLogger("tests.outages"))
    for _ in range(1000):
        log.report("the database cannot be reached", ValueError("no\nroute"))
    assert len(caplog.records) == 1
    assert caplog.messages[0].startswith("the database cannot be reached: ValueError: no route")
    clock[0] += 61
    log.report("the database cannot be reached")
    assert len(caplog.records) == 2
    assert "(999 more times since the last line)" in caplog.messages[1]


def test_reads_from_what_is_remembered_say_it_once(
    clock: list[float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.outage.reset()
    values: TTLCache[int] = TTLCache()
    assert values.get("a", lambda: 7) == 7

    def away() -> int:
        raise OperationalError("refused")

    logging.getLogger("feedback").addHandler(caplog.handler)
    try:
        for _ in range(50):
            clock[0] += 0.1
            values._kept["a"] = (clock[0] - 30, 7)
            assert values.get("a", away) == 7
    finally:
        logging.getLogger("feedback").removeHandler(caplog.handler)
    assert len(caplog.records) == 1
    assert "using data read 30 s ago" in caplog.messages[0]
