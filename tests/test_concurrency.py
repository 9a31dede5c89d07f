"""Many at once: raters on the real server, connections of many threads, values that several threads ask for."""

import http.client
import json
import os
import random
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from backend import database
from feedback.cache import TTLCache
from tests.support.api_client import decision_body
from tests.support.campaign_scale import scaled
from tests.support.postgres import fresh_database
from tests.support.postgres import postgres_url as postgres_url
from tests.support.server import Server, query

RATERS = scaled("RATERS", 20)
DECISIONS = scaled("DECISIONS", 4)
"""Few, so that all raters meet on the same rows; each is rated twice."""
PATIENCE_S = 60.0
"""How long a client tries to get one rating through."""


@dataclass
class Rater:
    """One client: rates every decision twice, clicks double, and sends again what got no answer."""

    server: Server
    key: str
    name: str
    before_send: Callable[[], None]
    sent: list[tuple[str, str]] = field(default_factory=list)
    """(id, decision) of each rating that was answered, in this rater's order."""
    statuses: list[int] = field(default_factory=list)
    outages: bool = False
    """True where the database is stopped meanwhile: a 503 is sent again then."""

    def rate(self, decisions: list[str]) -> None:
        dice = random.Random(self.name)
        connections: list[http.client.HTTPConnection | None] = [None, None]
        with ThreadPoolExecutor(2) as hands:
            for said in ("up", "down"):
                for decision in dice.sample(decisions, len(decisions)):
                    body = {"id": str(uuid.uuid4()), "thumb": said, "rater": self.name}
                    path = f"/api/decisions/{decision}/ratings/"
                    # a double click every other time: the same write twice at the same moment
                    clicks = connections[: 1 + dice.randrange(2)]
                    answered = hands.map(lambda at: self._send(at, path, body), clicks)  # noqa: B023
                    connections[: len(clicks)] = answered
                    if dice.randrange(4) == 0:
                        # and a retry that comes late
                        connections[0] = self._send(connections[0], path, body)
                    self.sent.append((body["id"], decision))
        for connection in connections:
            if connection is not None:
                connection.close()

    def _send(
        self, connection: http.client.HTTPConnection | None, path: str, body: dict[str, Any]
    ) -> http.client.HTTPConnection:
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.before_send()
            try:
                if connection is None:
                    connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE_S)
                connection.request("POST", path, json.dumps(body), headers)
                answer = connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException):
                # no answer: it may have been stored or not, so it is sent again with its id
                connection = None
                assert time.monotonic() < deadline, self.server.log()
                time.sleep(0.05)
                continue
            if self.outages and answer.status == 503:
                assert time.monotonic() < deadline, self.server.log()
                time.sleep(0.2)
                continue
            self.statuses.append(answer.status)
            return connection


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """The server on a database of its own."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'raters.sqlite3'}"
    else:
        url = fresh_database(request.getfixturevalue("postgres_url"))
    found = Server(url, tmp_path)
    found.migrate()
    with found:
        yield found


def rated(
    server: Server,
    before_send: Callable[[], None] = lambda: None,
    *others: Server,
    outages: bool = False,
    prepared: Callable[[], None] = lambda: None,
) -> tuple[list[str], list[Rater]]:
    """All raters at work at once, at this server and others; the decisions and the raters when all is answered.

    prepared: called when the key and the decisions are there, before anybody rates.
    """
    key = server.key("ingest", "rate", "rate_as")
    first = Rater(server, key, "nobody", lambda: None)
    decisions = [str(uuid.uuid4()) for _ in range(DECISIONS)]
    for decision in decisions:
        first._send(None, "/api/decisions/", decision_body(id=decision))
    assert first.statuses == [201] * DECISIONS
    prepared()
    servers = [server, *others]
    raters = [
        Rater(servers[n % len(servers)], key, f"rater-{n}", before_send, outages=outages)
        for n in range(RATERS)
    ]
    with ThreadPoolExecutor(RATERS) as pool:
        list(pool.map(lambda rater: rater.rate(decisions), raters))
    return decisions, raters


def check_everything_is_stored_once(server: Server, decisions: list[str], raters: list[Rater]) -> None:
    statuses = Counter(status for rater in raters for status in rater.statuses)
    assert set(statuses) <= {200, 201}, f"{statuses}\n{server.log()}"
    sent = {uuid.UUID(pk) for rater in raters for pk, _ in rater.sent}
    assert len(sent) == RATERS * DECISIONS * 2
    stored = query(server, "SELECT id, decision_id, rater, supersedes_id, thumb FROM feedback_rating")
    assert {as_uuid(row[0]) for row in stored} == sent, "each rating that was answered is there, and no other"
    assert len(stored) == len(sent)
    # per rater and decision one chain: up first, down over it
    chains = Counter((as_uuid(row[1]), row[2], row[3] is None, row[4]) for row in stored)
    expected = {
        (uuid.UUID(decision), rater.name, first, thumb)
        for decision in decisions
        for rater in raters
        for first, thumb in ((True, "up"), (False, "down"))
    }
    assert set(chains) == expected
    assert set(chains.values()) == {1}
    counted = query(server, "SELECT ratings_human FROM feedback_decision")
    assert counted == [(RATERS,)] * DECISIONS, "each rater's standing word is counted once"


def as_uuid(value: Any) -> uuid.UUID:
    return value if isinstance(value, uuid.UUID) else uuid.UUID(value)


@pytest.mark.campaign
def test_many_raters_at_once(server: Server, record_property: Callable[[str, object], None]) -> None:
    decisions, raters = rated(server)
    record_property("tried", sum(len(rater.statuses) for rater in raters))
    check_everything_is_stored_once(server, decisions, raters)
    # outside of any transaction of a test: nothing of a rating of nothing is stored
    lost = Rater(server, raters[0].key, "lost", lambda: None)
    lost._send(None, f"/api/decisions/{uuid.uuid4()}/ratings/", {"thumb": "up"})
    lost._send(None, f"/api/decisions/{uuid.uuid4()}/ratings/", {"thumb": "up", "rater_kind": "simulated"})
    assert lost.statuses == [404, 404]
    check_everything_is_stored_once(server, decisions, raters)


@pytest.mark.campaign
def test_many_raters_through_a_kill_and_a_restart(server: Server) -> None:
    """Killed once a third of the writes was sent, as by a power cut, and started again while all of them try."""
    third = threading.Semaphore(RATERS * DECISIONS * 2 // 3)
    reached, killed = threading.Event(), threading.Event()

    def before_send() -> None:
        if not third.acquire(blocking=False):
            reached.set()

    def kill_and_restart() -> None:
        assert reached.wait(10 * PATIENCE_S)  # a third of a campaign's writes, on a busy machine
        server.kill()
        time.sleep(0.3)
        server.start()
        killed.set()

    killer = threading.Thread(target=kill_and_restart)
    killer.start()
    decisions, raters = rated(server, before_send)
    killer.join()
    assert killed.is_set()
    check_everything_is_stored_once(server, decisions, raters)


SESSIONS = """
import json
from django.contrib.auth.models import Group, User
from django.contrib.sessions.backends.db import SessionStore
from feedback.services import decision_record
found = []
for number in range({raters}):
    user = User.objects.create_user(f"rater-{{number}}", is_staff=False)
    user.groups.add(Group.objects.get(name="rater"))
    session = SessionStore()
    session.update({{"_auth_user_id": str(user.pk), "_auth_user_hash": user.get_session_auth_hash(),
                     "_auth_user_backend": "django.contrib.auth.backends.ModelBackend"}})
    session.create()
    found.append(session.session_key)
