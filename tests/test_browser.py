"""The rating page in a real browser: by keyboard alone, by touch, with scripts blocked, small and dark."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from django.contrib.auth.models import User
from django.test import Client
from playwright.sync_api import Browser, Page, expect, sync_playwright

from feedback.models import Comparison, Decision, ImportBatch, Rating
from feedback.rating import views
from feedback.rating.suggestions import suggestion_counts, suggestions_record
from feedback.recording.traces import trace_record
from feedback.selectors import comparisons_standing, ratings_standing
from feedback.services import decision_record, outcome_record, rating_submit
from rl.datasets.reward_records import rewards_calculate
from rl.management import simulation
from rl.models import Experiment, LabelRun
from tests.support.experiments import expose, policy_of, running_of

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not os.path.exists(CHROMIUM):  # noqa: PTH110
        reason = "Chromium was not found: install Debian's package `chromium`"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    # playwright's synchronous API runs an event loop in this thread, where Django would refuse the database
    before = os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield found
        found.close()
    os.environ.pop("DJANGO_ALLOW_ASYNC_UNSAFE")
    if before is not None:
        os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = before


Opener = Callable[..., Page]


@pytest.fixture
def opener(browser: Browser, live_server: Any) -> Iterator[Opener]:
    """Opens a page of the running server in a window of its own, signed in as ada."""
    client = Client()
    client.force_login(User.objects.create_superuser("ada"))
    session = client.cookies["sessionid"].value
    windows = []

    def open_page(path: str = "/rate/", **options: Any) -> Page:
        window = browser.new_context(**({"viewport": {"width": 1100, "height": 800}} | options))
        window.add_cookies([{"name": "sessionid", "value": session, "url": live_server.url}])
        window.set_default_timeout(10_000)
        windows.append(window)
        page = window.new_page()
        page.complaints = []  # type: ignore[attr-defined]
        page.on("console", lambda m: m.type == "error" and page.complaints.append(m.text))  # type: ignore[attr-defined]
        page.on("pageerror", lambda e: page.complaints.append(str(e)))  # type: ignore[attr-defined]
        page.goto(live_server.url + path)
        return page

    yield open_page
    for window in windows:
        window.close()


def record(number: int = 1, **facts: Any) -> Decision:
    known = {"agent": "assistant", "messages": f"question {number}", "response": f"answer {number}"}
    return decision_record(**(known | facts)).row


def standing() -> list[Rating]:
    return list(ratings_standing().select_related("decision"))


def rated(page: Page, count: int) -> None:
    """Wait until the page says so many were rated today."""
    expect(page.locator(".progress strong").first).to_have_text(str(count))


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


def test_a_accepts_what_is_suggested_and_u_takes_it_back(opener: Opener) -> None:
    first = record(1)
    record(2)
    suggestions_record({first.pk: 0.9}, "labels-1")
    page = opener()
    expect(page.locator(".suggested")).to_contain_text("90 of 100")
    page.keyboard.press("a")
    rated(page, 1)
    assert [(rating.decision_id, rating.thumb) for rating in standing()] == [(first.pk, "up")]
    assert suggestion_counts("assistant").accepted == 1
    expect(page.locator(".suggested")).to_have_count(0)
    page.keyboard.press("a")  # nothing is suggested for the second: nothing happens
    page.keyboard.press("u")
    rated(page, 0)
    assert standing() == []
    assert suggestion_counts("assistant").open == 1
    assert page.complaints == []  # type: ignore[attr-defined]


def test_u_takes_back_and_the_page_can_be_rated_again(opener: Opener) -> None:
    record(1)
    record(2)
    page = opener()
    page.keyboard.press("ArrowDown")
    rated(page, 1)
    page.keyboard.press("u")
    rated(page, 0)
    expect(page.locator(".turn.response")).to_contain_text("answer 1")
    assert standing() == []
    page.keyboard.press("ArrowUp")
    rated(page, 1)
    assert [rating.thumb for rating in standing()] == ["up"]


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


def test_a_correction_by_keyboard_alone(opener: Opener) -> None:
    record(1)
    page = opener()
    page.keyboard.press("c")
    expect(page.locator("textarea[name=correction]")).to_be_focused()
    page.keyboard.press("Control+a")
    page.keyboard.type("Better.")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    rated(page, 1)
    assert [(rating.correction, rating.thumb) for rating in standing()] == [("Better.", "")]


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


def test_the_next_card_is_there_before_the_server_has_answered(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 4):
        record(number)
    page = opener()
    expect(page.locator("#stage[data-ahead]")).to_be_attached()
    go_on, submit = threading.Event(), views.rating_submit

    def held(**facts: Any) -> Any:
        assert go_on.wait(30)
        return submit(**facts)

    monkeypatch.setattr(views, "rating_submit", held)
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


AGENTS = ("widgets", "fixtures", "filer", "assistant")


@pytest.mark.parametrize("agent", AGENTS)
def test_nothing_sticks_out_at_phone_width(opener: Opener, agent: str) -> None:
    simulation.simulate(agent, scenarios=1)
    page = opener(
        "/rate/?agent=" + agent, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True
    )
    for _ in range(4):
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        good = page.locator("button[value=up]")
        expect(good).to_be_in_viewport(ratio=1)
        box = good.bounding_box()
        assert box
        assert min(box["width"], box["height"]) >= 44
        before = Rating.objects.count()
        good.tap()
        rated(page, before + 1)
    for path in ("/", "/runs/"):
        page.goto(page.url.split("/rate/")[0] + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


CONTRAST = """() => {
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const parse = (c) => { const m = c.match(/[\\d.]+/g).map(Number); return { rgb: m.slice(0, 3), a: m[3] ?? 1 }; };
  const light = (rgb) => 0.2126 * channel(rgb[0]) + 0.7152 * channel(rgb[1]) + 0.0722 * channel(rgb[2]);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.a === 1) return c.rgb;
    }
    return [255, 255, 255];
  };
  const seen = { visibilityProperty: true, opacityProperty: true };
  const poor = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility(seen) || e.closest("svg, option, :disabled")) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color).rgb), light(ground(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const wanted = parseFloat(getComputedStyle(e).fontSize) >= 24 ? 3 : 4.5;
    if (ratio < wanted) poor.push([e.tagName, e.className, ratio.toFixed(2), e.textContent.trim().slice(0, 40)]);
  }
  return poor;
}"""
"""Texts whose contrast is under 4.5 (3 for large ones), as WCAG 2.2 criterion 1.4.3 computes it."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_their_ground(opener: Opener, scheme: str) -> None:
    for agent in AGENTS:
        simulation.simulate(agent, scenarios=1, rated=agent == "widgets")
    page = opener(color_scheme=scheme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(244, 243, 239)", "dark": "rgb(18, 22, 27)"}[scheme]
    home = page.url.split("/rate/")[0]
    for path in ("/", "/runs/", "/accounts/link/a/b/", *(f"/rate/?agent={agent}" for agent in AGENTS)):
        page.goto(home + path)
        assert page.evaluate(CONTRAST) == [], path


def test_every_control_is_reached_by_tab_with_visible_focus_and_a_name(opener: Opener) -> None:
    simulation.simulate("widgets", scenarios=1)
    page = opener()
    controls = (
        "a[href], button:not(:disabled):not([hidden]), input:not([type=hidden]), textarea, select, summary"
    )
    wanted = page.locator(f"main >> css={controls}").evaluate_all(
        "all => all.filter(e => e.checkVisibility()).length"
    )
    reached = set()
    page.locator(".to-content").focus()
    for _ in range(60):
        page.keyboard.press("Tab")
        found = page.evaluate(
            """() => {
              const e = document.activeElement;
              if (!e.closest("main") || !e.matches("a, button, input, textarea, select, summary")) return null;
              const shown = e.matches(".tag input") ? e.nextElementSibling : e;
              e.dataset.seen ??= Math.random();
              const name = e.ariaLabel || e.textContent.trim() || e.closest("label")?.textContent.trim();
              return [e.dataset.seen, getComputedStyle(shown).outlineStyle, name || ""];
            }"""
        )
        if found is not None:
            seen, outline, name = found
            assert outline == "solid", name
            assert name
            reached.add(seen)
    assert wanted > 12
    assert len(reached) == wanted


def test_no_page_complains_to_the_console(opener: Opener) -> None:
    """Broken scripts, files that are missing, and whatever the content security policy stopped."""
    simulation.simulate("widgets", scenarios=1)
    page = opener()
    home = page.url.split("/rate/")[0]
    for path in (
        "/",
        "/runs/",
        "/rate/?agent=widgets",
        "/admin/",
        "/admin/rl/policy/",
        "/admin/feedback/decision/",
        f"/admin/feedback/decision/{Decision.objects.latest('created_at').pk}/change/",
        "/admin/rl/learnersettings/add/",
        "/admin/auth/user/",
        "/api/docs/",
    ):
        page.goto(home + path)
        page.wait_for_load_state("networkidle")
    assert page.complaints == []  # type: ignore[attr-defined]


def test_a_link_opens_the_door_in_the_browser(browser: Browser, live_server: Any) -> None:
    from feedback.accounts.sign_in import signin_link

    # somebody who is there already: the groups of new people come from a migration, which a test before has flushed
    User.objects.create_user("grace")
    page = browser.new_context().new_page()
    link = signin_link("grace", live_server.url)
    page.goto(link.url)
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator(".who")).to_contain_text("grace")
    page.get_by_role("button", name="Sign out").click()
    page.goto(link.url)
    expect(page.locator("h1")).to_have_text("This link is used up")
    page.context.close()


