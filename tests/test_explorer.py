"""The explorer: decisions found page by page, one decision with all that is known, a trace as a timeline."""

from __future__ import annotations

import re
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from backend.rest import pages
from feedback.explorer import listing
from feedback.explorer.decision_facts import LinkedFacts
from feedback.explorer.listing import DecisionSearch, decisions_page
from feedback.explorer.search import DecisionFilter
from feedback.explorer.timeline import PARTS_READ, STEPS_SHOWN, timeline_of
from feedback.models import Decision, Trace
from feedback.recording.ingest import trace_record
from feedback.services import (
    comparison_submit,
    decision_record,
    outcome_record,
    rating_submit,
    rating_withdraw,
)
from tests.support.api_client import person
from tests.support.postgres import postgres_url as postgres_url

pytestmark = pytest.mark.django_db

START = timezone.now() - timedelta(days=2)


def decide(number: int = 1, **facts: Any) -> Decision:
    known = {"agent": "assistant", "messages": f"question {number}", "response": f"answer {number}"}
    return decision_record(**(known | {"created_at": START + timedelta(minutes=number)} | facts)).row


def found(within: DecisionFilter | None = None, **asked: Any) -> list[str]:
    return [
        row.response for row in decisions_page(DecisionSearch(within or DecisionFilter(), **asked)).decisions
    ]


@pytest.fixture
def operator(client: Client) -> Client:
    client.force_login(person("olga", "operator"))
    return client


# --- Finding ------------------------------------------------------------------------------------------------


def test_the_newest_come_first_and_pages_leave_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAGE", 3)
    ids = sorted(uuid.uuid4() for _ in range(4))
    for number in range(4):
        decide(number)
    for pk in ids:  # at the same moment
        decide(9, id=pk, response=pk.hex)
    seen, place = [], ""
    while True:
        page = decisions_page(DecisionSearch(DecisionFilter()), place)
        seen += [row.response for row in page.decisions]
        if not page.older:
            break
        place = page.older
    assert seen == [pk.hex for pk in reversed(ids)] + ["answer 3", "answer 2", "answer 1", "answer 0"]


def test_text_is_found_in_prompt_and_response() -> None:
    decide(1, messages="Wo ist mein Päckchen?")
    decide(2, response='It costs "50 %" less')
    decide(3)
    assert found(q="päckCHEN") == ["answer 1"]
    assert found(q='"50 %"') == ['It costs "50 %" less']
    assert found(q="%") == ['It costs "50 %" less']
    decide(4, reasoning="Bolts come in packs of TEN.")
    assert found(q="packs of ten") == ["answer 4"]


def test_decisions_are_found_by_agent_policy_tag_and_day() -> None:
    decide(1, agent="helpdesk", policy="helpdesk-v1", tags=["a b"])
    decide(2, policy="assistant-v2", tags=["a"])
    old = decide(3)
    Decision.objects.filter(pk=old.pk).update(created_at=START - timedelta(days=9))
    assert found(DecisionFilter(agent="helpdesk")) == ["answer 1"]
    assert found(DecisionFilter(policy="assistant-v2")) == ["answer 2"]
    assert found(DecisionFilter(tag="a")) == ["answer 2"]
    assert found(DecisionFilter(tag="a b")) == ["answer 1"]
    assert found(DecisionFilter(until=(START - timedelta(days=9)).date())) == ["answer 3"]
    assert found(DecisionFilter(since=START.date())) == ["answer 2", "answer 1"]


def test_decisions_are_found_by_what_stands_of_their_ratings() -> None:
    good, bad, disputed, fixed, withdrawn, _ = (decide(number) for number in range(6))
    rating_submit(decision=good, rater="ada", thumb="up")
    # the finest signal speaks: four stars and a thumb down are good
    rating_submit(decision=good, rater="bob", thumb="down", stars=4)
    rating_submit(decision=bad, rater="ada", score=0.2)
    rating_submit(decision=disputed, rater="ada", stars=1)
    rating_submit(decision=disputed, rater="sim", stars=5, rater_kind="simulated")
    rating_submit(decision=fixed, rater="ada", correction="better", notes="why")
    rating_withdraw(rating_submit(decision=withdrawn, rater="ada", thumb="up").row)
    assert found(rated="good") == ["answer 2", "answer 0"]
    assert found(rated="bad") == ["answer 2", "answer 1"]
    assert found(rated="disputed") == ["answer 2"]
    assert found(rated="corrected") == found(rated="noted") == ["answer 3"]
    assert found(rated="rated") == found(rated="people") == ["answer 3", "answer 2", "answer 1", "answer 0"]
    assert found(rated="unrated") == ["answer 5", "answer 4"]


