"""Workers: two clusters on one database, a web server and a worker on one SQLite file, a device for one at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakeredis import TcpFakeServer

from rl.jobs import child_process
from tests.support.postgres import NoPostgres, cluster
from tests.support.server import ROOT, Server, query

RUNS = 2

QUEUE = f"""
from rl.jobs.lifecycle import TrainOrder, run_dispatch, run_enqueue
for _ in range({RUNS}):
    run = run_enqueue(TrainOrder("nobody", actor="test"))
    run_dispatch(run)
    run_dispatch(run)
"""
ATTEMPTS = "SELECT status, attempts FROM rl_trainingrun ORDER BY id"


@pytest.mark.training
@pytest.mark.postgres
def test_two_clusters_on_one_postgresql_take_no_run_twice(tmp_path: Path) -> None:
    """Every message is there twice, and two machines (each with a data folder of its own) take them."""
    try:
        with cluster() as url:
            machines = []
            for name in ("left", "right"):
                (tmp_path / name).mkdir()
                machines.append(Server(url, tmp_path / name))
            machines[0].migrate()
            machines[0].manage("shell", "--no-imports", "-c", QUEUE)
            clusters = [
                subprocess.Popen(
                    ["env", "Q_CLUSTER_NAME=training", sys.executable, str(ROOT / "manage.py"), "qcluster"],
                    env=machine.environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                for machine in machines
            ]  # fmt: skip
            try:
                deadline = time.monotonic() + 120
                attempts: list[tuple[Any, ...]] = [("queued", 0)]
                while any(status in ("queued", "running") for status, _ in attempts):
                    assert time.monotonic() < deadline, attempts
                    time.sleep(0.2)
                    attempts = query(machines[0], ATTEMPTS)
            finally:
                for process in clusters:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            # nobody has no feedback: each run is claimed, and refused, once
            assert attempts == [("refused", 1)] * RUNS
    except NoPostgres as reason:
        pytest.skip(str(reason))


QUEUE_ONE = """
from rl.jobs.lifecycle import TrainOrder, run_dispatch, run_enqueue
run_dispatch(run_enqueue(TrainOrder("nobody", actor="test")))
"""


@pytest.mark.training
def test_a_cluster_works_on_after_each_of_its_processes_was_killed(tmp_path: Path) -> None:
    """An idle reader of a queue holds its lock: killed, it would take the lock with it."""
    server = Server(f"sqlite:///{tmp_path / 'db.sqlite3'}", tmp_path)
    server.migrate()
    process = subprocess.Popen(
        ["env", "Q_CLUSTER_NAME=training", sys.executable, str(ROOT / "manage.py"), "qcluster"],
        env=server.environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        for number in range(3):  # worker, monitor, pusher: they are started in this order
            crew = _crew(process.pid)
            os.kill(crew[number], signal.SIGKILL)
            deadline = time.monotonic() + 60
            while set(_crew(process.pid)) & set(crew):  # all are new
                assert time.monotonic() < deadline
                time.sleep(0.1)
        server.manage("shell", "--no-imports", "-c", QUEUE_ONE)
        deadline = time.monotonic() + 60
        while query(server, ATTEMPTS) != [("refused", 1)]:
            assert time.monotonic() < deadline, "the task was not taken"
            time.sleep(0.2)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.training
def test_redis_carries_the_messages_where_a_setting_says_so(tmp_path: Path) -> None:
    """Against a server that speaks Redis' protocol; the database holds no message then."""
    redis = TcpFakeServer(("127.0.0.1", 0))
    threading.Thread(target=redis.serve_forever, daemon=True).start()
    server = Server(f"sqlite:///{tmp_path / 'db.sqlite3'}", tmp_path)
    server.environment["REDIS_URL"] = f"redis://127.0.0.1:{redis.server_address[1]}/0"
    server.migrate()
    server.manage("shell", "--no-imports", "-c", QUEUE_ONE)
    process = subprocess.Popen(
        ["env", "Q_CLUSTER_NAME=training", sys.executable, str(ROOT / "manage.py"), "qcluster"],
        env=server.environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while query(server, ATTEMPTS) != [("refused", 1)]:
            assert time.monotonic() < deadline, "the task was not taken"
            time.sleep(0.2)
        assert query(server, "SELECT count(*) FROM django_q_ormq") == [(0,)]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        redis.shutdown()


def _crew(cluster_pid: int) -> list[int]:
    """The three processes of a cluster's sentinel, in the order in which they were started."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for sentinel in psutil.Process(cluster_pid).children():
            found = [child.pid for child in sentinel.children() if _runs(child)]
            if len(found) == 3:
                return sorted(found)
        time.sleep(0.1)
    raise AssertionError("the cluster has not its three processes")


def _runs(process: psutil.Process) -> bool:
    """Whether a process runs: neither dead and waiting for its parent, nor gone since it was listed."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


WRITES = """
import sys
from pathlib import Path
from rl.models import RunMetric, TrainingRun
run = TrainingRun.objects.create(agent="widgets", method="dpo", base_model="bundled")
step, home = 0, Path({home!r})
while not (home / "stop").exists():
    step += 1
    RunMetric.objects.update_or_create(run=run, step=step, defaults={{"values": {{"loss": 1.0}}}})
    TrainingRun.objects.filter(pk=run.pk).update(steps_done=step)
    (home / "begun").touch()
"""


@pytest.mark.campaign
def test_web_and_worker_write_one_sqlite_file_at_once(tmp_path: Path) -> None:
    import http.client

    server = Server(f"sqlite:///{tmp_path / 'db.sqlite3'}", tmp_path, workers=2)
    server.migrate()
    key = server.key("ingest", "rate")
    statuses: list[int] = []
    with server:
        worker = subprocess.Popen(
            [sys.executable, str(ROOT / "manage.py"), "shell", "--no-imports", "-c",
             WRITES.format(home=str(tmp_path))],
            env=server.environment, cwd=ROOT, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "begun").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            for number in range(40):
                connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
                connection.request(
                    "POST", "/api/policies/feedback/widgets",
                    json.dumps({"prompt": f"question {number}", "response": "answer", "score": 0.5}),
                    {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
                )  # fmt: skip
                statuses.append(connection.getresponse().status)
        finally:
            (tmp_path / "stop").touch()
            _, said = worker.communicate(timeout=60)
        assert "locked" not in server.log()
    assert (worker.returncode, statuses) == (0, [201] * 40), said


@pytest.mark.parametrize("cluster_name", ["ratchet", "training"])
def test_a_job_is_not_delivered_again_while_it_may_still_work(settings: Any, cluster_name: str) -> None:
    found = settings.Q_CLUSTER | settings.Q_CLUSTER["ALT_CLUSTERS"].get(cluster_name, {})
    assert found["timeout"] < found["retry"]
    assert cluster_name == "ratchet" or found["workers"] == 1  # one training at a time per device


def test_a_device_is_held_by_one_at_a_time() -> None:
    order: list[str] = []

    def second() -> None:
        with child_process.device():
            order.append("second")

    with child_process.device():
        waiting = threading.Thread(target=second)
        waiting.start()
        waiting.join(0.2)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]


def test_a_machine_does_not_wait_for_the_device_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = threading.Event()

    def other() -> None:
        with child_process.device():
            reached.set()

    with child_process.device():
        monkeypatch.setattr(child_process.socket, "gethostname", lambda: "another")
        threading.Thread(target=other, daemon=True).start()
        assert reached.wait(20)


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    if child_process.dies_with_parent() is None:
        pytest.skip("only Linux tells a child that its parent died")
    said = tmp_path / "child"
    code = (
        "import subprocess, sys, time\n"
        "from rl.jobs.child_process import dies_with_parent\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True,\n"
        "                         preexec_fn=dies_with_parent())\n"
        f"open({str(said)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 30
    while not said.exists() or not said.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child = int(said.read_text())
    parent.kill()
    parent.wait()
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.02)
