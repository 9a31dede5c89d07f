"""A real browser, signed in, and what it is shown."""

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from playwright.sync_api import Browser, Page, expect, sync_playwright

from feedback.models import Comparison, Decision, Rating
from feedback.selectors import comparisons_standing, ratings_standing
from feedback.services import decision_record

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"


ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


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


def record_pairs(count: int) -> None:
    """As many prompts, each answered by two policies."""
    for number in range(count):
        for policy in ("assistant-v1", "assistant-v2"):
            record(messages=f"question {number}", response=f"{policy} to {number}", policy=policy)


def comparisons() -> list[Comparison]:
    return list(comparisons_standing().select_related("left", "right"))


def compared(page: Page, count: int) -> None:
    expect(page.locator(".progress strong").first).to_have_text(str(count))
