"""The rating page, without a browser: what is shown, what is stored, what is refused."""

from __future__ import annotations

import re
import uuid
from dataclasses import replace
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from feedback.explorer.previews import agent_facts, preview_of, text_blocks, turns_of
from feedback.models import Decision, Rating
from feedback.selectors import ratings_standing
from feedback.services import decision_record, rating_submit
from rl.agents import AGENTS
from rl.agents.fixtures import SITUATIONS
from rl.agents.fixtures.drawing import fixture_drawing
from rl.agents.template import TemplateAgent
from rl.agents.widgets import WIDGETS
from rl.agents.widgets.drawing import widget_drawing
from tests.support.api_client import person

pytestmark = pytest.mark.django_db


@pytest.fixture
def rater(client: Client) -> Client:
    client.force_login(person("ada", "rater"))
    return client


def record(agent: str = "assistant", **facts: Any) -> Decision:
    return decision_record(
        **({"agent": agent, "messages": "How do I reset it?", "response": "Open Settings."} | facts)
    ).row


def scenario(slug: str, option: int = 0) -> dict[str, Any]:
    """A built-in agent's first scenario, answered with one of its candidates."""
    agent = AGENTS[slug]
    state = agent.scenarios()[0].state
    candidates = agent.candidates(state)
    return {
        "agent": slug,
        "messages": agent.render(state),
        "state": state,
        "candidates": candidates,
        "response": candidates[option],
    }


def fields(html: str) -> dict[str, str]:
    """The hidden fields of the rating form."""
    return dict(re.findall(r'<input type="hidden" name="(id|decision|agent)" value="([^"]*)"', html))


def press(client: Client, verdict: str, html: str | None = None, **more: Any) -> Any:
    sent = fields(html or client.get("/rate/").text) | {"verdict": verdict} | more
    return client.post("/rate/", sent)


# --- What is shown ------------------------------------------------------------------------------------------


def test_a_rater_is_blind_to_the_policy(rater: Client) -> None:
    record(policy="assistant-v312", arm="arm-b", unit="user-7", run_id="run-9", propensity=0.25)
    html = rater.get("/rate/").text
    assert "Open Settings." in html
    for hidden in ("assistant-v312", "arm-b", "user-7", "run-9", "0.25"):
        assert hidden not in html


def test_what_the_simulated_rater_likes_is_not_shown(rater: Client) -> None:
    facts = scenario("filer")
    assert facts["state"]["filed_in"]
    record(**facts)
    assert "filed_in" not in rater.get("/rate/").text


def test_the_system_prompt_is_folded_away_and_the_user_prominent(rater: Client) -> None:
    record(
        messages=[
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "How do I reset it?"},
            {"role": "assistant", "content": "Reset what?"},
            {"role": "user", "content": [{"type": "text", "text": "The password"}]},
        ]
    )
    html = rater.get("/rate/").text
    assert re.search(r"<details class=\"system\"><summary>[^<]+</summary><div[^>]*>Be kind\.", html)
    assert re.findall(r'<div class="turn (\w+)"', html) == ["user", "other", "user", "response"]
    assert "The password" in html


def test_of_a_long_conversation_the_last_turns_are_unfolded(rater: Client) -> None:
    record(messages=[{"role": "user", "content": f"turn {number}"} for number in range(9)])
    page = rater.get("/rate/").text
    folded, _, shown = page[page.index("earlier") :].partition("</details>")
    assert "5 earlier messages" in folded
    assert re.findall(r"turn (\d)<", folded) == list("01234")
    assert re.findall(r"turn (\d)<", shown) == list("5678")


@pytest.mark.parametrize(
    ("slug", "sign"),
    [
        ("widgets", '<svg class="drawing'),
        ("fixtures", "screen-app"),
        ("filer", 'class="tree"'),
        ("assistant", "turn response"),
    ],
)
def test_each_built_in_agent_has_its_preview(rater: Client, slug: str, sign: str) -> None:
    record(**scenario(slug))
    html = rater.get("/rate/").text
    assert sign in html
    assert "{&quot;" not in re.sub(r"<option.*?</option>", "", html), "raw JSON outside the correction"


