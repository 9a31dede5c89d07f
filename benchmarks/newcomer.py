"""The newcomer's way with an agent of their own, timed: `shell` by the README's commands, `pages` by mouse in Chromium.

The agent is a plant nursery's, unknown to this project: its own options, its own key, and raters who want soaking where
the soil is dry under a sunny forecast, nothing where it is wet. Each way begins with an empty data folder and ends with
the new champion's answer. Prints seconds per step as JSON; `shell` also the longest silence of each command, `pages`
writes a picture of each step, wide and narrow, light and dark. `tasks` then counts the clicks of ten tasks in the
folder that `pages` left, and `strip` makes the README's film strip of its pictures.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import itertools
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import Locator, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docs.screenshots import picture_shrink  # noqa: E402
from tests.support.server import free_port  # noqa: E402

AGENT = "nursery"
PLANTS = ("Fern", "Lavender", "Tomato", "Rose", "Basil", "Hydrangea", "Thyme", "Maple")
PLACES = ("glasshouse", "shade tunnel", "open field")
SOILS = ("dry", "damp", "wet")
FORECASTS = ("sun", "rain")
OPTIONS = ("soak", "mist", "rest")
SYSTEM = "Pick one listed watering for the bed. Answer in JSON."


def best_watering(soil: str, forecast: str) -> str:
    """The watering that the gardeners want; it depends on both."""
    if soil == "wet" or (soil == "damp" and forecast == "rain"):
        return "rest"
    return "soak" if soil == "dry" and forecast == "sun" else "mist"


def question(plant: str, place: str, soil: str, forecast: str, options: tuple[str, ...]) -> str:
    return "\n".join(
        [f"bed: {plant}, {place}", f"soil: {soil}", f"forecast: {forecast}", "waterings:", *options]
    )


def reply(option: str) -> str:
    return json.dumps({"watering": option})


def rows(rated: int, unrated: int) -> list[dict[str, Any]]:
    """Logged decisions of an app that always mists a little too much, `rated` of them with a thumb or a correction."""
    draw = random.Random(7)
    beds = list(itertools.product(PLANTS, PLACES, SOILS, FORECASTS))
    draw.shuffle(beds)
    found = []
    for number, (plant, place, soil, forecast) in enumerate(
        itertools.islice(itertools.cycle(beds), rated + unrated)
    ):
        options = tuple(draw.sample(OPTIONS, len(OPTIONS)))
        answered = draw.choice(OPTIONS)
        right = best_watering(soil, forecast)
        row: dict[str, Any] = {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": question(plant, place, soil, forecast, options)},
            ],
            "response": reply(answered),
        }
        if number < rated:
            row |= {"rater": "greta", "thumb": "up" if answered == right else "down"}
            if answered != right:
                row["correction"] = reply(right)
        found.append(row)
    return found


def data_lines(rated: int = 138, unrated: int = 12) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows(rated, unrated))


# --- In a shell ---------------------------------------------------------------------------------------------


def command_time(name: str, arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run a command as a log would see it: seconds, the longest silence and the line before it, the last line."""
    began = spoke = time.monotonic()
    silence, before, line = 0.0, "(start)", "(start)"
    process = subprocess.Popen(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1,
    )  # fmt: skip
    assert process.stdout is not None
    for text in itertools.chain(process.stdout, [""]):
        now = time.monotonic()
        if now - spoke > silence:
            silence, before = now - spoke, line
        spoke, line = now, text.strip() or line
        if text:
            sys.stderr.write(f"{now - began:7.1f}  {text.rstrip()[:150]}\n")
    code = process.wait()
    return {
        "step": name, "seconds": round(time.monotonic() - began, 1), "silence_s": round(silence, 1),
        "silent_after": before, "last": line, "code": code,
    }  # fmt: skip


def shell(home: Path) -> list[dict[str, Any]]:
    """The README's commands on the nursery's file."""
    lines = home / "waterings.jsonl"
    lines.write_text(data_lines(), "utf-8")
    environment = os.environ | {"RATCHET_HOME": str(home / "var"), "PYTHONUNBUFFERED": "1"}
    steps = [command_time("migrate", ["migrate", "--verbosity", "0"], environment)]

    def step(name: str, *arguments: str) -> dict[str, Any]:
        steps.append(command_time(name, list(arguments), environment))
        return steps[-1]

    step("import", "import_feedback", str(lines), "--agent", AGENT)
    step("dry run", "train_sft", "--agent", AGENT, "--dry-run")
    policy = re.search(rf"{AGENT}-v\d+", step("train", "train_sft", "--agent", AGENT)["last"])
    name = policy[0] if policy else f"{AGENT}-v1"
    step("judge", "evaluate_model", "--policy", name, "--compare-base")
    step("promote", "policy", "promote", name)
    step("export", "export_model", "--policy", name, "--format", "gguf", "--quantization", "q4_k_m")
    return steps


