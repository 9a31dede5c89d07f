"""The whole program while PostgreSQL is stopped: every process goes on, and the log says it once per process."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rl.jobs.supervisor import cluster_crew
from tests.support.campaign_scale import scaled
from tests.support.crash_loop import QUICK, Loop
from tests.support.postgres import fresh_database, stopped
from tests.support.postgres import postgres_url as postgres_url

AWAY_S = scaled("AWAY", 40)
PROCESSES = 9
"""Web, clock and recorder; pusher, worker and sentinel of two clusters."""
CLUSTERS, PUSHER_S = 2, 10
"""django-q2 starts each cluster's pusher again this often, with one line each time."""


@pytest.mark.postgres
def test_an_outage(tmp_path: Path, postgres_url: str, record_property: Callable[[str, object], None]) -> None:
    with Loop(tmp_path, "bundled", fresh_database(postgres_url), config=QUICK) as loop:
        loop.rate(4)
        loop.wait(lambda: len(loop.victims("worker")) == CLUSTERS * 5, 60)
        before = [process.pid for kind in ("web", "worker", "clock") for process in loop.victims(kind)]
        pushers = {
            cluster_crew(process.pid)[-1].pid
            for process in loop.victims("worker")
            if cluster_crew(process.pid)
        }
        said = len((tmp_path / "serve.log").read_text())
        with stopped(postgres_url):
            time.sleep(AWAY_S)
        told = (tmp_path / "serve.log").read_text()[said:]
        loop.rate(4)
        after = [process.pid for kind in ("web", "worker", "clock") for process in loop.victims(kind)]
        assert len(loop.facts()["ratings"]) == 8
    record_property("tried", AWAY_S)
    assert len(pushers) == CLUSTERS
    assert set(before) - pushers <= set(after), told
    lines = re.findall(r"^\d{4}-.*", told, re.MULTILINE)
    most = PROCESSES * (1 + AWAY_S // 60) + CLUSTERS * (1 + AWAY_S // PUSHER_S)
    assert 1 <= len(lines) <= most, told
    assert "Traceback" not in told
