"""Content-Security-Policy: on every answer, without unsafe-inline, and nothing inline on any page for it to refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import unfold
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import User
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from feedback.accounts.sign_in import signin_link
from feedback.models import Decision, ImportBatch
from rl.management.simulation import simulate
from rl.models import Policy, TrainingRun
from tests.support.experiments import expose, policy_of, running_of
from tests.test_admin import make

pytestmark = pytest.mark.django_db

NO_PAGES = {"/accounts/logout/", "/metrics", "/readyz", "/healthz"}


class Inline(HTMLParser):
    """Collects what a policy without unsafe-inline refuses: scripts, styles, handlers, javascript: links."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        data = str(given.get("type", "")).endswith("json")
        if tag == "style" or (tag == "script" and "src" not in given and not data):
            self.faults.append(f"<{tag}>")
        for name, value in attrs:
            if name == "style" or name.startswith("on"):
                self.faults.append(f"{tag} {name}={value!r}")
            if name in ("href", "src", "action") and (value or "").strip().lower().startswith("javascript:"):
                self.faults.append(f"{tag} {name}={value!r}")


def inline(text: str) -> list[str]:
    found = Inline()
    found.feed(text)
    return found.faults


def routes(
    patterns: list[URLPattern | URLResolver], values: dict[str, str], before: str = "/"
) -> Iterator[tuple[str, str]]:
    """Every route of the resolver, and its address with a value in each place."""
    for pattern in patterns:
        here = before + re.sub(r"^\^|\$$", "", str(pattern.pattern))
        if isinstance(pattern, URLResolver):
            yield from routes(pattern.url_patterns, values, here)
        elif "(?P" not in here:
            yield here, re.sub(r"<(?:\w+:)?(\w+)>", lambda match: values.get(match[1], "7"), here)


def addresses(patterns: list[URLPattern | URLResolver], values: dict[str, str]) -> Iterator[str]:
    """Every address of the resolver."""
    for _, address in routes(patterns, values):
        yield address


def directives(header: str) -> dict[str, list[str]]:
    return {part.split()[0]: part.split()[1:] for part in header.split(";") if part.strip()}


@pytest.fixture
def operator(client: Client) -> Client:
    client.force_login(User.objects.create_superuser("ada"))
    client.raise_request_exception = False
    return client


@pytest.fixture
def world() -> dict[str, str]:
    """A row of everything a page is about; the values that stand in the addresses."""
    make(1)
    simulate("widgets", scenarios=2)
    policy_of("filer-v1", "champion")
    policy_of("filer-v2")
    running = running_of()
    expose(range(20), lambda n, new: {"thumb": "up" if n % 2 else "down"})
    ImportBatch.objects.create(id=7, format="ratchet", bytes=1)
    return {
        "slug": "widgets",
        "pk": str(TrainingRun.objects.latest("pk").pk),
        "name": Policy.objects.latest("pk").name,
        "number": "7",
        "agent": "widgets",
        "url": "nowhere",
        "uid": "MQ",
        "token": "abc-def",
        "experiment": str(running.pk),
    }


@pytest.mark.slow
def test_every_page_of_the_resolver_sends_the_policy_and_holds_nothing_inline(
    operator: Client, world: dict[str, str]
) -> None:
    pages = set(addresses(get_resolver().url_patterns, world))
    pages = {page for page in pages if not page.startswith(("/api/", "/v1/", "/admin/"))} - NO_PAGES
    pages |= {
        f"/decisions/{Decision.objects.latest('created_at').pk}/",
        f"/experiments/{world['experiment']}/",
    }
    pages |= {
        "/api/docs/",
        "/api/agreement/",
        "/v1/models",
        "/admin/",
        "/admin/rl/policy/",
        "/admin/nowhere/",
    }
    # Unfold's pages are slow and alike: of each model the page of a row, or the form where it has none
    for model in admin.site._registry:
        row = model._default_manager.first()
        of_row = f"{row.pk}/change/" if row is not None else "add/"
        pages.add(f"/admin/{model._meta.app_label}/{model._meta.model_name}/{of_row}")
    shown, faults = 0, {}
    for page in sorted(pages):
        answer = operator.get(page)
        assert answer.status_code < 500, (page, answer.status_code)
        policy = directives(answer.headers.get("Content-Security-Policy", ""))
        assert policy.get("default-src") == ["'none'"], page
        assert "'unsafe-inline'" not in answer["Content-Security-Policy"], page
        assert ("'unsafe-eval'" in policy["script-src"]) == page.startswith("/admin/"), page
        if not answer.streaming and "html" in answer["Content-Type"]:
            shown += answer.status_code == 200
            if found := inline(answer.text):
                faults[page] = found
    assert faults == {}
    assert shown > 40


@pytest.mark.parametrize("page", ["/accounts/login/", "/admin/login/", "/nowhere/", "/api/nowhere/"])
def test_pages_of_nobody_send_it_too(client: Client, page: str) -> None:
    answer = client.get(page)
    assert directives(answer["Content-Security-Policy"])["script-src"][0] == "'self'"
    assert inline(answer.text) == []


def test_the_page_of_a_link_has_nothing_inline(client: Client) -> None:
    answer = client.get(signin_link("ada", "http://localhost").url)
    assert "Hello, ada" in answer.text
    assert inline(answer.text) == []


def test_the_walk_sees_what_is_inline() -> None:
    page = "<p style='a'><a href=' JavaScript:x' onclick=y><style></style><script>1</script><script src=x></script>"
    assert len(inline(page)) == 5


def test_our_copy_of_unfolds_list_of_actions_differs_in_one_line(settings: Any) -> None:
    """A style given as text is refused by the policy; as an object Alpine sets it through the style's own interface."""
    theirs = (Path(unfold.__file__).parent / "templates/admin/actions.html").read_text().splitlines()
    ours = (settings.BASE_DIR / "templates/admin/actions.html").read_text().splitlines()
    differing = [(old, new) for old, new in zip(theirs, ours, strict=True) if old != new]
    assert len(differing) == 1
    assert "x-bind:style=\"'width: '" in differing[0][0]


def test_a_row_of_the_admin_has_no_address_elsewhere(operator: Client) -> None:
    """Django's redirect to a row's own page: no model of ours has one, and an id that is none is no fault of ours."""
    assert not [m for m in apps.get_models() if m in admin.site._registry and hasattr(m, "get_absolute_url")]
    for address in ("/admin/r/1/2/", "/admin/r/x/y/", "/admin/r/", "/admin/r/999/\x00/"):
        assert operator.get(address).status_code == 404