# --- By mouse -----------------------------------------------------------------------------------------------

WIDTHS = {"wide": {"width": 1280, "height": 860}, "narrow": {"width": 390, "height": 844}}
SCHEMES = ("light", "dark")
PATIENCE_S = 1800.0
"""Longest wait for the training: the machine may have other work."""
RATED_IN_PLACE = 6
CHROMIUM_ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


LINK = re.compile(r"http://\S+/accounts/link/\S+")


class Serve:
    """`manage.py serve` at a terminal of its own, as a newcomer starts it; reads the sign-in link it prints."""

    def __init__(self, home: Path) -> None:
        self.port = free_port()
        self.environment = os.environ | {"RATCHET_HOME": str(home)}
        subprocess.run(
            [sys.executable, "manage.py", "migrate", "--verbosity", "0"],
            cwd=ROOT, env=self.environment, check=True,
        )  # fmt: skip
        self.terminal, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "manage.py", "serve", "--port", str(self.port)],
            cwd=ROOT, env=self.environment, stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
        )  # fmt: skip
        os.close(inner)
        self.output = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        # an OSError is how a pseudo-terminal says that nobody holds its other end any more
        with contextlib.suppress(OSError):
            while block := os.read(self.terminal, 4096):
                self.output += block.decode("utf-8", "replace")

    def address(self) -> str:
        """Address of the server, once it has said that it answers. Raises TimeoutError after five minutes."""
        deadline = time.monotonic() + 300
        while "Ratchet is at" not in self.output:
            if time.monotonic() > deadline:
                raise TimeoutError(f"expected `Ratchet is at` within 300 s, found: {self.output[-500:]}")
            time.sleep(0.2)
        return f"http://localhost:{self.port}"

    def link(self) -> str:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if found := LINK.search(re.sub(r"\x1b\[[0-9;]*m", "", self.output)):
                return found[0]
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        raise SystemExit(f"serve printed no sign-in link; it said: {self.output[-2000:]}")

    def shell(self, code: str) -> None:
        command = [sys.executable, "manage.py", "shell", "-c", code]
        subprocess.run(command, cwd=ROOT, env=self.environment, check=True, stdout=subprocess.DEVNULL)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


class Walk:
    """A window that is used with the mouse alone; text is pasted. Notes seconds and takes pictures of each step."""

    def __init__(self, page: Page, pictures: Path) -> None:
        self.page, self.pictures = page, pictures
        self.steps: list[dict[str, Any]] = []
        self.clicks = 0
        self._began = time.monotonic()
        self._photographing = 0.0
        self._clicks_before = 0
        self.overflows: list[str] = []

    def click(self, role: Any, name: str) -> None:
        self.click_at(self.page.get_by_role(role, name=name, exact=True).first)

    def click_at(self, target: Locator) -> None:
        target.click()  # scrolls to it, moves the mouse there and presses its button
        self.clicks += 1

    def paste(self, label: str, text: str) -> None:
        self.click_at(self.page.get_by_label(label))
        self.page.keyboard.insert_text(text)

    def done(self, step: str) -> None:
        """End a step: its seconds, those of the pictures left out."""
        now = time.monotonic()
        seconds = now - self._began - self._photographing
        self.steps.append(
            {"step": step, "seconds": round(seconds, 1), "clicks": self.clicks - self._clicks_before}
        )
        sys.stderr.write(f"{seconds:7.1f} s  {step}\n")
        self._began, self._photographing, self._clicks_before = time.monotonic(), 0.0, self.clicks

    def photograph(self, name: str, showing: str = "main") -> None:
        """The page as it stands in both widths and schemes; the window is as before afterwards. `showing` is what its
        frame for the film strip is about."""
        began = time.monotonic()
        for scheme, (width, size) in itertools.product(SCHEMES, WIDTHS.items()):
            self.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            self.page.set_viewport_size(size)  # type: ignore[arg-type]
            beyond = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
            if beyond > 0:
                self.overflows.append(f"{name} {width}: {beyond} px")
            if (width, scheme) == ("wide", "light"):
                if showing != "main":
                    self.page.locator(showing).evaluate("part => part.scrollIntoView({block: 'end'})")
                self.page.screenshot(path=self.pictures / f"{name}-frame.png")
            # as high as the page: what sticks to the lower edge of a window would lie over the middle of a longer one
            height = self.page.evaluate("document.documentElement.scrollHeight")
            self.page.set_viewport_size({"width": size["width"], "height": max(size["height"], height)})
            self.page.screenshot(path=self.pictures / f"{name}-{width}-{scheme}.png")
        self.page.emulate_media(color_scheme="light")
        self.page.set_viewport_size(WIDTHS["wide"])  # type: ignore[arg-type]
        self._photographing += time.monotonic() - began


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
    walk.click("link", "Leaf through the answers side by side")
    page.wait_for_load_state("networkidle")
    walk.photograph("6-answers")
    page.go_back()
    walk.done("leaf through answers side by side")
    promote = page.get_by_role("button", name=re.compile(f"^Promote {AGENT}-v"))
    if promote.count():  # it is offered once the files are there from which the policy answers
        walk.click_at(promote)
    else:  # the gate stays closed: by force, with a reason
        walk.click_at(page.get_by_text("Promote it all the same"))
        walk.paste("Reason, which stays on record", "trying the loop out")
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


