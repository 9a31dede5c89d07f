"""Decisions as the rating page shows them: conversations, choices, trees, whatever an app sent; escaped, and blind."""

import json
import re

import pytest
from django.test import Client

from feedback.explorer.previews import answer_line, preview_of, text_blocks, turns_of
from rl.agents.base import AgentFacts
from tests.support.rating_page import record, scenario

pytestmark = pytest.mark.django_db


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


def test_each_built_in_agent_has_its_preview(rater: Client) -> None:
    signs = {"widgets": '<svg class="drawing', "fixtures": "screen-app", "filer": 'class="tree"'}
    for slug, sign in (*signs.items(), ("assistant", "turn response")):
        record(**scenario(slug))
        html = rater.get(f"/rate/?agent={slug}").text
        assert sign in html
        assert "{&quot;" not in re.sub(r"<option.*?</option>", "", html), "raw JSON outside the correction"
    record("support-bot", response="Sure.")  # an agent without a file is shown as text
    assert "turn response" in rater.get("/rate/?agent=support-bot").text


def test_the_chosen_folder_is_marked_in_the_tree(rater: Client) -> None:
    facts = scenario("filer") | {"response": '{"folder": "Mail Oakwood"}'}
    facts["candidates"] = ['{"folder": "Mail Oakwood"}', '{"folder": "Letters/2024"}']
    preview = preview_of(record(**facts), AgentFacts("a", "", "", (), "folder"))
    expected = [("Letters", 0, False), ("2024", 1, False), ("Mail Oakwood", 0, True)]
    assert [(folder.name, folder.depth, folder.chosen) for folder in preview.tree] == expected


def test_a_preview_without_a_template_falls_back_to_text() -> None:
    row = record()
    for kind in ("no-such-preview", "../../../etc/passwd", "_raw", ""):
        preview = preview_of(row, AgentFacts("a", "", "", (), kind))
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


def test_a_choice_that_was_not_listed_and_a_made_up_scenario_are_called_so(rater: Client) -> None:
    record(**scenario("widgets") | {"response": '{"widget": "hologram"}'}, source="simulation")
    html = rater.get("/rate/").text
    for said in ("hologram is not among the 4 listed", 'class="undrawn"', "made-up scenario"):
        assert said in html


def test_messages_of_any_shape_are_readable() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "search"}]}
    turns = turns_of([call, "odd", {"content": {"a": 1}}])
    assert [turn.role for turn in turns] == ["assistant", ""]
    assert '"search"' in turns[0].text
    assert '"a": 1' in turns[1].text


def test_code_fences_become_blocks() -> None:
    blocks = text_blocks("Like so:\n```python\nprint(1)\n```\nDone.")
    expected = [("Like so:", False), ("print(1)", True), ("Done.", False)]
    assert [(block.text, block.code) for block in blocks] == expected
    assert [block.code for block in text_blocks("```\nnever closed")] == [True]
    assert [block.text for block in text_blocks("plain")] == ["plain"]


def test_a_call_of_a_tool_is_shown_as_its_name_and_arguments() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "stock", "arguments": '{"sku": 4}'}}
    response = json.dumps([{"role": "assistant", "content": "One moment.", "tool_calls": [call]}])
    words, called = text_blocks(response)
    assert (words.text, called.text) == ("One moment.", '{"stock": {"sku": 4}}')
    assert called.structure is not None
    assert answer_line(response) == "One moment. · stock: (sku: 4)"
    (turn,) = turns_of(json.loads(response))
    assert turn.text == 'One moment.\n{"stock": {"sku": 4}}'
