"""Charts of runs in a real browser: values under the pointer and by keyboard, a run at work, axe."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from django.contrib.auth.models import User
from django.test import Client
from playwright.sync_api import expect

from rl.models import RunMetric, TrainingRun
from tests.support.browser import Opener, browser, opener
from tests.test_pages import make_run

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

LOSSES = [0.7, 0.6, 0.5, 0.4, 0.3]


def run_with(losses: list[float], **facts: object) -> TrainingRun:
    run = make_run(**facts)
    RunMetric.objects.bulk_create(
        RunMetric(run=run, step=step, values={"loss": loss, "learning_rate": loss / 1000})
        for step, loss in enumerate(losses, start=1)
    )
    return run


def test_the_pointer_and_the_keys_read_one_step_on_every_chart(opener: Opener, client: Client) -> None:
    run = run_with(LOSSES)
    # the first answer of a process loads its modules, for which a busy machine takes longer than a browser waits
    client.force_login(User.objects.create_superuser("eve"))
    client.get(f"/runs/{run.pk}/")
    page = opener(f"/runs/{run.pk}/")
    loss, rate = page.locator("[data-chart=loss]"), page.locator("[data-chart=learning_rate]")
    expect(loss.locator(".chart-key strong")).to_have_text("0.3")
    plot = loss.locator(".u-over")
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    expect(loss.locator(".chart-step")).to_have_text("step 3")
    expect(loss.locator(".chart-key strong")).to_have_text("0.5")
    expect(rate.locator(".chart-key strong")).to_have_text("5e-4")
    page.mouse.move(0, 0)
    expect(loss.locator(".chart-step")).to_be_hidden()
    page.locator("#plot-loss").focus()
    page.keyboard.press("Home")
    expect(loss.locator("[role=status]")).to_have_text("step 1: training 0.7")
    page.keyboard.press("ArrowRight")
    expect(loss.locator("[role=status]")).to_have_text("step 2: training 0.6")
    assert page.complaints == []  # type: ignore[attr-defined]


def test_the_charts_of_a_run_at_work_go_on_in_place(opener: Opener) -> None:
    run = run_with(LOSSES[:2], status="running", steps_total=5, steps_done=2, finished_at=None)
    page = opener(f"/runs/{run.pk}/")
    loss = page.locator("[data-chart=loss]")
    expect(loss.locator(".chart-key strong")).to_have_text("0.6")
    page.locator("#table-leading summary").click()
    page.locator("#plot-loss").focus()
    page.evaluate("document.getElementById('plot-loss').dataset.same = 'yes'")
    RunMetric.objects.create(run=run, step=3, values={"loss": 0.55, "learning_rate": 5e-4})
    expect(loss.locator(".chart-key strong")).to_have_text("0.55")
    expect(page.locator("#plot-loss")).to_have_attribute("data-same", "yes")
    expect(page.locator("#plot-loss")).to_be_focused()
    expect(page.locator("#table-leading")).to_have_attribute("open", "")
    assert page.complaints == []  # type: ignore[attr-defined]


def test_without_scripts_the_drawing_of_the_server_stays(opener: Opener) -> None:
    page = opener(f"/runs/{run_with(LOSSES).pk}/", java_script_enabled=False)
    expect(page.locator("[data-chart=loss] svg[role=img] path")).to_be_visible()
    assert page.locator("canvas").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault_on_runs_and_their_comparison(opener: Opener, scheme: str) -> None:
    first, second = run_with(LOSSES, recipe={"beta": 0.1}), run_with(LOSSES[:3], recipe={"beta": 0.2})
    page = opener("/runs/", color_scheme=scheme)
    home = page.url.split("/runs/")[0]
    for path in ("/runs/", f"/runs/{first.pk}/", f"/runs/compare/?run={first.pk}&run={second.pk}"):
        page.goto(home + path)
        for details in page.locator("details").all():
            details.evaluate("e => { e.open = true; }")
        answer = Axe().run(page).response
        serious = [(v["id"], [n["html"][:120] for n in v["nodes"]][:3]) for v in answer["violations"]
                   if v["impact"] in ("serious", "critical")]  # fmt: skip
        assert serious == [], path
