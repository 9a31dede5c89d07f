"""Ratings by signed token: from any site, for one decision, until it expires; and the form for people."""

import json
import time
import uuid
from typing import Any

import pytest
from django.test import Client
from rest_framework.settings import api_settings

from backend import limits
from backend.rest.access import ScopeThrottle
from feedback.accounts.authentication import KeyRefused, key_create
from feedback.accounts.feedback_tokens import APP_USER, token_sign
from feedback.models import Decision, Rating
from feedback.recording.recorder import decision_id_new
from feedback.services import decision_record
from tests.support.api_client import ApiClient, decision_body, error_of
from tests.support.serving import Parrot, parrot_only, support_bot_allowed, written_by_the_asking_thread  # noqa: F401
from tests.test_api_access import ENDPOINTS

pytestmark = pytest.mark.django_db

ORIGIN = "https://shop.example"


@pytest.fixture
def decision() -> Decision:
    return decision_record(agent="support-bot", messages="Where is it?", response="On its way.").row


def send(token: str, body: Any, client: Client | None = None) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body)
    return (client or Client(headers={"Origin": ORIGIN})).post(
        f"/api/feedback/{token}", raw, content_type="application/json"
    )


def refused(response: Any, status: int, code: str) -> None:
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert not Rating.objects.exists()


def test_a_token_rates_its_decision_and_a_later_word_supersedes(decision: Decision) -> None:
    token = token_sign(decision.pk)
    first = send(token, {"thumb": "down", "tags": ["wrong"], "correction": "It left today.", "stars": 2})
    assert first.status_code == 201, first.content
    assert (first.json()["rater"], first.json()["thumb"]) == (APP_USER, "down")
    assert send(token, {"thumb": "up"}).json()["supersedes"] == first.json()["id"]
    assert Rating.objects.filter(decision=decision).count() == 2


def test_the_same_id_is_one_rating_and_another_body_under_it_a_conflict(decision: Decision) -> None:
    token, body = token_sign(decision.pk), {"thumb": "up", "id": str(uuid.uuid4())}
    assert [send(token, body).status_code for _ in range(2)] == [201, 200]
    other = send(token, {**body, "thumb": "down"})
    assert (other.status_code, error_of(other)["code"]) == (409, "conflict")
    assert Rating.objects.get().thumb == "up"


def test_a_token_that_is_not_ours_rates_nothing(decision: Decision) -> None:
    token = token_sign(decision.pk)
    swapped = f"{decision.pk.hex}.{token_sign(uuid.uuid4()).split('.', 1)[1]}"
    for found in (token[:-1], token + "x", swapped, "nonsense", "a.b.c", decision.pk.hex + ".."):
        refused(send(found, {"thumb": "up"}), 403, "token_invalid")


def test_a_token_expires(decision: Decision, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    token = token_sign(decision.pk)
    settings.FEEDBACK_TOKEN_DAYS = 2
    now = time.time()
    monkeypatch.setattr("django.core.signing.time.time", lambda: now + 2 * 86_400 + 5)
    refused(send(token, {"thumb": "up"}), 403, "token_expired")
    assert Client().get(f"/feedback/{token}").status_code == 403


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "invalid"),
        ({"thumb": "sideways"}, 400, "invalid"),
        ({"stars": 9}, 400, "invalid"),
        ({"thumb": "up", "rater": "ada"}, 400, "invalid"),
        ({"thumb": "up", "rater_kind": "simulated"}, 400, "invalid"),
        (b"{", 400, "invalid"),
        ({"correction": "x" * limits.FEEDBACK_BYTES}, 413, "too_large"),
    ],
    ids=["nothing", "thumb", "stars", "rater", "rater_kind", "no json", "too large"],
)
def test_a_body_that_is_wrong_stores_nothing(decision: Decision, body: Any, status: int, code: str) -> None:
    refused(send(token_sign(decision.pk), body), status, code)


def test_a_decision_that_is_unknown_or_still_to_be_recorded() -> None:
    refused(send(token_sign(uuid.uuid4()), {"thumb": "up"}), 404, "not_found")
    pending = send(token_sign(decision_id_new()), {"thumb": "up"})
    refused(pending, 503, "pending")
    assert pending["Retry-After"] == "1"


