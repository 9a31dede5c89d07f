"""Everything that trains or asks a model, on a device that is not the CPU: a simulated one, so it runs anywhere."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import fake_device_run
from tests.support.dpo_runs import HARDWARE
from tests.support.tiny_models import tiny_model

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.campaign
@pytest.mark.training
def test_on_another_device_every_run_is_the_run_on_the_cpu(tmp_path: Path) -> None:
    """Nothing is left on the CPU that a GPU would miss there, and every number is the same."""
    base = str(tiny_model(tmp_path / "base"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.fake_device_run", base, str(tmp_path / "there")],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "backend.settings"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert set(said["refused"]) == {"a sum", "a product", "a generator", "numpy", "float64"}
    for name, run in fake_device_run.RUNS.items():
        there = said["found"][name]
        assert "failed" not in there, f"{name}: {there['failed']}"
        here = run(base, tmp_path / "here" / name, HARDWARE)
        assert there.keys() == here.keys(), name
        for what, values in here.items():
            assert_same(there[what], values, f"{name}, {what}")


def assert_same(there: list[Any], here: list[Any], what: str) -> None:
    if all(isinstance(value, (int, float)) for value in here):
        assert there == pytest.approx(here, abs=2e-4, rel=1e-3), what
    else:
        assert there == here, what
