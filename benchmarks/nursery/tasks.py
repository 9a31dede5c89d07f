"""Ten tasks of somebody who has a champion already, as selectors to click, and the clicks they take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from benchmarks.nursery.agent import AGENT, OPTIONS, question
from benchmarks.nursery.server import LINK, ROOT, Serve
from benchmarks.nursery.walk import CHROMIUM_ARGUMENTS, WIDTHS, Walk

SECOND_RUN = """
from feedback.models import Decision
from feedback.services import rating_submit
from rl.models import TrainingRun
run = TrainingRun.objects.get(pk=1)
metrics = list(run.metrics.all())
run.pk = None
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
policy.pk, policy.name, policy.stage = None, policy.name + "0", "candidate"
policy.run = TrainingRun.objects.filter(policy=None).last()
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
