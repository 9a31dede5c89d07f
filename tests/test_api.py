"""REST: recording decisions one at a time and in lists, finding and reading them."""

import json
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from backend.rest import pages
from feedback.models import AgentSettings, Decision, Rating, prompt_hash
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


def test_one_text_is_one_turn_of_the_user_and_null_says_nothing(app: ApiClient) -> None:
    nothing = dict.fromkeys(("id", "state", "policy", "propensity", "tags", "metadata", "created_at"))
    response = app.post("/api/decisions/", decision_body(messages="Where?", **nothing))
    expected = (201, [{"role": "user", "content": "Where?"}])
    assert (response.status_code, response.json()["messages"]) == expected


CALL = {"id": "c1", "type": "function", "function": {"name": "stock", "arguments": '{"sku": 4}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("response", "text", "metadata", "reasoning"),
    [
        (CALLING, [{**CALLING, "content": ""}], {"response_is": "messages"}, ""),
        (
            [
                {**CALLING, "reasoning_content": "Look."},
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
            ],
            [{**CALLING, "content": ""}, {"role": "tool", "content": "3", "tool_call_id": "c1"}],
            {"response_is": "messages"},
            "Look.",
        ),
        ({"role": "assistant", "content": [{"type": "text", "text": "Hi."}]}, "Hi.", {}, ""),
        ({"role": "assistant", "content": None, "refusal": "No."}, "No.", {"refusal": True}, ""),
        ({"role": "assistant", "content": None}, "", {}, ""),
    ],
)
def test_messages(app: ApiClient, response: Any, text: Any, metadata: dict[str, Any], reasoning: str) -> None:
    sent = {"agent": "support-bot", "messages": "4?", "response": response, "id": str(uuid.uuid4())}
    assert app.post("/api/decisions/", sent).status_code == 201
    row = Decision.objects.get()
    found = json.loads(row.response) if row.metadata.get("response_is") else row.response
    assert (found, row.metadata, row.reasoning) == (text, metadata, reasoning)
    assert app.post("/api/decisions/", sent).status_code == 200


def test_a_retry_gets_the_first_answer_and_another_body_is_a_conflict(app: ApiClient) -> None:
    body = decision_body(id=str(uuid.uuid4()))
    first, again = app.post("/api/decisions/", body), app.post("/api/decisions/", body)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == first.json()
    response = app.post("/api/decisions/", {**body, "response": "Lost."})
    assert (response.status_code, error_of(response)["code"]) == (409, "conflict")
    assert Decision.objects.get().response == "On its way."


def test_recording_costs_one_insert_alone(app: ApiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feedback.storage.tombstones.ABSENCE_S", 3600.0)
    app.post("/api/decisions/", decision_body())
    with CaptureQueriesContext(connection) as queries:
        app.post("/api/decisions/", decision_body())
    assert [q["sql"].split()[0] for q in queries if "SAVEPOINT" not in q["sql"]] == ["INSERT"]


BAD: dict[str, list[Any]] = {
    "agent": ["Support Bot", 7, None, "x" * 65],
    "messages": [
        *([], [{}], [123], [{"role": 1, "content": "x"}], [{"role": "user", "content": 5}], {"role": "user"}),
        *("a\x00b", "\ud800", "x" * 1_000_001),
    ],
    "response": [
        5,
        "\udc00",
        "a\x00b",
        [],
        [5],
        {"role": "user", "content": "x"},
        {"a": 1},
        {"role": "assistant", "tool_calls": [5]},
    ],
    "id": ["7", 7, []],
    "propensity": [0, 1.5, True, 10**400],
    "latency_ms": [-1, "12"],
    "tokens_in": [1.5, 2**31],
    "tokens_out": [-1],
    "tags": ["polite", ["x"] * 51, ["\ud800"], [7]],
    "metadata": [[], "abc", {"a": "\x00"}, {"\udfff": 1}],
    "state": ["\x00", "x" * 1_000_001],
    "candidates": ["a", [7], [{"response": "a", "score": 2}]],
    "policy": ["x" * 201],
    "created_at": ["yesterday", 1700000000, "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"],
    "resposne": ["x"],
    "source": ["import"],
}


@pytest.mark.parametrize("field", BAD)
def test_a_bad_field_is_refused_by_name(app: ApiClient, field: str) -> None:
    for value in BAD[field]:
        response = app.post("/api/decisions/", decision_body(**{field: value}))
        (named,) = error_of(response)["fields"]
        assert (response.status_code, named.partition("[")[0]) == (400, field), ascii(value)[:50]
    assert set(error_of(app.post("/api/decisions/", decision_body(**{"\ud800": 1})))["fields"]) == {"?"}
    assert not Decision.objects.exists()


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "field", ["state", "metadata", "agent", "messages", "tags", "id", "propensity", "candidates"]
)
def test_deep_nesting_is_refused_and_nesting_up_to_the_limit_read_back(app: ApiClient, field: str) -> None:
    for levels in (70, 400, 900):
        response = app.post("/api/decisions/", decision_body(**{field: nested(levels)}))
        assert response.status_code == 400
        error_of(response)
    made = app.post("/api/decisions/", decision_body(state=nested(64))).json()
    assert app.get(f"/api/decisions/{made['id']}/").json()["state"] == nested(64)


def test_text_that_only_looks_bad_is_kept(app: ApiClient) -> None:
    for typed in (
        "\\u0000 was typed",
        "C:\\ud800",
        "back\\\\slash \\\\u0000",
        "\u2028 \ufffe \U0001f600",
        "é" * 10,
    ):
        made = app.post("/api/decisions/", decision_body(messages=typed, metadata={"t": typed})).json()
        shown = app.get(f"/api/decisions/{made['id']}/").json()
        assert (shown["messages"][0]["content"], shown["metadata"]) == (typed, {"t": typed})


def test_every_fault_and_every_missing_field_is_named_at_once(app: ApiClient) -> None:
    for body, fields in (
        (decision_body(agent="A", propensity=2, tags="x"), {"agent", "propensity", "tags"}),
        ({}, {"agent", "messages", "response"}),
    ):
        assert set(error_of(app.post("/api/decisions/", body))["fields"]) == fields


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


def test_the_same_list_again_creates_nothing_nor_does_one_of_it_alone(app: ApiClient) -> None:
    items = [
        decision_body(
            id=str(uuid.uuid4()), response=str(n), state={"b": 1, "a": [1.5, None]}, metadata={"ü": "x"}
        )
        for n in range(40)
    ]
    first, again = app.post("/api/decisions/", items), app.post("/api/decisions/", items)
    assert (first.status_code, again.status_code) == (201, 200)
    assert (first.json()["created"], again.json()["created"], again.json()["repeated"]) == (40, 0, 40)
    assert app.post("/api/decisions/", items[7]).status_code == 200
    assert Decision.objects.count() == 40


def test_a_list_of_a_thousand_is_taken_and_one_more_is_not(app: ApiClient) -> None:
    assert app.post("/api/decisions/", [decision_body()] * 1000).json()["created"] == 1000
    response = app.post("/api/decisions/", [decision_body()] * 1001)
    assert response.status_code == 400
    assert "1,001" in error_of(response)["message"]
    assert error_of(app.post("/api/decisions/", []))["code"] == "invalid"


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


def record(n: int, **more: Any) -> Decision:
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=n)
    return decision_record(
        **{"agent": "a", "messages": f"question {n}", "response": f"answer {n}", "created_at": at, **more}
    ).row


