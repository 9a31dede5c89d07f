"""Pages and endpoints that show two responses side by side: pairs and judging rounds."""

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
from rl.models import JudgingRound, PairJudgement
from rl.registry.judging import judgement_submit, round_stop
from tests.support.api_client import ApiClient, error_of
from tests.support.experiments import policy_of
from tests.support.judging import AGENT, SIDES, preference, round_of

pytestmark = pytest.mark.django_db


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


def test_two_responses_to_one_prompt_make_a_pair_and_nothing_else_does() -> None:
    two()
    answer("other", "alone")
    answer("same", "said twice")
    answer("same", "said twice")
    for response in "cd":
        answer("q", response, agent="helpdesk", tags=["billing"])
    Decision.objects.update(ratings_wanted=9)
    assert sorted(map(sorted, offered("ada"))) == [["c", "d"], ["one", "two"]]
    assert list(offered("bob", DecisionFilter(agent="helpdesk"))) == [{"c", "d"}]
    assert list(offered("bob", DecisionFilter(tag="billing"))) == []
    answer("q", "three")  # all pairs of a prompt are offered once each
    expected = [["one", "three"], ["one", "two"], ["three", "two"]]
    assert sorted(map(sorted, offered("eve", DecisionFilter(agent="assistant")))) == expected


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


def test_sides_depend_on_the_pair_and_the_rater_and_on_nothing_else() -> None:
    pairs = [(uuid.uuid4(), uuid.uuid4()) for _ in range(200)]
    assert all(sides_of("ada", a, b) == sides_of("ada", b, a) for a, b in pairs)
    kept = sum(sides_of("ada", a, b)[0] == a for a, b in pairs)
    # of 200 fair coins between 65 and 135 come up heads but once in a million times
    assert 65 < kept < 135


def test_one_raters_word_on_swapped_sides_counts_once_and_the_last_one_stands() -> None:
    one, other = two()
    comparison_submit(left=one, right=other, preference="left", rater="ada")
    last = comparison_submit(left=other, right=one, preference="left", rater="ada").row
    comparison_submit(left=other, right=one, preference="tie", rater="bob")
    assert list(comparisons_standing().filter(rater="ada")) == [last]
    assert feedback_counts("assistant").comparisons == 2
    found = [e for e in DatabaseEvidence("assistant").evidence({}) if isinstance(e, ComparisonEvidence)]  # type: ignore[arg-type]
    assert [(e.left, e.preference) for e in found if e.preference != "tie"] == [("two", "left")]


def fields(html: str) -> dict[str, str]:
    return dict(re.findall(r'<input type="hidden" name="(id|left|right)" value="([^"]*)"', html))


def press(client: Client, preference: str, html: str | None = None, **more: Any) -> Any:
    sent = fields(html or client.get("/rate/pairs/").text) | {"preference": preference} | more
    return client.post("/rate/pairs/", sent)


def test_a_button_stores_what_was_shown_on_which_side_and_a_double_click_once(rater: Client) -> None:
    for number, said in enumerate(("left", "right", "tie", "both_bad")):
        two(f"prompt {number}")
        html = rater.get("/rate/pairs/").text
        shown = re.findall(r'<div class="words">(one|two)</div>', html)
        assert press(rater, said, html, notes="Because.")["Location"] == f"/rate/pairs/?said={said}"
        row = Comparison.objects.latest("created_at")
        assert [row.left.response, row.right.response] == shown
        expected = (said, "ada", "human", "Because.")
        assert (row.preference, row.rater, row.rater_kind, row.notes) == expected
        assert press(rater, said, html, notes="Because.").status_code == 302
        assert compared_today("ada") == Comparison.objects.count() == number + 1
    assert press(rater, "left", html).status_code == 409


def test_a_rater_is_blind_to_the_policies(rater: Client) -> None:
    answer("q", "one", "secret-v1", unit="user-7", arm="arm-b")
    answer("q", "two", "secret-v2")
    html = rater.get("/rate/pairs/").text
    assert "one" in html
    for hidden in ("secret-v", "user-7", "arm-b"):
        assert hidden not in html
    assert rater.get("/rate/pairs/?policy=secret-v1").status_code == 403


def test_undo_and_skip_show_the_pair_again_on_the_same_sides(rater: Client) -> None:
    two()
    html = rater.get("/rate/pairs/").text
    rater.post("/rate/pairs/skip/", fields(html))
    assert "Only those you skipped are left" in rater.get("/rate/pairs/").text
    rater.post("/rate/pairs/skip/", {"all": "1"})
    assert fields(rater.get("/rate/pairs/").text)["left"] == fields(html)["left"]
    assert not Comparison.objects.exists()
    press(rater, "left")
    again = rater.post("/rate/pairs/undo/", follow=True)
    assert not comparisons_standing().exists()
    assert "Undone" in again.text
    assert fields(again.text)["left"] == fields(html)["left"]
    press(rater, "right", again.text)
    assert [row.preference for row in comparisons_standing()] == ["right"]
    for _ in range(2):
        last = rater.post("/rate/pairs/undo/", follow=True)
    assert "nothing to undo" in last.text


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


