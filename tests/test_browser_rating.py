"""The rating page and the charts of runs in a real browser: by keyboard, without scripts, without a connection."""

import threading
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from django.contrib.auth.models import User
from django.test import Client
from playwright.sync_api import expect

from feedback.models import Rating
from feedback.rating import views as service
from rl.management import simulation
from rl.models import RunMetric, TrainingRun
from tests.support.browser import Opener, browser, opener, rated, record, standing
from tests.support.registry_rows import make_run

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def test_twenty_decisions_are_rated_by_keyboard_alone(opener: Opener) -> None:
    for number in range(20):
        record(number)
    page = opener()
    keys = ["ArrowUp", "ArrowDown", "1", "2", "3", "4", "5"]
    for number in range(20):
        expect(page.locator(".turn.response")).to_contain_text(f"answer {number}")
        page.keyboard.press(keys[number % len(keys)])
        rated(page, number + 1)
    verdicts = [rating.thumb or str(rating.stars) for rating in standing()]
    assert verdicts == [["up", "down", "1", "2", "3", "4", "5"][n % 7] for n in range(20)]
    assert [rating.decision.response for rating in standing()] == [f"answer {n}" for n in range(20)]
    expect(page.locator("h1")).to_have_text("All rated")
    assert page.complaints == []  # type: ignore[attr-defined]


def test_tags_and_notes_by_keyboard_and_no_key_acts_while_typing(opener: Opener) -> None:
    record(1)
    page = opener()
    page.keyboard.press("t")
    page.keyboard.press("Space")
    page.keyboard.press("n")
    page.keyboard.type("15 stars? cut sus")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowDown")
    assert Rating.objects.count() == 0
    expect(page.locator("textarea[name=notes]")).to_have_value("15 stars? cut sus")
    expect(page.locator("#keys")).to_be_hidden()
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowDown")
    rated(page, 1)
    rating = standing()[0]
    assert (rating.thumb, rating.notes, rating.tags) == ("down", "15 stars? cut sus", ["wrong"])


def test_digits_after_t_pick_tags_and_give_no_stars(opener: Opener) -> None:
    record(1)
    page = opener()
    boxes = page.locator(".tags input[type=checkbox]")
    names = boxes.evaluate_all("all => all.map(one => one.value)")
    page.keyboard.press("t")
    page.keyboard.press("1")
    page.keyboard.press("2")
    page.keyboard.press("1")  # taken off again
    page.keyboard.press("9")  # there is no ninth
    expect(boxes.nth(1)).to_be_checked()
    expect(boxes.nth(0)).not_to_be_checked()
    assert Rating.objects.count() == 0
    page.keyboard.press("Escape")
    page.keyboard.press("4")
    rated(page, 1)
    assert [(rating.stars, rating.tags) for rating in standing()] == [(4, [names[1]])]


def test_ctrl_enter_saves_a_correction(opener: Opener) -> None:
    record(1)
    page = opener()
    page.keyboard.press("n")
    page.keyboard.press("Control+Enter")  # saves corrections alone
    page.keyboard.press("Escape")
    page.keyboard.press("c")
    page.keyboard.press("Control+a")
    page.keyboard.type("Better.")
    page.keyboard.press("Control+Enter")
    rated(page, 1)
    assert [(rating.correction, rating.thumb, rating.stars) for rating in standing()] == [
        ("Better.", "", None)
    ]


def test_enter_in_the_field_for_tags_gives_no_verdict(opener: Opener) -> None:
    record(1)
    page = opener()
    page.locator("input[name=other_tags]").fill("rude")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowDown")
    rated(page, 1)
    assert [(rating.thumb, rating.tags) for rating in standing()] == [("down", ["rude"])]
    assert Rating.objects.count() == 1


