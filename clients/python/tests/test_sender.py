"""From the spool to the server: nothing lost, nothing twice, through dead servers, kills and forks."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_server import ROOT, Ratchet
from ratchet_client import TraceCollector
from ratchet_client.collector import Disposition, HttpConnection, HttpResponse, delivery_of
from ratchet_client.outbox import Outbox
from ratchet_client.problem_log import ProblemLog
from ratchet_client.processes import exclusive


@pytest.fixture
def ratchet() -> Iterator[Ratchet]:
    server = Ratchet()
    yield server
    server.stop()


@pytest.fixture
def connected(ratchet: Ratchet, tmp_path: Path) -> Iterator[TraceCollector]:
    with TraceCollector("support-bot", ratchet.url, "key", tmp_path / "spool", fsync=False) as found:
        yield found


def test_everything_arrives_once_in_order_with_the_key(ratchet: Ratchet, connected: TraceCollector) -> None:
    for i in range(20):
        with connected.trace(f"run-{i}") as trace:
            trace.step("plan")
    assert connected.flush(10)
    assert [body["run_id"] for _, _, body in ratchet.requests] == [f"run-{i}" for i in range(20)]
    assert {(path, key) for path, key, _ in ratchet.requests} == {("/api/traces/", "Bearer key")}
    assert connected.status().sent == 20


def test_ratings_and_outcomes_follow_their_decision(ratchet: Ratchet, connected: TraceCollector) -> None:
    key = connected.decision("Where?", "There")
    connected.rate(key, rater="user-7", thumb="up", tags=["short"])
    connected.outcome(key, "ticket_reopened", 1)
    assert connected.flush(10)
    expected = ["/api/traces/", f"/api/decisions/{key}/ratings/", f"/api/decisions/{key}/outcomes/"]
    assert [path for path, _, _ in ratchet.requests] == expected
    rating, outcome = ratchet.requests[1][2], ratchet.requests[2][2]
    expected = {"rater": "user-7", "thumb": "up", "tags": ["short"]}
    assert {k: v for k, v in rating.items() if k != "id"} == expected
    assert (outcome["name"], outcome["value"]) == ("ticket_reopened", 1)


@pytest.mark.slow
def test_a_dead_server_loses_nothing(ratchet: Ratchet, tmp_path: Path) -> None:
    ratchet.stop()
    with TraceCollector("support-bot", ratchet.url, spool_dir=tmp_path, fsync=False) as collector:
        for i in range(5):
            collector.trace(f"run-{i}").finish()
        assert collector.flush(0.5) is False
        assert "no answer" in collector.status().last_problem
        ratchet.start()
        assert collector.flush(20)
    assert ratchet.runs == Counter({f"run-{i}": 1 for i in range(5)})


def test_a_new_process_sends_what_an_old_one_left(ratchet: Ratchet, tmp_path: Path) -> None:
    TraceCollector("support-bot", spool_dir=tmp_path).trace("left behind").finish()
    with TraceCollector("support-bot", ratchet.url, spool_dir=tmp_path) as collector:
        assert collector.flush(10)
    assert ratchet.runs == Counter(["left behind"])


@pytest.mark.slow
@pytest.mark.parametrize("status", [401, 403, 404, 405, 408, 429, 500, 502, 503, 301])
def test_what_may_pass_is_sent_later(ratchet: Ratchet, connected: TraceCollector, status: int) -> None:
    ratchet.answer = lambda path, body: status
    for i in range(3):
        connected.trace(f"run-{i}").finish()
    assert connected.flush(0.5) is False
    assert connected.refused() == []
    ratchet.answer = lambda path, body: None
    assert connected.flush(20)
    assert ratchet.runs == Counter({f"run-{i}": 1 for i in range(3)})


@pytest.mark.parametrize("status", [400, 413, 422])
def test_refusals_are_kept_with_the_reason(ratchet: Ratchet, connected: TraceCollector, status: int) -> None:
    ratchet.answer = lambda path, body: status if body["run_id"] == "bad" else None
    connected.trace("bad").finish()
    connected.trace("good").finish()
    assert connected.flush(10)
    assert ratchet.runs == Counter(["good"])
    (entry,) = connected.refused()
    assert entry["record"]["body"]["run_id"] == "bad"
    assert entry["reason"].startswith(f"HTTP {status}")


def test_known_differs(ratchet: Ratchet, connected: TraceCollector, caplog: pytest.LogCaptureFixture) -> None:
    ratchet.answer = lambda path, body: 409
    connected.trace("known").finish()
    assert connected.flush(10)
    assert len(ratchet.requests) == 1
    assert [r.levelname for r in caplog.records if "another body" in r.message] == ["WARNING"]


@pytest.mark.slow
def test_one_failing_trace_holds_up_no_other(ratchet: Ratchet, connected: TraceCollector) -> None:
    ratchet.answer = lambda path, body: 500 if body["run_id"] == "poison" else None
    for run in ("a", "poison", "b"):
        connected.trace(run).finish()
    assert connected.flush(1) is False
    assert ratchet.runs == Counter(["a", "b"])
    ratchet.answer = lambda path, body: None
    assert connected.flush(20)
    assert ratchet.runs == Counter(["a", "b", "poison"])


@pytest.mark.slow
def test_a_rating_waits_for_a_trace_that_is_held_up(ratchet: Ratchet, connected: TraceCollector) -> None:
    ratchet.answer = lambda path, body: (
        500
        if path == "/api/traces/" and "run_id" in body and body["run_id"] == "slow"
        else (404 if "ratings" in path else None)
    )
    with connected.trace("slow") as trace:
        key = trace.decision("Where?", "There")
    connected.rate(key, rater="u", thumb="up")
    connected.trace("other").finish()
    assert connected.flush(1) is False
    assert connected.refused() == []
    ratchet.answer = lambda path, body: None
    assert connected.flush(20)
    taken = [path for path, _, body in ratchet.requests if body["id"] in ratchet.taken]
    assert f"/api/decisions/{key}/ratings/" in taken
    assert len(ratchet.taken) == 3


def test_a_rating_of_an_unknown_decision_is_refused(ratchet: Ratchet, connected: TraceCollector) -> None:
    ratchet.answer = lambda path, body: 404 if "ratings" in path else None
    connected.rate(uuid.uuid4(), rater="u", thumb="up")
    assert connected.flush(10)
    assert [entry["record"]["kind"] for entry in connected.refused()] == ["rating"]


def test_a_kept_alive_connection_the_server_has_closed_is_opened_anew(ratchet: Ratchet) -> None:
    server = HttpConnection(ratchet.url, None, 5)
    ratchet.hang_up = True  # says nothing of it, as a server whose idle time ran out
    answers = [server.post("/api/traces/", json.dumps({"id": str(i)}).encode()) for i in range(3)]
    server.close()
    assert [answer.status for answer in answers] == [201, 201, 201]
    assert len(ratchet.requests) == 3


def test_a_server_that_was_away_is_found_again(ratchet: Ratchet, connected: TraceCollector) -> None:
    connected.trace("first").finish()
    assert connected.flush(10)
    ratchet.stop()
    ratchet.start()
    connected.trace("second").finish()
    assert connected.flush(10)
    assert ratchet.runs == Counter(["first", "second"])


def test_a_rating_of_a_decision_that_is_being_recorded_waits_alone() -> None:
    body = '{"error": {"code": "pending", "message": "the decision is being recorded", "fields": {}}}'
    found = delivery_of(HttpResponse(503, body, 1.0), "rating", lambda: False)
    assert (found.disposition, found.retry_after_s) == (Disposition.DEFERRED, 1.0)


def test_a_servers_wish_to_wait_is_read(ratchet: Ratchet) -> None:
    ratchet.answer = lambda path, body: 429
    ratchet.headers = {"Retry-After": "7"}
    server = HttpConnection(ratchet.url, None, 5)
    assert server.post("/api/traces/", b'{"id": "x"}').retry_after_s == 7.0
    server.close()


CHILD = """
import sys
sys.path.insert(0, {root!r})
from ratchet_client import TraceCollector
assert not [name for name in sys.modules if name.split(".")[0] in ("django", "rest_framework", "numpy")]
"""


def child(code: str, *arguments: str, root: Path = ROOT / "src") -> subprocess.Popen[str]:
    """A Python without this project's packages: no site folder, no environment, the standard library alone."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", CHILD.format(root=str(root)) + code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_runs_without_django_from_a_copy_of_its_own_files(tmp_path: Path, ratchet: Ratchet) -> None:
    shutil.copytree(ROOT / "src" / "ratchet_client", tmp_path / "ratchet_client")
    code = """
collector = TraceCollector("support-bot", sys.argv[1], spool_dir=sys.argv[2])
with collector.trace("alone") as trace:
    trace.decision("Where?", "There")
assert collector.flush(10)
"""
    process = child(code, ratchet.url, str(tmp_path / "spool"), root=tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert ratchet.runs == Counter(["alone"])


def test_the_end_of_a_process_waits_for_what_it_has_to_send(ratchet: Ratchet, tmp_path: Path) -> None:
    code = """
collector = TraceCollector("support-bot", sys.argv[1], spool_dir=sys.argv[2], fsync=False, exit_timeout_s=20)
for i in range(50):
    collector.trace(f"run-{i}").finish()
"""
    process = child(code, ratchet.url, str(tmp_path))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert ratchet.runs == Counter({f"run-{i}": 1 for i in range(50)})


def test_a_killed_process_loses_nothing(ratchet: Ratchet, tmp_path: Path) -> None:
    code = """
import time
collector = TraceCollector("support-bot", sys.argv[1], spool_dir=sys.argv[2], fsync=False)
i = 0
while True:
    collector.trace(f"run-{i}").finish()
    i += 1
    time.sleep(0.001)
"""
    process = child(code, ratchet.url, str(tmp_path))
    deadline = time.monotonic() + 30
    while len(ratchet.taken) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    left = {record.body["body"]["id"] for record in Outbox(tmp_path, ProblemLog()).pending()}
    made = left | set(ratchet.taken)
    assert len(made) >= 20
    with TraceCollector("support-bot", ratchet.url, spool_dir=tmp_path) as collector:
        assert collector.flush(60)
        assert collector.refused() == []
    assert set(ratchet.taken) == made
    assert set(ratchet.runs.values()) == {1}
    seen = Counter(body["id"] for _, _, body in ratchet.requests)
    assert [n for n in seen.values() if n > 1] in ([], [2])  # the one on its way when the process was killed


@pytest.mark.slow
def test_many_processes_and_threads_share_a_spool(ratchet: Ratchet, tmp_path: Path) -> None:
    code = """
import threading
collector = TraceCollector("support-bot", sys.argv[1], spool_dir=sys.argv[2], fsync=False, exit_timeout_s=30)
def work(t):
    for i in range(25):
        with collector.trace(f"{sys.argv[3]}-{t}-{i}") as trace:
            trace.step("x" * 5000)
threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
"""
    processes = [child(code, ratchet.url, str(tmp_path), str(p)) for p in range(4)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    with TraceCollector("support-bot", ratchet.url, spool_dir=tmp_path) as collector:
        assert collector.flush(30)
        assert collector.refused() == []
    assert ratchet.runs == Counter({f"{p}-{t}-{i}": 1 for p in range(4) for t in range(4) for i in range(25)})
    assert len(ratchet.requests) == 400


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_worker_records_and_sends_on_its_own(ratchet: Ratchet, connected: TraceCollector) -> None:
    connected.trace("parent").finish()
    assert connected.flush(10)  # the parent's thread runs and its connection is open

    def work() -> None:
        connected.trace("child").finish()
        os._exit(0 if connected.flush(20) else 1)

    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0
    connected.trace("parent again").finish()
    assert connected.flush(10)
    assert ratchet.runs == Counter(["parent", "child", "parent again"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_what_waits_for_the_disk_is_the_parents_alone_to_write(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("a file where the folder should be")
    collector = TraceCollector("support-bot", spool_dir=tmp_path / "spool")
    collector.trace("waits").finish()
    assert collector.outbox.waiting == 1
    pid = os.fork()
    if pid == 0:
        os._exit(collector.outbox.waiting)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_worker_that_outlives_its_killed_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    code = """
import os, time
from pathlib import Path
from typing import Any
from ratchet_client.outbox import Outbox
from ratchet_client.problem_log import ProblemLog
from ratchet_client.processes import exclusive
with exclusive(Path(sys.argv[1]) / "append.lock"):
    worker = os.fork()
    if not worker:
        print(os.getpid(), flush=True)
    time.sleep(60)
"""
    process = child(code, str(tmp_path))
    worker = int(process.stdout.readline())
    with exclusive(tmp_path / "append.lock", wait=False) as free:
        assert not free
    process.kill()
    process.wait(30)
    with exclusive(tmp_path / "append.lock", wait=False) as free:
        assert free
    os.kill(worker, signal.SIGKILL)
    process.communicate(timeout=30)
