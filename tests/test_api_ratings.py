"""REST: ratings, comparisons, outcomes, traces and scored responses."""

import uuid
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from feedback.accounts.authentication import KeyRefused, key_create
from feedback.api.bodies import RatingSent
from feedback.models import AgentSettings, Comparison, Decision, Outcome, Rating, Trace
from feedback.services import decision_record
from tests.support.api_client import ApiClient, error_of, signed_in

pytestmark = pytest.mark.django_db


@pytest.fixture
def app() -> ApiClient:
    return ApiClient("ingest", "rate", "rate_as", "read")


@pytest.fixture
def decision() -> Decision:
    return made()


def made(**more: Any) -> Decision:
    return decision_record(**{"agent": "a", "messages": "q", "response": "r", **more}).row


def ratings_of(decision: Decision) -> str:
    return f"/api/decisions/{decision.pk}/ratings/"


def test_a_rating_is_stored_as_it_was_said(app: ApiClient) -> None:
    whole = {"thumb": "down", "stars": 1, "score": 0.1, "correction": "x", "tags": ["a", "b"], "notes": "n"}
    parts: list[dict[str, Any]] = [{name: value} for name, value in whole.items()]
    for said in ({"thumb": "up"}, {"stars": 5}, {"score": 0.0}, *parts, {**whole, "rater": "ada"}):
        decision = made()
        response = app.post(ratings_of(decision), said)
        shown, row = response.json(), Rating.objects.get(decision=decision)
        assert response.status_code == 201
        assert said == {name: shown[name] for name in said} == {name: getattr(row, name) for name in said}
        # the key rates where nobody is named
        assert shown["rater"] == said.get("rater", "key-ingest-rate-rate_as-read")
    response = app.post(ratings_of(made()), {"thumb": "", "stars": 4})
    assert (response.status_code, response.json()["thumb"]) == (201, None)
    assert RatingSent.model_json_schema()["properties"]["thumb"]["enum"] == ["", "up", "down"]


def test_a_simulated_rating_takes_no_work_off_people(app: ApiClient, decision: Decision) -> None:
    assert app.post(ratings_of(decision), {"thumb": "up", "rater_kind": "simulated"}).status_code == 201
    decision.refresh_from_db()
    assert (decision.ratings_human, Rating.objects.get().rater_kind) == (0, "simulated")


def test_a_later_rating_of_the_same_rater_supersedes(app: ApiClient, decision: Decision) -> None:
    first = app.post(ratings_of(decision), {"thumb": "up", "rater": "ada"}).json()
    second = app.post(ratings_of(decision), {"thumb": "down", "rater": "ada"}).json()
    app.post(ratings_of(decision), {"thumb": "up", "rater": "bob"})
    assert (first["supersedes"], second["supersedes"]) == (None, first["id"])
    shown = app.get(f"/api/decisions/{decision.pk}/").json()
    assert {(r["rater"], r["thumb"]) for r in shown["ratings"]} == {("ada", "down"), ("bob", "up")}
    assert shown["ratings_human"] == 2
    assert Rating.objects.count() == 3