# --- Side by side -------------------------------------------------------------------------------------------


def record_pairs(count: int) -> None:
    """As many prompts, each answered by two policies."""
    for number in range(count):
        for policy in ("assistant-v1", "assistant-v2"):
            record(messages=f"question {number}", response=f"{policy} to {number}", policy=policy)


def compared(page: Page, count: int) -> None:
    expect(page.locator(".progress strong").first).to_have_text(str(count))


def comparisons() -> list[Comparison]:
    return list(comparisons_standing().select_related("left", "right"))


def test_pairs_are_compared_by_keyboard_alone(opener: Opener) -> None:
    record_pairs(5)
    page = opener("/rate/pairs/")
    said = []
    keys = {"ArrowLeft": "left", "ArrowRight": "right", "=": "tie", "0": "both_bad"}
    for number, key in enumerate(keys):
        expect(page.locator("#stage[data-ahead]")).to_be_attached()
        sides = page.locator(".side-text").all_inner_texts()
        page.keyboard.press(key)
        compared(page, number + 1)
        said.append((sides, keys[key]))
    assert [([row.left.response, row.right.response], row.preference) for row in comparisons()] == said
    page.keyboard.press("u")
    compared(page, 3)
    assert len(comparisons()) == 3
    page.keyboard.press("n")
    page.keyboard.type("= 0 s u")
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    compared(page, 4)
    assert (comparisons()[-1].preference, comparisons()[-1].notes) == ("right", "= 0 s u")
    page.keyboard.press("s")
    expect(page.locator("h1")).to_have_text("Only those you skipped are left")
    assert page.complaints == []  # type: ignore[attr-defined]


