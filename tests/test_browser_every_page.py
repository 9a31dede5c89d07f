"""Every page of the site and of the admin in a browser: it fits, axe finds nothing, and nothing complains."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from django.test import Client
from django.urls import URLPattern, resolve
from playwright.sync_api import Page

from feedback import urls as feedback_urls
from rl import urls as rl_urls
from tests.support.browser import Opener, browser, opener
from tests.support.page_world import admin_pages, user_pages, world_recorded

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.django_db(transaction=True)]

WINDOWS = ((1280, "light"), (390, "dark"))
FOR_BUTTONS = {
    "rate-undo", "rate-skip", "pairs-undo", "pairs-skip", "decision-withdraw", "decision-restore", "decisions-withdraw",
    "import-do", "import-undo", "start-bring", "start-take", "run-new", "run-cancel", "experiment-new",
    "experiment-change", "reward-model-move", "policy-move", "policy-follow-up", "playground-rate", "export-file",
    "signin-link", "agent-base", "policy-judge", "judging-stop", "upstream", "start-connect", "start-key",
    "agent-sample", "agent-rewards",
}  # fmt: skip
"""Routes that take what a form sends, a file, and a link that signs in once."""


def faults(page: Page, home: str, addresses: Iterable[str]) -> Iterator[str]:
    """Faults of each page in each window, with everything unfolded; what nobody may open is passed over."""
    axe = Axe()
    for path in addresses:
        answer = page.goto(home + path)
        assert answer is not None
        if answer.status in (403, 405):
            page.complaints.clear()  # type: ignore[attr-defined]
            continue
        if answer.status != 200:
            yield f"{path}: {answer.status}"
            continue
        page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        for width, scheme in WINDOWS:
            page.set_viewport_size({"width": width, "height": 800})
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            page.wait_for_timeout(150)  # colours fade over
            found = page.evaluate("document.documentElement.scrollWidth")
            if found > width:
                yield f"{path}: {found} px wide in {width}"
            for rule in axe.run(page).response["violations"]:
                yield f"{path} {width} {scheme}: {rule['id']} {json.dumps(rule['nodes'][0]['html'])[:200]}"
        if page.complaints:  # type: ignore[attr-defined]
            yield f"{path}: {page.complaints}"  # type: ignore[attr-defined]
            page.complaints.clear()  # type: ignore[attr-defined]


@pytest.fixture
def looked_at(opener: Opener) -> Callable[[Iterable[str]], list[str]]:
    def look(addresses: Iterable[str]) -> list[str]:
        # the first answer of a process loads its modules, for which a busy machine takes longer than a browser waits
        Client().get("/accounts/login/")
        Client().get("/admin/")
        page = opener("/glossary/")
        page.set_default_timeout(60_000)
        return list(faults(page, page.url.removesuffix("/glossary/"), addresses))

    return look


def test_pages_fit_and_axe_finds_nothing(looked_at: Callable[[Iterable[str]], list[str]]) -> None:
    pages = list(user_pages(world_recorded()))
    named = {resolve(path.partition("?")[0]).url_name for path in pages}
    routes = {
        route.name
        for route in (*feedback_urls.urlpatterns, *rl_urls.urlpatterns)
        if isinstance(route, URLPattern)
    }
    assert routes - named - FOR_BUTTONS == {"login", "logout"}
    assert looked_at(pages) == []


@pytest.mark.campaign
@pytest.mark.parametrize("app", ["rl_evidence", "rl_others", "others"])
def test_pages_of_the_admin_fit_and_axe_finds_nothing(
    looked_at: Callable[[Iterable[str]], list[str]], app: str
) -> None:
    """In three parts, which run side by side."""
    world_recorded()
    ours = {
        "rl_evidence": r"^/admin/rl/[a-e]",
        "rl_others": r"^/admin/rl/[f-z]",
        "others": r"^/admin/(?!rl/)",
    }
    pages = [path for path in admin_pages() if re.match(ours[app], path)]
    assert len(pages) > 10
    assert looked_at(pages) == []