def test_a_double_click_is_one_rating(app: ApiClient, decision: Decision) -> None:
    body = {"thumb": "up", "rater": "ada", "id": str(uuid.uuid4())}
    answers = [app.post(ratings_of(decision), body) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [201, 200, 200]
    assert len({answer.content for answer in answers}) == 1
    for path, change in ((ratings_of(decision), {"thumb": "down"}), (ratings_of(made()), {})):
        response = app.post(path, {**body, **change})
        assert (response.status_code, error_of(response)["code"]) == (409, "conflict")
    assert Rating.objects.count() == 1
    decision.refresh_from_db()
    assert decision.ratings_human == 1


def test_a_rating_of_nothing_is_not_found(app: ApiClient) -> None:
    for kind in ("human", "simulated"):
        response = app.post(f"/api/decisions/{uuid.uuid4()}/ratings/", {"thumb": "up", "rater_kind": kind})
        assert (response.status_code, set(error_of(response)["fields"])) == (404, {"decision"})
    assert not Rating.objects.exists()


BAD_RATINGS: dict[str, list[dict[str, Any]]] = {
    "thumb": [{}, {"tags": [""]}, {"thumb": "sideways"}, {"thumb": True}, {"thumb": ["up"]}],
    "stars": [{"stars": stars} for stars in (0, 6, 4.5, "5", 10**400)],
    "score": [{"score": 1.01}, {"score": -0.01}],
    "correction": [{"correction": "  "}, {"correction": 5}],
    "notes": [{"notes": "x" * 20_001}],
    "tags": [{"tags": ["x" * 101]}],
    "rater": [{"thumb": "up", "rater": rater} for rater in ("", "x" * 201, 7)],
    "rater_kind": [{"thumb": "up", "rater_kind": "robot"}],
    "id": [{"thumb": "up", "id": "1"}],
    "thumbs": [{"thumbs": "up"}],
}
BAD_OUTCOMES: dict[str, list[dict[str, Any]]] = {
    "name": [{"name": "Ticket Reopened", "value": 1}],
    "value": [{"name": "x"}, {"name": "x", "value": "1"}, {"name": "x", "value": 10**400}],
    "at": [{"name": "x", "value": 1, "at": "soon"}],
}


def refused(app: ApiClient, address: str, cases: dict[str, list[dict[str, Any]]]) -> None:
    """Each body is refused, and its field is named."""
    for field, bodies in cases.items():
        for body in bodies:
            response = app.post(address, body)
            assert response.status_code == 400, ascii(body)[:60]
            assert field in error_of(response)["fields"], ascii(body)[:60]


def test_a_bad_rating_or_outcome_is_refused_by_field(app: ApiClient, decision: Decision) -> None:
    refused(app, ratings_of(decision), BAD_RATINGS)
    refused(app, f"/api/decisions/{decision.pk}/outcomes/", BAD_OUTCOMES)
    assert not Rating.objects.exists()
    assert not Outcome.objects.exists()


def test_rating_costs_two_statements(app: ApiClient, decision: Decision) -> None:
    app.post(ratings_of(made()), {"thumb": "up"})
    with CaptureQueriesContext(connection) as queries:
        app.post(ratings_of(decision), {"thumb": "up"})
    assert [q["sql"].split()[0] for q in queries if "SAVEPOINT" not in q["sql"]] in (
        ["INSERT", "UPDATE"],
        ["WITH"],
    )


def test_a_signed_in_person_rates_as_themselves(decision: Decision) -> None:
    client = signed_in("ada", "rater")
    said = {"thumb": "up"}
    answer = client.post(ratings_of(decision), said, content_type="application/json")
    assert (answer.status_code, answer.json()["rater"]) == (201, "ada")
    for more in ({"rater": "bob"}, {"rater_kind": "simulated"}):
        answer = client.post(ratings_of(decision), {**said, **more}, content_type="application/json")
        assert answer.status_code == 400
        assert set(error_of(answer)["fields"]) == set(more)


def test_a_key_that_may_only_rate_says_nothing_about_its_rater(decision: Decision) -> None:
    other, key = made(), ApiClient("rate")
    comparison = {"left": str(decision.pk), "right": str(other.pk), "preference": "left"}
    for path, said in ((ratings_of(decision), {"thumb": "up"}), ("/api/comparisons/", comparison)):
        for more in ({"rater": "bob"}, {"rater_kind": "simulated"}):
            response = key.post(path, {**said, **more})
            assert (response.status_code, set(error_of(response)["fields"])) == (403, set(more))
        assert (
            key.post(path, {**said, "rater": " key-rate ", "rater_kind": "human"}).json()["rater"]
            == "key-rate"
        )


def test_spaces_around_a_raters_name_make_no_second_rater(app: ApiClient, decision: Decision) -> None:
    first = app.post(ratings_of(decision), {"thumb": "up", "rater": "ada"}).json()
    second = app.post(ratings_of(decision), {"thumb": "down", "rater": " ada\u00a0\n"}).json()
    assert (second["rater"], second["supersedes"]) == ("ada", first["id"])
    decision.refresh_from_db()
    assert decision.ratings_human == 1


def test_every_preference_is_kept_and_a_later_one_supersedes(app: ApiClient) -> None:
    pair = {"left": str(made(response="l").pk), "right": str(made(response="r").pk), "rater": "ada"}
    before = None
    for preference in ("left", "right", "tie", "both_bad"):
        body = pair | {"preference": preference, "id": str(uuid.uuid4())}
        answers = [app.post("/api/comparisons/", body) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [201, 200]
        shown = answers[0].json()
        assert (shown["preference"], shown["supersedes"]) == (preference, before)
        before = shown["id"]
    assert Comparison.objects.count() == 4


def test_a_bad_comparison_is_refused_by_field(app: ApiClient) -> None:
    one, two, elsewhere, other_agent = made(), made(), made(messages="another"), made(agent="b")
    pair = {"left": str(one.pk), "right": str(two.pk), "preference": "left"}
    for change, status in (
        ({"left": str(uuid.UUID(int=5))}, 404),
        ({"right": str(uuid.UUID(int=5))}, 404),
        ({"right": "x"}, 400),
        ({"right": None}, 400),
        ({"preference": "neither"}, 400),
        ({"winner": "left"}, 400),
        *(({"right": str(row.pk)}, 400) for row in (one, elsewhere, other_agent)),
    ):
        response = app.post("/api/comparisons/", pair | change)
        assert (response.status_code, set(error_of(response)["fields"])) == (status, set(change)), change
    assert not Comparison.objects.exists()


def test_an_outcome_is_a_number(app: ApiClient, decision: Decision) -> None:
    path = f"/api/decisions/{decision.pk}/outcomes/"
    for value, kept in ((True, 1.0), (False, 0.0), (-3, -3.0), (0.5, 0.5)):
        body = {"name": "reopened", "value": value, "at": "2026-03-02T10:00:00Z", "id": str(uuid.uuid4())}
        assert [app.post(path, body).status_code for _ in range(2)] == [201, 200]
        assert app.post(path, {**body, "value": 77}).status_code == 409
        assert Outcome.objects.get(pk=body["id"]).value == kept


def trace(**more: Any) -> dict[str, Any]:
    decided = {"kind": "decision", "at": "2026-03-02T10:00:02Z", "duration_ms": 40}
    decided |= {"messages": "Where?", "response": "There."}
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
            decided | {"unit": "user-1", "policy": "p1", "candidates": ["There.", "Here."]},
            {"kind": "task", "name": "answer", "status": "completed"},
        ],
        **more,
    }