def test_each_built_in_agent_is_compared_as_it_is_seen(rater: Client) -> None:
    for agent in ("widgets", "fixtures", "filer", "assistant"):
        simulation.simulate(agent, scenarios=1)
        html = rater.get(f"/rate/pairs/?agent={agent}").text
        assert html.count('class="side-panel"') == 2
        assert "{&quot;" not in html
        assert re.findall(r"<style|\sstyle=|\son\w+=", html) == []


def test_what_cannot_be_compared_or_stored_is_refused(rater: Client) -> None:
    for query in ("pair=x", "after=a~b~c&pair=1~2", "agent=No%20Slug"):
        assert rater.get(f"/rate/pairs/?{query}").status_code == 404
    one, other = answer("q", "a"), answer("p", "b")  # different prompts are no pair
    sent = {"id": str(uuid.uuid4()), "left": str(one.pk), "right": str(other.pk), "preference": "left"}
    assert rater.post("/rate/pairs/", sent).status_code == 404
    two()
    for broken in ({"preference": "middle"}, {"id": "7"}, {"notes": "x" * 20_001}):
        answered = press(rater, **({"preference": "left"} | broken))
        assert answered.status_code == 400
        assert re.search(r'<p class="fault" role="alert">[^<]{10,}', answered.text)
    assert not Comparison.objects.exists()


def pair_of(html: str) -> str:
    return re.search(r'name="pair" value="([^"]+)"', html)[1]


def page(judging: JudgingRound) -> str:
    return f"/rate/pairs/?round={judging.pk}"


def test_a_rater_judges_a_round_without_scripts(rater: Client) -> None:
    judging = round_of(3)
    seen = []
    for preferred in ("left", "tie", "both_bad"):
        html = rater.get(page(judging)).text
        seen.append(pair_of(html))
        answered = rater.post(page(judging), {"pair": seen[-1], "preference": preferred})
        assert answered["Location"] == f"/rate/pairs/?round={judging.pk}&said={preferred}"
    assert len(set(seen)) == 3
    html = rater.get(page(judging)).text
    assert "This round has ended" in html
    assert f"/judging/{judging.pk}/" not in html
    assert PairJudgement.objects.filter(rater="ada").count() == 3


def test_the_pair_is_blind(rater: Client) -> None:
    judging = round_of(1)
    html = rater.get(page(judging)).text
    assert judging.policy.name not in html
    assert judging.opponent_name not in html
    assert all(
        answer in html
        for answer in (f"{SIDES[0]} 0".replace("'", "&#x27;"), f"{SIDES[1]} 0".replace("'", "&#x27;"))
    )
    assert rater.get(f"/judging/{judging.pk}/").status_code == 403


def test_skip_and_undo(rater: Client) -> None:
    judging = round_of(2)
    first = pair_of(rater.get(page(judging)).text)
    rater.post(page(judging), {"pair": first, "turn": "skip"})
    second = pair_of(rater.get(page(judging)).text)
    assert second != first
    rater.post(page(judging), {"pair": second, "preference": "left"})
    assert "Only those you skipped are left" in rater.get(page(judging)).text
    assert pair_of(rater.post(page(judging), {"turn": "undo"}, follow=True).text) == second
    assert not PairJudgement.objects.exists()
    rater.post(page(judging), {"pair": second, "preference": "left"})
    rater.post(page(judging), {"turn": "all"})
    assert pair_of(rater.get(page(judging)).text) == first


def test_a_pair_is_judged_once_and_by_its_own_round(rater: Client) -> None:
    judging, other = round_of(2), round_of(2, policy=policy_of("v2", "candidate", AGENT))
    pair = pair_of(rater.get(page(judging)).text)
    sent = {"pair": pair, "preference": "left"}
    assert rater.post(page(other), sent).status_code == 404
    assert rater.post(page(judging), sent).status_code == 302
    assert rater.post(page(judging), sent).status_code == 400
    assert rater.post(page(judging), {"pair": pair, "preference": "best"}).status_code == 400
    assert PairJudgement.objects.count() == 1


def test_no_such_round_or_pair(rater: Client) -> None:
    for named in ("999", "x", "", "-1", "9" * 30, "%00"):
        assert rater.get(f"/rate/pairs/?round={named}").status_code == 404
    judging = round_of(2)
    for pair in ("", "x", "00000000-0000-0000-0000-000000000007"):
        assert rater.post(page(judging), {"pair": pair, "preference": "left"}).status_code == 404
        assert rater.get(f"{page(judging)}&pair={pair or 'y'}").status_code == 404


