"""The guided start in a browser, by mouse: connect an upstream, record and rate its answers, be offered a training."""

import json
import re
import urllib.request
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from feedback.models import Decision, Rating
from rl.registry.service import champion_of
from rl.serving.gateway import recorder
from tests.support.browser import Opener, browser, opener, rated
from tests.support.stub_openai import ModelServer

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def provider() -> Iterator[ModelServer]:
    with ModelServer() as server:
        server.said = "It left our depot this morning."
        yield server


def ask(address: str, key: str, question: str) -> None:
    """A call of the app, as the snippet for curl has it."""
    body = json.dumps({"model": "shop", "messages": [{"role": "user", "content": question}]})
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(address, body.encode(), headers)) as answer:
        assert answer.status == 200
    assert recorder.drain(10.0)


def test_an_upstream_is_connected_rated_and_trained(opener: Opener, provider: ModelServer) -> None:
    page = opener("/start/?agent=")
    page.fill(".choose [name=agent]", "shop")
    page.click("text=A server of our own")
    page.fill("[name=url]", provider.url)
    page.fill("[name=model]", "m-1")
    page.fill("[name=key]", "sk-0123456789")
    page.click("button:has-text('Connect')")
    expect(page.locator(".arrived")).to_contain_text("Waiting for the first decision of shop")
    champion = champion_of("shop")
    assert champion.kind == "hosted"
    page.click("button:has-text('Make a key')")
    snippet = page.locator(".of-curl").inner_text()
    (address,) = re.findall(r"curl (\S+)", snippet)
    (key,) = re.findall(r"rk_[\w-]{40}", snippet)
    ask(address, key, "Where is parcel 0?")
    expect(page.locator(".arrived")).to_contain_text("Where is parcel 0?", timeout=20_000)
    assert key in page.locator(".of-curl").inner_text()  # what arrives takes nothing away
    for number in range(1, 10):
        ask(address, key, f"Where is parcel {number}?")
    assert set(Decision.objects.values_list("policy", flat=True)) == {champion.name}
    page.click("text=Rate it")
    for number in range(10):
        page.locator(f"button[name=verdict][value={'up' if number % 2 else 'down'}]").first.click()
        rated(page, number + 1)
    expect(page.locator("#h-step")).to_contain_text("Train", timeout=20_000)
    assert Rating.objects.count() == 10
    assert page.complaints == []  # type: ignore[attr-defined]