@pytest.mark.parametrize("rate", ["feedback_token", "feedback_address"])
def test_ratings_are_limited(decision: Decision, rate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {**api_settings.DEFAULT_THROTTLE_RATES, rate: "2/hour"}
    monkeypatch.setattr(api_settings, "DEFAULT_THROTTLE_RATES", rates)
    monkeypatch.setattr(ScopeThrottle, "_counts", {})
    other = decision_record(agent="support-bot", messages="When?", response="Soon.").row
    token = token_sign(decision.pk)
    assert [send(token, {"thumb": "up"}).status_code for _ in range(2)] == [201, 201]
    limited = send(token, {"thumb": "up"})
    assert (limited.status_code, error_of(limited)["code"]) == (429, "throttled")
    assert 1 <= int(limited["Retry-After"]) <= 3600
    assert Client().post(f"/feedback/{token}", {"thumb": "up", "id": uuid.uuid4()}).status_code == 429
    expected = 201 if rate == "feedback_token" else 429
    assert send(token_sign(other.pk), {"thumb": "up"}).status_code == expected


def test_only_this_address_answers_other_sites(decision: Decision) -> None:
    asks = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    token = token_sign(decision.pk)
    preflight = Client().options(f"/api/feedback/{token}", headers=asks)
    assert (preflight.status_code, preflight["Access-Control-Allow-Origin"]) == (200, "*")
    assert "Access-Control-Allow-Credentials" not in preflight
    assert send(token, {"thumb": "up"})["Access-Control-Allow-Origin"] == "*"
    app = ApiClient("rate", "ingest")
    for address in (f"/api/decisions/{decision.pk}/ratings/", "/api/decisions/", "/v1/chat/completions"):
        assert "Access-Control-Allow-Origin" not in app.client.options(address, headers=asks)
        sent = app.client.post(address, "{}", content_type="application/json", headers={"Origin": ORIGIN})
        assert "Access-Control-Allow-Origin" not in sent


def publishable(agent: str = "support-bot", origin: str = ORIGIN) -> str:
    return key_create(f"{agent} on {origin}", ["rate"], agent=agent, origin=origin)[1]


def from_page(key: str, origin: str | None = ORIGIN) -> Client:
    return Client(headers={"Authorization": f"Bearer {key}", **({"Origin": origin} if origin else {})})


def test_a_publishable_key_rates_answers_of_its_agent_from_its_site(decision: Decision) -> None:
    answer = send(str(decision.pk), {"thumb": "up"}, from_page(publishable()))
    assert (answer.status_code, answer.json()["rater"]) == (201, f"support-bot on {ORIGIN}")
    assert answer["Access-Control-Allow-Origin"] == "*"


@pytest.mark.parametrize("origin", ["https://evil.example", "http://shop.example", "null", None])
def test_a_publishable_key_is_refused_elsewhere(decision: Decision, origin: str | None) -> None:
    refused(send(str(decision.pk), {"thumb": "up"}, from_page(publishable(), origin)), 403, "forbidden")


def test_a_publishable_key_rates_no_other_agent_and_no_unknown_decision(decision: Decision) -> None:
    client = from_page(publishable("filer"))
    refused(send(str(decision.pk), {"thumb": "up"}, client), 403, "forbidden")
    refused(send(str(uuid.uuid4()), {"thumb": "up"}, client), 404, "not_found")
    refused(send(str(decision_id_new()), {"thumb": "up"}, client), 503, "pending")


@pytest.mark.parametrize(("method", "address", "scope"), ENDPOINTS, ids=[f"{m} {a}" for m, a, _ in ENDPOINTS])
def test_a_publishable_key_opens_no_other_endpoint(method: str, address: str, scope: str) -> None:
    if not address.startswith("/api/feedback/"):
        client = from_page(publishable())
        answer = client.generic(method, address, b"{}", content_type="application/json")
        assert (answer.status_code, error_of(answer)["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"agent": "a"}, "origin"),
        ({"origin": ORIGIN}, "agent"),
        ({"agent": "A b", "origin": ORIGIN}, "agent"),
        ({"agent": "a", "origin": "shop.example"}, "origin"),
        ({"agent": "a", "origin": "https://shop.example/page"}, "origin"),
        ({"agent": "a", "origin": "*"}, "origin"),
        ({"agent": "a", "origin": ORIGIN, "scopes": ["rate", "read"]}, "scopes"),
        ({"agent": "a", "origin": ORIGIN, "scopes": ["ingest"]}, "scopes"),
    ],
    ids=str,
)
def test_a_publishable_key_only_rates_one_agent_on_one_site(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(KeyRefused) as refusal:
        key_create("k", **{"scopes": ["rate"], **options})
    assert set(refusal.value.fields) == {fault}


@pytest.mark.usefixtures("written_at_once", "support_bot")
def test_a_completion_hands_out_a_token_plain_and_streamed(parrot: Parrot) -> None:
    api = ApiClient("ingest")
    body = {"model": "support-bot", "messages": [{"role": "user", "content": "hello"}]}
    plain = api.post("/v1/chat/completions", body)
    routing = plain.json()["ratchet"]  # type: ignore[attr-defined]
    assert routing["decision"] == plain.json()["id"]  # type: ignore[attr-defined]
    assert plain["X-Ratchet-Feedback"] == routing["feedback_token"]
    assert routing["feedback_url"] == f"http://testserver/feedback/{routing['feedback_token']}"
    streamed: Any = api.post("/v1/chat/completions", {**body, "stream": True})
    chunks = b"".join(streamed.streaming_content).decode().strip().split("\n\n")
    last = json.loads(chunks[-2].removeprefix("data: "))
    for token in (
        routing["feedback_token"],
        last["ratchet"]["feedback_token"],
        streamed["X-Ratchet-Feedback"],
    ):
        assert send(token, {"thumb": "up"}).status_code == 201
    rated = Rating.objects.filter(superseded_by=None).values_list("decision", flat=True)
    assert {str(pk) for pk in rated} == {routing["decision"], last["id"]}


@pytest.mark.usefixtures("written_at_once", "support_bot")
@pytest.mark.parametrize("address", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_other_dialects_hand_out_a_token_too(parrot: Parrot, address: str, stream: bool) -> None:
    body = {"model": "support-bot", "stream": stream, "max_tokens": 9, "messages": [], "input": "hello"}
    del body["max_tokens" if address == "/v1/responses" else "input"]
    del body["messages"]
    if address == "/v1/messages":
        body["messages"] = [{"role": "user", "content": "hello"}]
    answer: Any = ApiClient("ingest").post(address, body)
    assert answer.status_code == 200, answer.content
    text = b"".join(answer.streaming_content).decode() if stream else answer.content.decode()
    token = answer["X-Ratchet-Feedback"]
    assert token.split(".")[0] in text
    assert '"feedback_token": "' in text or '"feedback_token":"' in text
    assert send(token, {"stars": 4}).status_code == 201


def test_a_recorded_decision_and_a_decided_one_hand_out_a_token() -> None:
    made = ApiClient("ingest").post("/api/decisions/", decision_body()).json()  # type: ignore[attr-defined]
    assert made["feedback_url"].endswith(f"/feedback/{made['feedback_token']}")
    assert send(made["feedback_token"], {"score": 0.25}).status_code == 201
    assert str(Rating.objects.get().decision_id) == made["id"]


def test_the_form_stores_what_is_sent_and_opening_a_link_stores_nothing(decision: Decision) -> None:
    path = f"/feedback/{token_sign(decision.pk)}"
    client = Client(enforce_csrf_checks=True)
    shown = client.get(path, {"thumb": "down"})
    assert shown.status_code == 200
    assert b'value="down" checked' in shown.content
    assert b"On its way." not in shown.content
    assert not Rating.objects.exists()
    form = {"id": uuid.uuid4(), "thumb": "down", "correction": "It left today.", "notes": "late"}
    sent = [client.post(path, form) for _ in range(2)]
    assert [answer.status_code for answer in sent] == [302, 302]
    rating = Rating.objects.get()
    assert (rating.thumb, rating.correction, rating.notes) == ("down", "It left today.", "late")
    assert rating.rater == APP_USER
    assert client.get(sent[0]["Location"]).status_code == 200


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"thumb": ""}, 400),
        ({"thumb": "sideways"}, 400),
        ({"id": "nonsense", "thumb": "up"}, 400),
        ({"thumb": "up", "notes": "x" * limits.FEEDBACK_BYTES}, 413),
    ],
    ids=["nothing", "thumb", "id", "too large"],
)
def test_a_wrong_form_says_why(decision: Decision, form: dict[str, str], status: int) -> None:
    answer = Client().post(f"/feedback/{token_sign(decision.pk)}", {"id": str(uuid.uuid4()), **form})
    assert answer.status_code == status
    assert b'role="alert"' in answer.content or status == 413
    assert not Rating.objects.exists()


def test_the_form_of_a_token_that_rates_nothing(decision: Decision) -> None:
    form = {"id": uuid.uuid4(), "thumb": "up"}
    assert Client().post(f"/feedback/{token_sign(decision.pk)}x", form).status_code == 403
    assert Client().post(f"/feedback/{token_sign(uuid.uuid4())}", form).status_code == 404
    pending = Client().post(f"/feedback/{token_sign(decision_id_new())}", form)
    assert (pending.status_code, pending["Retry-After"]) == (503, "1")
    assert not Rating.objects.exists()
