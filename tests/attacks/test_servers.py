"""Fifty raters while PostgreSQL is stopped and started, and at two servers on one folder: stored once, none lost."""

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.campaign_scale import scaled
from tests.support.postgres import fresh_database, stopped
from tests.support.postgres import postgres_url as postgres_url
from tests.support.server import Server
from tests.test_concurrency import Rater, check_everything_is_stored_once, rated

STOPS = scaled("STOPS", 3)

Told = Callable[[str, object], None]


def answers(raters: list[Rater]) -> int:
    return sum(len(rater.statuses) for rater in raters)


class Watcher(threading.Thread):
    """Opens pages and endpoints all the while; counts what they answer."""

    PATHS = ("/readyz", "/decisions/", "/api/decisions/?agent=support-bot", "/rate/", "/accounts/login/")

    def __init__(self, server: Server, session: str, key: str) -> None:
        super().__init__(daemon=True)
        self.server, self.session, self.key = server, session, key
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.faults: list[str] = []
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            for path in self.PATHS:
                connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
                headers = (
                    {"Authorization": f"Bearer {self.key}"}
                    if path.startswith("/api/")
                    else {"Cookie": f"sessionid={self.session}"}
                )
                connection.request("GET", path, headers=headers)
                answer = connection.getresponse()
                body = answer.read().decode()
                self.statuses[path, answer.status] += 1
                if answer.status not in (200, 302, 503) or "Traceback" in body:
                    self.faults.append(f"{path}: {answer.status} {body[:300]}")
                connection.close()
            time.sleep(0.05)


SESSION = """
from django.contrib.auth.models import User
from django.contrib.sessions.backends.db import SessionStore
user = User.objects.create_superuser("ada")
session = SessionStore()
session.update({"_auth_user_id": str(user.pk), "_auth_user_hash": user.get_session_auth_hash(),
                "_auth_user_backend": "django.contrib.auth.backends.ModelBackend"})
session.create()
print(session.session_key)
"""


def test_postgresql_stops_while_50_rate(postgres_url: str, tmp_path: Path, record_property: Told) -> None:
    server = Server(fresh_database(postgres_url), tmp_path)
    server.migrate()
    session = server.manage("shell", "--no-imports", "-c", SESSION).split()[-1]
    done = threading.Event()
    stops: list[float] = []

    def stop_and_start() -> None:
        for _ in range(STOPS):
            time.sleep(1.0)
            if done.is_set():
                return
            with stopped(postgres_url):
                time.sleep(0.7)
            stops.append(time.monotonic())

    with server:
        watcher = Watcher(server, session, server.key("read"))
        watcher.start()
        stopper = threading.Thread(target=stop_and_start)
        decisions, raters = rated(server, outages=True, prepared=stopper.start)
        done.set()
        stopper.join()
        time.sleep(3)  # the database is back: what was kept meanwhile is written
        watcher.over.set()
        watcher.join(60)
        check_everything_is_stored_once(server, decisions, raters)
    record_property("tried", answers(raters) + watcher.statuses.total())
    assert watcher.faults == []
    assert stops, "it was never stopped"
    assert any(status == 503 for _, status in watcher.statuses), watcher.statuses
    log = (tmp_path / "server.log").read_text()
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_two_servers_share_a_folder_and_a_database(
    database: str, request: pytest.FixtureRequest, tmp_path: Path, record_property: Told
) -> None:
    url = (
        f"sqlite:///{tmp_path / 'raters.sqlite3'}"
        if database == "sqlite"
        else fresh_database(request.getfixturevalue("postgres_url"))
    )
    one, other = Server(url, tmp_path), Server(url, tmp_path)
    one.migrate()
    with one, other:
        decisions, raters = rated(one, lambda: None, other)
        check_everything_is_stored_once(one, decisions, raters)
        shown: list[Any] = []
        for server in (one, other):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.request("GET", "/readyz")
            shown.append(json.loads(connection.getresponse().read())["database"])
    record_property("tried", answers(raters))
    assert shown == ["ok", "ok"]