for number in range({decisions}):
    decision_record(agent="support-bot", messages=f"question {{number}}", response="r")
print(json.dumps(found))
"""


@pytest.mark.campaign
def test_raters_at_once_are_never_shown_the_same_card(server: Server) -> None:
    """Eight people at the rating page until nothing is left: each decision was shown to one of them alone."""
    raters, decisions = 8, 40
    made = server.manage("shell", "-c", SESSIONS.format(raters=raters, decisions=decisions))
    sessions = json.loads(made.strip().splitlines()[-1])

    def work(session: str) -> list[str]:
        seen: list[str] = []
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        while True:
            connection.request("GET", "/rate/", headers={"Cookie": f"sessionid={session}"})
            answer = connection.getresponse()
            page = answer.read().decode()
            assert answer.status == 200, server.log()
            sent = dict(re.findall(r'name="(id|decision|csrfmiddlewaretoken)" value="([^"]+)"', page))
            if "decision" not in sent:
                return seen
            seen.append(sent["decision"])
            cookie = (answer.getheader("Set-Cookie") or "").partition(";")[0]
            headers = {
                "Cookie": f"sessionid={session}; {cookie}",
                "Content-Type": "application/x-www-form-urlencoded",
                "X-Ratchet-Card": "1",
            }
            connection.request("POST", "/rate/", urlencode(sent | {"verdict": "up"}), headers)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, server.log()

    with ThreadPoolExecutor(raters) as pool:
        seen = [pk for shown in pool.map(work, sessions) for pk in shown]
    assert len(seen) == len(set(seen)) == decisions
    assert query(server, "SELECT count(*) FROM feedback_rating") == [(decisions,)]


TEACHING = """
from feedback.services import decision_record, rating_submit
for number in range(40):
    row = decision_record(agent="desk", messages=f"message {number}", response=f"queue {number % 3}").row
    rating_submit(decision=row, rater="ada", correction=f"queue {number % 2}")
