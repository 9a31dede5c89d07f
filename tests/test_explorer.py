"""The explorer of decisions and traces, and the drawings of agents' choices."""

import re
import uuid
from dataclasses import replace
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from backend.rest import pages
from feedback.explorer import listing
from feedback.explorer.decision_facts import LinkedFacts
from feedback.explorer.listing import PARTS_READ, STEPS_SHOWN, DecisionSearch, decisions_page, timeline_of
from feedback.explorer.previews import agent_facts, preview_of
from feedback.explorer.search import DecisionFilter
from feedback.models import Decision, Trace
from feedback.recording.ingest import trace_record
from feedback.services import (
    comparison_submit,
    decision_record,
    outcome_record,
    rating_submit,
    rating_withdraw,
)
from rl.agents import AGENTS, get_agent
from rl.agents.template import TemplateAgent
from rl.agents.widgets import WIDGETS, Canvas, widget_drawing
from tests.support.api_client import person
from tests.support.postgres import postgres_url as postgres_url
from tests.support.rating_page import record, scenario

pytestmark = pytest.mark.django_db


START = timezone.now() - timedelta(days=2)


def decide(number: int = 1, **facts: Any) -> Decision:
    known = {"agent": "assistant", "messages": f"question {number}", "response": f"answer {number}"}
    return decision_record(**(known | {"created_at": START + timedelta(minutes=number)} | facts)).row


def found(within: DecisionFilter | None = None, **asked: Any) -> list[str]:
    return [
        row.response for row in decisions_page(DecisionSearch(within or DecisionFilter(), **asked)).decisions
    ]


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
    Decision.objects.filter(pk=decide(3).pk).update(created_at=START - timedelta(days=9))
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
    # the stars of a simulated rater say nothing of what people like
    assert (found(rated="liked"), found(rated="disliked")) == (["answer 0"], ["answer 2", "answer 1"])


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


def test_queries_do_not_grow(operator: Client, django_assert_max_num_queries: DjangoAssertNumQueries) -> None:
    for number in range(30):
        rating_submit(decision=decide(number), rater="ada", thumb="up")
    # session, user, two for permissions, agents, policies, the place where the look ends, decisions, ratings; and
    # what the frame shows: work in the background, problems
    with django_assert_max_num_queries(11):
        operator.get("/decisions/?rated=good")


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


def test_results_are_counted_asked_in_one_click_and_reset(operator: Client, monkeypatch: Any) -> None:
    monkeypatch.setattr(listing, "COUNTED", 42)
    for number in range(listing.PAGE + 2):
        rating_submit(decision=decide(number), rater="ada", thumb="down" if number else "up")
    page = operator.get("/decisions/?agent=assistant")
    assert page.context["count"] == "42 decisions"
    assert 'href="/decisions/?agent=assistant&amp;rated=disliked">disliked by people' in page.text
    assert f"since={timezone.localdate() - timedelta(days=7)}" in page.text
    assert ">reset<" not in page.text
    disliked = operator.get("/decisions/?agent=assistant&rated=disliked")
    assert (disliked.context["count"], disliked.context["narrowed"]) == (
        "41 decisions",
        ["disliked by people"],
    )
    assert 'href="/decisions/?agent=assistant">reset<' in disliked.text
    decide(99)
    assert operator.get("/decisions/").context["count"] == "more than 42 decisions"
    assert operator.get("/decisions/?rated=liked").context["count"] == "1 decision"


