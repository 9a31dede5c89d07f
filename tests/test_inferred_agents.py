"""What an agent's recorded responses say about its answers, and judging and serving it by that."""

import json
from io import StringIO
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.test import Client

from feedback.cache import forget_all
from feedback.services import decision_record, rating_submit
from rl.agents import AGENTS, agent_facts, agent_register, get_agent
from rl.agents.base import InvalidResponse
from rl.agents.filer import AGENT as FILER
from rl.agents.inference import agent_inferred, closed_answers
from rl.agents.template import TemplateAgent
from rl.models import AgentDefinition, Evaluation, Policy
from rl.models.agent_definitions import agent_served
from rl.registry.gate_evidence import policy_judge
from rl.serving.base import Ask, Model
from rl.serving.fallback import _ask_for_model
from tests.support.api_client import ApiClient, person
from tests.support.serving import Parrot, parrot_only, policy_made, written_by_the_asking_thread  # noqa: F401

pytestmark = pytest.mark.django_db

FILMS = ("Watch Heat.", "Watch Totoro.", "Watch Alien.")


def recorded(count: int = 60) -> list[tuple[str, str]]:
    return [(f"What shall I watch on day {i}?", FILMS[i % 3]) for i in range(count)]


def test_an_app_that_answers_with_one_of_three_texts_has_a_closed_set_of_answers() -> None:
    agent = agent_inferred("movie-night", recorded())
    assert set(agent.answers) == set(FILMS)
    assert agent.is_valid("Watch Heat. ")
    assert not agent.structured
    assert agent.discrete
    with pytest.raises(InvalidResponse, match="one of the 3 answers it was recorded with, found 'Open Plans"):
        agent.parse("Open Plans.")


@pytest.mark.parametrize("count", [0, 39])
def test_few_responses_show_nothing(count: int) -> None:
    assert agent_inferred("movie-night", recorded(count)) is None


def test_a_set_is_closed_where_hardly_a_new_text_is_to_be_expected() -> None:
    # Good's estimate of what was never seen: 2 of 40 texts stand there once, 5 %; then 3 of 41
    texts = ["a"] * 20 + ["b"] * 18 + ["c", "d"]
    assert set(closed_answers(texts)) == {"a", "b", "c", "d"}
    assert closed_answers([*texts, "e"]) == ()
    assert closed_answers(["a"] * 100) == ()  # one answer is no choice
    assert closed_answers([str(i % 33) for i in range(3_300)]) == ()  # 33 are not listed any more
    assert len(closed_answers([str(i % 32) for i in range(3_200)])) == 32


@pytest.mark.parametrize(("replies", "given", "closed"), [(23, 40, False), (6, 10, True), (6, 8, False)])
def test_repeated_canned_replies_are_a_closed_set(replies: int, given: int, closed: bool) -> None:
    texts = [
        f"Thank you for writing to us, we will come back to you about matter {chr(97 + i % replies)} today."
        for i in range(replies * given)
    ]
    assert bool(closed_answers(texts)) == closed
    rows = [(f"message {i}", text) for i, text in enumerate(texts)]
    assert (agent_inferred("desk", rows) is not None) == closed


def test_options_that_stand_in_the_prompt_are_not_closed() -> None:
    """Another prompt lists other options: what was recorded is no limit, but the form stays."""
    rows = [
        (f"drinks: {a}, {b}", json.dumps({"drink": a})) for a, b in [("tea", "milk"), ("cocoa", "tea")] * 30
    ]
    agent = agent_inferred("barista", rows)
    assert agent.answers == ()
    assert agent.structured
    assert agent.discrete
    assert agent.is_valid('{"drink": "lemonade"}')
    assert not agent.is_valid('{"folder": "tea"}')
    assert not agent.is_valid('{"drink": 7}')
    assert not agent.is_valid("tea")


def test_wordings_and_free_text() -> None:
    # objects of wordings have a form and are not told the same by it
    rows = [("hello", json.dumps({"reply": f"Dear customer {i}, ...", "urgency": i / 2})) for i in range(50)]
    agent = agent_inferred("letters", rows)
    assert agent.schema["properties"] == {"reply": {"type": "string"}, "urgency": {"type": "number"}}
    assert agent.structured
    assert not agent.discrete
    # free text stays free
    assert agent_inferred("letters", [("hello", f"Dear customer {i}") for i in range(100)]) is None


