"""Masking before storage: placeholders for the model and the log, the words again for who asked."""

from __future__ import annotations

import json
import uuid
from typing import Any

import openai
import pytest
from django.core.exceptions import ValidationError
from django.core.files.uploadedfile import SimpleUploadedFile

from feedback.cache import forget_all
from feedback.models import AgentSettings, Decision, Rating, Trace, masks_read
from feedback.recording.ingest import trace_record
from feedback.services import comparison_submit, decision_record, rating_submit
from feedback.storage.masking import Masker
from rl.serving.assembly import Restorer
from rl.serving.base import Piece
from rl.serving.gateway import recorder
from tests.support.api_client import ApiClient
from tests.support.hosted import hosted, model_server, recorded  # noqa: F401
from tests.support.serving import Parrot, openai_client, parrot_only, policy_made  # noqa: F401
from tests.support.stub_openai import ModelServer

database = pytest.mark.django_db(transaction=True)
MASKS = ["email", "phone", {"name": "order", "pattern": r"A-\d+"}]
ASKED = "I am ada@example.org, order A-77 and A-78; call +49 30 1234567. Again: ada@example.org"
MASKED = "I am <EMAIL_1>, order <ORDER_1> and <ORDER_2>; call <PHONE_1>. Again: <EMAIL_1>"
SECRETS = ("ada@example.org", "A-77", "1234567")


def masker() -> Masker:
    return Masker(masks_read(MASKS))


# --- Words and placeholders ---------------------------------------------------------------------------------------


def test_equal_words_get_the_same_placeholder_and_come_back() -> None:
    one = masker()
    assert one.masked({"a": [ASKED], "n": 3}) == {"a": [MASKED], "n": 3}
    assert one.restored(MASKED) == ASKED
    assert one.restored("<EMAIL_9> <NOBODY_1>") == "<EMAIL_9> <NOBODY_1>"


def test_masking_again_changes_nothing_and_numbers_go_on() -> None:
    assert masker().masked(MASKED) == MASKED
    assert masker().masked([MASKED, "bob@example.org"]) == [MASKED, "<EMAIL_2>"]


@pytest.mark.parametrize(
    ("name", "hit", "miss"),
    [
        ("email", "a.b+c@mail.example.org", "user at example"),
        ("iban", "DE89 3704 0044 0532 0130 00", "DE89 short"),
        ("card", "4111 1111 1111 1111", "2026-11-27"),
        ("phone", "+49 30 1234567", "2026-11-27 02:12"),
    ],
)
def test_named_patterns(name: str, hit: str, miss: str) -> None:
    one = Masker(masks_read([name]))
    assert one.masked(f"x {hit} y") == f"x <{name.upper()}_1> y"
    assert one.masked(miss) == miss


@pytest.mark.parametrize(
    "given",
    ["email", ["nobody"], [{"name": "x"}], [{"name": "X Y", "pattern": "a"}], [{"name": "x", "pattern": "("}],
     [{"name": "x", "pattern": "a*"}], [{"name": "x", "pattern": ".+"}]],
)  # fmt: skip
def test_masks_that_cannot_be_are_refused(given: Any) -> None:
    with pytest.raises(ValidationError, match="masks"):
        AgentSettings(agent="bot", masks=given).clean()


@pytest.mark.parametrize("size", [1, 3, 200])
def test_a_placeholder_in_two_pieces_comes_back_whole(size: int) -> None:
    one = masker()
    said = one.masked(f"{ASKED} <b")
    restorer = Restorer(one)
    pieces = [Piece.of_text(said[at : at + size]) for at in range(0, len(said), size)]
    call = json.dumps({"to": "<EMAIL_1>"})
    calls = [
        Piece({"tool_calls": [{"index": 0, "function": {"arguments": call[at : at + size]}}]})
        for at in range(0, len(call), size)
    ]
    found = [out for piece in [*pieces, *calls, Piece(end=True)] for out in restorer.pieces(piece)]
    assert "".join(piece.text for piece in found) == f"{ASKED} <b"
    arguments = [one["function"]["arguments"] for p in found for one in p.delta.get("tool_calls", ())]  # type: ignore[attr-defined]
    assert json.loads("".join(arguments)) == {"to": "ada@example.org"}
    assert found[-1].end


# --- What is stored -------------------------------------------------------------------------------------------------


@pytest.fixture
def masked(db: None) -> None:
    AgentSettings.objects.create(agent="bot", masks=MASKS)
    forget_all()


def nothing_stored(home: Any) -> None:
    """No table of feedback and no file of the data folder has a masked word."""
    rows = [*Decision.objects.values(), *Rating.objects.values(), *Trace.objects.values()]
    text = json.dumps(rows, default=str)
    files = b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())
    for secret in SECRETS:
        assert secret not in text
        assert secret.encode() not in files