# --- Ten tasks ----------------------------------------------------------------------------------------------

SECOND_RUN = """
from feedback.models import Decision
from feedback.services import rating_submit
from rl.models import TrainingRun
run = TrainingRun.objects.get(pk=1)
metrics = list(run.metrics.all())
run.pk, run.policy_made = None, None
run.save()
for metric in metrics:
    metric.pk, metric.run = None, run
    metric.save()
for decision in Decision.objects.filter(ratings__thumb="up")[:3]:
    rating_submit(decision=decision, rater="hugo", thumb="down")
"""
"""Needed by two of the tasks: a run beside the first one, and a rater who differs."""
SECOND_CHAMPION = """
from rl.models import Policy, TrainingRun
from rl.registry import service as registry
policy = Policy.objects.get(stage="champion")
artifacts = list(policy.artifacts.all())
policy.pk, policy.name, policy.stage, policy.run = None, policy.name + "0", "candidate", TrainingRun.objects.last()
policy.save()
for artifact in artifacts:
    artifact.pk, artifact.policy = None, policy
    artifact.save()
registry.policy_promote(policy, "champion", actor="hugo", force=True, reason="to be rolled back")
"""
"""Needed to roll back: a champion that replaced another one."""


def tasks(home: Path, chromium: str) -> list[dict[str, Any]]:
    """Clicks of ten tasks from the first page after sign-in, in the folder that `pages` left; fields are one each."""
    served = Serve(home)
    try:
        served.shell(SECOND_RUN)
        link = [sys.executable, "manage.py", "login_link", "--user", "admin", "--base-url", served.address()]
        said = subprocess.run(
            link, cwd=ROOT, env=served.environment, check=True, capture_output=True, text=True
        )
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGUMENTS)
            page = browser.new_context(viewport=WIDTHS["wide"]).new_page()  # type: ignore[arg-type]
            page.set_default_timeout(60_000)
            page.goto(LINK.findall(said.stdout)[0])
            page.get_by_role("button", name="Sign in").click()
            found = []
            for name, steps in TASKS.items():
                if name == "roll back":
                    served.shell(SECOND_CHAMPION)
                found.append(_task(Walk(page, home), served.address(), name, steps))
            browser.close()
        return found
    finally:
        served.stop()


def _task(walk: Walk, address: str, name: str, steps: tuple[str, ...]) -> dict[str, Any]:
    """Follow selectors by clicks; `selector = text` types into the field after its click."""
    page = walk.page
    page.goto(f"{address}/")
    for step in steps:
        selector, _, text = step.partition(" = ")
        target = page.locator(selector).first
        walk.click_at(target)
        if text:
            page.keyboard.insert_text(text)
        page.wait_for_load_state("networkidle")
    sys.stderr.write(f"{walk.clicks} clicks  {name}: {page.url} {page.locator('h1').first.inner_text()}\n")
    return {"task": name, "clicks": walk.clicks, "at": page.url}