def test_a_trace_becomes_a_trace_and_its_decisions(app: ApiClient) -> None:
    sent = trace()
    answers = [app.post("/api/traces/", sent) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 200]
    row, decision = Trace.objects.get(), Decision.objects.get()
    assert (str(row.pk), row.steps, row.metadata) == (sent["id"], sent["steps"], sent["metadata"])
    assert (decision.pk, decision.trace_id) == (uuid.uuid5(uuid.UUID(sent["id"]), "2"), row.pk)
    assert (decision.unit, decision.policy, decision.run_id) == ("user-1", "p1", "run-1")
    assert (decision.latency_ms, decision.created_at.isoformat()) == (40, "2026-03-02T10:00:02+00:00")
    assert [answer.json()["decisions"] for answer in answers] == [[str(decision.pk)]] * 2
    assert app.get(f"/api/decisions/{decision.pk}/").json()["trace"] == sent["id"]
    assert app.post("/api/traces/", {**sent, "run_id": "another"}).status_code == 409
    own, other = str(uuid.uuid4()), trace()
    other["steps"][2]["id"] = own
    assert app.post("/api/traces/", other).json()["decisions"] == [own]


def test_a_decision_recorded_alone_before_is_attached(app: ApiClient) -> None:
    own = str(uuid.uuid4())
    alone = {"id": own, "agent": "support-bot", "messages": "q", "response": "r", "run_id": "run-1"}
    app.post("/api/decisions/", alone)
    step = {"kind": "decision", "id": own, "messages": "q", "response": "r"}
    sent = trace(steps=[step])
    assert app.post("/api/traces/", sent).status_code == 201
    assert str(Decision.objects.get().trace_id) == sent["id"]
    assert app.post("/api/traces/", trace(steps=[{**step, "response": "another"}])).status_code == 409
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
    expected = {"steps[4].messages", "steps[5].response", "steps[6].propensity"}
    assert set(error_of(response)["fields"]) == expected
    assert not Trace.objects.exists()
    assert not Decision.objects.exists()