def test_an_agent_is_inferred_from_what_its_app_and_people_wrote_and_not_from_what_this_machine_wrote() -> (
    None
):
    for prompt, response in recorded(48):
        decision_record(
            agent="movie-night", messages=[{"role": "user", "content": prompt}], response=response
        )
    for i in range(20):
        decision_record(
            agent="movie-night",
            messages=[{"role": "user", "content": "?"}],
            response=f"ramble {i}",
            metadata={"serving": {"backend": "in-process"}},
            reserved=True,
        )
    first = decision_record(
        agent="movie-night", messages=[{"role": "user", "content": "Any idea?"}], response=FILMS[0]
    ).row
    for rater in ("lea", "tom"):
        rating_submit(decision=first, rater=rater, thumb="down", correction="Watch Amelie.")
    assert set(agent_served("movie-night").answers) == {*FILMS, "Watch Amelie."}
    assert get_agent("movie-night").answers == ()  # training data is taken as it comes
    AgentDefinition.objects.create(slug="movie-night", title="Movies")
    forget_all()
    assert agent_served("movie-night").answers == ()  # a definition says otherwise


def test_what_people_corrected_to_is_the_form_where_the_app_answers_otherwise() -> None:
    for number in range(45):
        made = decision_record(
            agent="movie-night",
            messages=[{"role": "user", "content": f"Any idea for {number}?"}],
            response=f"Well, what about number {number} of my list?",
        ).row
        right = {"film": {"title": FILMS[number % 3], "stars": number % 5}, "seen": number}
        rating_submit(decision=made, rater="lea", thumb="down", correction=json.dumps(right))
    forget_all()
    agent = agent_served("movie-night")
    assert agent.structured
    assert agent.discrete
    assert agent.is_valid('{"film": {"title": "Watch Heat.", "stars": 2}, "seen": 7}')


def test_built_in_agents_are_what_they_are() -> None:
    assert agent_served("filer") is get_agent("filer")


@pytest.fixture
def films() -> None:
    for prompt, response in recorded(45):
        decision_record(
            agent="support-bot", messages=[{"role": "user", "content": prompt}], response=response
        )
    forget_all()


@pytest.mark.usefixtures("written_at_once", "films")
def test_a_policy_answers_out_of_the_closed_set_and_an_apps_own_model_as_it_pleases(parrot: Parrot) -> None:
    api = ApiClient("ingest")
    asking = {"model": "support-bot", "messages": [{"role": "user", "content": "And tonight?"}]}
    api.post("/v1/chat/completions", asking)
    policy_made("support-bot-v3", "support-bot")
    forget_all()
    api.post("/v1/chat/completions", asking)
    api.post("/v1/chat/completions", {**asking, "response_format": {"type": "text"}})
    # what the app's own model answered the first time is one of its answers from then on
    assert [set(ask.answers) for ask, _ in parrot.asked] == [set(), {*FILMS, parrot.said}, set()]


@pytest.mark.usefixtures("written_at_once", "films")
def test_deciding_without_candidates_chooses_out_of_the_closed_set(parrot: Parrot) -> None:
    policy_made("support-bot-v3", "support-bot")
    response = ApiClient("ingest").post("/api/decide/", {"agent": "support-bot", "messages": "And tonight?"})
    body = response.json()
    assert response.status_code == 201
    assert {candidate["response"] for candidate in body["candidates"]} == set(FILMS)
    assert body["response"] == "Watch Heat."  # the shortest: the parrot gives each character a nat
    assert body["propensity"] == 1.0


@pytest.mark.parametrize(("name", "answers"), [("base", ()), ("movie-night-v1", FILMS)])
def test_the_base_model_is_not_held_to_answers_it_never_saw(name: str, answers: tuple[str, ...]) -> None:
    ask = Ask([{"role": "user", "content": "?"}], answers=FILMS)
    assert tuple(_ask_for_model(ask, Model(name, "bundled")).answers) == answers


@pytest.mark.campaign
@pytest.mark.training
def test_a_policy_over_a_closed_set_is_judged_by_its_choices_and_not_by_its_distance() -> None:
    """Of 60 starred answers a third is held out; base and policy choose among the three texts, so all are valid."""
    for i, (prompt, response) in enumerate(recorded(90)):
        made = decision_record(
            agent="movie-night", messages=[{"role": "user", "content": prompt}], response=response
        ).row
        rating_submit(decision=made, rater="lea", stars=5 if i % 3 == 0 else 1)
    call_command("train_kto", agent="movie-night", max_steps=1, stdout=StringIO(), stderr=StringIO())
    policy = Policy.objects.get(kind="adapter")
    call_command(
        "evaluate_model", policy=policy.name, compare="incumbent", stdout=StringIO(), stderr=StringIO()
    )
    evaluation = Evaluation.objects.get()
    assert evaluation.figures["valid_rate"]["value"] == 1.0
    assert {answer["answer"] for answer in evaluation.evidence["answers"]} <= set(FILMS)
    assert "kl" not in evaluation.figures
    report = policy_judge(policy, "champion")
    assert {verdict.rule: verdict.outcome for verdict in report.verdicts}["kl"] == "not_applicable"


