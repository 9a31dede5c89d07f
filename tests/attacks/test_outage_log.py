"""The whole program while PostgreSQL is stopped: every process goes on, and the log says it once per process."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.campaign_scale import scaled
from tests.support.crash_loop import QUICK, Loop
from tests.support.postgres import fresh_database, stopped
from tests.support.postgres import postgres_url as postgres_url

AWAY_S = scaled("AWAY", 40)
PROCESSES = 9
"""Web, clock and recorder; pusher, worker and sentinel of two clusters."""


@pytest.mark.postgres
def test_an_outage_kills_no_process_and_fills_no_log(
    tmp_path: Path, postgres_url: str, record_property: Callable[[str, object], None]
) -> None:
    with Loop(tmp_path, "bundled", fresh_database(postgres_url), config=QUICK) as loop:
        loop.rate(4)
        loop.wait(lambda: loop.log().count("is running") >= 2, 60)
        before = [process.pid for kind in ("web", "worker", "clock") for process in loop.victims(kind)]
        said = len((tmp_path / "serve.log").read_text())
        with stopped(postgres_url):
            time.sleep(AWAY_S)
        told = (tmp_path / "serve.log").read_text()[said:]
        loop.rate(4)
        after = [process.pid for kind in ("web", "worker", "clock") for process in loop.victims(kind)]
        assert len(loop.facts()["ratings"]) == 8
    record_property("tried", AWAY_S)
    assert set(before) <= set(after), told
    lines = re.findall(r"^\d{4}-.*", told, re.MULTILINE)
    assert 1 <= len(lines) <= PROCESSES * (1 + AWAY_S // 60), told
    assert "Traceback" not in told
