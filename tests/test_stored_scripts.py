"""Stored scripts: markup in every text of every row stays text on every page."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
from django.apps import apps
from django.contrib import admin
from django.db import IntegrityError, models, transaction
from django.test import Client
from django.urls import get_resolver

from feedback.erasure.withdrawals import decision_withdraw
from feedback.models import Decision, Rating
from feedback.recording.ingest import trace_record
from feedback.services import comparison_submit, decision_record, outcome_record
from tests.support.campaign_scale import CAMPAIGN
from tests.test_content_security import NO_PAGES, addresses, operator, world  # noqa: F401

pytestmark = pytest.mark.django_db

ELEMENT = "stored-script"
MARKUP = f"\"'></title></textarea></script><{ELEMENT} onload=alert(1)>javascript:alert(1){{{{7*7}}}}"
"""Closes whatever a text may stand in, then opens an element that no page of ours has."""

FIXED = {
    "agent", "name", "stage", "kind", "status", "method", "format", "reader", "source", "split", "path", "rater_kind",
    "base_model", "base_model_hash", "adapter_path", "digest", "prefix", "slug", "codename", "username", "password",
    "follow_up", "objective", "undone_by", "metric", "group", "salt", "prompt_hash", "key_hash", "hash", "quantization",
}  # fmt: skip
"""Columns that name something, or have a closed set of values: no client writes a text of its own there."""
OUR_JSON = {
    "recipe", "hardware", "counts", "verdicts", "checked", "metrics", "figures", "values", "settings", "guardrails",
    "slices", "functions", "outcomes", "components", "attached", "undone",
}  # fmt: skip
"""JSON of our own making; a client's words are not in it."""


class Elements(HTMLParser):
    """Counts elements of MARKUP, and attributes that run it."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag.startswith(ELEMENT):
            self.faults.append(f"<{tag}>")
        for name, value in attrs:
            if name in ("href", "src", "action", "formaction") and (value or "").strip().lower().startswith(
                ("javascript:", "data:text/html")
            ):
                self.faults.append(f"{tag} {name}={value!r}")


def elements(text: str) -> list[str]:
    found = Elements()
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


@pytest.mark.slow
def test_markup_in_any_text_stays_text_on_every_page(
    operator: Client,  # noqa: F811
    world: dict[str, str],  # noqa: F811
    record_property: Callable[[str, object], None],
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

    values = {**world, "pk": world["pk"]}
    pages = {
        page for page in addresses(get_resolver().url_patterns, values) if not page.startswith("/admin/")
    }
    pages = {page for page in pages if not page.startswith(("/api/", "/v1/"))} - NO_PAGES
    pages |= {f"/decisions/{pk}/" for pk in (left.pk, right.pk, Decision.objects.latest("created_at").pk)}
    pages |= {f"/experiments/{world['experiment']}/", "/decisions/?agent=widgets", "/rate/?agent=widgets"}
    pages |= {f"/rate/?agent=widgets&decision={left.pk}", f"/rate/pairs/?pair={left.pk}~{right.pk}"}
    names = ("q", "agent", "next", "reader", "tag", "rater") if CAMPAIGN else ("q", "next")
    filtered = ("/decisions/", "/problems/", "/accounts/login/", "/agreement/")
    pages |= {f"{page}?{name}={MARKUP}" for page in filtered for name in names}
    for model in admin.site._registry if CAMPAIGN else list(admin.site._registry)[::6]:
        place = f"/admin/{model._meta.app_label}/{model._meta.model_name}/"
        if row := model._default_manager.first():
            pages.add(f"{place}{row.pk}/change/")
            pages |= {place, f"{place}?q={MARKUP}"} if CAMPAIGN else set()
    shown, faults = 0, {}
    for page in sorted(pages):
        answer = operator.get(page)
        assert answer.status_code < 500, (page, answer.status_code)
        if not answer.streaming and "html" in answer.get("Content-Type", ""):
            shown += MARKUP.split("<")[-1][:20] in answer.text
            if found := elements(answer.text):
                faults[page] = found
    record_property("tried", len(pages))
    assert faults == {}
    assert shown >= 15, "the texts were on the pages"


def test_the_walk_sees_an_element_that_got_through() -> None:
    assert elements(f"<p title='{MARKUP}'>") == [f"<{ELEMENT}>"]
    assert elements(f"<script type='application/json'>{json.dumps([MARKUP])}</script>") == [f"<{ELEMENT}>"]
    assert elements("<a href=' JavaScript:alert(1)'>") != []
