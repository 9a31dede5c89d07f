"""REST: ratings, comparisons, outcomes, traces and scored responses."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from feedback.accounts.authentication import KeyRefused, key_create
from feedback.api.bodies import RatingSent
from feedback.models import AgentSettings, Comparison, Decision, Outcome, Rating, Trace
from feedback.services import decision_record
from tests.support.api_client import ApiClient, error_of, person

pytestmark = pytest.mark.django_db


@pytest.fixture
def app() -> ApiClient:
    return ApiClient("ingest", "rate", "rate_as", "read")


@pytest.fixture
def decision() -> Decision:
    return made()


def made(**more: Any) -> Decision:
    row: Decision = decision_record(**{"agent": "a", "messages": "q", "response": "r", **more}).row
    return row


def ratings_of(decision: Decision) -> str:
    return f"/api/decisions/{decision.pk}/ratings/"


# --- Ratings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        {"thumb": "up"},
        {"stars": 5},
        {"score": 0.0},
        {"correction": "better"},
        {"tags": ["rude"]},
        {"notes": "hm"},
        {
            "thumb": "down",
            "stars": 1,
            "score": 0.1,
            "correction": "x",
            "tags": ["a", "b"],
            "notes": "n",
            "rater": "ada",
        },
    ],
    ids=str,
)
def test_a_rating_is_stored_as_it_was_said(app: ApiClient, decision: Decision, said: dict[str, Any]) -> None:
    response = app.post(ratings_of(decision), said)
    assert response.status_code == 201
    assert {name: response.json()[name] for name in said} == said
    row = Rating.objects.get()
    assert {name: getattr(row, name) for name in said} == said
    assert row.decision_id == decision.pk


def test_the_key_rates_where_nobody_is_named(app: ApiClient, decision: Decision) -> None:
    assert app.post(ratings_of(decision), {"thumb": "up"}).json()["rater"] == "key-ingest-rate-rate_as-read"


def test_a_later_rating_of_the_same_rater_supersedes(app: ApiClient, decision: Decision) -> None:
    first = app.post(ratings_of(decision), {"thumb": "up", "rater": "ada"}).json()
    second = app.post(ratings_of(decision), {"thumb": "down", "rater": "ada"}).json()
    app.post(ratings_of(decision), {"thumb": "up", "rater": "bob"})
    assert (first["supersedes"], second["supersedes"]) == (None, first["id"])
    shown = app.get(f"/api/decisions/{decision.pk}/").json()
    assert {(r["rater"], r["thumb"]) for r in shown["ratings"]} == {("ada", "down"), ("bob", "up")}
    assert shown["ratings_human"] == 2
    assert Rating.objects.count() == 3


def test_an_empty_thumb_is_none_at_all_and_described_so(app: ApiClient) -> None:
    response = app.post(ratings_of(made()), {"thumb": "", "stars": 4})
    assert (response.status_code, response.json()["thumb"]) == (201, None)
    assert RatingSent.model_json_schema()["properties"]["thumb"]["enum"] == ["", "up", "down"]


def test_a_double_click_is_one_rating(app: ApiClient, decision: Decision) -> None:
    body = {"thumb": "up", "rater": "ada", "id": str(uuid.uuid4())}
    answers = [app.post(ratings_of(decision), body) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [201, 200, 200]
    assert len({answer.content for answer in answers}) == 1
    assert Rating.objects.count() == 1
    decision.refresh_from_db()
    assert decision.ratings_human == 1


def test_the_same_id_for_another_rating_is_a_conflict(app: ApiClient, decision: Decision) -> None:
    body = {"thumb": "up", "rater": "ada", "id": str(uuid.uuid4())}
    app.post(ratings_of(decision), body)
    for path, change in ((ratings_of(decision), {"thumb": "down"}), (ratings_of(made()), {})):
        response = app.post(path, {**body, **change})
        assert response.status_code == 409
        assert error_of(response)["code"] == "conflict"
    assert Rating.objects.count() == 1


def test_a_simulated_rating_is_marked_and_takes_no_work_off_people(
    app: ApiClient, decision: Decision
) -> None:
    assert app.post(ratings_of(decision), {"thumb": "up", "rater_kind": "simulated"}).status_code == 201
    decision.refresh_from_db()
    assert decision.ratings_human == 0
    assert Rating.objects.get().rater_kind == "simulated"


@pytest.mark.parametrize("kind", ["human", "simulated"])
def test_a_rating_of_nothing_is_not_found(app: ApiClient, kind: str) -> None:
    response = app.post(f"/api/decisions/{uuid.uuid4()}/ratings/", {"thumb": "up", "rater_kind": kind})
    assert response.status_code == 404
    assert error_of(response)["fields"] == {"decision": "does not exist"}
    assert not Rating.objects.exists()


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({}, "thumb"),
        ({"tags": [""]}, "thumb"),
        ({"thumb": "sideways"}, "thumb"),
        ({"thumb": True}, "thumb"),
        ({"thumb": ["up"]}, "thumb"),
        ({"stars": 0}, "stars"),
        ({"stars": 6}, "stars"),
        ({"stars": 4.5}, "stars"),
        ({"stars": "5"}, "stars"),
        ({"stars": 10**400}, "stars"),
        ({"score": 1.01}, "score"),
        ({"score": -0.01}, "score"),
        ({"correction": "  "}, "correction"),
        ({"correction": 5}, "correction"),
        ({"notes": "x" * 20_001}, "notes"),
        ({"tags": ["x" * 101]}, "tags"),
        ({"thumb": "up", "rater": ""}, "rater"),
        ({"thumb": "up", "rater": "x" * 201}, "rater"),
        ({"thumb": "up", "rater": 7}, "rater"),
        ({"thumb": "up", "rater_kind": "robot"}, "rater_kind"),
        ({"thumb": "up", "id": "1"}, "id"),
        ({"thumbs": "up"}, "thumbs"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_a_bad_rating_is_refused_by_field(
    app: ApiClient, decision: Decision, said: dict[str, Any], field: str
) -> None:
    response = app.post(ratings_of(decision), said)
    assert response.status_code == 400
    assert field in error_of(response)["fields"]
    assert not Rating.objects.exists()


def test_rating_costs_two_statements(app: ApiClient, decision: Decision) -> None:
    app.post(ratings_of(made()), {"thumb": "up"})
    with CaptureQueriesContext(connection) as queries:
        app.post(ratings_of(decision), {"thumb": "up"})
    assert [q["sql"].split()[0] for q in queries if "SAVEPOINT" not in q["sql"]] in (
        ["INSERT", "UPDATE"],
        ["WITH"],
    )


def test_a_signed_in_person_rates_as_themselves(decision: Decision) -> None:
    client = Client()
    client.force_login(person("ada", "rater"))
    said = {"thumb": "up"}
    answer = client.post(ratings_of(decision), said, content_type="application/json")
    assert (answer.status_code, answer.json()["rater"]) == (201, "ada")
    for more in ({"rater": "bob"}, {"rater_kind": "simulated"}):
        answer = client.post(ratings_of(decision), {**said, **more}, content_type="application/json")
        assert answer.status_code == 400
        assert set(error_of(answer)["fields"]) == set(more)


# --- Comparisons and outcomes -----------------------------------------------------------------------------


def test_a_comparison_is_stored_and_a_later_one_supersedes(app: ApiClient) -> None:
    left, right = made(response="l"), made(response="r")
    body = {"left": str(left.pk), "right": str(right.pk), "preference": "left", "rater": "ada"}
    first = app.post("/api/comparisons/", body)
    second = app.post("/api/comparisons/", {**body, "preference": "tie"})
    assert (first.status_code, second.status_code) == (201, 201)
    assert second.json()["supersedes"] == first.json()["id"]
    assert Comparison.objects.count() == 2


@pytest.mark.parametrize("preference", ["left", "right", "tie", "both_bad"])
def test_every_preference_is_kept(app: ApiClient, preference: str) -> None:
    body = {
        "left": str(made().pk),
        "right": str(made().pk),
        "preference": preference,
        "id": str(uuid.uuid4()),
    }
    assert app.post("/api/comparisons/", body).json()["preference"] == preference
    assert app.post("/api/comparisons/", body).status_code == 200


def test_only_answers_to_one_prompt_are_compared(app: ApiClient) -> None:
    one, elsewhere, other_agent = made(), made(messages="another"), made(agent="b")
    for right in (one, elsewhere, other_agent):
        body = {"left": str(one.pk), "right": str(right.pk), "preference": "left"}
        response = app.post("/api/comparisons/", body)
        assert response.status_code == 400
        assert set(error_of(response)["fields"]) == {"right"}


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"left": str(uuid.UUID(int=5))}, 404, "left"),
        ({"right": str(uuid.UUID(int=5))}, 404, "right"),
        ({"right": "x"}, 400, "right"),
        ({"right": None}, 400, "right"),
        ({"preference": "neither"}, 400, "preference"),
        ({"winner": "left"}, 400, "winner"),
    ],
    ids=str,
)
def test_a_bad_comparison_is_refused_by_field(
    app: ApiClient, change: dict[str, Any], status: int, field: str
) -> None:
    body = {"left": str(made().pk), "right": str(made().pk), "preference": "left", **change}
    response = app.post("/api/comparisons/", body)
    assert response.status_code == status
    assert field in error_of(response)["fields"]
    assert not Comparison.objects.exists()


@pytest.mark.parametrize(("value", "kept"), [(True, 1.0), (False, 0.0), (-3, -3.0), (0.5, 0.5)])
def test_an_outcome_is_a_number(app: ApiClient, decision: Decision, value: Any, kept: float) -> None:
    body = {"name": "ticket_reopened", "value": value, "at": "2026-03-02T10:00:00Z", "id": str(uuid.uuid4())}
    path = f"/api/decisions/{decision.pk}/outcomes/"
    assert [app.post(path, body).status_code for _ in range(2)] == [201, 200]
    assert app.post(path, {**body, "value": 77}).status_code == 409
    assert Outcome.objects.get().value == kept


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "Ticket Reopened", "value": 1}, "name"),
        ({"name": "x"}, "value"),
        ({"name": "x", "value": "1"}, "value"),
        ({"name": "x", "value": 10**400}, "value"),
        ({"name": "x", "value": 1, "at": "soon"}, "at"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_a_bad_outcome_is_refused_by_field(
    app: ApiClient, decision: Decision, body: dict[str, Any], field: str
) -> None:
    response = app.post(f"/api/decisions/{decision.pk}/outcomes/", body)
    assert response.status_code == 400
    assert field in error_of(response)["fields"]


# --- Traces -----------------------------------------------------------------------------------------------


def trace(**more: Any) -> dict[str, Any]:
    return {
        "id": str(uuid.uuid4()),
        "agent": "support-bot",
        "run_id": "run-1",
        "started_at": "2026-03-02T10:00:00Z",
        "finished_at": "2026-03-02T10:00:05Z",
        "metadata": {"status": "completed"},
        "steps": [
            {"kind": "reasoning", "text": "look it up", "at": "2026-03-02T10:00:00Z"},
            {"kind": "tool_call", "name": "find", "arguments": {"q": 7}, "result": "x", "duration_ms": 3.5},
            {
                "kind": "decision", "at": "2026-03-02T10:00:02Z", "duration_ms": 40, "messages": "Where?",
                "response": "There.", "unit": "user-1", "policy": "p1", "candidates": ["There.", "Here."],
            },
            {"kind": "task", "name": "answer", "status": "completed"},
        ],
        **more,
    }  # fmt: skip


def test_a_trace_becomes_a_trace_and_its_decisions(app: ApiClient) -> None:
    sent = trace()
    response = app.post("/api/traces/", sent)
    assert response.status_code == 201
    row = Trace.objects.get()
    assert (str(row.pk), row.steps, row.metadata) == (sent["id"], sent["steps"], sent["metadata"])
    decision = Decision.objects.get()
    assert decision.pk == uuid.uuid5(uuid.UUID(sent["id"]), "2")
    assert decision.trace_id == row.pk
    assert (decision.unit, decision.policy, decision.run_id, decision.latency_ms) == (
        "user-1",
        "p1",
        "run-1",
        40,
    )
    assert decision.created_at.isoformat() == "2026-03-02T10:00:02+00:00"
    assert response.json()["decisions"] == [str(decision.pk)]
    assert app.get(f"/api/decisions/{decision.pk}/").json()["trace"] == sent["id"]


def test_a_decisions_own_id_in_a_trace_is_kept(app: ApiClient) -> None:
    sent, own = trace(), str(uuid.uuid4())
    sent["steps"][2]["id"] = own
    assert app.post("/api/traces/", sent).json()["decisions"] == [own]


def test_a_trace_sent_again_adds_nothing(app: ApiClient) -> None:
    sent = trace()
    answers = [app.post("/api/traces/", sent) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 200]
    assert answers[0].json() == answers[1].json()
    assert (Trace.objects.count(), Decision.objects.count()) == (1, 1)
    assert app.post("/api/traces/", {**sent, "run_id": "another"}).status_code == 409


def test_a_decision_recorded_alone_before_is_attached(app: ApiClient) -> None:
    own = str(uuid.uuid4())
    alone = {"id": own, "agent": "support-bot", "messages": "q", "response": "r", "run_id": "run-1"}
    app.post("/api/decisions/", alone)
    step = {"kind": "decision", "id": own, "messages": "q", "response": "r"}
    sent = trace(steps=[step])
    assert app.post("/api/traces/", sent).status_code == 201
    assert str(Decision.objects.get().trace_id) == sent["id"]
    other = trace(steps=[{**step, "response": "another"}])
    assert app.post("/api/traces/", other).status_code == 409
    assert Trace.objects.count() == 1


def test_a_fault_in_one_step_stores_nothing(app: ApiClient) -> None:
    sent = trace()
    sent["steps"] += [
        {"kind": "decision", "messages": [], "response": "x"},
        {"kind": "decision", "messages": "q"},
        {"kind": "decision", "messages": "q", "response": "x", "propensity": 7},
    ]
    response = app.post("/api/traces/", sent)
    assert response.status_code == 400
    assert set(error_of(response)["fields"]) == {
        "steps[4].messages",
        "steps[5].response",
        "steps[6].propensity",
    }
    assert not Trace.objects.exists()
    assert not Decision.objects.exists()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"agent": "A b"}, "agent"),
        ({"steps": {}}, "steps"),
        ({"steps": [3]}, "steps[0]"),
        ({"steps": [{}]}, "steps[0].kind"),
        ({"steps": [{"kind": "dance"}]}, "steps[0].kind"),
        ({"steps": [{"kind": ["step"]}]}, "steps[0].kind"),
        ({"steps": [{"kind": "step", "name": 5}]}, "steps[0].name"),
        ({"steps": [{"kind": "step", "at": "soon"}]}, "steps[0].at"),
        ({"steps": [{"kind": "step", "duration_ms": -1}]}, "steps[0].duration_ms"),
        ({"steps": [{"kind": "step", "result": "\x00"}]}, "steps"),
        ({"metadata": []}, "metadata"),
        ({"started_at": 5}, "started_at"),
        ({"steps": None}, "steps"),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_a_bad_trace_is_refused_by_field(app: ApiClient, change: dict[str, Any], field: str) -> None:
    response = app.post("/api/traces/", trace(**change))
    assert response.status_code == 400
    assert field in error_of(response)["fields"]
    assert not Trace.objects.exists()


def test_a_trace_with_no_decision_is_kept(app: ApiClient) -> None:
    assert app.post("/api/traces/", trace(steps=[])).status_code == 201


def test_a_trace_is_kept_for_a_decision_that_is_kept(app: ApiClient) -> None:
    AgentSettings.objects.create(agent="support-bot", collection_rate=0.5)
    step = {"kind": "decision", "messages": "q", "response": "r"}
    # ids of their own: whether a decision is left out goes by its id, and the same ids give the same answer in each run
    sent = [trace(id=str(uuid.UUID(int=number)), steps=[step, step]) for number in range(40)]
    answers = [app.post("/api/traces/", body) for body in sent]
    left_out = [answer for answer in answers if answer.status_code == 202]
    kept = [answer for answer in answers if answer.status_code == 201]
    assert len(left_out) + len(kept) == 40
    assert 0 < len(left_out) < 20  # where both of two are: 10 of 40 on average
    assert Trace.objects.count() == len(kept)
    assert Decision.objects.count() == sum(len(answer.json()["decisions"]) for answer in kept)
    assert [app.post("/api/traces/", body).status_code == 202 for body in sent] == [
        answer.status_code == 202 for answer in answers
    ]


# --- A response with its score ----------------------------------------------------------------------------


def test_feedback_becomes_a_decision_and_a_rating(app: ApiClient) -> None:
    body = {"prompt": "Where?", "response": "There.", "score": 0.75, "runId": "r1", "notes": "fine"}
    response = app.post("/api/policies/feedback/support-bot", body)
    assert response.status_code == 201
    shown = response.json()
    assert set(shown) == {"id", "agentId", "score", "createdAt"}
    assert (shown["agentId"], shown["score"]) == ("support-bot", 0.75)
    rating = Rating.objects.get(pk=shown["id"])
    assert (rating.score, rating.notes) == (0.75, "fine")
    assert (rating.decision.messages, rating.decision.response) == (
        [{"role": "user", "content": "Where?"}],
        "There.",
    )
    assert (rating.decision.run_id, rating.decision.agent) == ("r1", "support-bot")


def test_feedback_on_a_recorded_run_rates_that_decision(app: ApiClient) -> None:
    row = made(agent="support-bot", messages="Where?", response="There.", run_id="r1")
    app.post(
        "/api/policies/feedback/support-bot",
        {"prompt": "Where?", "response": "There.", "score": 1, "runId": "r1"},
    )
    assert Rating.objects.get().decision_id == row.pk
    app.post(
        "/api/policies/feedback/support-bot",
        {"prompt": "Where?", "response": "No.", "score": 0, "runId": "r1"},
    )
    assert Decision.objects.count() == 2


def test_every_feedback_counts_though_it_says_the_same(app: ApiClient) -> None:
    body = {"prompt": "Where?", "response": "There.", "score": 0.5}
    ids = {app.post("/api/policies/feedback/a", body).json()["id"] for _ in range(3)}
    assert len(ids) == Rating.objects.count() == 3


def test_feedback_with_an_id_is_stored_once(app: ApiClient) -> None:
    body = {"prompt": "Where?", "response": "There.", "score": 0.5, "id": str(uuid.uuid4())}
    answers = [app.post("/api/policies/feedback/a", body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 200]
    assert answers[0].json() == answers[1].json()
    for change in ({"score": 0.6}, {"prompt": "Why?"}):
        assert app.post("/api/policies/feedback/a", {**body, **change}).status_code == 409
    assert (Rating.objects.count(), Decision.objects.count()) == (1, 1)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"score": 1.5}, "score"),
        ({"score": None}, "score"),
        ({"score": "1"}, "score"),
        ({"score": True}, "score"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"response": 5}, "response"),
        ({"runId": 5}, "runId"),
        ({"run_id": "x"}, "run_id"),
    ],
    ids=str,
)
def test_bad_feedback_is_refused_by_field(app: ApiClient, change: dict[str, Any], field: str) -> None:
    response = app.post("/api/policies/feedback/a", {"prompt": "q", "response": "r", "score": 0.5, **change})
    assert response.status_code == 400
    assert field in error_of(response)["fields"]
    assert not Decision.objects.exists()


def test_feedback_needs_an_agents_slug(app: ApiClient) -> None:
    response = app.post(
        "/api/policies/feedback/Not%20A%20Slug", {"prompt": "q", "response": "r", "score": 0.5}
    )
    assert set(error_of(response)["fields"]) == {"agent"}


# --- Whose rating -------------------------------------------------------------------------------------------


def test_a_key_with_rate_alone_rates_as_itself(decision: Decision) -> None:
    other = made(response="another answer")
    app = ApiClient("rate")
    address = ratings_of(decision)
    refused = app.post(address, {"thumb": "up", "rater": "ada"})
    assert (refused.status_code, error_of(refused)["code"]) == (403, "forbidden")
    assert "rate_as" in error_of(refused)["message"]
    pair = {"left": str(decision.pk), "right": str(other.pk), "preference": "left"}
    assert app.post("/api/comparisons/", {**pair, "rater": "ada"}).status_code == 403
    assert app.post(address, {"thumb": "up", "rater": "key-rate"}).json()["rater"] == "key-rate"
    assert app.post(address, {"thumb": "down"}).json()["rater"] == "key-rate"
    assert app.post("/api/comparisons/", pair).json()["rater"] == "key-rate"


def test_rate_as_needs_rate() -> None:
    with pytest.raises(KeyRefused, match="also needs the scope rate"):
        key_create("app", ["rate_as"])