"""


@pytest.mark.slow
def test_identical_trainings_at_once_are_one_run(server: Server) -> None:
    """Eight requests at the same moment, four times."""
    server.manage("shell", "-c", TEACHING)
    headers = {"Authorization": f"Bearer {server.key('read', 'operate')}"}

    def train(penalty: int) -> tuple[int, Any]:
        body = {"agent": "desk", "method": "linear", "knobs": {"penalty": penalty}}
        answer = httpx.post(f"{server.address}/api/runs/", json=body, headers=headers, timeout=PATIENCE_S)
        return answer.status_code, answer.json().get("id", answer.text)

    for penalty in range(1, 5):
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(train, [penalty] * 8))
        assert {status for status, _ in answers} == {202}, answers
        assert len({run for _, run in answers}) == 1, answers
    assert query(server, "SELECT count(*) FROM rl_trainingrun") == [(4,)]


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


class Making:
    """A value that takes as long as the test wants, and counts how often it was made."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.count = threading.Event(), threading.Event(), 0

    def __call__(self) -> int:
        self.count += 1
        self.begun.set()
        assert self.go_on.wait(10)
        return self.count


def asked_by_many(cache: TTLCache[int], make: Callable[[], int], pool: ThreadPoolExecutor) -> list[int]:
    return [one.result(10) for one in [pool.submit(cache.get, "agent", make) for _ in range(8)]]


def test_threads_that_ask_at_once_make_a_value_once() -> None:
    cache, make = TTLCache[int](), Making()
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(cache.get, "agent", make)
        assert make.begun.wait(10)
        threading.Timer(0.05, make.go_on.set).start()
        assert asked_by_many(cache, make, pool) == [1] * 8
        assert first.result(10) == 1
    assert make.count == 1


def test_what_is_read_before_a_change_is_not_kept_after_it() -> None:
    cache, before, after = TTLCache[int](), Making(), Making()
    after.go_on.set()
    after.count = 41
    with ThreadPoolExecutor(2) as pool:
        old = pool.submit(cache.get, "agent", before)
        assert before.begun.wait(10)
        cache.clear()
        assert cache.get("agent", after) == 42
        before.go_on.set()
        assert old.result(10) == 1
    assert cache.get("agent", before) == 42


def test_a_failure_is_told_to_everyone_and_tried_again() -> None:
    def fail() -> int:
        raise LookupError("no such agent")

    cache = TTLCache[int]()
    with ThreadPoolExecutor(2) as pool, pytest.raises(LookupError):
        asked_by_many(cache, fail, pool)
    assert cache.get("agent", lambda: 7) == 7


def test_a_forked_process_waits_for_no_thread_it_does_not_have() -> None:
    cache, make = TTLCache[int](), Making()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(cache.get, "agent", make)
        assert make.begun.wait(10)
        child = os.fork()
        if not child:
            os._exit(cache.get("agent", lambda: 7))
        _, status = os.waitpid(child, 0)
        make.go_on.set()
    assert os.waitstatus_to_exitcode(status) == 7