def test_what_cannot_be_asked_is_said(operator: Client) -> None:
    bad = ("agent=No%20Slug", "since=tomorrow", "rated=maybe", "before=x", "before=2026-01-01~x", "q=a%00b")
    for query in bad:
        answer = operator.get(f"/decisions/?{query}")
        assert answer.status_code == 400, query
        assert re.search(r'<p class="fault" role="alert">[^<]{8,}', answer.text)
    assert operator.get(f"/decisions/{uuid.uuid4()}/").status_code == 404


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
    shown = ("5 of 5 stars", "2 of 5 stars", "replaced", "On second thought.", "Better still.", ">preferred<")
    linked = ("ticket_reopened", "assistant-v2", "user-7", "0.25", "0.700", "question 1")
    for said in (*shown, *linked, "Is &lt;this&gt; the way?"):
        assert said in html, said
    assert ">not preferred<" in operator.get(f"/decisions/{other.pk}/").text


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


AT = "2026-01-01T00:00:00+00:00"


def traced(*steps: dict[str, Any], **facts: Any) -> tuple[Trace, uuid.UUID]:
    decision = {"kind": "decision", "messages": "q", "response": "r"}
    written = trace_record(agent="a", steps=[*steps, decision], started_at=AT, **facts)
    return written.trace, written.decisions[0]


def test_a_step_shows_what_went_in_what_came_out_and_how_long_it_took() -> None:
    call = {"kind": "tool_call", "name": "search", "arguments": {"q": 1}, "error": "TimeoutError"}
    trace, decision = traced(call | {"at": "2026-01-01T00:00:01.500Z", "duration_ms": 2500, "attempt": 2})
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


ALL_WIDGETS = sorted({name for kinds in WIDGETS.values() for kind in kinds for name in kind})


def draw(name: str, seed: str = "a", **context: Any) -> str | None:
    return widget_drawing(name, asked="compare orders of every team", context=context, seed=seed)


def test_every_widget_is_drawn_within_its_sheet() -> None:
    for name, on, points in product(ALL_WIDGETS, ("phone", "wall screen"), (4, 4000)):
        svg = draw(name, on=on, points=points)
        width = float(re.search(r'<svg[^>]* width="(\d+)"', svg)[1])  # type: ignore[index]
        xs = [float(x) for x in re.findall(r' (?:x|x1|x2|cx)="([-\d.]+)"', svg)]
        assert all(-1 <= x <= width + 1 for x in xs), name
        assert "nan" not in svg
        assert "inf" not in svg
    odd = (None, True, "many", float("nan"), float("inf"), -3, 10**9)
    assert [points for points in odd if draw("line_chart", points=points) is None] == []
    assert draw("hologram") is None


def test_an_agent_draws_its_own_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drawing is what agents without code that have its preview are shown by, too."""
    asked: dict[str, Any] = {}

    def sketch(choice: str, **facts: Any) -> str:
        asked.update(facts, choice=choice)
        return "<svg><text>mine</text></svg>"

    monkeypatch.setitem(AGENTS, "widgets", replace(AGENTS["widgets"], drawing=sketch))
    monkeypatch.setitem(
        AGENTS, "plain", TemplateAgent(slug="plain", title="", description="", preview="widget")
    )
    assert agent_facts("plain").draw is sketch
    assert agent_facts("filer").draw is None
    decision = record(**scenario("widgets"))
    facts = agent_facts(decision.agent)
    preview = preview_of(decision, facts)
    assert preview.drawing == "<svg><text>mine</text></svg>"
    assert asked["choice"] == preview.choice
    assert asked["seed"] == decision.prompt_hash


def test_a_drawing_that_fails_leaves_the_page_without_a_picture(caplog: pytest.LogCaptureFixture) -> None:
    def broken(choice: str, **facts: Any) -> str:
        raise KeyError("colour")

    preview = preview_of(record(**scenario("widgets")), replace(get_agent("widgets").facts(), draw=broken))
    assert preview.drawing is None
    assert preview.choice
    assert "the drawing of agent widgets failed" in caplog.text


def test_texts_of_a_drawing_cannot_leave_it() -> None:
    canvas = Canvas(100, 50, '"><script>')
    canvas.text(1, 1, "<script>alert(1)</script>")
    assert canvas.svg().count("&lt;script&gt;") == 2
    assert "<script" not in canvas.svg()