BAD_STEPS: list[tuple[Any, str]] = [
    ({}, "steps"),
    (None, "steps"),
    ([3], "steps[0]"),
    *(([{"kind": kind}], "steps[0].kind") for kind in (None, "dance", ["step"])),
    *(
        ([{"kind": "step", name: value}], f"steps[0].{name}")
        for name, value in {"name": 5, "at": "soon", "duration_ms": -1}.items()
    ),
    ([{"kind": "step", "result": "\x00"}], "steps"),
]


def test_a_bad_trace_is_refused_by_field(app: ApiClient) -> None:
    changes = [({"agent": "A b"}, "agent"), ({"metadata": []}, "metadata"), ({"started_at": 5}, "started_at")]
    for change, field in (*changes, *(({"steps": steps}, field) for steps, field in BAD_STEPS)):
        response = app.post("/api/traces/", trace(**change))
        assert response.status_code == 400, change
        assert field in error_of(response)["fields"], change
    assert not Trace.objects.exists()
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


def test_feedback_becomes_a_decision_and_a_rating(app: ApiClient) -> None:
    body = {"prompt": "Where?", "response": "There.", "score": 0.75, "runId": "r1", "notes": "fine"}
    response = app.post("/api/policies/feedback/support-bot", body)
    shown = response.json()
    assert (response.status_code, set(shown)) == (201, {"id", "agentId", "score", "createdAt"})
    assert (shown["agentId"], shown["score"]) == ("support-bot", 0.75)
    rating = Rating.objects.get(pk=shown["id"])
    made = rating.decision
    assert (rating.score, rating.notes, made.run_id, made.agent) == (0.75, "fine", "r1", "support-bot")
    assert (made.messages, made.response) == ([{"role": "user", "content": "Where?"}], "There.")


def test_feedback_on_a_recorded_run_rates_that_decision(app: ApiClient) -> None:
    row = made(agent="support-bot", messages="Where?", response="There.", run_id="r1")
    body = {"prompt": "Where?", "response": "There.", "score": 1, "runId": "r1"}
    app.post("/api/policies/feedback/support-bot", body)
    assert Rating.objects.get().decision_id == row.pk
    app.post("/api/policies/feedback/support-bot", body | {"response": "No."})
    assert Decision.objects.count() == 2
    # every feedback counts though it says the same
    ids = {app.post("/api/policies/feedback/support-bot", body).json()["id"] for _ in range(3)}
    assert (len(ids), Rating.objects.count()) == (3, 5)


def test_feedback_with_an_id_is_stored_once(app: ApiClient) -> None:
    body = {"prompt": "Where?", "response": "There.", "score": 0.5, "id": str(uuid.uuid4())}
    answers = [app.post("/api/policies/feedback/a", body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 200]
    assert answers[0].json() == answers[1].json()
    for change in ({"score": 0.6}, {"prompt": "Why?"}):
        assert app.post("/api/policies/feedback/a", {**body, **change}).status_code == 409
    assert (Rating.objects.count(), Decision.objects.count()) == (1, 1)


def test_bad_feedback_is_refused_by_field(app: ApiClient) -> None:
    body = {"prompt": "q", "response": "r", "score": 0.5}
    bad: dict[str, list[Any]] = {"score": [1.5, None, "1", True], "prompt": ["", 5], "response": [5]}
    bad |= {"runId": [5], "run_id": ["x"]}
    refused(
        app, "/api/policies/feedback/a", {name: [body | {name: value} for value in bad[name]] for name in bad}
    )
    refused(app, "/api/policies/feedback/Not%20A%20Slug", {"agent": [body]})
    assert not Decision.objects.exists()


def test_rate_as_needs_rate() -> None:
    with pytest.raises(KeyRefused, match="also needs the scope rate"):
        key_create("app", ["rate_as"])