def test_a_round_is_offered_where_pairs_are_compared(rater: Client) -> None:
    judging = round_of(40)
    assert page(judging) in rater.get("/rate/pairs/").text
    assert page(judging) in rater.get(f"/rate/pairs/?agent={AGENT}").text
    assert page(judging) not in rater.get("/rate/pairs/?agent=filer").text
    round_stop(judging, actor="olga")
    assert page(judging) not in rater.get("/rate/pairs/").text


def test_the_result_shows_pairs_once_it_has_ended(operator: Client) -> None:
    judging = round_of(30)
    pair, side = preference(judging, "ada", "policy")
    judgement_submit(pair, "ada", side)
    html = operator.get(f"/judging/{judging.pk}/").text
    assert "Win share" in html
    assert SIDES[0].split("'")[0] not in html
    stopped = operator.post(f"/judging/{judging.pk}/stop/", {"reason": "enough"}, follow=True)
    assert stopped.status_code == 200
    assert pair.answer.replace("'", "&#x27;") in stopped.text
    assert re.search(r'<h2 id="finding"><span class="verdict finding-open">No verdict', stopped.text)
    judging.refresh_from_db()
    assert (judging.status, judging.verdict) == ("ended", "open")
    assert "enough" in judging.reason


def test_a_round_begins_on_the_policys_page(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[Any] = []
    monkeypatch.setattr("rl.evaluation.judging.async_task", lambda *found, **_: handed.append(found))
    policy = policy_of("v2", "candidate", AGENT)
    assert "/policies/v2/judge/" in operator.get("/policies/v2/").text
    answered = operator.post("/policies/v2/judge/")
    judging = JudgingRound.objects.get()
    assert answered["Location"] == f"/judging/{judging.pk}/"
    assert handed == [("rl.tasks.judging_round_answer", judging.pk)]
    assert (judging.policy, judging.created_by, judging.status) == (policy, "olga", "waiting")
    assert "is open" in operator.post("/policies/v2/judge/", follow=True).text
    assert operator.get(f"/judging/{judging.pk}/").status_code == 200
    assert "answers are not there yet" in operator.get(page(judging)).text


def test_raters_begin_and_stop_nothing(rater: Client) -> None:
    judging = round_of(2)
    for address in (f"/policies/{judging.policy.name}/judge/", f"/judging/{judging.pk}/stop/"):
        assert rater.post(address).status_code == 403
    assert (JudgingRound.objects.get().status, JudgingRound.objects.count()) == ("running", 1)


def test_pairs_are_judged_blind_and_once() -> None:
    judging = round_of(1)
    api, address = ApiClient("rate"), f"/api/judging-rounds/{judging.pk}/pairs/"
    found = api.get(address).json()
    pair = judging.pairs.get()
    assert {found["left"], found["right"]} == {pair.answer, pair.other_answer}
    assert set(found) == {"pair", "messages", "left", "right"}
    assert api.post(address, {"pair": found["pair"], "preference": "best"}).status_code == 400
    stored = api.post(address, {"pair": found["pair"], "preference": "left"})
    assert (stored.status_code, stored.json()["status"]) == (201, "ended")
    assert api.post(address, {"pair": found["pair"], "preference": "left"}).status_code == 409
    assert api.get(address).json()["pair"] is None
    assert PairJudgement.objects.count() == 1


def test_a_pair_of_another_round_is_not_found() -> None:
    judging, other = round_of(1), round_of(1, policy=policy_of("v2", "candidate", AGENT))
    sent = {"pair": str(other.pairs.get().pk), "preference": "left"}
    answered = ApiClient("rate").post(f"/api/judging-rounds/{judging.pk}/pairs/", sent)
    assert (answered.status_code, error_of(answered)["code"]) == (404, "not_found")


def test_rounds_begin_are_read_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.evaluation.judging.async_task", lambda *_, **__: None)
    policy_of("v2", "candidate", AGENT)
    api = ApiClient("operate", "read")
    begun = api.post("/api/judging-rounds/", {"policy": "v2"})
    assert (begun.status_code, begun.json()["against"], begun.json()["status"]) == (202, "base", "waiting")
    assert api.post("/api/judging-rounds/", {"policy": "v2"}).status_code == 409
    assert api.post("/api/judging-rounds/", {"policy": "v9"}).status_code == 404
    number = begun.json()["id"]
    assert api.get(f"/api/judging-rounds/{number}/").json()["verdict"] == "open"
    assert [row["id"] for row in api.get("/api/judging-rounds/").json()["results"]] == [number]
    assert api.post(f"/api/judging-rounds/{number}/stop/", {}).json()["status"] == "ended"
    assert api.post(f"/api/judging-rounds/{number}/stop/", {}).status_code == 409
    assert JudgingRound.objects.count() == 1