def test_what_no_index_knows_is_looked_for_a_bounded_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "LOOK", 4)
    for number in range(10):
        decide(number, response="needle" if number in (1, 8) else "hay")
    first = decisions_page(DecisionSearch(DecisionFilter(), q="needle"))
    assert [row.messages[0]["content"] for row in first.decisions] == ["question 8"]
    assert first.scan_end == START + timedelta(minutes=6)
    second = decisions_page(DecisionSearch(DecisionFilter(), q="needle"), first.older)
    assert second.decisions == []
    third = decisions_page(DecisionSearch(DecisionFilter(), q="needle"), second.older)
    assert [row.messages[0]["content"] for row in third.decisions] == ["question 1"]
    assert (third.older, third.scan_end) == ("", None)


def test_a_page_takes_as_many_queries_for_many_as_for_one(
    operator: Client, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    for number in range(30):
        rating_submit(decision=decide(number), rater="ada", thumb="up")
    # session, user, two for permissions, agents, policies, the place where the look ends, decisions, ratings; and
    # whether anything was ever promoted, for the link to the start
    with django_assert_max_num_queries(10):
        operator.get("/decisions/?rated=good")


# --- Pages and who may see them -----------------------------------------------------------------------------


def test_raters_are_blind_and_see_no_decisions(client: Client) -> None:
    row = decide(policy="assistant-v1")
    assert client.get("/decisions/").status_code == 302
    client.force_login(person("ada", "rater"))
    assert client.get("/decisions/").status_code == 403
    assert client.get(f"/decisions/{row.pk}/").status_code == 403
    assert "/decisions/" not in client.get("/").text


def test_the_list_links_to_each_decision_and_escapes_what_apps_said(operator: Client) -> None:
    row = decide(response="<img src=x>", messages="<b>bold</b>", tags=["<i>"], policy="<u>")
    html = operator.get("/decisions/").text
    assert f'href="/decisions/{row.pk}/"' in html
    assert "&lt;img src=x&gt;" in html
    assert not re.search(r"<(img|b|i|u)>", html)
    assert not re.search(r"<(img|b|i|u)>", operator.get(f"/decisions/{row.pk}/").text)


def test_filters_are_filled_in_and_stay_in_the_links(operator: Client) -> None:
    for number in range(listing.PAGE + 1):
        decide(number, tags=["x"])
    html = operator.get("/decisions/?q=answer&tag=x&rated=unrated").text
    assert 'value="answer"' in html
    assert '<option value="unrated" selected>' in html
    older = re.search(r'href="(/decisions/\?[^"]*before=[^"]*)"', html)
    assert older
    last = operator.get(older[1].replace("&amp;", "&")).text
    assert "answer 0" in last
    assert last.count('class="found-asked"') == 1


@pytest.mark.parametrize(
    "query",
    ["agent=No%20Slug", "since=tomorrow", "rated=maybe", "before=x", "before=2026-01-01~x", "q=a%00b"],
)
def test_what_cannot_be_asked_is_said(operator: Client, query: str) -> None:
    answer = operator.get(f"/decisions/?{query}")
    assert answer.status_code == 400
    assert re.search(r'<p class="fault" role="alert">[^<]{8,}', answer.text)


def test_one_decision_shows_all_that_was_said_of_it(operator: Client) -> None:
    row = decide(
        policy="assistant-v2",
        reasoning="Is <this> the way?",
        unit="user-7",
        propensity=0.25,
        candidates=[{"response": "answer 1", "score": 0.7}],
    )
    other = decide(2, messages="question 1", policy="assistant-v1")
    rating_submit(decision=row, rater="ada", stars=2)
    rating_submit(decision=row, rater="ada", stars=5, notes="On second thought.", correction="Better still.")
    comparison_submit(left=other, right=row, preference="right", rater="bob")
    outcome_record(decision=row, name="ticket_reopened", value=1)
    html = operator.get(f"/decisions/{row.pk}/").text
    for said in ("5 of 5 stars", "2 of 5 stars", "replaced", "On second thought.", "Better still.", ">preferred<",
                 "ticket_reopened", "assistant-v2", "user-7", "0.25", "0.700", "question 1",
                 "Is &lt;this&gt; the way?"):  # fmt: skip
        assert said in html, said
    assert ">not preferred<" in operator.get(f"/decisions/{other.pk}/").text


def test_a_decision_that_is_not_there_is_not_found(operator: Client) -> None:
    assert operator.get(f"/decisions/{uuid.uuid4()}/").status_code == 404


def facts_of(decision: uuid.UUID, policy: str) -> LinkedFacts:
    parts = [
        {"name": "tool_success", "raw": -1.0, "weight": 0.5, "detail": {"failed": 2}},
        {"name": "syntax", "raw": None, "weight": 1.0, "detail": {"reason": "no code"}},
    ]
    reward = {"value": 0.375, "raw": -0.5, "components": parts, "calculated_at": None}
    return {"reward": reward, "policy_url": f"/policies/{policy}/"}  # type: ignore[typeddict-item]


def test_the_reward_and_the_policys_page_come_through_the_setting(operator: Client, settings: Any) -> None:
    row = decide(policy="assistant-v2")
    assert "Reward" not in operator.get(f"/decisions/{row.pk}/").text
    settings.FEEDBACK_DECISION_FACTS = "tests.test_explorer.facts_of"
    html = operator.get(f"/decisions/{row.pk}/").text
    assert "<strong>0.375</strong>" in html
    assert "-1.00" in html
    # from -1 to 0 on a scale from -2 to 2
    assert 'x="25.0" width="25.0"' in html
    assert "not applied" in html
    assert 'href="/policies/assistant-v2/"' in html


# --- Timeline -----------------------------------------------------------------------------------------------

AT = "2026-01-01T00:00:00+00:00"


def traced(*steps: dict[str, Any], **facts: Any) -> tuple[Trace, uuid.UUID]:
    decision = {"kind": "decision", "messages": "q", "response": "r"}
    written = trace_record(agent="a", steps=[*steps, decision], started_at=AT, **facts)
    return written.trace, written.decisions[0]


def test_a_step_shows_what_went_in_what_came_out_and_how_long_it_took() -> None:
    call = {"kind": "tool_call", "name": "search", "arguments": {"q": 1}, "error": "TimeoutError",
            "at": "2026-01-01T00:00:01.500Z", "duration_ms": 2500, "attempt": 2}  # fmt: skip
    trace, decision = traced(call)
    (step, own) = timeline_of(trace, decision).steps
    assert (step.name, step.arguments, step.error) == ("search", '{"q": 1}', "TimeoutError")
    assert (step.after_text, step.duration_text) == ("+1.5 s", "2.5 s")
    assert step.details == [("attempt", "2")]
    assert (own.here, own.result, own.decision) == (True, "r", decision)
    assert timeline_of(trace, decision).errors == 1


def test_steps_within_steps_are_indented() -> None:
    steps = [{"kind": "step", "n": n, "parent": parent} for n, parent in enumerate([None, 0, 1, 0, None])]
    trace, decision = traced(*steps)
    assert [step.depth for step in timeline_of(trace, decision).steps] == [0, 1, 2, 1, 0, 0]


def test_a_long_trace_is_shown_in_parts_and_opens_where_the_decision_is() -> None:
    trace, decision = traced(*({"kind": "step", "name": str(n)} for n in range(STEPS_SHOWN + 7)))
    last = timeline_of(trace, decision)
    assert (last.part, last.parts, last.total, len(last.steps)) == (2, 2, STEPS_SHOWN + 8, 8)
    first = timeline_of(trace, decision, part=1)
    assert [step.name for step in first.steps] == [str(n) for n in range(STEPS_SHOWN)]
    assert timeline_of(trace, decision, part=99).part == 2


def test_a_trace_sent_in_pieces_is_put_together_in_the_order_of_its_numbers() -> None:
    whole = uuid.uuid4()
    later = [{"kind": "step", "n": 3}, {"kind": "step", "n": 0}]
    trace_record(agent="a", id=whole, run_id="run", steps=later)
    trace_record(agent="a", run_id="run", steps=[{"kind": "step", "n": 9}])
    trace, decision = traced(
        {"kind": "step", "n": 2}, run_id="run", metadata={"trace": str(whole), "part": 1}
    )
    shown = timeline_of(trace, decision)
    assert shown.total == 4
    assert shown.missing == 0
    assert PARTS_READ > 2


def test_steps_of_any_shape_are_shown(client: Client) -> None:
    odd = [
        {"kind": "step", "name": None, "at": "2026-01-01", "text": {"deep": [1]}, "parent": 7, "n": 1},
        {"kind": "task", "name": "t", "status": "failed", "result": None, "unfinished": True},
        {"kind": "tool_call", "name": "big", "result": "x" * 10_000, "duration_ms": 65_000},
    ]
    trace, decision = traced(*odd)
    shown = timeline_of(trace, decision)
    assert shown.steps[0].text == '{"deep": [1]}'
    assert (shown.steps[1].unfinished, shown.errors) == (True, 1)
    assert shown.steps[2].result.endswith("… 4,000 more characters")
    assert shown.steps[2].duration_text == "1 min 5 s"
    client.force_login(person("olga", "operator"))
    assert "never finished" in client.get(f"/decisions/{decision}/").text
