"""POST /api/decide/: a state becomes a choice with its exact probability, or a written answer; recorded either way."""

import json
import math
import uuid
from collections import Counter
from typing import Any

import pytest

from feedback.models import Decision
from feedback.services import decision_record
from rl.agents import AGENTS
from rl.models import ServingSettings
from rl.serving.base import BackendFailed, BackendUnable
from tests.support.api_client import ApiClient, error_of
from tests.support.serving import (  # noqa: F401
    Parrot,
    parrot_only,
    policy_made,
    support_bot_allowed,
    written_by_the_asking_thread,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("written_at_once", "support_bot")]

STATE = {"document": "invoice 3", "folders": ["aa", "b", "cccc"]}
"""Its responses are 16, 15 and 18 characters long, so that the parrot gives them -16, -15 and -18 nats."""


@pytest.fixture
def api() -> ApiClient:
    return ApiClient("ingest")


def decided(api: ApiClient, status: int = 201, **body: Any) -> dict[str, Any]:
    response = api.post("/api/decide/", {"agent": "filer", **body})
    assert response.status_code == status, response.content
    found: dict[str, Any] = json.loads(response.content)
    return found


def test_the_best_candidate_is_chosen_and_recorded(api: ApiClient, parrot: Parrot) -> None:
    policy_made("filer-v1", "filer")
    body = decided(api, state=STATE, unit="ada", run_id="r1", metadata={"screen": "phone"})
    assert (body["action"], body["response"]) == ({"folder": "b"}, '{"folder": "b"}')
    assert (body["policy"], body["propensity"], body["stored"]) == ("filer-v1", 1.0, True)
    row = Decision.objects.get()
    assert (str(row.pk), row.unit, row.run_id, row.state) == (body["id"], "ada", "r1", STATE)
    assert row.messages == AGENTS["filer"].render(STATE)
    assert row.metadata["screen"] == "phone"
    assert [c["response"] for c in row.candidates] == AGENTS["filer"].candidates(STATE)
    assert [c["probability"] for c in row.candidates] == [0.0, 1.0, 0.0]
    assert [c["log_probability"] for c in row.candidates] == [-16.0, -15.0, -18.0]


def test_the_agents_temperature_and_epsilon_are_what_it_is_drawn_by(api: ApiClient, parrot: Parrot) -> None:
    ServingSettings.objects.create(agent="filer", choose_temperature=1.0, epsilon=0.3)
    weights = [math.exp(-1), 1.0, math.exp(-3)]
    expected = [0.7 * w / sum(weights) + 0.1 for w in weights]
    drawn: Counter[str] = Counter()
    for _ in range(60):
        body = decided(api, state=STATE)
        shares = {c["response"]: c["probability"] for c in body["candidates"]}
        assert list(shares.values()) == pytest.approx(expected)
        assert body["propensity"] == shares[body["response"]]
        drawn[body["response"]] += 1
    # the rarest has a share of 0.127: not to be drawn in 60 is a chance of 3 in 10,000
    assert len(drawn) == 3


def test_own_candidates_keep_their_scores(api: ApiClient, parrot: Parrot) -> None:
    body = decided(
        api,
        agent="support-bot",
        messages="Where is it?",
        candidates=["On its way.", {"response": "Ok.", "score": 0.2}],
    )
    assert body["response"] == "Ok."
    assert body["action"] is not None
    assert body["candidates"] == [
        {"response": "On its way.", "probability": 0.0, "log_probability": -11.0},
        {"response": "Ok.", "score": 0.2, "probability": 1.0, "log_probability": -3.0},
    ]


def test_without_candidates_an_answer_is_written(api: ApiClient, parrot: Parrot) -> None:
    body = decided(api, agent="support-bot", messages=[{"role": "user", "content": "Where is it?"}])
    assert (body["response"], body["propensity"], body["candidates"]) == ("hello there", None, None)
    assert (body["tokens_in"], body["tokens_out"]) == (7, 3)


def test_without_probabilities_one_is_written(api: ApiClient, parrot: Parrot, monkeypatch: Any) -> None:
    def unable(*_: Any) -> list[float]:
        raise BackendUnable("no", param="candidates")

    monkeypatch.setattr(parrot, "log_probabilities", unable)
    parrot.said = '{"folder": "aa"}'
    assert decided(api, state=STATE)["action"] == {"folder": "aa"}
    assert parrot.asked[-1][0].response_schema["properties"]["folder"]["enum"] == STATE["folders"]
    refused = api.post("/api/decide/", {"agent": "filer", "messages": "x", "candidates": ["a", "b"]})
    assert refused.status_code == 400


def test_an_answer_nobody_can_act_on_is_recorded_without_action(api: ApiClient, parrot: Parrot) -> None:
    parrot.said = "no json"
    assert decided(api, messages="file this")["action"] is None


ORDERED = {"goal": "go on", "tasks": ["c1", "c2", "c3"]}


def test_an_ordering_that_repeats_an_item_is_none_to_choose(api: ApiClient, parrot: Parrot) -> None:
    repeats, whole = '{"order": ["c3", "c3", "c3"]}', '{"order": ["c3", "c1", "c2"]}'
    refused = api.post(
        "/api/decide/", {"agent": "prioritizer", "state": ORDERED, "candidates": [whole, repeats]}
    )
    assert refused.status_code == 400
    assert "candidates[1]" in json.loads(refused.content)["error"]["fields"]["candidates"]
    # drafts of the state's own are left out
    state = {**ORDERED, "drafts": [["c3", "c3", "c3"], ["c3", "c1", "c2"]]}
    body = decided(api, agent="prioritizer", state=state)
    assert [candidate["response"] for candidate in body["candidates"]] == [whole]
    assert body["action"] == {"order": ["c3", "c1", "c2"]}