def test_the_chosen_folder_is_marked_in_the_tree(rater: Client) -> None:
    facts = scenario("filer") | {"response": '{"folder": "Mail Oakwood"}'}
    facts["candidates"] = ['{"folder": "Mail Oakwood"}', '{"folder": "Letters/2024"}']
    preview = preview_of(record(**facts), "folder")
    assert [(folder.name, folder.depth, folder.chosen) for folder in preview.tree] == [
        ("Letters", 0, False),
        ("2024", 1, False),
        ("Mail Oakwood", 0, True),
    ]


def test_an_agent_without_a_file_is_shown_as_text(rater: Client) -> None:
    record("support-bot", response="Sure.")
    assert "turn response" in rater.get("/rate/").text


@pytest.mark.parametrize("kind", ["no-such-preview", "../../../etc/passwd", "_raw", ""])
def test_a_preview_without_a_template_falls_back_to_text(kind: str) -> None:
    preview = preview_of(record(), kind)
    assert preview.template == "feedback/preview/text.html"


@pytest.mark.parametrize(
    "response", ["<script>alert(1)</script>", '{"widget": ', "[1, 2]", '{"a": "x", "b": "y"}', ""]
)
def test_an_unreadable_choice_is_shown_as_it_is_and_escaped(rater: Client, response: str) -> None:
    record(**scenario("widgets") | {"response": response})
    html = rater.get("/rate/").text
    assert 'class="raw"' in html
    assert "<script>alert" not in html
    assert re.sub(r"[<>&\"]", "", response)[:10] in html.replace("&quot;", "").replace("&lt;", "").replace(
        "&gt;", ""
    )


def test_a_choice_that_was_not_listed_says_so(rater: Client) -> None:
    record(**scenario("widgets") | {"response": '{"widget": "hologram"}'})
    html = rater.get("/rate/").text
    assert "hologram is not among the 4 listed" in html
    assert 'class="undrawn"' in html


def test_texts_of_an_app_are_escaped_everywhere(rater: Client) -> None:
    evil = "<img src=x onerror=alert(1)>"
    facts = scenario("widgets")
    facts["state"] = facts["state"] | {"question": evil, "context": {evil: evil}, "widgets": [evil]}
    facts |= {"candidates": None, "response": '{"widget": "table"}', "messages": evil}
    record(**facts)
    record("bot", messages=[{"role": evil, "content": evil}], response=evil)
    for agent in ("widgets", "bot"):
        assert "<img" not in rater.get(f"/rate/?agent={agent}").text


def test_made_up_scenarios_are_called_so(rater: Client) -> None:
    record(**scenario("widgets"), source="simulation")
    assert "made-up scenario" in rater.get("/rate/").text


def test_the_page_carries_no_inline_script_or_style(rater: Client) -> None:
    record(**scenario("widgets"))
    html = rater.get("/rate/").text
    assert "default-src 'none'" in html
    assert re.findall(r"<script(?![^>]*\bsrc=)", html) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", html) == []


def test_messages_of_any_shape_are_readable() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "search"}]}
    turns = turns_of([call, "odd", {"content": {"a": 1}}])
    assert [turn.role for turn in turns] == ["assistant", ""]
    assert '"search"' in turns[0].text
    assert '"a": 1' in turns[1].text


def test_code_fences_become_blocks() -> None:
    blocks = text_blocks("Like so:\n```python\nprint(1)\n```\nDone.")
    assert [(block.text, block.code) for block in blocks] == [
        ("Like so:", False),
        ("print(1)", True),
        ("Done.", False),
    ]
    assert [block.code for block in text_blocks("```\nnever closed")] == [True]
    assert [block.text for block in text_blocks("plain")] == ["plain"]


# --- Drawings -----------------------------------------------------------------------------------------------

ALL_WIDGETS = sorted({name for kinds in WIDGETS.values() for kind in kinds for name in kind})
ALL_FIXTURES = sorted({name for _, brief, guided in SITUATIONS.values() for name in (*brief, *guided)})


def draw(name: str, seed: str = "a", **context: Any) -> str | None:
    return widget_drawing(name, asked="compare orders of every team", context=context, seed=seed)


