"""Pages of judging rounds: blind for raters, results for operators, moves for those who may make them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client

from rl.models import JudgingRound, PairJudgement
from rl.registry.judging import judgement_submit, round_stop
from tests.support.api_client import person
from tests.support.experiments import policy_of
from tests.support.judging import AGENT, SIDES, preference, round_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def rater(client: Client) -> Client:
    client.force_login(person("ada", "rater"))
    return client


@pytest.fixture
def operator() -> Client:
    client = Client()
    client.force_login(person("olga", "operator"))
    return client


def pair_of(html: str) -> str:
    found = re.search(r'name="pair" value="([^"]+)"', html)
    assert found is not None
    return found[1]


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


def test_cards_come_one_after_another_by_script(rater: Client) -> None:
    judging = round_of(2)
    card = {"X-Ratchet-Card": "1"}
    first = pair_of(rater.get(page(judging)).text)
    ahead = pair_of(rater.get(f"{page(judging)}&after={first}", headers=card).text)
    answered = rater.post(
        page(judging), {"pair": first, "preference": "tie"}, headers=card | {"X-Ratchet-Shown": ahead}
    )
    assert (pair_of(answered.text), answered["X-Ratchet-Card"]) == (ahead, "1")
    assert rater.get(f"{page(judging)}&after={ahead}", headers=card).status_code == 204
    last = rater.post(page(judging), {"pair": ahead, "preference": "left"}, headers=card)
    assert "This round has ended" in last.text


def test_skip_and_undo(rater: Client) -> None:
    judging = round_of(2)
    first = pair_of(rater.get(page(judging)).text)
    rater.post(page(judging), {"pair": first, "turn": "skip"})
    second = pair_of(rater.get(page(judging)).text)
    assert second != first
    rater.post(page(judging), {"pair": second, "preference": "left"})
    assert "Only those you skipped are left" in rater.get(page(judging)).text
    back = rater.post(page(judging), {"turn": "undo"}, follow=True)
    assert pair_of(back.text) == second
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


@pytest.mark.parametrize("named", ["999", "x", "", "-1", "9" * 30, "%00"])
def test_no_such_round(rater: Client, named: str) -> None:
    assert rater.get(f"/rate/pairs/?round={named}").status_code == 404


@pytest.mark.parametrize("pair", ["", "x", "00000000-0000-0000-0000-000000000007"])
def test_no_such_pair(rater: Client, pair: str) -> None:
    judging = round_of(2)
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
