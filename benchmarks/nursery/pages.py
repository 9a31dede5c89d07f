"""The newcomer's way by mouse: from the sign-in link to the new champion's answer and its rating."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import sync_playwright

from benchmarks.nursery.agent import AGENT, best_watering, data_lines, reply
from benchmarks.nursery.server import Serve
from benchmarks.nursery.walk import CHROMIUM_ARGUMENTS, WIDTHS, Walk

PATIENCE_S = 1800.0
"""Longest wait for the training: the machine may have other work."""
RATED_IN_PLACE = 6
READING_MS = 300
"""Time for the card that came."""


def rate_in_place(walk: Walk, count: int) -> None:
    """Good, bad, or what it should have been, by what the gardeners want of the bed that is shown."""
    card = walk.page.locator("#rate-form")
    for number in range(count):
        shown = card.get_attribute("data-shown") or ""
        text = card.inner_text()
        soil = re.search(r"soil:? *(\w+)", text, re.IGNORECASE)
        forecast = re.search(r"forecast:? *(\w+)", text, re.IGNORECASE)
        answer = card.locator(".response").first.inner_text()
        right = best_watering(soil[1], forecast[1]) if soil and forecast else ""
        if right in answer:
            walk.click_at(card.locator("button.thumb.good"))
        elif number % 2:
            walk.click_at(card.locator("button.thumb.bad"))
        else:
            walk.click_at(card.locator("details.correct summary"))
            field = card.locator("[name=correction]")
            if field.evaluate("field => field.tagName") == "SELECT":
                field.select_option(value=reply(right))  # a native list, which the page does not draw itself
            else:
                walk.click_at(field)
                walk.page.keyboard.press("Control+A")
                walk.page.keyboard.insert_text(reply(right))
            walk.click_at(card.locator("button[value=correct]"))
        walk.page.wait_for_function(
            "before => document.querySelector('#rate-form')?.dataset.shown !== before", arg=shown
        )
        # a press sooner than a quarter of a second after a new card counts as the last one's second half
        walk.page.wait_for_timeout(READING_MS)


PHASE = re.compile(r"(?P<name>.*?)(?:,? (?:step )?(?P<done>[\d,]+) of (?P<total>[\d,]+).*)?")
"""Phase as a page names it, with how far it is."""


def watch_training(walk: Walk) -> list[dict[str, Any]]:
    """Seconds of each phase that the page names until the policy is judged, and how long the page said the same at
    most; pictures of the training when a quarter is done, and of the judging."""
    phases: list[dict[str, Any]] = []
    photographed: set[str] = set()
    began = changed = time.monotonic()
    text_before = ""
    while time.monotonic() - began < PATIENCE_S:
        with contextlib.suppress(PlaywrightError):  # the region is replaced while it is read
            text = walk.page.locator("[data-live]").inner_text(timeout=2000)
            now = time.monotonic()
            changed, text_before = (changed, text) if text == text_before else (now, text)
            named = walk.page.locator(".phase strong")
            found = PHASE.fullmatch(named.inner_text(timeout=500) if named.count() else "")
            name = found["name"].lower() if found else ""
            if name and (not phases or phases[-1]["phase"] != name):
                phases.append({"phase": name, "at_s": round(now - began, 1), "unchanged_s": 0.0})
            if phases:
                phases[-1]["unchanged_s"] = round(max(phases[-1]["unchanged_s"], now - changed), 1)
            steps = (
                [int(found[part].replace(",", "")) for part in ("done", "total")]
                if found and found["done"]
                else []
            )
            for kind, ready in {"training": steps and 4 * steps[0] >= steps[1], "judging": True}.items():
                if name.startswith(kind) and ready and kind not in photographed:
                    photographed.add(kind)
                    walk.photograph(f"5-{kind}")
                    changed = time.monotonic()
            if walk.page.locator("#h-step").inner_text(timeout=500).startswith(("5.", "6.")):
                return phases
        time.sleep(0.3)
    raise SystemExit(f"no judged policy within {PATIENCE_S:.0f} s; phases so far: {phases}")


def pages(home: Path, pictures: Path, chromium: str) -> dict[str, Any]:
    """The way of docs/start.md by mouse; seconds, clicks and phases."""
    pictures.mkdir(parents=True, exist_ok=True)
    served = Serve(home)
    try:
        link = served.link()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGUMENTS)
            page = browser.new_context(viewport=WIDTHS["wide"]).new_page()  # type: ignore[arg-type]
            page.set_default_timeout(60_000)
            walk = Walk(page, pictures)
            phases = _walk_pages(walk, link)
            browser.close()
        return {"steps": walk.steps, "phases": phases, "overflows": walk.overflows}
    finally:
        served.stop()


def _walk_pages(walk: Walk, link: str) -> list[dict[str, Any]]:
    page = walk.page
    page.goto(link)
    walk.photograph("0-sign-in")
    walk.click("button", "Sign in")
    page.wait_for_url("**/start/")
    walk.done("sign in")
    walk.paste("Your agent's name", AGENT)
    walk.paste("Ten lines or more, pasted or dropped here", data_lines())
    walk.photograph("1-paste")
    walk.click("button", "See what is recognised")
    page.get_by_role("heading", name="What was recognised").wait_for()
    walk.done("paste, see what is recognised")
    walk.photograph("2-recognised")
    walk.click("button", "Import")
    page.locator(".guide").wait_for()
    walk.done("import")
    walk.photograph("3-imported")
    walk.click_at(page.locator(".guide a", has_text="Rate"))
    page.get_by_role("heading", name="2. Rate").wait_for()
    walk.photograph("3-rate")
    rate_in_place(walk, RATED_IN_PLACE)
    walk.done(f"rate {RATED_IN_PLACE} in place")
    walk.click_at(page.locator(".guide a", has_text="Train"))
    page.get_by_role("button", name="Train", exact=True).wait_for()
    walk.photograph("4-train")
    walk.click("button", "Train")
    phases = watch_training(walk)
    walk.done("train and judge")
    promote_and_ask(walk)
    return phases


def promote_and_ask(walk: Walk) -> None:
    """From the judged policy to its answer as champion, and a rating of that."""
    page = walk.page
    walk.photograph("6-judged")
    walk.click("link", "Browse the answers side by side")
    page.wait_for_load_state("networkidle")
    walk.photograph("6-answers")
    page.go_back()
    walk.done("leaf through answers side by side")
    promote = page.get_by_role("button", name=re.compile(f"^Promote {AGENT}-v"))
    if promote.count():  # it is offered once the files are there from which the policy answers
        walk.click_at(promote)
    else:  # the gate stays closed: by force, with a reason
        walk.click_at(page.get_by_text("Promote it anyway"))
        walk.paste("Reason, kept on record", "trying the loop out")
        walk.click("button", "Promote by force")
    page.get_by_role("heading", name="6. Ask it").wait_for()
    walk.done("promote")
    ask_champion(walk)


def ask_champion(walk: Walk) -> None:
    """Ask the champion and rate its answer."""
    page = walk.page
    walk.photograph("7-ask")
    walk.click("button", "Ask it and the base model")
    page.locator(".answer-card .rate-here").nth(1).wait_for(timeout=180_000)
    walk.done("ask it")
    walk.steps[-1]["answers"] = page.locator(
        ".answer-card .side-text, .answer-card .answer"
    ).all_inner_texts()
    walk.photograph("8-answer", showing="#answers")
    walk.click_at(page.locator(".answer-card .rate-here button[value=up]").first)
    page.locator(".answer-card .picked").first.wait_for()
    walk.done("rate its answer")
    walk.photograph("9-rated")
    for name, path in {"10-run": "/runs/1/", "11-policy": f"/policies/{AGENT}-v77/", "12-home": "/"}.items():
        page.goto(urljoin(page.url, path))
        page.wait_for_load_state("networkidle")
        walk.photograph(name)
        if name == "11-policy":
            verdict = page.locator("section.card", has=page.get_by_role("heading", name="The gate's verdict"))
            verdict.screenshot(path=walk.pictures / "gate-frame.png")