SCHEMA = {"type": "object", "properties": {"team": {"enum": ["sales", "help"]}}, "required": ["team"]}
FACTS: dict[str, Any] = {"slug": "router", "title": "Router", "system_prompt": "Which team? Answer in JSON."}
FACTS |= {"template": "ticket: {ticket}\nknown: {known}", "schema": SCHEMA, "suggested_tags": ["wrong team"]}

MINE = TemplateAgent(slug="mine", title="Mine", description="", template="{question}")
ANOTHER_FILER = TemplateAgent(slug="filer", title="Filer", description="")


@pytest.fixture
def registered() -> Any:
    before = dict(AGENTS)
    yield
    AGENTS.clear()
    AGENTS.update(before)


def test_a_template_takes_its_values_from_the_state() -> None:
    agent = TemplateAgent(
        slug="router", title="", description="", template=FACTS["template"], system_prompt="S"
    )
    state = {"ticket": "my {known} parcel", "known": ["late", "paid"]}
    assert agent.render(state) == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": 'ticket: my {known} parcel\nknown: ["late", "paid"]'},
    ]
    with pytest.raises(ValueError, match="the state needs 'known'; found ticket"):
        agent.render({"ticket": "x"})


def test_an_answer_must_fit_the_schema() -> None:
    agent = TemplateAgent(slug="router", title="", description="", schema=SCHEMA)
    assert agent.structured
    assert agent.parse('{"team": "help"}') == {"team": "help"}
    for response in ("help", '{"team": "boss"}', "{}", '{"team": "help", "team": "sales"}', " "):
        with pytest.raises(InvalidResponse, match="expected"):
            agent.parse(response)
    assert MINE.parse("anything") == {"text": "anything"}
    assert not MINE.structured


def test_known_answers_are_its_ground_truth() -> None:
    agent = TemplateAgent(slug="router", title="", description="", schema=SCHEMA)
    state = {"question": "?", "right": {"team": "help"}}
    assert agent.ground_truth(state) == ['{"team": "help"}']
    assert agent.quality(state, '{ "team": "help" }') == 1.0
    assert agent.quality({"question": "?"}, '{"team": "help"}') is None


@pytest.mark.usefixtures("registered")
def test_an_agent_from_outside_is_known() -> None:
    agent_register("mine", MINE)
    assert get_agent("mine") is MINE
    agent_register("filer", FILER)  # known already


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("found", "said"),
    [
        (3.14, "expected an Agent"),
        (ANOTHER_FILER, "'filer' is taken"),
        (TemplateAgent(slug="Not A Slug", title="", description=""), "expected a slug"),
    ],
)
def test_what_is_no_agent_is_refused(found: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        agent_register("mine", found)


def test_an_agent_without_code_is_known_everywhere() -> None:
    definition = AgentDefinition(**FACTS)
    definition.full_clean()
    definition.save()
    forget_all()
    agent = get_agent("router")
    assert agent.render({"ticket": "t", "known": "k"})[1]["content"] == "ticket: t\nknown: k"
    assert agent.response_schema() == SCHEMA
    assert agent_facts("router").suggested_tags == ("wrong team",)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("slug", "filer", "a file of its own"),
        ("slug", "Not A Slug", "valid"),
        ("template", "no place", r"expected at least one \{name\}"),
        ("schema", {"type": "nonsense"}, "expected a JSON schema"),
        ("schema", {"$ref": "http://example.org/x.json"}, "stay within it"),
        ("schema", [1], "an object"),
        ("suggested_tags", "late", "list of texts"),
        ("max_new_tokens", 0, "1 to 8192"),
    ],
)
def test_a_definition_that_cannot_work_is_refused_by_field(field: str, value: Any, said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        AgentDefinition(**{**FACTS, field: value}).full_clean()
    assert field in refused.value.message_dict
    with pytest.raises(ValidationError, match=said):
        AgentDefinition(**{**FACTS, field: value}).full_clean()


def test_an_operator_defines_an_agent_in_the_admin_and_a_rater_cannot(client: Client) -> None:
    user = person("olga", "operator")
    user.is_staff = True
    user.save()
    client.force_login(user)
    page = "/admin/rl/agentdefinition/add/"
    assert client.get(page).status_code == 200
    sent = {
        **FACTS,
        "schema": '{"type": "object"}',
        "suggested_tags": "[]",
        "max_new_tokens": 64,
        "description": "",
    }
    assert client.post(page, sent).status_code == 302
    forget_all()
    decision_record(agent="router", messages="t", response="{}")
    assert get_agent("router").max_new_tokens == 64
    client.force_login(person("rita", "rater"))
    assert client.get(page).status_code in (302, 403)


def test_lines_of_a_form_stand_in_a_definition_as_they_were_typed() -> None:
    definition = AgentDefinition(**{**FACTS, "system_prompt": "one\r\ntwo", "template": "a\r\n{question}"})
    definition.clean()
    assert (definition.system_prompt, definition.template) == ("one\ntwo", "a\n{question}")
