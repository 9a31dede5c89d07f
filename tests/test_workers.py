"""Workers: two clusters on one database, a device for one at a time, and processes that are killed."""

import json
import os
import random
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
from rl.jobs.supervisor import LOOK_S, cluster_crew, dies_with_parent
from tests.support.crash_loop import QUICK, Loop, faults
from tests.support.postgres import NoPostgres, cluster
from tests.support.server import ROOT, Server, query
from tests.support.tiny_models import tiny_model

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
            with machines[0].training_worker(), machines[1].training_worker():
                # nobody has no feedback: each run is claimed, and refused, once
                attempts_wait(machines[0], [("refused", 1)] * RUNS)
    except NoPostgres as reason:
        pytest.skip(str(reason))


QUEUE_ONE = """
from rl.jobs.lifecycle import TrainOrder, run_dispatch, run_enqueue
run_dispatch(run_enqueue(TrainOrder("nobody", actor="test")))
"""


def attempts_wait(server: Server, wanted: list[tuple[str, int]]) -> None:
    """Return once the runs have these statuses and attempts."""
    deadline = time.monotonic() + 120
    while (found := query(server, ATTEMPTS)) != wanted:
        assert time.monotonic() < deadline, (found, server.log())
        time.sleep(0.2)


@pytest.mark.training
def test_a_cluster_works_on_after_each_of_its_processes_was_killed(tmp_path: Path) -> None:
    """An idle reader of a queue holds its lock: killed, it takes the lock with it."""
    server = Server(f"sqlite:///{tmp_path / 'db.sqlite3'}", tmp_path)
    server.migrate()
    with server.training_worker() as serve:
        for hung, killed in ((False, "worker"), (False, "monitor"), (True, "worker")):
            before = crew(serve.pid)
            time.sleep(2 * LOOK_S)  # `serve` knows them
            if hung:  # a sentinel that waits for the lock of a dead worker
                psutil.Process(before["worker"]).parent().suspend()
            os.kill(before[killed], signal.SIGKILL)
            while set(crew(serve.pid).values()) & set(before.values()):
                time.sleep(0.1)
        before = crew(serve.pid)
        os.kill(before["pusher"], signal.SIGKILL)
        while (after := crew(serve.pid)) == before:
            time.sleep(0.1)
        # django-q2 alone replaces the pusher, so a job goes on
        assert [role for role in before if before[role] == after[role]] == ["worker", "monitor"]
        server.manage("shell", "--no-imports", "-c", QUEUE_ONE)
        attempts_wait(server, [("refused", 1)])


@pytest.mark.training
def test_redis_carries_the_messages_where_a_setting_says_so(tmp_path: Path) -> None:
    """Against a server that speaks Redis' protocol; the database holds no message then."""
    redis = TcpFakeServer(("127.0.0.1", 0))
    threading.Thread(target=redis.serve_forever, daemon=True).start()
    server = Server(f"sqlite:///{tmp_path / 'db.sqlite3'}", tmp_path)
    server.environment["REDIS_URL"] = f"redis://127.0.0.1:{redis.server_address[1]}/0"
    server.migrate()
    server.manage("shell", "--no-imports", "-c", QUEUE_ONE)
    with server.training_worker():
        attempts_wait(server, [("refused", 1)])
        assert query(server, "SELECT count(*) FROM django_q_ormq") == [(0,)]
    redis.shutdown()


def crew(serve_pid: int) -> dict[str, int]:
    """Process ids of the cluster that `serve` keeps, once all three live."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for found in psutil.Process(serve_pid).children():
            processes = cluster_crew(found.pid)
            if len(processes) == 3:
                return dict(zip(("worker", "monitor", "pusher"), [one.pid for one in processes], strict=True))
        time.sleep(0.1)
    raise AssertionError("the cluster has not its three processes")


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
        writes = WRITES.format(home=str(tmp_path))
        worker = subprocess.Popen(
            [sys.executable, str(ROOT / "manage.py"), "shell", "--no-imports", "-c", writes],
            env=server.environment,
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "begun").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            for number in range(40):
                connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
                body = json.dumps({"prompt": f"question {number}", "response": "answer", "score": 0.5})
                headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
                connection.request("POST", "/api/policies/feedback/widgets", body, headers)
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
    if dies_with_parent() is None:
        pytest.skip("only Linux tells a child that its parent died")
    said = tmp_path / "child"
    code = (
        "import subprocess, sys, time\n"
        "from rl.jobs.supervisor import dies_with_parent\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True,\n"
        "                         preexec_fn=dies_with_parent())\n"
        f"open({str(said)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 120
    while not said.exists() or not said.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child = int(said.read_text())
    parent.kill()
    parent.wait()
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.02)


@pytest.mark.campaign
@pytest.mark.training
def test_a_retrain_survives_the_death_of_its_child_its_worker_and_the_web(tmp_path: Path) -> None:
    base, choose = tiny_model(tmp_path / "base"), random.Random(0)
    with Loop(tmp_path, base, config=QUICK) as loop:
        loop.rate(60)
        for kinds in (("child",), ("worker", "web")):
            loop.wait(loop.training, 240)
            for kind in kinds:
                assert loop.kill(kind, choose)
        loop.wait(loop.learnt, 240)
        facts = loop.facts()
    assert faults(loop, facts) == []
    assert facts["attempts"] > 1, "no kill met the training"
    assert "assistant-v28" in facts["made"]  # as without kills
    # Ctrl-C ended all of it
    assert loop.process.returncode == 0
