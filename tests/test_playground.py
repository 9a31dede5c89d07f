"""The playground: one question to several policies, answers recorded and rated side by side."""

import json
import re

import pytest
from django.test import Client

from feedback.models import Comparison, Decision, Rating
from feedback.services import decision_record
from rl.models import ServingSettings
from rl.serving.base import BackendFailed
from rl.serving.playground import question_read, question_text, system_prompt_recorded
from tests.support.serving import (  # noqa: F401
    Parrot,
    parrot_only,
    policy_made,
    written_by_the_asking_thread,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("written_at_once")]

PAGE = "/agents/support-bot/playground/"


@pytest.fixture
def asked_before() -> Decision:
    made = decision_record(
        agent="support-bot",
        messages=[{"role": "user", "content": "Where is my parcel?"}],
        response="On its way.",
    )
    return Decision.objects.get(pk=made.row.pk)


def ask(client: Client, *policies: str, question: str = "Where is my parcel?", **more: str) -> str:
    return client.post(PAGE, {"question": question, "policy": policies, **more}).content.decode()


def test_the_apps_answer_stands_beside(operator: Client, parrot: Parrot, asked_before: Decision) -> None:
    assert operator.get(PAGE).context["before"] is None
    assert operator.get(f"{PAGE}?decision={asked_before.pk}").context["before"]["decision"] == asked_before
    for _ in range(2):  # what was asked here is no answer of the app
        page = operator.post(PAGE, {"question": "Where is my parcel?", "policy": ["base"]})
        assert page.context["before"]["decision"] == asked_before


def test_each_answer_is_a_decision(operator: Client, parrot: Parrot, asked_before: Decision) -> None:
    policy_made("support-bot-v1", "support-bot")
    page = ask(operator, "base", "support-bot-v1")
    made = Decision.objects.exclude(pk=asked_before.pk)
    assert sorted(made.values_list("policy", flat=True)) == ["base", "support-bot-v1"]
    assert {row.metadata["playground"] for row in made} == {"olga"}
    assert page.count("hello there") == 2


def test_a_failure_hides_no_other(operator: Client, parrot: Parrot, asked_before: Decision) -> None:
    policy_made("support-bot-v1", "support-bot")
    parrot.failing["support-bot-v1"] = BackendFailed("the adapter is damaged")
    page = ask(operator, "base", "support-bot-v1")
    assert "the adapter is damaged" in page
    assert "hello there" in page


def test_candidates_have_probabilities(operator: Client, parrot: Parrot, asked_before: Decision) -> None:
    ServingSettings.objects.create(agent="support-bot", choose_temperature=1, epsilon=0)
    page = ask(operator, "base", candidates="yes\nno")
    # the parrot's log-probability is minus the length: e^-2 against e^-3
    assert [round(float(p), 2) for p in re.findall(r'class="num">([\d.]+)', page)] == [0.73, 0.27]


@pytest.mark.parametrize("verdict", ["up", "down"])
def test_answers_are_rated(operator: Client, parrot: Parrot, asked_before: Decision, verdict: str) -> None:
    ask(operator, "base")
    made = Decision.objects.get(policy="base")
    answer = operator.post(
        f"{PAGE}rate/", {"answers": str(made.pk), "decision": str(made.pk), "verdict": verdict}
    )
    assert answer.status_code == 302
    assert str(made.pk) in answer["Location"]
    rating = Rating.objects.get(decision=made)
    assert (rating.thumb, rating.rater) == (verdict, "olga")


def test_the_best_of_three_wins_twice(operator: Client, parrot: Parrot, asked_before: Decision) -> None:
    policy_made("support-bot-v1", "support-bot")
    policy_made("support-bot-v2", "support-bot", stage="candidate")
    ask(operator, "base", "support-bot-v1", "support-bot-v2")
    rows = {row.policy: row for row in Decision.objects.exclude(policy="")}
    ids = ",".join(str(row.pk) for row in rows.values())
    best = rows["support-bot-v2"]
    operator.post(f"{PAGE}rate/", {"answers": ids, "decision": str(best.pk), "verdict": "best"})
    found = Comparison.objects.all()
    assert {(row.left_id, row.preference) for row in found} == {(best.pk, "left")}
    assert {row.right_id for row in found} == {rows["base"].pk, rows["support-bot-v1"].pk}