def test_pairs_are_compared_with_scripts_blocked(opener: Opener) -> None:
    record_pairs(2)
    page = opener("/rate/pairs/", java_script_enabled=False)
    page.locator("textarea[name=notes]").fill("Clearer")
    page.locator("button[value=left]").click()
    expect(page.locator(".said")).to_have_text("Saved: A is better")
    page.get_by_role("button", name="Skip").click()
    page.get_by_role("button", name="Bring them back").click()
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".said")).to_have_text("Undone")
    page.locator("button[value=tie]").click()
    page.locator("button[value=both_bad]").click()
    expect(page.locator("h1")).to_have_text("All compared")
    assert [row.preference for row in comparisons()] == ["tie", "both_bad"]


PAGES = (
    "/",
    "/rate/",
    "/rate/?agent=filer",
    "/rate/pairs/",
    "/rate/pairs/?agent=widgets",
    "/decisions/",
    "/agreement/",
    "/import/",
    "/export/",
    "/agents/widgets/",
    "/rate/?agent=retriever",
    "/rate/?agent=tool_agent",
    "/experiments/",
)


def everything_recorded() -> Decision:
    """Something to see on every page; returns a decision with all that one can have."""
    simulation.simulate("filer", scenarios=3, rated=True)
    simulation.simulate("widgets", scenarios=3)
    for agent in ("retriever", "tool_agent"):
        simulation.simulate(agent, scenarios=1)
    rewards_calculate("filer")
    suggestions_record({row.pk: 0.8 for row in Decision.objects.exclude(agent="filer")}, "widgets-labels-1")
    curve = [{"stated": 0.2, "observed": 0.1, "n": 20}, {"stated": 0.8, "observed": 0.9, "n": 20}]
    figures = dict.fromkeys(("accuracy", "brier", "brier_base", "calibration_error"), 0.2)
    LabelRun.objects.create(
        agent="widgets", base_model="b", path="p", ratings=40, figures={**figures, "n": 40, "curve": curve},
        left_out={"reward model": "none was trained"},
    )  # fmt: skip
    record_pairs(2)
    steps: list[dict[str, Any]] = [
        {"kind": "reasoning", "text": "Look it up first.", "n": 0, "parent": None},
        {"kind": "tool_call", "name": "orders.find", "arguments": {"number": 1}, "error": "TimeoutError", "n": 1,
         "parent": 0, "duration_ms": 12},
        {"kind": "decision", "messages": "q", "response": "r", "candidates": [{"response": "r", "score": 0.9}],
         "policy": "assistant-v2", "tags": ["a"]},
        {"kind": "task", "name": "t", "status": "failed"},
    ]  # fmt: skip
    whole = trace_record(agent="assistant", steps=steps).decisions[0]
    for rater, said in (("ada", {"thumb": "up", "notes": "Fine.", "tags": ["kind"]}), ("bob", {"stars": 1})):
        rating_submit(decision=whole, rater=rater, **said)
    rating_submit(decision=whole, rater="bob", correction="better")
    outcome_record(decision=whole, name="clicked", value=1)
    policy_of("filer-v1", "champion")
    policy_of("filer-v2")
    running_of(slices=["source"])
    expose(range(120), lambda n, new: {"thumb": n % 5 < (4 if new else 2), "latency_ms": 90.0 + n % 7})
    return Decision.objects.get(pk=whole)