CARD = f"[aria-labelledby=agent-{AGENT}]"
TASKS = {
    "see why it was refused, rule by rule": (f"{CARD} .big.name a",),
    "ask the new policy and the base model": (
        f"{CARD} >> text=Playground",
        f"textarea[name=question] = {question('Rose', 'open field', 'dry', 'sun', OPTIONS)}",
        "#playground button[type=submit]",
    ),
    "see which answers it lost": (f"{CARD} .big.name a", "a[href*=answers]", "a[href*='show=loss']"),
    "export for llama.cpp": (f"{CARD} .big.name a", "button[value=export]"),
    "compare two runs": (
        "nav >> text=Runs",
        "input[name=run] >> nth=0",
        "input[name=run] >> nth=1",
        "text=Compare the chosen runs",
    ),
    "see what raters disagree on": ("nav >> text=Agreement", "text=Decisions on which raters differ"),
    "give a colleague a key to rate": (
        f"{CARD} h2 a",
        "text=Key for a rater",
        "input[name=name] = hugo",
        "text=Make the key",
    ),
    "withdraw a decision": ("nav >> text=Decisions", ".found li a", "text=Withdraw it"),
    "roll back": (f"{CARD} .big.name a", "button[value=rollback]"),
    "undo my import": (
        f"{CARD} >> text=Imports",
        "text=Undo…",
        "input[name=force]",
        "text=Undo the import >> nth=-1",
    ),
}
"""Task -> the selectors clicked; the last two change what the others look at."""


# --- The film strip -----------------------------------------------------------------------------------------

STRIP = ROOT / "docs" / "images" / "newcomer.webp"
FRAMES = {
    "1-paste": "Paste what your app decided",
    "2-recognised": "See what is recognised",
    "3-rate": "Rate in place",
    "5-training": "Train, with every phase named",
    "6-answers": "Leaf through answers, side by side",
    "8-answer": "Ask the new champion",
}
"""Picture -> the words below it."""
DOCS_PICTURES = {"start": "4-train", "answers": "6-answers", "run": "10-run", "gate": "gate"}
"""Pictures of docs/ that this way takes: name there -> name here."""
STRIP_PAGE = """<style>
body {{ margin: 0; padding: 20px; background: #f4f2ee; font: 600 19px system-ui, sans-serif; color: #1b2430;
  display: grid; grid-template-columns: repeat(3, 1fr); gap: 18px 20px; width: 1560px; }}
figure {{ margin: 0; }}
img {{ width: 100%; display: block; border: 1px solid #cfcac0; border-radius: 10px; }}
figcaption {{ padding: 8px 2px 0; }}
b {{ color: #0f6e66; margin-right: 6px; }}
</style>{figures}"""


def _base64_text(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def strip(pictures: Path, chromium: str) -> dict[str, Any]:
    """One picture of six frames that `pages` took, for the README."""
    from PIL import Image

    figures = "".join(
        f"<figure><img src='data:image/png;base64,{_base64_text(pictures / f'{name}-frame.png')}'><figcaption>"
        f"<b>{number}</b>{words}</figcaption></figure>"
        for number, (name, words) in enumerate(FRAMES.items(), 1)
    )
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGUMENTS)
        page = browser.new_page(viewport={"width": 1600, "height": 800})
        page.set_content(STRIP_PAGE.format(figures=figures))
        page.wait_for_load_state("load")
        page.screenshot(path=Path(folder) / "strip.png", full_page=True)
        browser.close()
        Image.open(Path(folder) / "strip.png").convert("RGB").save(STRIP, quality=80, method=6)
    for name, picture in DOCS_PICTURES.items():
        target = STRIP.with_name(f"{name}.png")
        shutil.copy(pictures / f"{picture}-frame.png", target)
        picture_shrink(target)
    return {"strip": str(STRIP.relative_to(ROOT)), "bytes": STRIP.stat().st_size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "way",
        choices=("shell", "pages", "tasks", "strip", "data"),
        help="data prints the lines that are brought",
    )
    parser.add_argument(
        "--home", type=Path, help="An empty data folder (default: a new one that is removed)."
    )
    parser.add_argument(
        "--pictures", type=Path, default=Path("newcomer"), help="Folder of the pictures of `pages`."
    )
    parser.add_argument("--chromium", default=shutil.which("chromium") or "/usr/bin/chromium")
    options = parser.parse_args()
    if options.way == "data":
        sys.stdout.write(data_lines())
        return
    with tempfile.TemporaryDirectory() as new:
        home = options.home or Path(new)
        home.mkdir(parents=True, exist_ok=True)
        found: Any
        if options.way == "shell":
            found = shell(home)
        elif options.way == "tasks":
            found = tasks(home, options.chromium)
        elif options.way == "strip":
            found = strip(options.pictures, options.chromium)
        else:
            found = pages(home, options.pictures, options.chromium)
        sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
