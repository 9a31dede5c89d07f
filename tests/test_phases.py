"""Phases of long work: named in a run's row, on a progress bar, and every few seconds in a log."""

from __future__ import annotations

import io
import re
import time

import pytest
from django.test import Client
from django.utils import timezone

from backend import command
from backend.command import ProgressBar
from feedback.accounts.authentication import key_create
from rl.jobs.lifecycle import run_claim, run_finish
from rl.jobs.progress import PhaseRecorder
from rl.models import TrainingRun
from tests.test_pages import make_run


def test_a_phase_is_a_line_and_its_steps_follow_without_its_name() -> None:
    said = io.StringIO()
    with ProgressBar("training", said) as bar:
        bar.update(0, 0, "loading the model")
        bar.update(0, 0, "loading the model")
        bar.update(0, 0, "training")
        bar.update(1, 2)
        bar.update(2, 2, "loss 0.500")
    assert said.getvalue().splitlines() == [
        "training: loading the model",
        "training: training",
        "training: 1 of 2",
        "training: 2 of 2 loss 0.500",
    ]


def test_silence_is_broken_with_what_is_done_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "QUIET_S", 0.04)
    said = io.StringIO()
    with ProgressBar("dry run", said) as bar:
        bar.update(0, 0, "asking the model a few prompts")
        for _ in range(500):
            if "few prompts, " in said.getvalue():
                break
            time.sleep(0.01)
    assert re.search(r"dry run: asking the model a few prompts, \d+ s so far", said.getvalue())
    length = len(said.getvalue())
    time.sleep(0.1)
    assert len(said.getvalue()) == length


@pytest.mark.django_db
def test_the_phase_stands_in_the_run_until_it_ends() -> None:
    run = run_claim(make_run(status="queued", finished_at=None).pk)
    told: list[tuple[int, int, str]] = []
    record = PhaseRecorder(run, lambda *figures: told.append(figures))
    record(0, 0, "reference pass")
    run.refresh_from_db()
    began = run.phase_at
    assert (run.phase, began is not None) == ("reference pass", True)
    record.written_at -= 7200
    record(32, 300)
    run.refresh_from_db()
    assert (run.phase, run.phase_at) == ("reference pass, 32 of 300", began)
    assert told == [(0, 0, "reference pass"), (32, 300, "")]
    run_finish(run, TrainingRun.Status.CANCELLED, reason="a test")
    assert (run.phase, run.phase_at) == ("", None)


@pytest.mark.django_db
def test_within_a_phase_the_row_is_written_now_and_then_alone() -> None:
    run = make_run(status="running", finished_at=None)
    record = PhaseRecorder(run)
    record(0, 0, "judging")
    record(1, 400)
    run.refresh_from_db()
    assert run.phase == "judging"
    record(0, 0, "exporting")
    record.written_at -= 7200
    record(7_000_000, 9_000_000, "quantising to q4_k_m")
    run.refresh_from_db()
    assert run.phase == "exporting, quantising to q4_k_m"


@pytest.mark.django_db
def test_rest_says_the_phase() -> None:
    run = make_run(
        status="running",
        finished_at=None,
        phase="training",
        steps_done=12,
        steps_total=58,
        phase_at=timezone.now(),
    )
    client = Client(headers={"Authorization": f"Bearer {key_create('reader', ['read'])[1]}"})
    found = client.get(f"/api/runs/{run.pk}/").json()
    assert found["phase"] == "training, step 12 of 58"
    assert found["phaseAt"].startswith(str(timezone.now().year))
