"""REST: recording decisions one at a time and in lists, finding and reading them."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from backend.rest import pages
from feedback.models import AgentSettings, Decision, prompt_hash
from feedback.services import decision_record, rating_submit
from feedback.storage.sampling import is_collected
from tests.support.api_client import ApiClient, decision_body, error_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def app() -> ApiClient:
    return ApiClient("ingest", "read")


def test_a_decision_is_recorded_as_it_was_sent(app: ApiClient) -> None:
    sent = decision_body(
        id=str(uuid.uuid4()),
        messages=[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Wo? 🙂"}],
        state={"order": 7},
        candidates=["On its way.", {"response": "Lost.", "score": 0.1}],
        policy="support-bot-v3",
        unit="user-1",
        arm="b",
        propensity=0.25,
        run_id="run-9",
        latency_ms=12.5,
        tokens_in=9,
        tokens_out=4,
        tags=["order"],
        metadata={"channel": "web"},
        created_at="2026-03-02T10:30:00+01:00",
    )
    response = app.post("/api/decisions/", sent)
    assert response.status_code == 201
    shown = response.json()
    assert {name: shown[name] for name in sent if name != "created_at"} == {
        name: value for name, value in sent.items() if name != "created_at"
    }
    assert datetime.fromisoformat(shown["created_at"]) == datetime(2026, 3, 2, 9, 30, tzinfo=UTC)
    assert shown["prompt_hash"] == prompt_hash("support-bot", sent["messages"])
    assert shown["stored"] is True
    row = Decision.objects.get(pk=sent["id"])
    assert row.messages == sent["messages"]
    assert row.candidates == sent["candidates"]
    assert row.source == "app"


def test_one_text_is_one_turn_of_the_user(app: ApiClient) -> None:
    shown = app.post("/api/decisions/", decision_body(messages="Where?")).json()
    assert shown["messages"] == [{"role": "user", "content": "Where?"}]


CALL = {"id": "c1", "type": "function", "function": {"name": "stock", "arguments": '{"sku": 4}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("response", "text", "metadata", "reasoning"),
    [
        (CALLING, [{**CALLING, "content": ""}], {"response_is": "messages"}, ""),
        ([{**CALLING, "reasoning_content": "Look."}, {"role": "tool", "tool_call_id": "c1", "content": "3"}],
         [{**CALLING, "content": ""}, {"role": "tool", "content": "3", "tool_call_id": "c1"}],
         {"response_is": "messages"}, "Look."),
        ({"role": "assistant", "content": [{"type": "text", "text": "Hi."}]}, "Hi.", {}, ""),
        ({"role": "assistant", "content": None, "refusal": "No."}, "No.", {"refusal": True}, ""),
        ({"role": "assistant", "content": None}, "", {}, ""),
    ],
)  # fmt: skip
def test_a_response_may_be_messages(
    app: ApiClient, response: Any, text: Any, metadata: dict[str, Any], reasoning: str
) -> None:
    sent = {"agent": "support-bot", "messages": "4?", "response": response, "id": str(uuid.uuid4())}
    assert app.post("/api/decisions/", sent).status_code == 201
    row = Decision.objects.get()
    found = json.loads(row.response) if row.metadata.get("response_is") else row.response
    assert (found, row.metadata, row.reasoning) == (text, metadata, reasoning)
    assert app.post("/api/decisions/", sent).status_code == 200


@pytest.mark.parametrize(
    "response",
    [[], [5], {"role": "user", "content": "x"}, {"a": 1}, {"role": "assistant", "tool_calls": [5]}],
)
def test_a_response_that_is_no_answer_is_refused(app: ApiClient, response: Any) -> None:
    answer = app.post("/api/decisions/", {"agent": "support-bot", "messages": "4?", "response": response})
    assert (answer.status_code, list(error_of(answer)["fields"])) == (400, ["response"])


def test_null_says_nothing(app: ApiClient) -> None:
    nothing = dict.fromkeys(("id", "state", "policy", "propensity", "tags", "metadata", "created_at"))
    assert app.post("/api/decisions/", decision_body(**nothing)).status_code == 201


def test_a_retry_gets_the_first_answer_and_stores_nothing(app: ApiClient) -> None:
    body = decision_body(id=str(uuid.uuid4()))
    first, again = app.post("/api/decisions/", body), app.post("/api/decisions/", body)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == first.json()
    assert Decision.objects.count() == 1


def test_another_body_under_the_same_id_is_a_conflict(app: ApiClient) -> None:
    body = decision_body(id=str(uuid.uuid4()))
    app.post("/api/decisions/", body)
    response = app.post("/api/decisions/", {**body, "response": "Lost."})
    assert response.status_code == 409
    assert error_of(response)["code"] == "conflict"
    assert Decision.objects.get().response == "On its way."


def test_recording_costs_an_insert_alone_where_nothing_was_erased(
    app: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feedback.storage.tombstones.ABSENCE_S", 3600.0)
    app.post("/api/decisions/", decision_body())
    with CaptureQueriesContext(connection) as queries:
        app.post("/api/decisions/", decision_body())
    assert [q["sql"].split()[0] for q in queries if "SAVEPOINT" not in q["sql"]] == ["INSERT"]


# --- What is refused --------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"agent": "Support Bot"}, "agent"),
    ({"agent": 7}, "agent"),
    ({"agent": None}, "agent"),
    ({"agent": "x" * 65}, "agent"),
    ({"messages": []}, "messages"),
    ({"messages": [{}]}, "messages"),
    ({"messages": [123]}, "messages"),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": "a\x00b"}, "messages"),
    ({"messages": "\ud800"}, "messages"),
    ({"messages": "x" * 1_000_001}, "messages"),
    ({"response": 5}, "response"),
    ({"response": "\udc00"}, "response"),
    ({"response": "a\x00b"}, "response"),
    ({"id": "7"}, "id"),
    ({"id": 7}, "id"),
    ({"id": []}, "id"),
    ({"propensity": 0}, "propensity"),
    ({"propensity": 1.5}, "propensity"),
    ({"propensity": True}, "propensity"),
    ({"propensity": 10**400}, "propensity"),
    ({"latency_ms": -1}, "latency_ms"),
    ({"latency_ms": "12"}, "latency_ms"),
    ({"tokens_in": 1.5}, "tokens_in"),
    ({"tokens_in": 2**31}, "tokens_in"),
    ({"tokens_out": -1}, "tokens_out"),
    ({"tags": "polite"}, "tags"),
    ({"tags": ["x"] * 51}, "tags"),
    ({"tags": ["\ud800"]}, "tags"),
    ({"tags": [7]}, "tags"),
    ({"metadata": []}, "metadata"),
    ({"metadata": "abc"}, "metadata"),
    ({"metadata": {"a": "\x00"}}, "metadata"),
    ({"metadata": {"\udfff": 1}}, "metadata"),
    ({"state": "\x00"}, "state"),
    ({"state": "x" * 1_000_001}, "state"),
    ({"candidates": "a"}, "candidates"),
    ({"candidates": [7]}, "candidates[0]"),
    ({"candidates": [{"response": "a", "score": 2}]}, "candidates[0].score"),
    ({"policy": "x" * 201}, "policy"),
    ({"created_at": "yesterday"}, "created_at"),
    ({"created_at": 1700000000}, "created_at"),
    ({"created_at": "0001-01-01T00:00:00+14:00"}, "created_at"),
    ({"created_at": "9999-12-31T23:59:59-14:00"}, "created_at"),
    ({"resposne": "x"}, "resposne"),
    ({"source": "import"}, "source"),
    ({"\ud800": 1}, "?"),
]


@pytest.mark.parametrize(("change", "field"), BAD, ids=[ascii(change)[:50] for change, _ in BAD])
def test_a_bad_field_is_refused_by_name(app: ApiClient, change: dict[str, Any], field: str) -> None:
    response = app.post("/api/decisions/", decision_body(**change))
    assert response.status_code == 400
    assert field in error_of(response)["fields"]
    assert not Decision.objects.exists()


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "field", ["state", "metadata", "agent", "messages", "tags", "id", "propensity", "candidates"]
)
@pytest.mark.parametrize("levels", [70, 400, 900])
def test_deep_nesting_is_refused(app: ApiClient, field: str, levels: int) -> None:
    response = app.post("/api/decisions/", decision_body(**{field: nested(levels)}))
    assert response.status_code == 400
    error_of(response)


def test_nesting_up_to_the_limit_is_kept_and_read_back(app: ApiClient) -> None:
    made = app.post("/api/decisions/", decision_body(state=nested(64))).json()
    assert app.get(f"/api/decisions/{made['id']}/").json()["state"] == nested(64)


@pytest.mark.parametrize(
    "typed",
    ["\\u0000 was typed", "C:\\ud800", "back\\\\slash \\\\u0000", "\u2028 \ufffe \U0001f600", "é" * 10],
)
def test_text_that_only_looks_bad_is_kept(app: ApiClient, typed: str) -> None:
    made = app.post("/api/decisions/", decision_body(messages=typed, metadata={"t": typed})).json()
    shown = app.get(f"/api/decisions/{made['id']}/").json()
    assert shown["messages"][0]["content"] == typed
    assert shown["metadata"] == {"t": typed}


def test_every_fault_is_named_at_once(app: ApiClient) -> None:
    error = error_of(app.post("/api/decisions/", decision_body(agent="A", propensity=2, tags="x")))
    assert set(error["fields"]) == {"agent", "propensity", "tags"}


def test_missing_fields_are_named(app: ApiClient) -> None:
    assert set(error_of(app.post("/api/decisions/", {}))["fields"]) == {"agent", "messages", "response"}


# --- Lists ------------------------------------------------------------------------------------------------


def test_each_of_a_list_is_answered_on_its_own(app: ApiClient) -> None:
    known = app.post("/api/decisions/", decision_body(id=str(uuid.uuid4()))).json()["id"]
    fresh = str(uuid.uuid4())
    items = [
        decision_body(),
        decision_body(agent="Not A Slug"),
        decision_body(id=known),
        decision_body(id=known, response="Another."),
        "no object",
        decision_body(id=fresh, response="First."),
        decision_body(id=fresh, response="First."),
        decision_body(id=fresh, response="Second."),
        decision_body(unknown=1),
    ]
    response = app.post("/api/decisions/", items)
    body = response.json()
    assert response.status_code == 207
    assert [result["status"] for result in body["results"]] == [201, 400, 200, 409, 400, 201, 200, 409, 400]
    assert (body["created"], body["repeated"], body["left_out"], body["refused"]) == (2, 2, 0, 5)
    assert body["results"][1]["error"]["fields"].keys() == {"agent"}
    assert body["results"][3]["error"]["code"] == "conflict"
    assert Decision.objects.count() == 3
    assert Decision.objects.get(pk=fresh).response == "First."


def test_the_same_list_again_creates_nothing(app: ApiClient) -> None:
    items = [decision_body(id=str(uuid.uuid4()), response=str(n)) for n in range(40)]
    first, again = app.post("/api/decisions/", items), app.post("/api/decisions/", items)
    assert (first.status_code, again.status_code) == (201, 200)
    assert (first.json()["created"], again.json()["created"], again.json()["repeated"]) == (40, 0, 40)
    assert Decision.objects.count() == 40


def test_a_list_of_a_thousand_is_taken_and_one_more_is_not(app: ApiClient) -> None:
    assert app.post("/api/decisions/", [decision_body()] * 1000).json()["created"] == 1000
    response = app.post("/api/decisions/", [decision_body()] * 1001)
    assert response.status_code == 400
    assert "1,001" in error_of(response)["message"]
    assert error_of(app.post("/api/decisions/", []))["code"] == "invalid"


def test_a_decision_is_the_same_row_sent_alone_or_in_a_list(app: ApiClient) -> None:
    body = decision_body(id=str(uuid.uuid4()), state={"b": 1, "a": [1.5, None]}, metadata={"ü": "x"})
    app.post("/api/decisions/", [body])
    assert app.post("/api/decisions/", body).status_code == 200


# --- The share that is kept -------------------------------------------------------------------------------


def test_the_share_kept_is_a_function_of_the_id(app: ApiClient) -> None:
    AgentSettings.objects.create(agent="support-bot", collection_rate=0.25)
    ids = [str(uuid.UUID(int=n)) for n in range(400)]
    alone = [app.post("/api/decisions/", decision_body(id=pk)) for pk in ids[:100]]
    listed = app.post("/api/decisions/", [decision_body(id=pk) for pk in ids]).json()
    kept = [result["stored"] for result in listed["results"]]
    assert [response.json()["stored"] for response in alone] == kept[:100]
    assert {response.status_code for response in alone} == {201, 202}
    assert Decision.objects.count() == sum(kept) == 400 - listed["left_out"]
    # 400 ids at a quarter: 100, give or take four standard deviations of sqrt(400 x 0.25 x 0.75) = 8.7
    assert 65 < sum(kept) < 135


def test_a_retry_of_a_decision_left_out_is_left_out_again(app: ApiClient) -> None:
    AgentSettings.objects.create(agent="support-bot", collection_rate=0.0)
    body = decision_body(id=str(uuid.uuid4()))
    first, again = app.post("/api/decisions/", body), app.post("/api/decisions/", body)
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json() == again.json() == {"id": body["id"], "stored": False}
    rating = app.post(f"/api/decisions/{body['id']}/outcomes/", {"name": "clicked", "value": 1})
    assert rating.status_code == 404
    assert "collection_rate" in error_of(rating)["message"]


def test_a_higher_rate_keeps_all_that_a_lower_one_kept(settings: Any) -> None:
    settings.FEEDBACK_REMEMBER_S = 0
    ids = [uuid.UUID(int=n) for n in range(300)]
    row = AgentSettings.objects.create(agent="a", collection_rate=0.1)
    low = {pk for pk in ids if is_collected("a", pk)}
    row.collection_rate = 0.6
    row.save()
    assert low < {pk for pk in ids if is_collected("a", pk)}


def test_a_decision_kept_before_the_rate_fell_is_still_known(app: ApiClient, settings: Any) -> None:
    settings.FEEDBACK_REMEMBER_S = 0
    body = decision_body(id=str(uuid.uuid4()))
    app.post("/api/decisions/", body)
    AgentSettings.objects.create(agent="support-bot", collection_rate=0.0)
    assert app.post("/api/decisions/", body).status_code == 200
    assert app.post("/api/decisions/", {**body, "response": "x"}).status_code == 409
    assert [r["status"] for r in app.post("/api/decisions/", [body]).json()["results"]] == [200]


def test_wanted_ratings_follow_the_agents_settings(app: ApiClient) -> None:
    AgentSettings.objects.create(agent="support-bot", ratings_wanted=2, overlap_share=0.5, overlap_ratings=5)
    app.post("/api/decisions/", [decision_body() for _ in range(100)])
    wanted = list(Decision.objects.values_list("ratings_wanted", flat=True))
    assert set(wanted) == {2, 5}
    assert 25 < wanted.count(5) < 75  # five standard deviations of a half of 100


# --- Finding and reading ----------------------------------------------------------------------------------


def record(n: int, **more: Any) -> Decision:
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=n)
    row: Decision = decision_record(
        **{"agent": "a", "messages": f"question {n}", "response": f"answer {n}", "created_at": at, **more}
    ).row
    return row


def found(app: ApiClient, **query: Any) -> list[str]:
    response = app.get("/api/decisions/", **query)
    assert response.status_code == 200, response.content
    return [row["response"] for row in response.json()["results"]]


def test_filters_narrow_the_list(app: ApiClient) -> None:
    rating_submit(decision=record(1), rater="ada", thumb="up")
    record(2, agent="b")
    record(3, policy="a-v1", response="Grüße aus Köln, 100% sicher")
    assert found(app) == ["Grüße aus Köln, 100% sicher", "answer 2", "answer 1"]
    assert found(app, agent="b") == ["answer 2"]
    assert found(app, policy="a-v1") == ["Grüße aus Köln, 100% sicher"]
    assert found(app, rated="true") == ["answer 1"]
    assert found(app, rated="false") == ["Grüße aus Köln, 100% sicher", "answer 2"]
    assert found(app, since="2026-01-01T02:00:00Z") == ["Grüße aus Köln, 100% sicher", "answer 2"]
    assert found(app, since="2026-01-01T03:00:00+01:00", agent="b") == ["answer 2"]
    assert found(app, q="QUESTION 1") == ["answer 1"]
    assert found(app, q="100%") == ["Grüße aus Köln, 100% sicher"]
    assert found(app, q="_") == []


def test_text_is_found_in_prompts_in_any_script(app: ApiClient) -> None:
    record(1, messages='Wo ist "Größe"?')
    record(2, messages="ここはどこ")
    assert found(app, q="Größe") == ["answer 1"]
    assert found(app, q='"Größe"') == ["answer 1"]
    assert found(app, q="どこ") == ["answer 2"]


@pytest.mark.parametrize(
    "query",
    [
        {"agent": "Not A Slug"},
        {"rated": "maybe"},
        {"since": "yesterday"},
        {"since": "2026-13-01"},
        {"q": "a\x00b"},
        {"page_size": "0"},
        {"page_size": "1001"},
        {"page_size": "-5"},
        {"page_size": "1e2"},
        {"page_size": "٣"},
        {"cursor": "nonsense"},
        {"cursor": "W10"},
        {"cursor": "ü"},
        {"agnet": "a"},
        {"page_size": ["x", "5"]},
        {"agent": ["a", "b"]},
    ],
    ids=str,
)
def test_a_bad_parameter_is_refused_by_name(app: ApiClient, query: dict[str, Any]) -> None:
    response = app.get("/api/decisions/", **query)
    assert response.status_code == 400
    assert set(error_of(response)["fields"]) == set(query)


def test_pages_hold_every_row_once_though_all_have_one_time(app: ApiClient) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    for n in range(25):
        record(n, created_at=at)
    answers, url = [], "/api/decisions/?page_size=4"
    while url:
        page = app.client.get(url).json()
        answers.append([row["response"] for row in page["results"]])
        url, before = page["next"], page["previous"]
    assert [len(page) for page in answers] == [4, 4, 4, 4, 4, 4, 1]
    assert len({name for page in answers for name in page}) == 25
    back = []
    while before:
        page = app.client.get(before).json()
        back.insert(0, [row["response"] for row in page["results"]])
        before = page["previous"]
    assert back == answers[:-1]


def test_what_no_index_knows_is_looked_for_a_bounded_way_at_a_time(
    app: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "LOOK", 3)
    for n in range(10):
        record(n, messages="needle" if n in (0, 1, 8) else "hay")
    answers, url = [], "/api/decisions/?q=NEEDLE&page_size=2"
    while url:
        page = app.client.get(url).json()
        answers.append([row["response"] for row in page["results"]])
        url, before = page["next"], page["previous"]
    # 9 to 7, 6 to 4, 3 to 1 and 0 were looked through
    assert answers == [["answer 8"], [], ["answer 1"], ["answer 0"]]
    back = []
    while before:
        page = app.client.get(before).json()
        back += [row["response"] for row in page["results"]]
        before = page["previous"]
    assert back == ["answer 1", "answer 8"]


def test_rows_that_arrive_between_pages_shift_nothing(app: ApiClient) -> None:
    for n in range(6):
        record(n)
    first = app.get("/api/decisions/", page_size=3).json()
    record(99)
    second = app.client.get(first["next"]).json()
    assert [row["response"] for row in second["results"]] == ["answer 2", "answer 1", "answer 0"]
    assert second["next"] is None


def test_filters_stay_on_the_next_page(app: ApiClient) -> None:
    for n in range(4):
        record(n, agent="a" if n % 2 else "b")
    first = app.get("/api/decisions/", agent="a", page_size=1).json()
    assert [row["response"] for row in app.client.get(first["next"]).json()["results"]] == ["answer 1"]


def test_a_decision_is_read_with_what_stands_of_it(app: ApiClient) -> None:
    row = record(1)
    rating_submit(decision=row, rater="ada", thumb="up")
    rating_submit(decision=row, rater="ada", thumb="down", tags=["rude"])
    app.post(f"/api/decisions/{row.pk}/outcomes/", {"name": "reopened", "value": True})
    shown = app.get(f"/api/decisions/{row.pk}/").json()
    assert [(r["rater"], r["thumb"], r["tags"]) for r in shown["ratings"]] == [("ada", "down", ["rude"])]
    assert [(o["name"], o["value"]) for o in shown["outcomes"]] == [("reopened", 1.0)]
    assert shown["ratings_human"] == 1


def test_an_unknown_decision_is_not_found(app: ApiClient) -> None:
    response = app.get(f"/api/decisions/{uuid.uuid4()}/")
    assert response.status_code == 404
    assert error_of(response)["code"] == "not_found"


def test_lists_do_not_ask_per_row(app: ApiClient) -> None:
    for n in range(10):
        record(n)
    app.get("/api/decisions/")
    with CaptureQueriesContext(connection) as queries:
        assert len(json.loads(app.get("/api/decisions/", rated="false").content)["results"]) == 10
    # how far back it looks, and the rows
    assert len(queries) == 2
