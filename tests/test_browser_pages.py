"""Pages, pairs and imports in a real browser: by keyboard, by touch, small and wide, with scripts blocked."""

import json
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from django.contrib.auth.models import User
from playwright.sync_api import Browser, expect

from feedback.models import Decision, ImportBatch, Rating
from feedback.recording.ingest import trace_record
from feedback.services import outcome_record, rating_submit
from rl.datasets.reward_records import rewards_calculate
from rl.management import simulation
from rl.models import Experiment, PairJudgement, RunMetric
from tests.support.browser import Opener, browser, compared, comparisons, opener, rated, record, record_pairs
from tests.support.experiments import expose, policy_of, running_of
from tests.support.judging import round_of
from tests.support.page_world import user_pages, world_recorded
from tests.support.registry_rows import make_run

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


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
    expect(page.locator("h1")).to_have_text("This link is no longer valid")
    page.context.close()


BROKEN_NUMBERS = """() => {
  const broken = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());)
    for (const found of node.textContent.matchAll(/\\d[\\d.,]+/g)) {
      const range = document.createRange();
      range.setStart(node, found.index);
      range.setEnd(node, found.index + found[0].length);
      const lines = new Set([...range.getClientRects()].filter(r => r.width > 0).map(r => Math.round(r.top)));
      // tables are cards on a phone: their heads are hidden in a pixel's width
      const free = "pre, code, .words, .mono" + (innerWidth <= 640 ? ", thead" : "");
      if (lines.size > 1 && !node.parentElement.closest(free)) broken.push(found[0]);
    }
  return broken;
}"""
"""Numbers that stand on two lines: 624 as 62 and 4."""


@pytest.mark.slow
def test_no_page_is_wider_than_its_window_and_no_number_is_broken(opener: Opener) -> None:
    addresses = list(user_pages(world_recorded()))
    page = opener("/glossary/")
    page.set_default_timeout(60_000)
    home = page.url.removesuffix("/glossary/")
    found = []
    for path in addresses:
        page.goto(home + path)
        page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        for width in (320, 700, 820, 980):
            page.set_viewport_size({"width": width, "height": 740})
            shown, broken = (
                page.evaluate("document.documentElement.scrollWidth"),
                page.evaluate(BROKEN_NUMBERS),
            )
            if shown > width or broken:
                found.append(f"{path} at {width}: {shown} px wide, broken numbers {broken}")
    assert not found, "\n".join(found)


def test_a_runs_page_breaks_long_paths_and_is_no_wider_than_a_chart_not_yet_redrawn(opener: Opener) -> None:
    path = "/srv/" + "checkout_of_the_support_team_" * 12
    run = make_run(
        reason=path,
        recipe={"file": path},
        hardware={"device": path, "reasons": {"batch": path}},
        result={"details": [path]},
    )
    for step in (1, 2, 3):
        RunMetric.objects.create(run=run, step=step, values={"loss": 1 / step})
    page = opener("/glossary/", viewport={"width": 980, "height": 740})
    page.add_init_script("ResizeObserver = class { observe() {} unobserve() {} disconnect() {} }")
    page.goto(page.url.replace("/glossary/", f"/runs/{run.pk}/"))
    expect(page.locator(".plot.scripted").first).to_be_visible()
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    for width in (980, 320):
        page.set_viewport_size({"width": width, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_pair_is_compared_by_touch(opener: Opener) -> None:
    record_pairs(2)
    page = opener("/rate/pairs/", viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
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
        ("/api/docs/", ".opblock-tag"),
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
    verdicts = page.locator(".verdicts .thumbs").bounding_box()
    assert verdicts
    for panel in page.locator(".side-panel").all():
        box = panel.bounding_box()
        assert box
        assert box["y"] + box["height"] <= verdicts["y"] + 1


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


def test_a_judging_round_is_judged_by_keyboard_alone_and_stays_blind(opener: Opener) -> None:
    judging = round_of(6)
    page = opener(f"/rate/pairs/?round={judging.pk}")
    said = []
    for number, key in enumerate(("ArrowLeft", "ArrowRight", "=", "0")):
        expect(page.locator("#stage[data-ahead]")).to_be_attached()
        sides = page.locator(".side-text").all_inner_texts()
        assert judging.policy.name not in page.content()
        page.keyboard.press(key)
        compared(page, number + 1)
        side = "policy" if "candidate" in sides[key == "ArrowRight"] else "opponent"
        said.append({"=": "tie", "0": "both_bad"}.get(key, side))
    given = PairJudgement.objects.order_by("pk").values_list("preference", flat=True)
    assert list(given) == said
    page.keyboard.press("u")
    compared(page, 3)
    page.keyboard.press("ArrowRight")
    compared(page, 4)
    assert list(given.all())[:3] == said[:3]
    assert list(given.all())[3] in ("policy", "opponent")
    assert comparisons() == []  # evidence, never training data
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
