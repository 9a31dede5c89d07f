"""The newcomer's way by mouse: from the sign-in link to the verdict on a new policy and its first answer."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import sync_playwright

from benchmarks.nursery.agent import AGENT, OPTIONS, best_watering, reply, rows
from benchmarks.nursery.server import Serve
from benchmarks.nursery.walk import CHROMIUM_ARGUMENTS, WIDTHS, Walk
from tests.support.stub_openai import ModelServer

PATIENCE_S = 1800.0
"""Longest wait for the training: the machine may have other work."""
READING_MS = 300
"""Time for the card that came."""


class NurseryModel(ModelServer):
    """The model that the nursery has: it answers any bed with a watering of chance."""

    draw = random.Random(3)

    def completion(self) -> dict[str, Any]:
        self.said = reply(self.draw.choice(OPTIONS))
        return super().completion()


def app_asks(snippet: str, count: int) -> None:
    """Calls of the nursery's app: the address, key and model of the snippet for curl, its own questions."""
    (address,) = re.findall(r"curl (\S+)", snippet)
    (key,) = re.findall(r"rk_[\w-]{40}", snippet)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    for row in rows(0, count):
        body = json.dumps({"model": AGENT, "messages": row["messages"]}).encode()
        with urllib.request.urlopen(urllib.request.Request(address, body, headers)) as answer:
            answer.read()


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
                    walk.photograph(f"3-{kind}")
                    changed = time.monotonic()
            if walk.page.locator("#h-step").inner_text(timeout=500).startswith(("5.", "6.")):
                return phases
        time.sleep(0.3)
    raise SystemExit(f"no judged policy within {PATIENCE_S:.0f} s; phases so far: {phases}")


def pages(
    home: Path, pictures: Path | None, chromium: str, answers: int = 10, *, judging: bool = False
) -> dict[str, Any]:
    """The way of docs/start.md by mouse; seconds, clicks and phases, and the verdict the page ends with. judging: with
    a judging round before it."""
    if pictures:
        pictures.mkdir(parents=True, exist_ok=True)
    served = Serve(home)
    try:
        with NurseryModel() as provider, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGUMENTS)
            page = browser.new_context(viewport=WIDTHS["wide"]).new_page()  # type: ignore[arg-type]
            page.set_default_timeout(60_000)
            complaints: list[str] = []
            page.on("pageerror", lambda fault: complaints.append(str(fault)))
            page.on("console", lambda line: line.type == "error" and complaints.append(line.text))
            link = served.link()
            walk = Walk(page, pictures)
            page.goto(link)
            walk.click("button", "Sign in")
            page.wait_for_url("**/start/")
            walk.done("sign in")
            connect(walk, provider.url, answers)
            rate_in_place(walk, answers)
            walk.done(f"rate {answers} in place")
            page.get_by_role("button", name="Train", exact=True).wait_for()
            walk.photograph("3-train")
            walk.click("button", "Train")
            phases = watch_training(walk)
            walk.done("train and evaluate")
            round_found = judge_round(walk) if judging else {}
            verdict = judged(walk)
            ask_champion(walk)
            photograph_others(walk)
            browser.close()
        seconds = round(sum(step["seconds"] for step in walk.steps), 1)
        found = {"steps": walk.steps, "seconds": seconds, "phases": phases, "overflows": walk.overflows}
        return {**found, "verdict": verdict, "complaints": complaints, "round": round_found}
    finally:
        served.stop()


def connect(walk: Walk, provider: str, answers: int) -> None:
    """Connect a model server, make a key, and let the app ask through the gateway."""
    page = walk.page
    walk.photograph("1-choose")
    walk.paste("Your agent's name", AGENT)
    walk.click_at(page.get_by_text("A server of our own"))
    walk.paste("Address", provider)
    walk.paste("Model", "m-1")
    walk.photograph("1-connect")
    walk.click("button", "Connect")
    page.locator(".arrived").wait_for()
    walk.photograph("1-snippets")
    walk.click_at(page.get_by_role("button", name="Make a key"))
    snippet = page.locator(".of-curl").inner_text()
    walk.done("connect the model, make a key")
    app_asks(snippet, answers)
    page.get_by_role("link", name="Rate it").wait_for()
    walk.photograph("1-arrived")
    walk.done(f"{answers} answers of the app, the first one arrives on the page")
    walk.click("link", "Rate it")
    page.get_by_role("heading", name="2. Rate").wait_for()
    walk.photograph("2-rate", showing="#rate-form")


