"""A user's own agents: with a file and a dotted path, or without code in the admin."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.test import Client

from feedback.cache import forget_all
from feedback.services import decision_record
from rl.agents import AGENTS, agent_facts, agent_register, get_agent
from rl.agents.base import InvalidResponse
from rl.agents.filer import AGENT as FILER
from rl.agents.template import TemplateAgent
from rl.models import AgentDefinition
from tests.support.api_client import person

SCHEMA = {"type": "object", "properties": {"team": {"enum": ["sales", "help"]}}, "required": ["team"]}
FACTS: dict[str, Any] = {
    "slug": "router",
    "title": "Router",
    "system_prompt": "Which team? Answer in JSON.",
    "template": "ticket: {ticket}\nknown: {known}",
    "schema": SCHEMA,
    "suggested_tags": ["wrong team"],
}

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


@pytest.mark.django_db
def test_an_agent_without_code_is_known_everywhere() -> None:
    definition = AgentDefinition(**FACTS)
    definition.full_clean()
    definition.save()
    forget_all()
    agent = get_agent("router")
    assert agent.render({"ticket": "t", "known": "k"})[1]["content"] == "ticket: t\nknown: k"
    assert agent.response_schema() == SCHEMA
    assert agent_facts("router").suggested_tags == ("wrong team",)


@pytest.mark.django_db
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


@pytest.mark.django_db
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