def test_the_same_id_is_decided_once(api: ApiClient, parrot: Parrot) -> None:
    id = str(uuid.uuid4())
    first = decided(api, state=STATE, id=id)
    again = decided(api, 200, state=STATE, id=id)
    for name in ("feedback_token", "feedback_url"):  # of the second in which they were signed
        del first[name], again[name]
    assert again == first
    assert first["id"] == id
    assert Decision.objects.count() == 1
    other = api.post("/api/decide/", {"agent": "widgets", "messages": "x", "id": id})
    assert (other.status_code, error_of(other)["code"]) == (409, "conflict")


@pytest.mark.parametrize(
    ("other", "status"),
    [
        ({}, 200),
        ({"messages": "Another question"}, 409),
        ({"unit": "user-2"}, 409),
        ({"candidates": ["a", "b"]}, 409),
        ({"messages": True}, 400),
        ({"candidates": ["a", "a"]}, 400),
    ],
    ids=str,
)
def test_another_order_conflicts(api: ApiClient, parrot: Parrot, other: dict[str, Any], status: int) -> None:
    body = {"agent": "assistant", "messages": "A question", "unit": "user-1", "id": str(uuid.uuid4())}
    first = api.post("/api/decide/", body)
    assert first.status_code == 201
    again = api.post("/api/decide/", body | other)
    assert again.status_code == status
    assert status != 200 or again.json()["response"] == first.json()["response"]


def test_an_id_recorded_by_an_app_is_not_decided_for(api: ApiClient, parrot: Parrot) -> None:
    row = decision_record(agent="assistant", messages="A question", response="An answer").row
    again = api.post("/api/decide/", {"agent": "assistant", "messages": "A question", "id": str(row.pk)})
    assert (again.status_code, error_of(again)["code"]) == (409, "conflict")


def test_where_a_policy_fails_the_base_decides(api: ApiClient, parrot: Parrot) -> None:
    policy_made("filer-v1", "filer")
    parrot.failing = {"filer-v1": BackendFailed("gone", kind="missing")}
    body = decided(api, state=STATE)
    assert body["policy"] == "base"
    assert body["metadata"]["serving"]["fallbacks"][0]["policy"] == "filer-v1"


def test_where_nobody_decides_it_is_503_with_retry_after(api: ApiClient, parrot: Parrot) -> None:
    parrot.failing = {"base": BackendFailed("down", retry_after_s=7)}
    response = api.post("/api/decide/", {"agent": "filer", "state": STATE})
    expected = (503, "7", "unavailable")
    assert (response.status_code, response["Retry-After"], error_of(response)["code"]) == expected
    assert not Decision.objects.exists()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "agent"),
        ({"agent": "No Slug", "state": STATE}, "agent"),
        ({"agent": 5, "state": STATE}, "agent"),
        ({"agent": "filer"}, "state"),
        ({"agent": "filer", "state": "x"}, "state"),
        ({"agent": "filer", "state": {}}, "state"),
        ({"agent": "filer", "state": {"document": "x", "folders": []}}, "state"),
        ({"agent": "filer", "messages": []}, "messages"),
        ({"agent": "filer", "messages": [{}]}, "messages"),
        ({"agent": "filer", "messages": "x", "candidates": []}, "candidates"),
        ({"agent": "filer", "messages": "x", "candidates": ["a", "a"]}, "candidates"),
        ({"agent": "filer", "messages": "x", "candidates": [5]}, "candidates"),
        ({"agent": "filer", "messages": "x", "candidates": "a"}, "candidates"),
        ({"agent": "filer", "messages": "x", "unit": 5}, "unit"),
        ({"agent": "filer", "messages": "x", "unit": "u" * 201}, "unit"),
        ({"agent": "filer", "messages": "x", "metadata": []}, "metadata"),
        ({"agent": "filer", "messages": "x", "id": "5"}, "id"),
        ({"agent": "filer", "messages": "x", "colour": "red"}, "colour"),
    ],
)
def test_a_bad_order_names_fields(api: ApiClient, parrot: Parrot, body: dict[str, Any], field: str) -> None:
    response = api.post("/api/decide/", body)
    assert response.status_code == 400
    assert field in error_of(response)["fields"]
    assert parrot.asked == []


def test_a_running_experiment_says_who_answers(api: ApiClient, parrot: Parrot) -> None:
    from rl.experiments.traffic import ArmOrder, experiment_create, experiment_start

    policy_made("filer-v1", "filer")
    policy_made("filer-v2", "filer", "challenger")
    arms = [ArmOrder("filer-v1", "control"), ArmOrder("filer-v2", "new", weight=3.0)]
    experiment = experiment_create("filer", "second", arms, actor="test", ramp=100)
    experiment_start(experiment, actor="test")
    seen = {}
    for number in range(12):
        body = decided(api, state=STATE, unit=f"user-{number}")
        assert body["arm"] == ("second/new" if body["policy"] == "filer-v2" else "second/control")
        assert body["metadata"]["arm_propensity"] == (0.75 if body["policy"] == "filer-v2" else 0.25)
        seen[number] = body["policy"]
    assert set(seen.values()) == {"filer-v1", "filer-v2"}
    assert [decided(api, state=STATE, unit=f"user-{n}")["policy"] for n in range(12)] == list(seen.values())
