"""All pages in a real browser: by Tab, small and wide, for axe, without a word on the console."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from django.contrib.auth.models import User
from playwright.sync_api import Browser, expect

from feedback.models import Decision, Rating
from feedback.rating.suggestions import suggestions_record
from feedback.recording.ingest import trace_record
from feedback.services import outcome_record, rating_submit
from rl.datasets.reward_records import rewards_calculate
from rl.management import simulation
from rl.models import Experiment, LabelRun
from tests.support.browser import Opener, browser, compared, opener, rated, record, record_pairs
from tests.support.experiments import expose, policy_of, running_of

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
    expect(page.locator("h1")).to_have_text("This link is no longer valid")
    page.context.close()


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