@pytest.mark.parametrize("name", ALL_WIDGETS)
def test_every_widget_is_drawn_within_its_sheet(name: str) -> None:
    for on in ("phone", "wall screen"):
        for points in (4, 4000):
            svg = draw(name, on=on, points=points)
            assert svg is not None
            width = float(re.search(r'<svg[^>]* width="(\d+)"', svg)[1])  # type: ignore[index]
            xs = [float(x) for x in re.findall(r' (?:x|x1|x2|cx)="([-\d.]+)"', svg)]
            assert all(-1 <= x <= width + 1 for x in xs)
            assert "nan" not in svg
            assert "inf" not in svg


@pytest.mark.parametrize("name", ALL_FIXTURES)
def test_every_fixture_is_drawn(name: str) -> None:
    assert "</svg>" in (fixture_drawing(name, description="one line of help") or "")


def test_responses_to_one_prompt_are_drawn_with_the_same_figures() -> None:
    assert draw("bar_chart", seed="a") == draw("bar_chart", seed="a")
    assert draw("bar_chart", seed="a") != draw("bar_chart", seed="b")


def test_more_readings_make_a_denser_curve() -> None:
    few, many = draw("line_chart", points=4), draw("line_chart", points=240)
    assert few is not None
    assert many is not None
    assert few.count(" L") == 3
    assert many.count(" L") == 239


@pytest.mark.parametrize("points", [None, True, "many", float("nan"), float("inf"), -3, 10**9])
def test_odd_counts_of_readings_are_drawn(points: Any) -> None:
    assert draw("line_chart", points=points) is not None


def test_what_is_compared_takes_its_name_from_the_question() -> None:
    assert "Team A" in (draw("table") or "")
    month = widget_drawing("table", asked="show orders by region for this month", context={}, seed="a")
    assert "Region A" in (month or "")


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
    preview = preview_of(decision, facts.preview, draw=facts.draw)
    assert preview.drawing == "<svg><text>mine</text></svg>"
    assert asked["choice"] == preview.choice
    assert asked["seed"] == decision.prompt_hash


def test_a_drawing_that_fails_leaves_the_page_without_a_picture(caplog: pytest.LogCaptureFixture) -> None:
    def broken(choice: str, **facts: Any) -> str:
        raise KeyError("colour")

    preview = preview_of(record(**scenario("widgets")), "widget", draw=broken)
    assert preview.drawing is None
    assert preview.choice
    assert "the drawing of agent widgets failed" in caplog.text


def test_texts_of_a_drawing_cannot_leave_it() -> None:
    svg = draw('bar_chart"><script>', seed="a") or fixture_drawing(
        "hint_line", description='<script>alert(1)</script>"'
    )
    assert svg is not None
    assert "<script" not in svg
    assert "&lt;script&gt;" in svg.lower()


def test_a_widget_nobody_drew_has_no_drawing() -> None:
    assert draw("hologram") is None


# --- What is stored -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdict", "stored"),
    [
        ("up", {"thumb": "up", "stars": None}),
        ("down", {"thumb": "down", "stars": None}),
        ("1", {"thumb": "", "stars": 1}),
        ("5", {"thumb": "", "stars": 5}),
    ],
)
def test_a_button_stores_its_verdict(rater: Client, verdict: str, stored: dict[str, Any]) -> None:
    decision = record()
    answer = press(rater, verdict)
    assert (answer.status_code, answer["Location"]) == (302, f"/rate/?said={verdict}")
    rating = Rating.objects.get()
    assert {name: getattr(rating, name) for name in stored} == stored
    assert (rating.decision, rating.rater, rating.rater_kind, rating.correction) == (
        decision,
        "ada",
        "human",
        None,
    )


def test_tags_and_notes_go_with_the_verdict(rater: Client) -> None:
    record()
    press(rater, "down", tag=["too long", "wrong"], other_tags=" rude ,, wrong", notes="Says\nnothing.")
    rating = Rating.objects.get()
    assert rating.tags == ["too long", "wrong", "rude"]
    assert rating.notes == "Says\nnothing."


def test_tags_and_notes_can_be_saved_without_a_verdict(rater: Client) -> None:
    record()
    press(rater, "save", notes="Odd.")
    rating = Rating.objects.get()
    assert (rating.thumb, rating.stars, rating.notes) == ("", None, "Odd.")


def test_an_edited_response_is_a_correction(rater: Client) -> None:
    record(response="Open Settings.\nThen go.")
    press(rater, "correct", correction="Open Billing.\r\nThen go.")
    rating = Rating.objects.get()
    assert (rating.correction, rating.thumb) == ("Open Billing.\nThen go.", "")


