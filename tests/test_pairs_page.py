"""Side by side: which two responses come next, on which sides, and what is stored of the answer."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.test import Client

from feedback.explorer.search import DecisionFilter
from feedback.models import Comparison, Decision
from feedback.rating import pair_views as pair_queue
from feedback.rating.pair_views import compared_today, pair_key, pairs_waiting, sides_of
from feedback.selectors import comparisons_standing, feedback_counts
from feedback.services import comparison_submit, decision_record
from rl.datasets.evidence import DatabaseEvidence
from rl.datasets.feedback_types import ComparisonEvidence
from rl.management import simulation
from tests.support.api_client import person

pytestmark = pytest.mark.django_db


@pytest.fixture
def rater(client: Client) -> Client:
    client.force_login(person("ada", "rater"))
    return client


def answer(prompt: str, response: str, policy: str = "", **facts: Any) -> Decision:
    return decision_record(
        **({"agent": "assistant", "messages": prompt, "response": response, "policy": policy} | facts)
    ).row


def two(prompt: str = "q") -> tuple[Decision, Decision]:
    return answer(prompt, "one", "v1"), answer(prompt, "two", "v2")


def offered(rater: str, within: DecisionFilter | None = None) -> Iterator[set[str]]:
    """Responses of each pair this rater is offered, comparing until nothing is left."""
    while (pair := pairs_waiting(rater, within).pair) is not None:
        yield {pair.left.response, pair.right.response}
        comparison_submit(left=pair.left, right=pair.right, preference="tie", rater=rater)


# --- Which pair ---------------------------------------------------------------------------------------------


def test_two_responses_to_one_prompt_make_a_pair_and_nothing_else_does() -> None:
    two()
    answer("other", "alone")
    answer("same", "said twice")
    answer("same", "said twice")
    answer("q", "another agent's", agent="helpdesk")
    assert list(offered("ada")) == [{"one", "two"}]


def test_nobody_is_asked_the_same_pair_twice_on_either_side() -> None:
    one, other = two()
    comparison_submit(left=other, right=one, preference="left", rater="ada")
    Decision.objects.update(ratings_wanted=2)
    comparison_submit(left=one, right=other, preference="left", rater="ada")
    assert pairs_waiting("ada").pair is None
    assert pairs_waiting("bob").pair is not None


def test_a_pair_that_as_many_people_compared_as_wanted_is_done() -> None:
    one, other = two()
    comparison_submit(left=one, right=other, preference="left", rater="sim", rater_kind="simulated")
    assert pairs_waiting("ada").pair is not None
    comparison_submit(left=one, right=other, preference="left", rater="bob")
    assert pairs_waiting("ada").pair is None
    Decision.objects.filter(pk=one.pk).update(ratings_wanted=2)
    assert pairs_waiting("ada").pair is not None


def test_pairs_between_policies_come_before_pairs_of_one_policy() -> None:
    for number in range(6):
        answer(f"within {number}", "a", "v1")
        answer(f"within {number}", "b", "v1")
    answer("between", "c", "v1")
    answer("between", "d", "v2")
    assert next(offered("ada")) == {"c", "d"}


def test_fewest_comparisons_come_first() -> None:
    one, other = two("compared")
    fresh = answer("fresh", "three", "v1"), answer("fresh", "four", "v1")
    Decision.objects.update(ratings_wanted=2)
    comparison_submit(left=one, right=other, preference="tie", rater="bob")
    assert next(offered("ada")) == {row.response for row in fresh}


def test_all_pairs_of_a_prompt_are_offered_once_each() -> None:
    for response in "abc":
        answer("q", response)
    assert sorted(map(sorted, offered("ada"))) == [["a", "b"], ["a", "c"], ["b", "c"]]


def test_raters_start_at_different_pairs_and_a_reload_shows_the_same_one() -> None:
    for number in range(12):
        two(f"prompt {number}")
    first = {name: pairs_waiting(name).pair for name in ("ada", "bob", "carl", "dora", "eve")}
    assert all(pairs_waiting(name).pair == pair for name, pair in first.items())
    assert len({pair.key for pair in first.values() if pair}) > 1


def test_older_prompts_are_looked_for_further_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_queue, "LOOK", 3)
    two()
    for number in range(5):
        answer(f"alone {number}", "r")
    assert list(offered("ada")) == [{"one", "two"}]
    monkeypatch.setattr(pair_queue, "LOOKS", 1)
    assert list(offered("bob")) == []


def test_pairs_are_narrowed_by_agent_and_tag() -> None:
    two()
    for response in "cd":
        answer("q", response, agent="helpdesk", tags=["billing"])
    assert list(offered("ada", DecisionFilter(agent="helpdesk"))) == [{"c", "d"}]
    assert list(offered("bob", DecisionFilter(tag="billing"))) == []


def test_sides_depend_on_the_pair_and_the_rater_and_on_nothing_else() -> None:
    pairs = [(uuid.uuid4(), uuid.uuid4()) for _ in range(200)]
    assert all(sides_of("ada", a, b) == sides_of("ada", b, a) for a, b in pairs)
    kept = sum(sides_of("ada", a, b)[0] == a for a, b in pairs)
    # of 200 fair coins between 65 and 135 come up heads but once in a million times
    assert 65 < kept < 135


# --- Swapped sides ------------------------------------------------------------------------------------------


def test_one_raters_word_on_swapped_sides_counts_once_and_the_last_one_stands() -> None:
    one, other = two()
    comparison_submit(left=one, right=other, preference="left", rater="ada")
    last = comparison_submit(left=other, right=one, preference="left", rater="ada").row
    comparison_submit(left=other, right=one, preference="tie", rater="bob")
    assert list(comparisons_standing().filter(rater="ada")) == [last]
    assert feedback_counts("assistant").comparisons == 2
    found = [e for e in DatabaseEvidence("assistant").evidence({}) if isinstance(e, ComparisonEvidence)]  # type: ignore[arg-type]
    assert [(e.left, e.preference) for e in found if e.preference != "tie"] == [("two", "left")]


# --- The page -----------------------------------------------------------------------------------------------


def fields(html: str) -> dict[str, str]:
    return dict(re.findall(r'<input type="hidden" name="(id|left|right)" value="([^"]*)"', html))


def press(client: Client, preference: str, html: str | None = None, **more: Any) -> Any:
    sent = fields(html or client.get("/rate/pairs/").text) | {"preference": preference} | more
    return client.post("/rate/pairs/", sent)


@pytest.mark.parametrize("preference", ["left", "right", "tie", "both_bad"])
def test_a_button_stores_what_was_shown_on_which_side(rater: Client, preference: str) -> None:
    two()
    html = rater.get("/rate/pairs/").text
    shown = re.findall(r'<div class="words">(one|two)</div>', html)
    answered = press(rater, preference, html, notes="Because.")
    assert answered["Location"] == f"/rate/pairs/?said={preference}"
    row = Comparison.objects.get()
    assert [row.left.response, row.right.response] == shown
    assert (row.preference, row.rater, row.rater_kind, row.notes) == (preference, "ada", "human", "Because.")
    assert compared_today("ada") == 1


def test_a_rater_is_blind_to_the_policies(rater: Client) -> None:
    answer("q", "one", "secret-v1", unit="user-7", arm="arm-b")
    answer("q", "two", "secret-v2")
    html = rater.get("/rate/pairs/").text
    assert "one" in html
    for hidden in ("secret-v", "user-7", "arm-b"):
        assert hidden not in html
    assert rater.get("/rate/pairs/?policy=secret-v1").status_code == 403


def test_a_double_click_is_stored_once(rater: Client) -> None:
    two()
    html = rater.get("/rate/pairs/").text
    assert [press(rater, "left", html).status_code for _ in range(2)] == [302, 302]
    assert press(rater, "right", html).status_code == 409
    assert Comparison.objects.count() == 1


def test_undo_takes_back_and_shows_the_pair_again_on_the_same_sides(rater: Client) -> None:
    two()
    html = rater.get("/rate/pairs/").text
    press(rater, "left", html)
    again = rater.post("/rate/pairs/undo/", follow=True)
    assert not comparisons_standing().exists()
    assert "Undone" in again.text
    assert fields(again.text)["left"] == fields(html)["left"]
    press(rater, "right", again.text)
    assert [row.preference for row in comparisons_standing()] == ["right"]
    for _ in range(2):
        last = rater.post("/rate/pairs/undo/", follow=True)
    assert "nothing to undo" in last.text


def test_a_skipped_pair_comes_back_when_asked_for(rater: Client) -> None:
    two()
    html = rater.get("/rate/pairs/").text
    rater.post("/rate/pairs/skip/", fields(html))
    assert "Only those you skipped are left" in rater.get("/rate/pairs/").text
    rater.post("/rate/pairs/skip/", {"all": "1"})
    assert fields(rater.get("/rate/pairs/").text)["left"] == fields(html)["left"]
    assert not Comparison.objects.exists()


def test_the_pair_ahead_stays_in_front_when_the_first_is_compared(rater: Client) -> None:
    for number in range(3):
        two(f"prompt {number}")
    card = {"X-Ratchet-Card": "1"}
    first = fields(rater.get("/rate/pairs/").text)
    after = pair_key(uuid.UUID(first["left"]), uuid.UUID(first["right"]))
    ahead = fields(rater.get("/rate/pairs/", {"after": after}, headers=card).text)
    assert {ahead["left"], ahead["right"]}.isdisjoint({first["left"], first["right"]})
    shown = {"X-Ratchet-Shown": f"{ahead['left']}~{ahead['right']}"}
    answered = rater.post("/rate/pairs/", first | {"preference": "tie"}, headers=card | shown)
    assert fields(answered.text)["left"] == ahead["left"]


@pytest.mark.parametrize("agent", ["widgets", "fixtures", "filer", "assistant"])
def test_each_built_in_agent_is_compared_as_it_is_seen(rater: Client, agent: str) -> None:
    simulation.simulate(agent, scenarios=1)
    html = rater.get(f"/rate/pairs/?agent={agent}").text
    assert html.count('class="side-panel"') == 2
    assert "{&quot;" not in html
    assert re.findall(r"<style|\sstyle=|\son\w+=", html) == []


@pytest.mark.parametrize("query", ["pair=x", "after=a~b~c&pair=1~2", "agent=No%20Slug"])
def test_a_pair_that_cannot_be_is_not_found(rater: Client, query: str) -> None:
    assert rater.get(f"/rate/pairs/?{query}").status_code == 404


def test_decisions_of_different_prompts_are_no_pair(rater: Client) -> None:
    one, other = answer("q", "a"), answer("p", "b")
    sent = {"id": str(uuid.uuid4()), "left": str(one.pk), "right": str(other.pk), "preference": "left"}
    assert rater.post("/rate/pairs/", sent).status_code == 404
    assert not Comparison.objects.exists()


@pytest.mark.parametrize("broken", [{"preference": "middle"}, {"id": "7"}, {"notes": "x" * 20_001}])
def test_what_cannot_be_stored_is_refused_with_a_reason(rater: Client, broken: dict[str, str]) -> None:
    two()
    answered = press(rater, **({"preference": "left"} | broken))
    assert answered.status_code == 400
    assert re.search(r'<p class="fault" role="alert">[^<]{10,}', answered.text)
    assert not Comparison.objects.exists()