@database
def test_whatever_is_recorded_is_masked(masked: None, settings: Any) -> None:
    facts = {
        "messages": ASKED,
        "response": ASKED,
        "reasoning": ASKED,
        "metadata": {"note": ASKED},
        "state": {"q": ASKED},
    }
    one = decision_record(agent="bot", **facts).row
    other = decision_record(agent="bot", messages=ASKED, response="no").row
    assert (one.response, one.metadata["note"], one.state) == (MASKED, MASKED, {"q": MASKED})
    assert one.prompt_hash == other.prompt_hash
    for decision in (one, one.pk):
        rating_submit(decision=decision, rater="ann", correction=ASKED, notes=ASKED)
    comparison_submit(left=one, right=other, preference="left", rater="ann", notes=ASKED)
    trace_record(agent="bot", steps=[{"kind": "decision", "name": "d", "messages": ASKED, "response": ASKED}])
    nothing_stored(settings.RATCHET_HOME)
    assert decision_record(agent="filer", messages=ASKED, response="r").row.messages[0]["content"] == ASKED


@database
def test_training_files_are_masked_by_the_patterns_of_all_agents(masked: None, settings: Any) -> None:
    api = ApiClient("operate", "read")
    turns = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ASKED}]
    line = json.dumps({"messages": turns}).encode()
    name = api.client.post(
        "/v1/files",
        {
            "purpose": "fine-tune",
            "file": SimpleUploadedFile("t.jsonl", b"\xef\xbb\xbf" + line + b"\n\n" + line),
        },
    ).json()["id"]
    content: Any = api.get(f"/v1/files/{name}/content")
    kept = [json.loads(row) for row in b"".join(content.streaming_content).splitlines()]
    assert kept == [{"messages": [turn | {"content": MASKED} for turn in turns]}] * 2
    nothing_stored(settings.RATCHET_HOME)


@database
@pytest.mark.parametrize("stream", [False, True])
def test_the_model_sees_placeholders_and_the_caller_the_words(
    client: openai.OpenAI, stub: ModelServer, masked: None, settings: Any, stream: bool
) -> None:
    hosted(stub.url)
    stub.said = "Mail to <EMAIL_1> about <ORDER_2>, or bob@example.org"
    made = client.chat.completions.create(
        model="bot", messages=[{"role": "user", "content": ASKED}], stream=stream, metadata={"note": ASKED}
    )
    said = (
        "".join(chunk.choices[0].delta.content or "" for chunk in made if chunk.choices)
        if stream
        else made.choices[0].message.content
    )
    assert said.strip() == "Mail to ada@example.org about A-78, or bob@example.org"
    assert stub.bodies[0]["messages"][-1]["content"] == MASKED
    nothing_stored(settings.RATCHET_HOME)  # before the recorder's thread is done
    (row,) = recorded()
    assert row.messages[-1]["content"] == MASKED
    assert row.response.strip() == "Mail to <EMAIL_1> about <ORDER_2>, or <EMAIL_2>"
    nothing_stored(settings.RATCHET_HOME)


@database
def test_tools_are_masked_and_choices_beside_the_first_get_their_words(
    client: openai.OpenAI, stub: ModelServer, masked: None
) -> None:
    hosted(stub.url)
    two = [
        {"index": n, "message": {"role": "assistant", "content": "<EMAIL_1>"}, "finish_reason": "stop"}
        for n in range(2)
    ]
    stub.sends = ("application/json", json.dumps({**stub.completion(), "choices": two}).encode())
    tool = {"type": "function", "function": {"name": "mail", "description": "Mails ada@example.org"}}
    made = client.chat.completions.create(
        model="bot",
        messages=[{"role": "user", "content": ASKED}],
        tools=[tool],  # type: ignore[list-item]
    )
    assert stub.bodies[0]["tools"][0]["function"]["description"] == "Mails <EMAIL_1>"
    assert made.choices[0].message.content == "ada@example.org"
    assert "ada@example.org" in str(made.ratchet["other_choices"])  # type: ignore[attr-defined]
    (row,) = recorded()
    assert "ada@example.org" not in str(row.metadata)


@database
def test_a_retry_gets_its_words_again(client: openai.OpenAI, stub: ModelServer, masked: None) -> None:
    hosted(stub.url)
    stub.said = "Mail to <EMAIL_1>"
    for _ in range(2):
        completion = client.chat.completions.create(
            model="bot", messages=[{"role": "user", "content": ASKED}], extra_headers={"Idempotency-Key": "k"}
        )
        assert completion.choices[0].message.content == "Mail to ada@example.org"
        assert recorder.drain(10)
    assert len(stub.bodies) == 1


@database
def test_decide_answers_in_words_and_stores_none(parrot: Parrot, masked: None, settings: Any) -> None:
    policy_made("bot-v1", agent="bot")
    body = {"id": str(uuid.uuid4()), "agent": "bot", "messages": ASKED, "candidates": ["refund A-77", "no"]}
    api = ApiClient("ingest")
    said = api.post("/api/decide/", body)
    assert said.status_code == 201, said.content
    assert said.json()["messages"][0]["content"] == ASKED
    assert said.json()["response"] in body["candidates"]
    assert MASKED in str(parrot.asked)
    assert recorder.drain(10)
    assert Decision.objects.get().candidates[0]["response"] == "refund <ORDER_1>"  # type: ignore[index]
    again = api.post("/api/decide/", body)
    assert (again.status_code, again.json()["messages"]) == (200, said.json()["messages"])
    assert again.json()["response"] == said.json()["response"]
    nothing_stored(settings.RATCHET_HOME)