def test_answers_of_another_agent_cannot_be_rated_here(operator: Client, asked_before: Decision) -> None:
    other = decision_record(
        agent="other-bot", messages=[{"role": "user", "content": "a"}], response="b"
    ).row.pk
    answer = operator.post(f"{PAGE}rate/", {"answers": str(other), "decision": str(other), "verdict": "up"})
    assert answer.status_code == 404


def test_a_recorded_prompt_fills_the_question(operator: Client, asked_before: Decision) -> None:
    page = operator.get(PAGE, {"decision": str(asked_before.pk)}).content.decode()
    assert re.search(r"<textarea name=\"question\"[^>]*>Where is my parcel\?</textarea>", page)


def test_the_recorded_system_prompt_is_asked_with(operator: Client, parrot: Parrot) -> None:
    policy_made("support-bot-v1", "support-bot")
    system = {"role": "system", "content": "Answer in JSON."}
    for number in range(3):
        asked = [system, {"role": "user", "content": f"question {number}"}]
        decision_record(agent="support-bot", messages=asked, response="{}")
    before = set(Decision.objects.values_list("pk", flat=True))
    assert "Answer in JSON." in ask(operator, "support-bot-v1", question="Where is it?")
    made = Decision.objects.exclude(pk__in=before).get()
    assert made.messages == [system, {"role": "user", "content": "Where is it?"}]
    page = operator.get(f"{PAGE}?decision={made.pk}").content.decode()
    assert re.search(r"<textarea[^>]*>\s*Where is it\?</textarea>", page)
    # a conversation says itself what it begins with
    ask(operator, "support-bot-v1", question='[{"role": "user", "content": "Hello"}]')
    assert Decision.objects.order_by("created_at", "id").last().messages == [
        {"role": "user", "content": "Hello"}
    ]  # type: ignore[union-attr]


def test_lines_that_a_form_sends_are_asked_as_they_were_typed(operator: Client, parrot: Parrot) -> None:
    policy_made("support-bot-v1", "support-bot")
    decision_record(agent="support-bot", messages="a", response="b")
    ask(operator, "support-bot-v1", question="one\r\ntwo")
    asked = Decision.objects.get(policy="support-bot-v1")
    assert asked.messages == [{"role": "user", "content": "one\ntwo"}]


def test_no_system_prompt_is_added_where_decisions_share_none() -> None:
    for content in ("Be kind.", "Be brief."):
        asked = [{"role": "system", "content": content}, {"role": "user", "content": "q"}]
        decision_record(agent="support-bot", messages=asked, response="a")
    assert system_prompt_recorded("support-bot") == ""


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({"question": "", "policy": ["base"]}, 200),
        ({"question": "hello"}, 400),
        ({"question": "hello", "policy": [f"p{n}" for n in range(7)]}, 400),
        ({"question": '{"unknown": 1}', "policy": ["nobody"]}, 200),
    ],
)
def test_what_cannot_be_asked_is_said_and_records_nothing(
    operator: Client, parrot: Parrot, asked_before: Decision, sent: dict[str, object], status: int
) -> None:
    answer = operator.post(PAGE, sent)
    assert answer.status_code == status
    assert 'class="fault"' in answer.content.decode()
    assert Decision.objects.count() == 1


@pytest.mark.parametrize("address", [f"{PAGE}?answers=x", "/agents/nobody-knows/playground/"])
def test_unknown_addresses_are_not_found(operator: Client, asked_before: Decision, address: str) -> None:
    assert operator.get(address).status_code == 404


@pytest.mark.parametrize(
    "text",
    ["Where is it?", '{"a": 1}', '[{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]'],
)
def test_a_question_survives_being_written_and_read(text: str) -> None:
    read = question_read(text)
    again = question_text(read, read) if isinstance(read, dict) else question_text(read, None)
    assert question_read(again) == read


def test_a_text_that_only_looks_like_json_is_a_text() -> None:
    assert question_read("{not json") == "{not json"
    assert question_read(json.dumps([1, 2])) == "[1, 2]"