def test_an_untouched_response_is_no_correction(rater: Client) -> None:
    record(response="Open Settings.\nThen go.")
    press(rater, "down", correction="Open Settings.\r\nThen go.")
    assert Rating.objects.get().correction is None


def test_saving_an_untouched_response_as_correction_is_refused(rater: Client) -> None:
    record()
    answer = press(rater, "correct", correction="Open Settings.", notes="kept")
    assert answer.status_code == 400
    assert "change it first" in answer.text
    assert "kept</textarea>" in answer.text
    assert not Rating.objects.exists()


def test_free_text_is_corrected_by_editing_it_also_where_drafts_are_listed(rater: Client) -> None:
    record(**scenario("assistant"))
    html = rater.get("/rate/").text
    assert '<textarea name="correction"' in html
    assert '<select name="correction"' not in html


def test_where_responses_are_listed_a_correction_is_chosen_among_them(rater: Client) -> None:
    facts = scenario("widgets")
    record(**facts)
    offered = re.findall(r'<option value="([^"]+)"', rater.get("/rate/").text)
    assert [value.replace("&quot;", '"') for value in offered] == facts["candidates"][1:]
    press(rater, "correct", correction=facts["candidates"][2])
    assert Rating.objects.get().correction == facts["candidates"][2]


def test_a_double_click_is_stored_once(rater: Client) -> None:
    record()
    html = rater.get("/rate/").text
    first, second = press(rater, "up", html), press(rater, "up", html)
    assert (first.status_code, second.status_code) == (302, 302)
    assert Rating.objects.count() == 1
    assert len(rater.session["rate_undo"]) == 1


def test_the_same_form_with_another_verdict_is_a_conflict(rater: Client) -> None:
    record()
    html = rater.get("/rate/").text
    press(rater, "up", html)
    answer = press(rater, "down", html)
    assert answer.status_code == 409
    assert "rated this already" in answer.text
    assert Rating.objects.get().thumb == "up"


def test_rating_again_replaces(rater: Client) -> None:
    decision = record()
    press(rater, "up")
    page = rater.get(f"/rate/?decision={decision.pk}").text
    assert "you said: up" in page
    press(rater, "down", page)
    assert [rating.thumb for rating in ratings_standing()] == ["down"]


@pytest.mark.parametrize(
    "broken",
    [
        {"verdict": "excellent"},
        {"verdict": ""},
        {"verdict": "6"},
        {"verdict": "save"},
        {"id": "7"},
        {"notes": "a\x00b"},
        {"notes": "x" * 20_001},
        {"tag": ["t" * 101]},
        {"other_tags": ",".join(map(str, range(60)))},
    ],
)
def test_what_cannot_be_stored_is_refused_with_a_reason(rater: Client, broken: dict[str, Any]) -> None:
    record()
    answer = press(rater, **({"verdict": "up"} | broken))
    assert answer.status_code == 400
    assert re.search(r'<p class="fault" role="alert">[^<]{10,}', answer.text)
    assert not Rating.objects.exists()


@pytest.mark.parametrize("decision", ["", "x", "cc99f58f-21f8-442f-8814-70e8116c129f"])
def test_an_unknown_decision_is_not_found(rater: Client, decision: str) -> None:
    assert press(rater, "up", "", decision=decision, id=str(uuid.uuid4())).status_code == 404
    assert rater.post("/rate/skip/", {"decision": decision}).status_code == 404


@pytest.mark.parametrize("address", ["/rate/?agent=No%20Slug", "/rate/?agent=a%00b", "/rate/?decision=x"])
def test_an_address_that_cannot_be_is_not_found(rater: Client, address: str) -> None:
    assert rater.get(address).status_code == 404


def test_a_form_from_elsewhere_is_refused() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_user("eve"))
    record()
    assert press(client, "up").status_code == 403
    assert not Rating.objects.exists()


# --- The card ahead, filters, guards ------------------------------------------------------------------------

CARD = {"X-Ratchet-Card": "1"}


