"""The JavaScript client in Node, against Ratchet's own API and against a server that fails."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from feedback.accounts.authentication import key_create
from feedback.models import Decision, Outcome, Rating
from tests.support.serving import Parrot, parrot_only, policy_made  # noqa: F401
from tests.support.stub_openai import ModelServer

CLIENT = Path(__file__).resolve().parent.parent / "clients" / "js"
ID = "7b0d8f4e-6a51-4d0e-9a2e-0c4a58f0a001"


def node(script: str, **given: str) -> Any:
    """What a module prints as JSON; `client` is a client of the agent `support-bot`."""
    program = f"""
import {{ Client, RequestRefused, ServerUnavailable }} from {json.dumps((CLIENT / "ratchet.js").as_uri())};
const given = {json.dumps(given)};
const client = new Client("support-bot", {{ url: given.url, apiKey: given.key, timeoutMs: 5000 }});
const caught = (call) => call().catch((error) => ({{ error: error.name, ...error }}));
{script}
"""
    done = subprocess.run(
        ["node", "--input-type=module", "-"],
        input=program,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.django_db(transaction=True)
def test_the_readmes_calls_are_stored(live_server: Any, parrot: Parrot) -> None:
    policy_made("support-bot-v1", agent="support-bot")
    _, key = key_create("app", ["ingest", "rate"])
    code = re.search(r"```js\n.*?const decision", (CLIENT / "README.md").read_text("utf-8"), re.DOTALL)
    calls = (
        (CLIENT / "README.md").read_text("utf-8")[code.end() - len("const decision") :].partition("```")[0]
    )
    found = node(calls + "console.log(JSON.stringify([decision, own]))", url=live_server.url, key=key)
    decision, own = Decision.objects.get(pk=found[0]["id"]), Decision.objects.get(pk=found[1]["id"])
    expected = ("user-7", found[0]["policy"], found[0]["response"])
    assert (decision.unit, decision.policy, decision.response) == expected
    assert (own.policy, own.response) == ("rules-v1", "sales")
    expected = {(decision.pk, "up", None), (own.pk, "down", "billing")}
    assert set(Rating.objects.values_list("decision", "thumb", "correction")) == expected
    assert Outcome.objects.get().value == 0.0


@pytest.mark.django_db(transaction=True)
def test_a_refusal_names_its_fields_and_is_not_repeated(live_server: Any) -> None:
    _, key = key_create("app", ["ingest", "rate"])
    script = f"""
const wrong = await caught(() => client.record("Where?", "There", {{ id: "{ID}", propensity: 7 }}));
const unknown = await caught(() => client.rate("{ID}", {{ thumb: "up" }}));
const invalid = await caught(() => client.rate("{ID}", {{}}));
const nobody = await caught(() => client.rate({{}}, {{ thumb: "up" }}));
console.log(JSON.stringify([wrong, unknown, invalid, nobody]));
"""
    wrong, unknown, invalid, nobody = node(script, url=live_server.url, key=key)
    assert (wrong["error"], wrong["status"], set(wrong["fields"])) == ("RequestRefused", 400, {"propensity"})
    assert (unknown["error"], unknown["status"]) == ("RequestRefused", 404)
    assert invalid["error"] == nobody["error"] == "TypeError"
    assert Decision.objects.count() == Rating.objects.count() == 0


@pytest.mark.django_db(transaction=True)
def test_a_token_rates_its_answer_without_a_key(live_server: Any) -> None:
    _, key = key_create("app", ["ingest"])
    script = """
const decision = await client.record("Where?", "There");
const token = decision.feedback_token;
const page = new Client("support-bot", { url: given.url });
const rated = await page.feedback(token, { thumb: "down", correction: "Here" });
const forged = await caught(() => page.feedback(token + "x", { thumb: "up" }));
const wrong = await caught(() => page.feedback(token, { stars: 9 }));
const nothing = await caught(() => page.feedback("../decisions/", { thumb: "up" }));
console.log(JSON.stringify([rated, forged, wrong, nothing]));
"""
    rated, forged, wrong, nothing = node(script, url=live_server.url, key=key)
    assert (forged["status"], forged["code"]) == (403, "token_invalid")
    assert (wrong["status"], set(wrong["fields"])) == (400, {"stars"})
    assert nothing["error"] == "TypeError"
    row = Rating.objects.get()
    assert (str(row.pk), row.thumb, row.correction) == (rated["id"], "down", "Here")


def test_a_failing_server_is_asked_again_under_one_id() -> None:
    stub = ModelServer()
    stub.statuses, stub.retry_after = [503, 0, 429], "0"
    found = node(
        'console.log(JSON.stringify(await client.record("a", "b")))', url=f"http://127.0.0.1:{stub.port}"
    )
    assert found["object"] == "chat.completion"
    assert len(stub.bodies) == 4
    assert len({body["id"] for body in stub.bodies}) == 1


def test_a_server_that_stays_away_is_given_up_with_the_id_to_repeat() -> None:
    stub = ModelServer()
    stub.statuses, stub.retry_after = [503] * 9, "0"
    script = (
        f'console.log(JSON.stringify(await caught(() => client.outcome("{ID}", "won", 1, {{ id: "{ID}" }}))))'
    )
    found = node(script, url=f"http://127.0.0.1:{stub.port}")
    expected = ("ServerUnavailable", 503, ID, 5)
    assert (found["error"], found["status"], found["id"], len(stub.bodies)) == expected
