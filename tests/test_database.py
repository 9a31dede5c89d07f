"""Connections to PostgreSQL of a process with many threads: a few threads keep theirs."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest

from backend import database


@dataclass
class OpenConnection:
    """As much of Django's connection as is looked at."""

    vendor: str = "postgresql"
    connection: Any = "open"
    in_atomic_block: bool = False
    closed: int = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> OpenConnection:
    """The connection of every thread; one place is free."""
    found = OpenConnection()
    monkeypatch.setattr(database, "connection", found)
    monkeypatch.setattr(database, "_places", threading.BoundedSemaphore(1))
    monkeypatch.setattr(database, "_thread", threading.local())
    return found


def release_in_a_thread() -> None:
    thread = threading.Thread(target=database.connection_release)
    thread.start()
    thread.join()


def test_a_thread_keeps_its_connection_while_there_is_a_place(opened: OpenConnection) -> None:
    for _ in range(3):
        database.connection_release()
    assert opened.closed == 0
    release_in_a_thread()
    assert opened.closed == 1


@pytest.mark.parametrize("state", [{"vendor": "sqlite"}, {"connection": None}, {"in_atomic_block": True}])
def test_what_is_no_open_connection_to_postgresql_is_left_alone(opened: OpenConnection, state: Any) -> None:
    database.connection_release()
    for name, value in state.items():
        setattr(opened, name, value)
    release_in_a_thread()
    assert opened.closed == 0