def test_the_card_ahead_is_fetched_and_stays_in_front_when_the_first_is_rated(rater: Client) -> None:
    for number in range(3):
        record(messages=f"question {number}", propensity=1.0 - number / 10)
    first = fields(rater.get("/rate/").text)
    ahead = fields(rater.get("/rate/", {"after": first["decision"]}, headers=CARD).text)
    assert ahead["decision"] != first["decision"]
    # something still more worth asking arrives meanwhile: what is in front of the rater does not change
    record(messages="urgent", propensity=0.01)
    answer = rater.post(
        "/rate/", first | {"verdict": "up"}, headers=CARD | {"X-Ratchet-Shown": ahead["decision"]}
    )
    assert fields(answer.text)["decision"] == ahead["decision"]


def test_a_card_ahead_that_another_took_is_not_kept(rater: Client) -> None:
    taken = record(messages="one", propensity=0.5)
    first, free = record(messages="two", propensity=0.1), record(messages="three")
    assert fields(rater.get("/rate/").text)["decision"] == str(first.pk)
    rating_submit(decision=taken, rater="bob", thumb="up")
    sent = {"id": str(uuid.uuid4()), "decision": str(first.pk), "verdict": "up"}
    answer = rater.post("/rate/", sent, headers=CARD | {"X-Ratchet-Shown": str(taken.pk)})
    assert fields(answer.text)["decision"] == str(free.pk)


def test_where_nothing_follows_there_is_no_card_ahead(rater: Client) -> None:
    only = record()
    assert rater.get("/rate/", {"after": str(only.pk)}, headers=CARD).status_code == 204


def test_another_rater_gets_another_card(rater: Client) -> None:
    record()
    assert "Open Settings." in rater.get("/rate/").text
    other = Client()
    other.force_login(person("bob", "rater"))
    assert "Other raters have the last ones open" in other.get("/rate/").text
    rater.post("/rate/skip/", fields(rater.get("/rate/").text))
    assert "Open Settings." in other.get("/rate/").text


def test_filters_stay_in_the_address_and_can_be_taken_away(rater: Client) -> None:
    record(tags=["billing"])
    query = "agent=assistant&amp;tag=billing&amp;since=2020-01-01"
    html = rater.get(f"/rate/?{query.replace('amp;', '')}").text
    assert f'action="/rate/?{query}"' in html
    assert 'href="/rate/?agent=assistant&amp;since=2020-01-01" title="Remove' in html
    assert "Nothing here to rate" in rater.get("/rate/?tag=nothing").text


def test_a_rater_cannot_lift_the_blindfold_by_a_filter(rater: Client) -> None:
    record(policy="assistant-v2")
    assert rater.get("/rate/?policy=assistant-v2").status_code == 403
    operator = Client()
    operator.force_login(person("olga", "operator"))
    assert "Open Settings." in operator.get("/rate/?policy=assistant-v2").text
    assert 'name="policy"' not in rater.get("/rate/").text


def test_who_may_not_rate_is_shown_nothing() -> None:
    decision = record()
    client = Client()
    client.force_login(User.objects.create_user("nobody"))
    assert client.get("/rate/").status_code == 403
    assert client.post("/rate/", {"decision": str(decision.pk)}).status_code == 403
    assert client.post("/rate/undo/").status_code == 403
    assert client.post("/rate/skip/").status_code == 403


# --- Undo and skip ------------------------------------------------------------------------------------------


def test_undo_takes_the_last_rating_back_and_fills_it_in_again(rater: Client) -> None:
    decision = record()
    record(messages="another")
    press(rater, "down", tag=["wrong"], notes="Too short.")
    answer = rater.post("/rate/undo/", follow=True)
    assert not ratings_standing().exists()
    assert fields(answer.text)["decision"] == str(decision.pk)
    assert "Undone" in answer.text
    assert "Too short.</textarea>" in answer.text
    assert 'value="wrong" checked' in answer.text


@pytest.mark.slow
def test_the_last_ten_ratings_can_be_taken_back(rater: Client) -> None:
    for number in range(12):
        record(messages=f"prompt {number}")
    for _ in range(12):
        press(rater, "up")
    for _ in range(10):
        rater.post("/rate/undo/")
    assert ratings_standing().count() == 2
    assert "nothing to undo" in rater.post("/rate/undo/", follow=True).text
    assert ratings_standing().count() == 2