def found(app: ApiClient, **query: Any) -> list[str]:
    response = app.get("/api/decisions/", **query)
    assert response.status_code == 200, response.content
    return [row["response"] for row in response.json()["results"]]


def walk(app: ApiClient, url: str, direction: str = "next") -> tuple[list[list[str]], str]:
    """Responses of each page from an address on, and the address of the page before the last one."""
    answers, before = [], ""
    while url:
        page = app.client.get(url).json()
        answers.append([row["response"] for row in page["results"]])
        url, before = page[direction], page["previous"]
    return answers, before


def test_pages_hold_every_row_once_though_all_have_one_time(app: ApiClient) -> None:
    for n in range(25):
        record(n, created_at=datetime(2026, 1, 1, tzinfo=UTC))
    answers, before = walk(app, "/api/decisions/?page_size=4")
    assert [len(page) for page in answers] == [4, 4, 4, 4, 4, 4, 1]
    assert len({name for page in answers for name in page}) == 25
    assert walk(app, before, "previous")[0] == answers[-2::-1]


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


BAD_PARAMETERS: dict[str, list[Any]] = {
    "agent": ["Not A Slug", ["a", "b"]],
    "rated": ["maybe"],
    "since": ["yesterday", "2026-13-01"],
    "q": ["a\x00b"],
    "page_size": ["0", "1001", "-5", "1e2", "٣", ["x", "5"]],
    "cursor": ["nonsense", "W10", "ü"],
    "agnet": ["a"],
}


