"""Every page sends a Content-Security-Policy, holds nothing inline for it to refuse, and keeps markup in texts text."""

import contextlib
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import unfold
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import IntegrityError, models, transaction
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from feedback.accounts.sign_in import signin_link
from feedback.erasure.withdrawals import decision_withdraw
from feedback.models import Decision, ImportBatch, Rating
from feedback.recording.ingest import trace_record
from feedback.services import comparison_submit, decision_record, outcome_record
from rl.management.simulation import simulate
from rl.models import Policy, TrainingRun
from tests.support.campaign_scale import CAMPAIGN
from tests.support.experiments import expose, policy_of, running_of
from tests.test_admin import make

pytestmark = pytest.mark.django_db

NO_PAGES = {"/accounts/logout/", "/metrics", "/readyz", "/healthz"}


ELEMENT = "stored-script"
MARKUP = f"\"'></title></textarea></script><{ELEMENT} onload=alert(1)>javascript:alert(1){{{{7*7}}}}"
"""Closes whatever a text may stand in, then opens an element that no page of ours has."""

FIXED = """agent name stage kind status method format reader source split path rater_kind base_model base_model_hash
    adapter_path digest prefix slug codename username password follow_up objective undone_by metric group salt
    prompt_hash key_hash hash quantization""".split()
"""Columns that name something, or have a closed set of values: no client writes a text of its own there."""
OUR_JSON = """recipe hardware counts verdicts checked metrics figures values settings guardrails slices functions
    outcomes components attached undone""".split()
"""JSON of our own making; a client's words are not in it."""


class Inline(HTMLParser):
    """Collects what a policy without unsafe-inline refuses, and elements of MARKUP."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        data = str(given.get("type", "")).endswith("json")
        if tag.startswith(ELEMENT) or tag == "style" or (tag == "script" and "src" not in given and not data):
            self.faults.append(f"<{tag}>")
        for name, value in attrs:
            if name == "style" or name.startswith("on"):
                self.faults.append(f"{tag} {name}={value!r}")
            link = (value or "").strip().lower()
            if name in ("href", "src", "action", "formaction") and link.startswith(
                ("javascript:", "data:text/html")
            ):
                self.faults.append(f"{tag} {name}={value!r}")


def inline(text: str) -> list[str]:
    found = Inline()
    found.feed(text)
    return found.faults


def marked(value: Any) -> Any:
    """JSON with MARKUP behind every text of it, and in the names of its members."""
    if isinstance(value, str):
        return value + MARKUP
    if isinstance(value, list):
        return [marked(item) for item in value]
    if isinstance(value, dict):
        return {
            **{name: item if name in ("role", "kind") else marked(item) for name, item in value.items()},
            MARKUP: MARKUP,
        }
    return value


def spoiled(model: type[models.Model]) -> int:
    """Put MARKUP into every text a client or a person may write in the rows of a model. Returns the texts."""
    count = 0
    for row in model._default_manager.all():
        changed: dict[str, Any] = {}
        for field in model._meta.concrete_fields:
            value = getattr(row, field.attname)
            if field.primary_key or field.name in FIXED or field.unique or getattr(field, "choices", None):
                continue
            if isinstance(field, models.JSONField) and field.name not in OUR_JSON and value:
                changed[field.name] = marked(value)
            elif type(field) is models.TextField or (
                type(field) is models.CharField and (field.max_length or 0) > len(MARKUP)
            ):
                changed[field.name] = (str(value or "") + MARKUP)[: field.max_length or None]
        for name, text in changed.items():
            # past the models that refuse to be changed: a client wrote it so; what a constraint refuses nobody wrote
            with contextlib.suppress(IntegrityError), transaction.atomic():
                models.QuerySet(model).filter(pk=row.pk).update(**{name: text})
                count += 1
    return count


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


def pages_of(world: dict[str, str]) -> set[str]:
    """Every page of the resolver; of each model in the admin the page of a row, as Unfold's are slow and alike."""
    pages = set(addresses(get_resolver().url_patterns, world))
    pages = {page for page in pages if not page.startswith(("/api/", "/v1/", "/admin/"))} - NO_PAGES
    pages |= {
        f"/decisions/{Decision.objects.latest('created_at').pk}/",
        f"/experiments/{world['experiment']}/",
    }
    pages |= set("/api/docs/ /api/agreement/ /v1/models /admin/ /admin/rl/policy/ /admin/nowhere/".split())
    names = ("q", "agent", "next", "reader", "tag", "rater") if CAMPAIGN else ("q", "next")
    filtered = ("/decisions/", "/problems/", "/accounts/login/", "/agreement/")
    pages |= {f"{page}?{name}={MARKUP}" for page in filtered for name in names}
    for model in admin.site._registry:
        row = model._default_manager.first()
        place = f"/admin/{model._meta.app_label}/{model._meta.model_name}/"
        pages.add(f"{place}{row.pk}/change/" if row is not None else f"{place}add/")
        pages |= {place, f"{place}?q={MARKUP}"} if CAMPAIGN else set()
    return pages


