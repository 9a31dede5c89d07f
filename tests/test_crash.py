"""The whole program under SIGKILL: nothing lost, nothing twice, nothing half. The long form is benchmarks/crash.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.crash_loop import QUICK, Loop, faults
from tests.support.tiny_models import tiny_model


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
    assert loop.process is not None
    assert loop.process.returncode == 0