def test_a_bad_parameter_is_refused_by_name(app: ApiClient) -> None:
    for name, values in BAD_PARAMETERS.items():
        for value in values:
            response = app.get("/api/decisions/", **{name: value})
            assert (response.status_code, set(error_of(response)["fields"])) == (400, {name}), value


def test_what_no_index_knows_is_looked_for_in_parts(app: ApiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "LOOK", 3)
    for n in range(10):
        record(n, messages="needle" if n in (0, 1, 8) else "hay")
    answers, before = walk(app, "/api/decisions/?q=NEEDLE&page_size=2")
    # 9 to 7, 6 to 4, 3 to 1 and 0 were looked through
    assert answers == [["answer 8"], [], ["answer 1"], ["answer 0"]]
    back = walk(app, before, "previous")[0]
    assert [answer for page in back for answer in page] == ["answer 1", "answer 8"]


def test_rows_that_arrive_between_pages_shift_nothing_and_filters_stay(app: ApiClient) -> None:
    for n in range(6):
        record(n)
        record(n, agent="b", response="elsewhere")
    first = app.get("/api/decisions/", page_size=3, agent="a").json()
    record(99)
    second = app.client.get(first["next"]).json()
    assert [row["response"] for row in second["results"]] == ["answer 2", "answer 1", "answer 0"]
    assert second["next"] is None


def test_a_decision_is_read_with_what_stands_of_it(app: ApiClient) -> None:
    row = record(1)
    rating_submit(decision=row, rater="ada", thumb="up")
    rating_submit(decision=row, rater="ada", thumb="down", tags=["rude"])
    app.post(f"/api/decisions/{row.pk}/outcomes/", {"name": "reopened", "value": True})
    shown = app.get(f"/api/decisions/{row.pk}/").json()
    assert [(r["rater"], r["thumb"], r["tags"]) for r in shown["ratings"]] == [("ada", "down", ["rude"])]
    assert [(o["name"], o["value"]) for o in shown["outcomes"]] == [("reopened", 1.0)]
    assert shown["ratings_human"] == 1
    missing = app.get(f"/api/decisions/{uuid.uuid4()}/")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")


def test_lists_do_not_ask_per_row(app: ApiClient) -> None:
    for n in range(10):
        record(n)
    app.get("/api/decisions/")
    with CaptureQueriesContext(connection) as queries:
        assert len(json.loads(app.get("/api/decisions/", rated="false").content)["results"]) == 10
    # how far back it looks, and the rows
    assert len(queries) == 2


@pytest.mark.django_db
def test_a_decision_is_recorded_in_the_words_that_files_use() -> None:
    client = ApiClient("ingest", "rate")
    sent = {"id": str(uuid.uuid4()), "agent": "support-bot", "prompt": "Where?", "response": "Here."}
    sent |= {"thumb": "up"}
    for status in (201, 200):  # sent again, it is the same decision and the same rating
        assert client.post("/api/decisions/", sent).status_code == status
    row = Decision.objects.get()
    assert row.messages == [{"role": "user", "content": "Where?"}]
    assert [(rating.thumb, rating.rater) for rating in row.ratings.all()] == [("up", "key-ingest-rate")]
    listed = [{**sent, "id": str(uuid.uuid4()), "thumb": thumb} for thumb in ("down", "sideways", None)]
    answer = client.post("/api/decisions/", listed)
    assert [result["status"] for result in answer.json()["results"]] == [201, 400, 201]
    assert Rating.objects.count() == 2


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("more", "status", "field"),
    [
        ({"thumb": "sideways"}, 400, "thumb"),
        ({"messages": "q"}, 400, "prompt"),
        ({"thumb": "up"}, 403, "thumb"),
    ],
)
def test_words_that_do_not_fit_store_nothing(more: dict[str, str], status: int, field: str) -> None:
    client = ApiClient("ingest") if status == 403 else ApiClient("ingest", "rate")
    answer = client.post("/api/decisions/", {"agent": "support-bot", "prompt": "q", "response": "r", **more})
    assert answer.status_code == status
    assert list(answer.json()["error"]["fields"]) == [field]
    assert not Decision.objects.exists()
