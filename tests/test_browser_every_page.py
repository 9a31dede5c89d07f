"""Every page of the site and of the admin in a browser: it fits, axe finds nothing, and nothing complains."""

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
from tests.support.registry_rows import make_run

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.django_db(transaction=True)]

KILOBYTES = 150
"""Most that a page is with all it loads, uncompressed."""
WINDOWS = ((1280, "light"), (390, "dark"))
FADED = """
new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))
    .then(() => document.getAnimations().filter(one => one instanceof CSSTransition).map(one => one.finished))
    .then(fading => Promise.allSettled(fading))
    .then(() => null)
"""
"""Waits until colours have faded over."""
PAINTED = """
new Promise(done => new PerformanceObserver(list =>
    list.getEntriesByName('first-contentful-paint').forEach(entry => done(entry.startTime))
).observe({type: 'paint', buffered: true}))
"""
"""Milliseconds to the first paint, once there was one."""
FOR_BUTTONS = {
    "rate-undo", "rate-skip", "pairs-undo", "pairs-skip", "decision-withdraw", "decision-restore", "decisions-withdraw",
    "import-do", "import-undo", "start-bring", "start-take", "run-new", "run-cancel", "run-resume",
    "experiment-change", "policy-move", "policy-file", "policy-follow-up", "playground-rate",
    "signin-link", "agent-base", "policy-judge", "judging-stop", "upstream", "start-connect", "start-key",
    "agent-sample", "agent-rewards", "export-file", "flywheel-step",
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
        kilobytes = page.evaluate(
            "performance.getEntries().reduce((sum, one) => sum + (one.encodedBodySize || 0), 0) / 1000"
        )
        if kilobytes > KILOBYTES and not path.startswith("/admin/"):
            yield f"{path}: {kilobytes:.0f} kB, at most {KILOBYTES} are allowed"
        page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        for width, scheme in WINDOWS:
            page.set_viewport_size({"width": width, "height": 800})
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            page.evaluate(FADED)
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
    assert routes - named - FOR_BUTTONS == {"login", "logout", "admin-login"}
    assert looked_at(pages) == []


def test_25_runs_are_seen_at_once(opener: Opener) -> None:
    for _ in range(25):
        make_run()
    rows = opener("/runs/", viewport={"width": 1280, "height": 800}).locator("tbody tr")
    assert rows.count() == 25
    box = rows.last.bounding_box()
    assert box["y"] + box["height"] <= 800


@pytest.mark.campaign
def test_first_paint_is_measured(opener: Opener, record_property: Callable[[str, object], None]) -> None:
    """Milliseconds to the first paint of each page, on the loopback; reported, never judged."""
    pages = list(user_pages(world_recorded()))
    page = opener("/glossary/")
    home = page.url.removesuffix("/glossary/")
    paints = {}
    for path in pages:
        page.goto(home + path)
        paints[path] = page.evaluate(PAINTED)
    slowest = sorted(paints.items(), key=lambda found: -found[1])[:5]
    record_property("first_paint_ms_slowest", slowest)
    print("slowest first paints in ms:", slowest)


@pytest.mark.campaign
@pytest.mark.parametrize("app", ["rl_evidence", "rl_others", "others"])
def test_admin_pages_fit_and_axe_is_silent(looked_at: Callable[[Iterable[str]], list[str]], app: str) -> None:
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