def addresses(whole: Decision) -> list[str]:
    """Every page there is something to see on."""
    return [*PAGES, f"/decisions/{whole.pk}/", f"/experiments/{Experiment.objects.get().pk}/"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(opener: Opener, scheme: str) -> None:
    axe = Axe()
    whole = everything_recorded()
    page = opener(color_scheme=scheme)
    home = page.url.split("/rate/")[0]
    for path in addresses(whole):
        page.goto(home + path)
        for details in page.locator("details").all():
            details.evaluate("e => { e.open = true; }")
        answer = axe.run(page).response
        assert "color-contrast" in {rule["id"] for rule in answer["passes"]}, "nothing was looked at"
        found = answer["violations"]
        serious = [(v["id"], [n["html"][:120] for n in v["nodes"]][:3]) for v in found
                   if v["impact"] in ("serious", "critical")]  # fmt: skip
        assert serious == [], path
    assert page.complaints == []  # type: ignore[attr-defined]


BROKEN_NUMBERS = """() => {
  const broken = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());)
    for (const found of node.textContent.matchAll(/\\d[\\d.,]+/g)) {
      const range = document.createRange();
      range.setStart(node, found.index);
      range.setEnd(node, found.index + found[0].length);
      const lines = new Set([...range.getClientRects()].filter(r => r.width > 0).map(r => Math.round(r.top)));
      if (lines.size > 1 && !node.parentElement.closest("pre, code, .words, .mono")) broken.push(found[0]);
    }
  return broken;
}"""
"""Numbers that stand on two lines: 624 as 62 and 4."""


@pytest.mark.parametrize("width", [320, 700, 820, 980])
def test_no_page_is_wider_than_a_tablet_and_no_number_is_broken(opener: Opener, width: int) -> None:
    whole = everything_recorded()
    page = opener(viewport={"width": width, "height": 740})
    home = page.url.split("/rate/")[0]
    for path in addresses(whole):
        page.goto(home + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert page.evaluate(BROKEN_NUMBERS) == [], path


def test_pages_fit_a_phone(opener: Opener) -> None:
    whole = everything_recorded()
    page = opener(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    home = page.url.split("/rate/")[0]
    for path in addresses(whole):
        page.goto(home + path)
        for details in page.locator("details").all():
            details.evaluate("e => { e.open = true; }")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
    page.goto(f"{home}/rate/pairs/")
    for value in ("left", "tie", "both_bad", "right"):
        box = page.locator(f"button[value={value}]").bounding_box()
        assert box
        assert min(box["width"], box["height"]) >= 44
    page.locator("button[value=right]").tap()
    compared(page, 1)


@pytest.mark.parametrize("width", [390, 1280])
def test_the_admin_and_the_description_of_the_api_fit_the_window(opener: Opener, width: int) -> None:
    page = opener("/glossary/", viewport={"width": width, "height": 800})
    page.set_default_timeout(60_000)  # the description is a large script
    home = page.url.split("/glossary/")[0]
    for path, shown in (
        ("/admin/", ".rt-groups"),
        (f"/admin/auth/user/{User.objects.get().pk}/change/", ".selector"),
        ("/api/docs/", ".opblock-summary"),
    ):
        page.goto(home + path, wait_until="commit")
        expect(page.locator(shown).first).to_be_visible(timeout=60_000)
        expect(page.locator(".masthead")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
    assert page.complaints == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("long", [False, True])
def test_both_answers_are_in_sight_on_a_phone(opener: Opener, long: bool) -> None:
    words = " It takes five working days, and you get a mail when it is on its way." * (12 if long else 0)
    for policy in ("v1", "v2"):
        record(response=f"by {policy}.{words}", policy=policy)
    page = opener("/rate/pairs/", viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.locator(".decision").evaluate("e => e.scrollIntoView()")
    verdicts = page.locator(".verdicts").bounding_box()
    assert verdicts
    for panel in page.locator(".side-panel").all():
        box = panel.bounding_box()
        assert box
        assert box["y"] + box["height"] <= verdicts["y"] + 1


def test_a_file_is_imported_by_keyboard_with_scripts_blocked(opener: Opener, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": "q", "chosen": "", "rejected": "b"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = opener(java_script_enabled=False)
    page.goto(page.url.split("/rate/")[0] + "/import/")
    page.set_input_files("input[name=file]", str(file))
    page.focus("input[name=agent]")
    page.keyboard.type("from-a-file")
    page.keyboard.press("Enter")
    expect(page.get_by_text("1 row cannot be read")).to_be_visible()
    page.get_by_role("button", name="Import without this row").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("2 decisions, 1 comparison imported")).to_be_visible()
    number = ImportBatch.objects.get().pk  # the numbers of a database grow on from test to test
    expect(page.get_by_text(f"(import {number}); 1 row left out.")).to_be_visible()
    assert Decision.objects.filter(agent="from-a-file").count() == 2