@pytest.mark.slow
def test_every_page_sends_the_policy_holds_nothing_inline_and_keeps_markup_text(
    operator: Client, world: dict[str, str], record_property: Callable[[str, object], None]
) -> None:
    left = decision_record(agent="widgets", messages="q", response="l", unit="u", tags=["t"], run_id="r").row
    right = decision_record(agent="widgets", messages="q", response="r").row
    Rating.objects.create(decision=left, rater="ann", thumb="up", notes="n", correction="c", tags=["t"])
    comparison_submit(left=left, right=right, preference="left", rater="ann", notes="n")
    outcome_record(decision=left, name="solved", value=1)
    steps = [{"kind": "tool_call", "name": "t", "arguments": {"a": "b"}, "result": "r", "error": "e"}]
    trace_record(agent="widgets", steps=steps, metadata={"a": "b"})
    decision_withdraw(right.pk, actor="ann", reason="r")
    spoilt = sum(spoiled(model) for model in apps.get_models() if model._meta.app_label in ("feedback", "rl"))
    assert spoilt > 200
    pages = pages_of(world) | {f"/decisions/{pk}/" for pk in (left.pk, right.pk)}
    pages |= {"/decisions/?agent=widgets", "/rate/?agent=widgets"}
    pages |= {f"/rate/?agent=widgets&decision={left.pk}", f"/rate/pairs/?pair={left.pk}~{right.pk}"}
    shown, with_markup, faults = 0, 0, {}
    for page in sorted(pages):
        answer = operator.get(page)
        assert answer.status_code < 500, (page, answer.status_code)
        policy = directives(answer.headers.get("Content-Security-Policy", ""))
        assert policy.get("default-src") == ["'none'"], page
        assert "'unsafe-inline'" not in answer["Content-Security-Policy"], page
        assert ("'unsafe-eval'" in policy["script-src"]) == page.startswith("/admin/"), page
        if not answer.streaming and "html" in answer.get("Content-Type", ""):
            shown += answer.status_code == 200
            with_markup += MARKUP.split("<")[-1][:20] in answer.text
            if found := inline(answer.text):
                faults[page] = found
    record_property("tried", len(pages))
    assert faults == {}
    assert shown > 40
    assert with_markup >= 15, "the texts were on the pages"


def test_pages_of_nobody_send_it_too(client: Client) -> None:
    for page in ("/accounts/login/", "/admin/login/", "/nowhere/", "/api/nowhere/"):
        answer = client.get(page)
        assert directives(answer["Content-Security-Policy"])["script-src"][0] == "'self'"
        assert inline(answer.text) == []
    answer = client.get(signin_link("ada", "http://localhost").url)
    assert "Hello, ada" in answer.text
    assert inline(answer.text) == []


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
