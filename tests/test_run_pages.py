"""Pages of one run and of several: what stands without scripts, what differs, what is refused; the vendored library."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from feedback.accounts.roles import role_give
from rl.models import RunMetric, TrainingRun
from tests.test_pages import make_run, words

pytestmark = pytest.mark.django_db

STATIC = Path(__file__).resolve().parent.parent / "static"


@pytest.fixture
def rater(client: Client) -> Client:
    user = User.objects.create_user("ada")
    role_give(user, "rater")
    client.force_login(user)
    return client


def run_logged(values: dict[str, list[float]], **facts: Any) -> TrainingRun:
    """A run whose figures were logged at steps 1, 2, 3, ..."""
    run = make_run(**facts)
    for step, row in enumerate(zip(*values.values(), strict=True), start=1):
        RunMetric.objects.create(run=run, step=step, values=dict(zip(values, row, strict=True)))
    return run


def test_a_run_shows_the_loss_first_and_the_families_below(rater: Client) -> None:
    run = run_logged({"learning_rate": [1e-4, 5e-5], "rewards/margins": [0.1, 0.4], "loss": [0.7, 0.5]})
    html = rater.get(f"/runs/{run.pk}/").text
    assert re.findall(r'data-chart="([^"]*)"', html) == ["loss", "rewards-margins", "learning_rate"]
    assert html.index("Reward margin") < html.index("Learning rate and gradient norm")


def test_every_chart_has_its_numbers_as_a_table_and_for_the_script(rater: Client) -> None:
    run = run_logged({"loss": [0.7, 0.5], "eval_loss": [0.8, 0.75]})
    html = rater.get(f"/runs/{run.pk}/").text
    assert "Step Loss, training Loss, held out 1 0.7 0.8 2 0.5 0.75" in words(html)
    (stored,) = re.findall(r'<script id="data-loss" type="application/json">(.*?)</script>', html)
    data = json.loads(stored)
    assert data["steps"] == [1, 2]
    assert [line["values"] for line in data["lines"]] == [[0.7, 0.5], [0.8, 0.75]]


def test_a_finished_run_has_no_bar_and_one_at_work_has(rater: Client) -> None:
    run = make_run(steps_total=58, steps_done=58)
    html = rater.get(f"/runs/{run.pk}/").text
    assert "<progress" not in html
    assert "58 steps, all done" in words(html)
    TrainingRun.objects.filter(pk=run.pk).update(status="running", steps_done=12, finished_at=None)
    html = rater.get(f"/runs/{run.pk}/").text
    assert "<progress" in html
    assert "12 of 58 steps" in words(html)


def test_runs_side_by_side_share_charts_and_list_what_differs(rater: Client) -> None:
    first = run_logged({"loss": [0.7, 0.5]}, recipe={"beta": 0.1, "epochs": 3}, seed=1)
    second = run_logged({"loss": [0.7, 0.25]}, recipe={"beta": 0.3, "epochs": 3}, seed=1)
    html = rater.get(f"/runs/compare/?run={first.pk}&run={second.pk}").text
    text = words(html)
    assert html.count("<figure") == 1
    assert f"run {first.pk} from 0.7 at step 1 to 0.5 at step 2" in html
    assert "beta 0.1 0.3" in text
    assert "epochs 3 3" not in text
    assert "last training loss 0.5 0.25" in text


@pytest.mark.parametrize("count", [0, 1, 6])
def test_too_few_or_too_many_runs_are_refused_in_words(rater: Client, count: int) -> None:
    runs = [make_run() for _ in range(count)]
    query = "&".join(f"run={run.pk}" for run in runs)
    answer = rater.get(f"/runs/compare/?{query}", follow=True)
    assert answer.redirect_chain[-1][0] == "/runs/"
    assert f"Choose 2 to 5 runs to compare; found {count}." in answer.text


@pytest.mark.parametrize("other", ["999999", "x", "-1", "1' OR 1", "9" * 30])
def test_a_run_that_is_not_there_is_not_found(rater: Client, other: str) -> None:
    assert rater.get("/runs/compare/", {"run": [make_run().pk, other]}).status_code == 404


def test_the_list_has_a_box_for_each_run_once_there_are_two(rater: Client) -> None:
    make_run()
    assert 'name="run"' not in rater.get("/runs/").text
    make_run()
    assert rater.get("/runs/").text.count('name="run"') == 2


def test_vendored_files_are_those_that_were_published() -> None:
    rows = re.findall(r"\| (\S+\.\w+) \|.*`([0-9a-f]{64})`", (STATIC / "vendor/README.md").read_text("utf-8"))
    assert {name for name, _ in rows} == {"uplot/uPlot.iife.min.js", "uplot/uPlot.min.css"}
    for name, stated in rows:
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == stated, name


def test_the_library_evaluates_no_text_as_code() -> None:
    source = (STATIC / "vendor/uplot/uPlot.iife.min.js").read_text("utf-8")
    assert not re.search(r"\beval\s*\(|new Function|innerHTML|setAttribute\(.style", source)
