"""Structured answers: read as tables, and everything else left as it was written."""

from __future__ import annotations

import json
import re

import pytest
from django.contrib.auth.models import User
from django.template import Context, Template
from django.test import Client

from feedback.explorer.structure import MOST_PARTS, line_of, structure_of
from feedback.services import decision_record, rating_submit

TICKET = {"queue": "billing", "urgent": True, "tags": ["refund", "card"], "customer": {"id": 7, "note": None}}


def shown(text: str) -> str:
    return Template("{% load answers %}{% answer text %}").render(Context({"text": text}))


def words(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_an_object_is_its_names_beside_its_values() -> None:
    html = shown(json.dumps(TICKET))
    assert words(html) == "queue billing urgent yes tags refund card customer id 7 note none"
    assert html.count("<dt>") == 6
    assert "{" not in html


def test_objects_of_one_form_are_a_table() -> None:
    html = shown(json.dumps([{"item": "tea", "n": 2}, {"n": 1, "item": "milk"}]))
    assert words(html) == "item n tea 2 milk 1"
    assert (html.count("<th "), html.count("<td>")) == (2, 4)


def test_arguments_of_a_call_are_json_within_json() -> None:
    call = [{"function": {"name": "find", "arguments": '{"number": 1043}'}}]
    assert line_of(json.dumps(call)) == "(function: (name: find, arguments: (number: 1043)))"


@pytest.mark.parametrize("fence", ["```json\n%s\n```", "```\n%s```", "  %s\n"])
def test_a_fence_around_the_whole_answer_is_no_part_of_it(fence: str) -> None:
    assert structure_of(fence % '{"a": 1}') == structure_of('{"a": 1}')


@pytest.mark.parametrize(
    "text", ["", "billing", "12", '"a"', "{}", "[]", "{'a': 1}", '{"a": 1} and more', "[" * 100_000, "{" * 5]
)
def test_any_other_text_has_no_structure(text: str) -> None:
    assert structure_of(text) is None


def test_an_answer_too_large_to_lay_out_is_shown_as_written() -> None:
    assert structure_of(json.dumps(list(range(MOST_PARTS - 1)))) is not None
    assert structure_of(json.dumps(list(range(MOST_PARTS)))) is None


def test_deep_levels_are_json_again() -> None:
    deep: object = "bottom"
    for _ in range(40):
        deep = {"in": deep}
    assert '{"in":' in words(shown(json.dumps(deep))).replace("&quot;", '"')


def test_markup_in_names_and_values_is_escaped() -> None:
    html = shown(json.dumps({"<b>name": "<script>alert(1)</script>"}))
    assert "<script" not in html
    assert "<b>" not in html


def test_code_between_words_becomes_a_table_where_it_is_json() -> None:
    html = shown('Here it is:\n```json\n{"a": "b"}\n```\nand\n```py\nx = {}\n```')
    assert words(html) == "Here it is: a b and x = {}"


@pytest.mark.django_db
def test_every_page_of_an_agent_nobody_defined_shows_tables(client: Client) -> None:
    client.force_login(User.objects.create_superuser("ada"))
    first, _ = (
        decision_record(agent="router", messages="I was charged twice", response=json.dumps({**TICKET, "n": n}),
                        policy=f"v{n}").row
        for n in (1, 2)
    )  # fmt: skip
    rating_submit(decision=first, rater="bob", correction='{"queue": "fraud"}')
    for page in ("/rate/?agent=router", "/rate/pairs/?agent=router", f"/decisions/{first.pk}/"):
        text = re.sub(r">\s+<", "><", client.get(page).text)
        assert '<div><dt>queue</dt><dd><span class="words">billing</span>' in text, page
    assert '<dd><span class="words">fraud</span>' in text
    assert "queue: billing · urgent: yes · tags: refund, card" in client.get("/decisions/?agent=router").text
