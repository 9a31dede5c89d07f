"""Pages while the database is away: a page that can be read, never a trace, and one line of log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import OperationalError, connection
from django.test import Client
from django.urls import get_resolver

from backend.rest import errors
from tests.test_content_security import addresses, inline

pytestmark = pytest.mark.django_db

NO_DATABASE = ("/static/", "/healthz", "/api/docs/", "/api/schema/", "/readyz", "/metrics")
"""Addresses that answer without the database, or say of it themselves."""


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    loggers = [logging.getLogger("backend"), logging.getLogger("django.request")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    errors.outage.reset()
    yield caplog
    for logger in loggers:
        logger.removeHandler(caplog.handler)


def away(*_: Any) -> Any:
    raise OperationalError("connection to server at 10.0.0.7 failed: secret-host")


@pytest.mark.slow
def test_every_page_is_a_readable_503_and_logged_once(client: Client, log: pytest.LogCaptureFixture) -> None:
    client.force_login(User.objects.create_superuser("ada"))
    client.raise_request_exception = False
    client.get("/decisions/")  # content types and permissions are known from here on, as in a server at work
    log.clear()
    statuses: dict[str, int] = {}
    with connection.execute_wrapper(away):
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
    errors_logged = [record for record in log.records if record.levelno >= logging.ERROR]
    assert len(errors_logged) == 1, log.messages
    assert "the database cannot be reached" in errors_logged[0].getMessage()
    assert all(record.exc_info is None for record in log.records)


def test_a_fault_of_ours_is_still_a_500_with_its_cause_in_the_log(
    client: Client, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("ours")

    monkeypatch.setattr("feedback.explorer.views.problems", broken)
    client.force_login(User.objects.create_superuser("ada"))
    client.raise_request_exception = False
    assert client.get("/problems/").status_code == 500
    assert {record.exc_info is not None for record in log.records} == {True}