def judge_round(walk: Walk) -> dict[str, Any]:
    """Begin a judging round from the verdict, judge its pairs by keyboard as the gardeners would, and read its page."""
    page, here = walk.page, walk.page.url
    page.goto(urljoin(here, page.locator("a", has_text="Details of").first.get_attribute("href") or ""))
    walk.click("button", "Compare its answers side by side")
    page.wait_for_url("**/judging/**")
    begun = page.url
    page.get_by_role("link", name="Compare side by side").wait_for(timeout=300_000)
    walk.done("begin a judging round, until its first pair")
    walk.click("link", "Compare side by side")
    given: dict[str, int] = {}
    while page.locator("#rate-form").count():
        form = page.locator("#rate-form")
        shown, text = form.get_attribute("data-shown"), form.inner_text()
        if not given:
            walk.photograph("8-judging")
        soil, forecast = (
            re.search(rf"{name}:? *(\w+)", text, re.IGNORECASE) for name in ("soil", "forecast")
        )
        right = best_watering(soil[1], forecast[1]) if soil and forecast else "?"
        held = [right in side for side in page.locator(".side-panel").all_inner_texts()]
        key = {(True, False): "ArrowLeft", (False, True): "ArrowRight", (True, True): "="}.get(
            (held[0], held[1]), "0"
        )
        given[key] = given.get(key, 0) + 1
        page.keyboard.press(key)
        page.wait_for_function(
            "before => document.querySelector('#rate-form')?.dataset.shown !== before", arg=shown
        )
        page.wait_for_timeout(READING_MS)
    walk.done(f"judge {sum(given.values())} pairs by keyboard")
    page.goto(begun)
    walk.photograph("8-round")
    found = {"keys": given, "says": page.locator(".finding").inner_text()}
    page.goto(here)
    return found


def judged(walk: Walk) -> str:
    """Look at the verdict and the answers side by side; promote, by force where the gate stays closed."""
    page = walk.page
    walk.photograph("5-judged")
    verdict = page.locator(".verdict-words").first.inner_text()
    walk.click("link", "Browse the answers side by side")
    page.wait_for_load_state("networkidle")
    walk.photograph("5-answers")
    page.go_back()
    walk.done("read the verdict, look through answers side by side")
    promote = page.get_by_role("button", name=re.compile(f"^Promote {AGENT}-v"))
    is_open = promote.count() > 0
    if is_open:
        walk.click_at(promote)
    else:
        walk.click_at(page.get_by_text("Promote it anyway"))
        walk.paste("Reason, kept on record", "trying the loop out")
        walk.click("button", "Promote by force")
    page.get_by_role("heading", name="6. Ask it").wait_for()
    walk.done("promote" if is_open else "promote by force, with a reason")
    return verdict


def ask_champion(walk: Walk) -> None:
    """Ask the champion and rate its answer."""
    page = walk.page
    walk.photograph("6-ask")
    walk.click_at(
        page.locator("form[action*=playground] button[type=submit], a.button[href*=playground]").first
    )
    page.locator(".answer-card .rate-here").nth(1).wait_for(timeout=180_000)
    walk.done("ask it")
    walk.photograph("6-answer", showing="#answers")
    walk.click_at(page.locator(".answer-card .rate-here button[value=up]").first)
    page.locator(".answer-card .picked").first.wait_for()
    walk.done("rate its answer")


def photograph_others(walk: Walk) -> None:
    """The other pages of what came about."""
    page = walk.page
    policy = page.locator(f"a:has-text('{AGENT}-v')").first.inner_text()
    addresses = {
        "7-run": "/runs/1/",
        "7-policy": f"/policies/{policy}/",
        "7-home": "/",
        "7-agent": f"/agents/{AGENT}/",
    }
    for name, path in addresses.items():
        page.goto(urljoin(page.url, path))
        page.wait_for_load_state("networkidle")
        walk.photograph(name)