def test_undo_passes_over_a_rating_that_was_replaced_elsewhere(rater: Client) -> None:
    first, second = record(messages="one"), record(messages="two")
    press(rater, "up")
    press(rater, "up")
    rating_submit(decision=second, rater="ada", thumb="down")
    rater.post("/rate/undo/")
    assert [(r.decision, r.thumb) for r in ratings_standing()] == [(second, "down")]
    assert Rating.objects.filter(decision=first, withdrawn=True).exists()


def test_nobody_undoes_the_rating_of_another(rater: Client) -> None:
    theirs = rating_submit(decision=record(), rater="bob", thumb="up").row
    session = rater.session
    session["rate_undo"] = [str(theirs.pk)]
    session.save()
    rater.post("/rate/undo/")
    assert ratings_standing().get() == theirs


def test_a_skipped_decision_waits_and_can_be_brought_back(rater: Client) -> None:
    first, second = record(messages="one"), record(messages="two")
    rater.post("/rate/skip/", {"decision": str(first.pk)})
    assert fields(rater.get("/rate/").text)["decision"] == str(second.pk)
    press(rater, "up")
    assert "Only those you skipped are left" in rater.get("/rate/").text
    rater.post("/rate/skip/", {"all": "1"})
    assert fields(rater.get("/rate/").text)["decision"] == str(first.pk)
    assert Rating.objects.count() == 1


@pytest.mark.parametrize("address", ["/rate/undo/", "/rate/skip/"])
def test_links_cannot_undo_or_skip(rater: Client, address: str) -> None:
    assert rater.get(address).status_code == 405


# --- The queue on the page ----------------------------------------------------------------------------------


def test_without_decisions_the_page_says_how_to_make_some(rater: Client) -> None:
    html = rater.get("/rate/").text
    assert "Nothing to rate yet" in html
    assert "manage.py simulate widgets" in html


def test_when_all_is_rated_the_page_says_so(rater: Client) -> None:
    record()
    press(rater, "up")
    html = rater.get("/rate/").text
    assert "All rated" in html
    assert "You rated 1 today" in html
    assert "train_dpo" in html


def test_an_agent_that_decided_nothing_is_named(rater: Client) -> None:
    record()
    html = rater.get("/rate/?agent=helpdesk").text
    assert "<strong>helpdesk</strong> has recorded no decision" in html


def test_the_agent_asked_for_stays_through_rating_undo_and_skip(rater: Client) -> None:
    for agent in ("helpdesk", "widgets"):
        record(agent)
    html = rater.get("/rate/?agent=helpdesk").text
    sent = fields(html) | {"verdict": "up"}
    assert 'action="/rate/?agent=helpdesk"' in html
    assert rater.post("/rate/?agent=helpdesk", sent)["Location"] == "/rate/?agent=helpdesk&said=up"
    for button in ("undo", "skip"):
        assert f'formaction="/rate/{button}/?agent=helpdesk"' in html
        assert "agent=helpdesk" in rater.post(f"/rate/{button}/?agent=helpdesk", sent)["Location"]


def test_progress_is_shown(rater: Client) -> None:
    for number in range(3):
        record(messages=f"prompt {number}")
    press(rater, "up")
    html = rater.get("/rate/").text
    assert '<progress max="3" value="1"' in html
    assert re.search(r"<strong>1</strong> rated today.*<strong>2</strong> left", html)


def test_our_script_gets_the_next_card_alone(rater: Client) -> None:
    record(messages="one")
    second = record(messages="two")
    sent = fields(rater.get("/rate/").text) | {"verdict": "up"}
    answer = rater.post("/rate/", sent, headers={"X-Ratchet-Card": "1"})
    assert (answer.status_code, answer["X-Ratchet-Card"]) == (200, "1")
    assert "<html" not in answer.text
    assert "Saved: good" in answer.text
    assert fields(answer.text)["decision"] == str(second.pk)
    undone = rater.post("/rate/undo/", headers={"X-Ratchet-Card": "1"})
    assert fields(undone.text)["decision"] == sent["decision"]
    skipped = rater.post("/rate/skip/", sent, headers={"X-Ratchet-Card": "1"})
    assert fields(skipped.text)["decision"] == str(second.pk)


def test_the_page_is_not_kept_by_caches(rater: Client) -> None:
    """A page from a cache would carry a rating id that was used before."""
    assert "no-store" in rater.get("/rate/")["Cache-Control"]
