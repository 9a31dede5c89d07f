"""The pictures in docs/images, taken from the running pages: `python docs/screenshots.py`.

A server of its own on a data folder of its own, with simulated decisions; --home takes the pages of policies and runs
from a data folder in which something was trained (after `manage.py demo`, say).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
WIDE = {"width": 1080, "height": 760}
ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


def django_setup(home: Path) -> None:
    os.environ.update(RATCHET_HOME=str(home), DJANGO_SETTINGS_MODULE="backend.settings")
    sys.path.insert(0, str(ROOT))
    import django

    django.setup()


def server_start() -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "manage.py", "runserver", "--noreload", "--insecure", f"127.0.0.1:{port}"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
    base = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{base}/accounts/login/")  # noqa: S310
            return server, base
        except urllib.error.URLError:
            time.sleep(0.2)
    server.kill()
    raise SystemExit(
        f"the server did not answer at {base} within 2 min: run `python manage.py runserver` to see why"
    )


def decision_shown(agent: str, response: str, **context: Any) -> str:
    """The address of a simulated decision with this response and context that nobody rated; empty without one."""
    from feedback.models import Decision

    unrated = Decision.objects.filter(agent=agent, response=response, source="simulation", ratings_human=0)
    for decision in unrated.order_by("id"):
        known = (decision.state or {}).get("context", {})
        if all(known.get(name) == value for name, value in context.items()):
            return f"/rate/?agent={agent}&decision={decision.pk}"
    return ""


def pair_shown(agent: str) -> str:
    """Two simulated responses to one prompt, as `?pair=` takes them; empty where there are none."""
    from feedback.explorer.search import DecisionFilter
    from feedback.rating.pair_views import pairs_waiting

    pair = pairs_waiting("admin", DecisionFilter(agent=agent)).pair
    return f"{pair.left.pk}~{pair.right.pk}" if pair else ""


def support_recorded() -> None:
    """A decision of an agent that looks things up first, with all that can be known of one."""
    from feedback.recording.ingest import trace_record
    from feedback.services import comparison_submit, decision_record, outcome_record, rating_submit

    prompt = [
        {"role": "system", "content": "You answer customers of a shop."},
        {
            "role": "user",
            "content": "Where is my order 1043? It was promised for Monday, and the party is tomorrow.",
        },
    ]
    good = "It left our warehouse this morning and arrives tomorrow before noon."
    late = "I am sorry to hear that. Your parcel is on its way; I cannot say when it will be there."
    thought = (
        "I should look the parcel up before I promise anything, and name a time only if the carrier does."
    )
    track = {"kind": "tool_call", "name": "carrier.track", "parent": 0, "arguments": {"tracking": "JD0002"}}
    call = {"kind": "tool_call", "name": "orders.find", "parent": 0, "arguments": {"number": 1043}}
    chosen = [{"response": good, "score": 0.81}, {"response": late, "score": 0.19}]
    choice = {
        "kind": "decision",
        "name": "answer",
        "messages": prompt,
        "response": good,
        "candidates": chosen,
    }
    facts = {"propensity": 0.81, "policy": "support-bot-v12", "unit": "user-7", "tags": ["delivery"]}
    steps = [
        {"kind": "step", "name": "plan", "n": 0, "duration_ms": 12.0},
        {"kind": "reasoning", "text": thought, "n": 1, "parent": 0},
        call | {"n": 2, "result": {"state": "shipped", "carrier": "DHL"}, "duration_ms": 184.0},
        track | {"n": 3, "error": "TimeoutError: no answer within 1 s", "duration_ms": 1002.0},
        track | {"n": 4, "result": "out for delivery, tomorrow 09:00-12:00", "duration_ms": 430.0},
        choice | facts | {"n": 5, "duration_ms": 912.0},
        {"kind": "task", "name": "answer the customer", "status": "completed", "n": 6},
    ]
    made = trace_record(agent="support-bot", run_id="run-7731", steps=steps).decisions[0]
    other = decision_record(agent="support-bot", messages=prompt, response=late, policy="support-bot-v11").row
    rating_submit(decision=made, rater="bob", stars=3)
    rating_submit(decision=made, rater="bob", stars=5, tags=["friendly"], notes="Says when, and why.")
    fixed = "It arrives tomorrow between 9 and 12. Shall I add a birthday card?"
    rating_submit(decision=made, rater="eve", thumb="down", correction=fixed)
    comparison_submit(left=other, right=made, preference="right", rater="bob")
    outcome_record(decision=made, name="ticket_reopened", value=0)


def experiment_recorded() -> None:
    """A challenger of the filer that does better, by made-up thumbs."""
    from rl.experiments.traffic import experiment_ramp
    from tests.support.experiments import expose, policy_of, running_of

    policy_of("filer-v1", "champion")
    policy_of("filer-v2")
    running = running_of("fewer-folders", ramp=50, slices=["metadata.country"])
    experiment_ramp(running, 100, actor="ann")

    def facts(n: int, new: bool) -> dict[str, Any]:
        thumb = n * 7919 % 1000 < (710 if new else 560) if n % 3 else None
        country = ("DE", "FR", "NL")[n % 7 % 3]
        return {"thumb": thumb, "latency_ms": 180.0 + n * 31 % 90, "metadata": {"country": country}}

    expose(range(2400), facts)


def picture_shrink(file: Path) -> None:
    """Store a picture of a page in 128 colours: a third of the bytes, and no difference to be seen."""
    from PIL import Image

    few = Image.open(file).convert("RGB").quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(file, optimize=True)


def pictures() -> list[tuple[str, str, dict[str, Any]]]:
    """Name, address and window of each picture."""
    from feedback.models import Decision
    from rl.models import Experiment, Policy, TrainingRun

    wide, phone = WIDE | {"height": 1040}, {"width": 390, "height": 780}
    pages: list[tuple[str, str, dict[str, Any]]] = []
    if line := decision_shown("widgets", '{"widget": "line_chart"}', on="desktop"):
        pages.append(("rating-page", line, {"viewport": wide}))
        pages.append(("rating-page-phone", line, {"viewport": phone, "has_touch": True, "is_mobile": True}))
    if folder := decision_shown("filer", '{"folder": "Reports/2024"}'):
        dark = {"viewport": wide | {"height": 900}, "color_scheme": "dark"}
        pages.append(("rating-page-dark", folder, dark))
    if pair := pair_shown("widgets"):
        pages.append(("pairs", f"/rate/pairs/?pair={pair}", {"viewport": wide}))
    if decision := Decision.objects.filter(agent="support-bot", trace__isnull=False).first():
        pages.append(("decisions", "/decisions/?agent=widgets", {"viewport": wide}))
        pages.append(("decision", f"/decisions/{decision.pk}/", {"viewport": wide | {"height": 1320}}))
        pages.append(("agreement", "/agreement/?agent=widgets&rater_kind=human", {"viewport": wide}))
    if experiment := Experiment.objects.filter(status="running").first():
        pages.append(("experiment", f"/experiments/{experiment.pk}/", {"viewport": wide | {"height": 1180}}))
    if policy := Policy.objects.exclude(metrics={}).first():
        pages.append(("start-page", "/", {"viewport": wide | {"height": 700}}))
        pages.append(
            ("policy", f"/admin/rl/policy/{policy.pk}/change/", {"viewport": {"width": 1280, "height": 980}})
        )
    if run := TrainingRun.objects.filter(
        status="succeeded", metrics__isnull=False, policy__isnull=False
    ).first():
        pages.append(("run", f"/runs/{run.pk}/", {"viewport": wide | {"height": 860}}))
    return pages


def file_to_import(folder: Path) -> Path:
    """Preferences of another program, of which three rows cannot be read."""
    rows: list[dict[str, Any]] = [
        {"id": f"row-{n}", "prompt": f"Where is order {n}?", "chosen": "On its way.", "rejected": "No idea."}
        for n in range(240)
    ]
    rows[17]["chosen"] = ""
    rows[88]["rejected"] = 7
    rows[140]["chosen"] = [{"role": "assistant", "content": "On its way."}]
    path = folder / "support-2026-03.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, help="A data folder to photograph (default: a new one)")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="Take these alone. Example: --only start-page run"
    )
    parser.add_argument("--chromium", default=shutil.which("chromium") or "/usr/bin/chromium")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as new:
        django_setup(options.home or Path(new))
        from django.core.management import call_command
        from playwright.sync_api import sync_playwright

        from feedback.accounts.sign_in import signin_link
        from feedback.models import Decision
        from feedback.services import rating_submit
        from rl.management import simulation

        call_command("migrate", verbosity=0)
        if options.home is None:
            # a data folder that somebody uses is looked at and left as it is
            simulation.simulate("widgets", scenarios=150)
            simulation.simulate("filer")
            for number, decision in enumerate(Decision.objects.filter(agent="widgets").order_by("-id")[:90]):
                good = number % 3 > 0
                rating_submit(decision=decision, rater="admin", thumb="up" if good else "down")
                # of forty two others say the same, but now and then
                for rater, every in (("ada", 11), ("bob", 4)):
                    if number < 40:
                        thumb = "up" if good != (number % every == 1) else "down"
                        rating_submit(decision=decision, rater=rater, thumb=thumb)
            support_recorded()
            experiment_recorded()
        server, base = server_start()
        try:
            wanted = pictures()
            link = signin_link("admin", base).url
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=options.chromium, args=ARGUMENTS)
                door = browser.new_context()
                page = door.new_page()
                page.goto(link)
                page.get_by_role("button", name="Sign in").click()
                page.wait_for_url(f"{base}/")
                for name, path, window in wanted:
                    if options.only and name not in options.only:
                        continue
                    page = browser.new_context(storage_state=door.storage_state(), **window).new_page()
                    page.goto(base + path)
                    page.wait_for_load_state("networkidle")
                    target = IMAGES / f"{name}.png"
                    card = page.locator(".agents-cards > .card").last
                    (card if name == "start-page" else page).screenshot(path=target)
                    picture_shrink(target)
                    sys.stdout.write(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1000:.0f} kB\n")
                if options.only and "import" not in options.only:
                    return
                page = browser.new_context(storage_state=door.storage_state(), viewport=WIDE).new_page()
                page.goto(f"{base}/import/")
                page.set_input_files("input[name=file]", file_to_import(Path(new)))
                page.get_by_role("button", name="Try it").click()
                page.get_by_role("heading", name="What would be imported").wait_for()
                page.screenshot(path=IMAGES / "import.png")
                picture_shrink(IMAGES / "import.png")
                browser.close()
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
