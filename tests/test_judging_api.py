"""REST of judging rounds: begin, read, stop, judge blind."""

from __future__ import annotations

import pytest

from rl.models import JudgingRound, PairJudgement
from tests.support.api_client import ApiClient, error_of
from tests.support.experiments import policy_of
from tests.support.judging import AGENT, round_of

pytestmark = pytest.mark.django_db


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
