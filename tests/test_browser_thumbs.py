"""<ratchet-thumbs> on a page of another site, in a browser; its size; and the form for people."""

import gzip
import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from django.test import Client
from playwright.sync_api import Browser, Page, expect

from feedback.accounts.authentication import key_create
from feedback.accounts.feedback_tokens import token_sign
from feedback.models import Decision, Rating
from tests.support.browser import browser, record, standing
from tests.support.server import ROOT

MODULE = ROOT / "static" / "thumbs" / "ratchet-thumbs.js"
MOST_BYTES = 5_000


def test_the_component_is_light_and_pages_of_other_sites_may_load_it() -> None:
    assert len(gzip.compress(MODULE.read_bytes(), 9)) <= MOST_BYTES
    served = Client().get("/static/thumbs/ratchet-thumbs.js")
    assert (served.status_code, served["Access-Control-Allow-Origin"]) == (200, "*")
    assert served["Content-Type"].startswith("text/javascript")


Shown = Callable[..., Page]


@pytest.fixture
def other_site(browser: Browser, live_server: Any) -> Iterator[Shown]:
    """Opens a page of another site, whose policy allows no inline script or style, with the component in it."""
    pages: dict[str, str] = {}

    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            kind = "text/javascript" if self.path.endswith(".js") else "text/html; charset=utf-8"
            self.send_header("Content-Type", kind)
            policy = f"default-src 'none'; script-src 'self'; connect-src {live_server.url}"
            self.send_header("Content-Security-Policy", policy)
            self.end_headers()
            self.wfile.write(MODULE.read_bytes() if self.path.endswith(".js") else pages["/"].encode())

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("localhost", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    windows = []

    def show(attributes: str, **options: Any) -> Page:
        pages["/"] = (
            f'<!doctype html><html lang="en"><title>Shop</title><main><h1>Shop</h1><p>Your parcel left today.</p>'
            '<script type="module" src="/ratchet-thumbs.js"></script>'
            f'<ratchet-thumbs endpoint="{live_server.url}" {attributes}></ratchet-thumbs></main>'
        )
        window = browser.new_context(**options)
        window.set_default_timeout(20_000)
        windows.append(window)
        page = window.new_page()
        page.goto(f"http://localhost:{server.server_port}/")
        return page

    yield show
    for window in windows:
        window.close()
    server.shutdown()


pytestmark = [pytest.mark.django_db(transaction=True)]


@pytest.fixture
def decision() -> Decision:
    return record()


@pytest.mark.browser
def test_a_thumb_from_another_site_is_stored_and_changed(other_site: Shown, decision: Decision) -> None:
    page = other_site(
        f'token="{token_sign(decision.pk)}" reasons="wrong, too long" correction stars text-down="Schlecht"'
    )
    down, up = page.get_by_role("button", name="Schlecht"), page.get_by_role("button", name="Good answer")
    expect(down).to_have_attribute("aria-pressed", "false")
    down.press("Enter")
    expect(page.get_by_role("status")).to_have_text("Thank you")
    expect(down).to_have_attribute("aria-pressed", "true")
    page.get_by_label("too long").check()
    page.get_by_label("What should it have said?").fill("It left this morning.")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("button", name="Send")).to_be_hidden()
    (rating,) = standing()
    assert (rating.decision_id, rating.thumb) == (decision.pk, "down")
    assert (rating.tags, rating.correction) == (["too long"], "It left this morning.")
    up.click()
    page.get_by_role("button", name="4 of 5 stars").click()
    expect(page.get_by_role("button", name="3 of 5 stars")).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_role("button", name="5 of 5 stars")).to_have_attribute("aria-pressed", "false")
    expect(page.get_by_role("status")).to_have_text("Thank you")
    (rating,) = standing()
    assert (rating.thumb, rating.stars) == ("up", 4)


@pytest.mark.browser
def test_what_cannot_be_stored_is_taken_back_and_said(other_site: Shown, decision: Decision) -> None:
    page = other_site(f'token="{token_sign(uuid.uuid4())}"')
    up = page.get_by_role("button", name="Good answer")
    up.click()
    expect(page.get_by_role("status")).to_have_text("This answer cannot be rated.")
    expect(up).to_have_attribute("aria-pressed", "false")
    renewed = "token => document.querySelector('ratchet-thumbs').setAttribute('token', token)"
    page.evaluate(renewed, token_sign(decision.pk))
    expect(page.get_by_role("status")).to_have_text("")
    page.context.set_offline(True)
    up.click()
    expect(page.get_by_role("status")).to_have_text("Not sent. Please try again.")
    page.context.set_offline(False)
    up.click()
    expect(page.get_by_role("status")).to_have_text("Thank you")
    assert Rating.objects.get().decision_id == decision.pk


@pytest.mark.browser
@pytest.mark.parametrize("is_own_site", [True, False])
def test_a_publishable_key_on_its_own_site(other_site: Shown, decision: Decision, is_own_site: bool) -> None:
    page = other_site("")
    origin = page.evaluate("location.origin") if is_own_site else "https://shop.example"
    key = key_create("page", ["rate"], agent=decision.agent, origin=origin)[1]
    page = other_site(f'decision="{decision.pk}" key="{key}"')
    page.get_by_role("button", name="Good answer").click()
    said = "Thank you" if is_own_site else "This answer cannot be rated."
    expect(page.get_by_role("status")).to_have_text(said)
    assert [row.rater for row in standing()] == (["page"] if is_own_site else [])


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(other_site: Shown, decision: Decision, scheme: str) -> None:
    attributes = f'token="{token_sign(decision.pk)}" reasons="wrong, too long" correction stars'
    page = other_site(attributes, color_scheme=scheme, viewport={"width": 390, "height": 700})
    page.get_by_role("button", name="Bad answer").click()
    expect(page.get_by_role("status")).to_have_text("Thank you")
    found = Axe().run(page).response["violations"]
    assert [(rule["id"], rule["nodes"][0]["html"]) for rule in found] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.browser
def test_the_form_works_without_scripts(browser: Browser, live_server: Any, decision: Decision) -> None:
    window = browser.new_context(java_script_enabled=False)
    page = window.new_page()
    page.goto(f"{live_server.url}/feedback/{token_sign(decision.pk)}?thumb=down")
    assert not Rating.objects.exists()
    page.get_by_label("What should it have said?").fill("It left today.")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("status")).to_be_visible()
    expect(page.get_by_role("radio", name="Bad")).to_be_checked()
    (rating,) = standing()
    assert (rating.thumb, rating.correction) == ("down", "It left today.")
    window.close()