def test_an_answer_that_repeats_is_picked_as_the_correction_by_keyboard(opener: Opener) -> None:
    for number in range(42):
        record(number, response=("yes", "no")[number % 2])
    page = opener()
    page.keyboard.press("c")
    expect(page.get_by_role("button", name="no", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    rated(page, 1)
    assert [(rating.correction, rating.thumb) for rating in standing()] == [("no", "")]
    assert page.complaints == []  # type: ignore[attr-defined]


def test_a_correction_among_listed_responses_is_a_choice(opener: Opener) -> None:
    simulation.simulate("widgets", scenarios=1)
    page = opener()
    page.keyboard.press("c")
    expect(page.locator("select[name=correction]")).to_be_focused()
    listed = page.locator("select[name=correction] option").evaluate_all("all => all.map(o => o.value)")
    page.locator("select[name=correction]").select_option(index=1)
    page.keyboard.press("ArrowDown")
    assert Rating.objects.count() == 0
    page.locator("button[value=correct]").click()
    rated(page, 1)
    assert standing()[0].correction in listed[1:]


def test_s_skips_and_leaves_no_rating(opener: Opener) -> None:
    record(1)
    record(2)
    page = opener()
    page.keyboard.press("s")
    expect(page.locator(".turn.response")).to_contain_text("answer 2")
    expect(page.locator(".said")).to_have_text("Skipped")
    page.keyboard.press("s")
    page.get_by_role("button", name="Bring them back").click()
    expect(page.locator(".turn.response")).to_contain_text("answer 1")
    assert Rating.objects.count() == 0


def test_the_next_card_precedes_the_answer(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 4):
        record(number)
    page = opener()
    expect(page.locator("#stage[data-ahead]")).to_be_attached()
    go_on, submit = threading.Event(), service.rating_submit

    def held(**facts: Any) -> Any:
        assert go_on.wait(30)
        return submit(**facts)

    monkeypatch.setattr(service, "rating_submit", held)
    page.keyboard.press("ArrowUp")
    expect(page.locator(".turn.response")).to_contain_text("answer 2")
    assert Rating.objects.count() == 0
    page.locator("textarea[name=notes]").fill("begun already")
    go_on.set()
    rated(page, 1)
    expect(page.locator("textarea[name=notes]")).to_have_value("begun already")
    expect(page.locator("#stage[data-ahead]")).to_be_attached()
    page.context.set_offline(True)
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowDown")
    # not saved: the card comes back with what was typed
    expect(page.locator(".said")).to_contain_text("Not saved")
    expect(page.locator(".turn.response")).to_contain_text("answer 2")
    expect(page.locator("textarea[name=notes]")).to_have_value("begun already")
    page.context.set_offline(False)
    page.keyboard.press("ArrowDown")
    rated(page, 2)
    assert [(r.thumb, r.notes) for r in standing()] == [("up", ""), ("down", "begun already")]


def test_the_list_of_keys_opens_and_holds_the_keys_back(opener: Opener) -> None:
    record(1)
    page = opener()
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_visible()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Escape")
    expect(page.locator("#keys")).to_be_hidden()
    assert Rating.objects.count() == 0
    page.keyboard.press("ArrowUp")
    rated(page, 1)


def test_keys_of_the_browser_are_left_alone(opener: Opener) -> None:
    record(1)
    page = opener()
    for key in ("Control+1", "Alt+ArrowUp", "Meta+s", "Control+u"):
        page.keyboard.press(key)
    page.wait_for_timeout(200)
    assert Rating.objects.count() == 0


def test_two_clicks_at_once_store_one_rating(opener: Opener) -> None:
    record(1)
    record(2)
    page = opener()
    page.evaluate("() => { const b = document.querySelector('[value=up]'); b.click(); b.click(); }")
    rated(page, 1)
    assert len(standing()) == 1


def test_without_a_connection_the_page_says_so_and_stores_later_once(opener: Opener) -> None:
    record(1)
    page = opener()
    page.context.set_offline(True)
    page.keyboard.press("ArrowUp")
    expect(page.locator(".said")).to_contain_text("Not saved")
    page.context.set_offline(False)
    page.keyboard.press("ArrowUp")
    rated(page, 1)
    assert Rating.objects.count() == 1


def test_who_was_signed_out_meanwhile_is_asked_to_sign_in(opener: Opener) -> None:
    record(1)
    page = opener()
    page.context.clear_cookies(name="sessionid")
    page.keyboard.press("ArrowUp")
    page.wait_for_url("**/accounts/login/?next=**")
    assert Rating.objects.count() == 0


def test_a_refused_rating_keeps_what_was_typed(opener: Opener) -> None:
    record(1)
    page = opener()
    page.locator("input[name=other_tags]").fill("t" * 101)
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowUp")
    expect(page.locator(".fault")).to_contain_text("at most 100 characters")
    expect(page.locator("input[name=other_tags]")).to_have_value("t" * 101)
    page.locator("input[name=other_tags]").fill("fine")
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowUp")
    rated(page, 1)


def test_after_an_undo_a_reload_shows_the_queue(opener: Opener, live_server: Any) -> None:
    first = record(1)
    record(2)
    page = opener(f"/rate/?decision={first.pk}")
    page.keyboard.press("ArrowUp")
    rated(page, 1)
    assert page.url == live_server.url + "/rate/"


def test_everything_works_with_scripts_blocked(opener: Opener) -> None:
    for number in range(1, 4):
        record(number)
    page = opener(java_script_enabled=False)
    expect(page.locator(".only-scripted")).to_be_hidden()
    page.get_by_label("too long").check()
    page.locator("textarea[name=notes]").fill("Two words")
    page.locator("button[value=down]").click()
    expect(page.locator(".said")).to_have_text("Saved: bad")
    page.locator("button[value='4']").click()
    page.get_by_role("button", name="Skip").click()
    expect(page.locator("h1")).to_have_text("Only those you skipped are left")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".said")).to_have_text("Undone")
    page.get_by_text("Correct it").click()
    page.locator("textarea[name=correction]").fill("Better.")
    page.get_by_role("button", name="Save the correction").click()
    first, second = standing()
    assert (first.thumb, first.tags, first.notes) == ("down", ["too long"], "Two words")
    assert (second.stars, second.correction) == (None, "Better.")


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
    box = loss.locator(".u-over").bounding_box()
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
