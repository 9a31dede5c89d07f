"""`manage.py serve`, before it serves: the port, the database, and who is handed a link."""

from __future__ import annotations

import io
import re
import socket
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import OperationalError
from django.test import Client
from django.utils import timezone

from backend.command import RatchetCommand
from rl.jobs import supervisor
from rl.management.commands.serve import Command


@pytest.mark.django_db
def test_a_port_in_use_is_refused_with_another_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PORT_WAIT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=f"in use.*serve --port {port + 1}"):
            call_command("serve", port=port)


def test_a_port_that_becomes_free_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert supervisor.port_answers("127.0.0.1", port)
    supervisor.port_wait("127.0.0.1", port)
    assert not supervisor.port_answers("127.0.0.1", port)


def greeting(monkeypatch: pytest.MonkeyPatch, host: str = "127.0.0.1", terminal: bool = True) -> str:
    said = io.StringIO()
    monkeypatch.setattr("rl.management.commands.serve.sys.stderr", io.StringIO())
    monkeypatch.setattr("rl.management.commands.serve.sys.stderr.isatty", lambda: terminal, raising=False)
    Command(stderr=said, no_color=True)._greet(host, 8123)
    return said.getvalue()


@pytest.mark.django_db
def test_the_first_person_is_handed_a_link_that_works(
    monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    link = re.search(r"http://localhost:8123(/accounts/link/\S+)", greeting(monkeypatch))
    assert link is not None
    client.post(link[1])
    assert client.session["_auth_user_id"] == str(User.objects.get().pk)


@pytest.mark.django_db
@pytest.mark.parametrize("without", [{"host": "0.0.0.0"}, {"terminal": False}, {"signed_in": True}])
def test_nobody_else_is_handed_a_link(monkeypatch: pytest.MonkeyPatch, without: dict[str, Any]) -> None:
    if without.pop("signed_in", False):
        User.objects.create_user("ada", last_login=timezone.now())
    said = greeting(monkeypatch, **without)
    assert "/accounts/link/" not in said
    assert "login_link --base-url http://localhost:8123" in said


def test_a_database_that_is_down_is_said_in_one_line_with_what_to_do() -> None:
    class Asks(RatchetCommand):
        def work(self, options: dict[str, Any]) -> dict[str, Any]:
            raise OperationalError("connection failed:\nConnection refused")

    with pytest.raises(CommandError) as refusal:
        call_command(Asks())
    assert "\n" not in str(refusal.value)
    assert "correct DATABASE_URL" in str(refusal.value)
