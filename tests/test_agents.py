"""The built-in agents: prompts, answers, made-up scenarios and the taste of the simulated rater."""

import json
import subprocess
import sys

import jsonschema
import pytest

from rl.agents import AGENTS, agent_facts, fixtures, get_agent, widgets
from rl.agents.base import ChoiceAgent, InvalidResponse, names_values
from rl.agents.worlds import scenarios_of

CHOOSERS = ("widgets", "fixtures", "filer")

WIDGET_STATE = {
    "question": "how did revenue change over last week",
    "context": {"on": "phone", "points": 12},
    "widgets": ["line_chart", "sparkline"],
}


def chooser(slug: str) -> ChoiceAgent:
    agent = AGENTS[slug]
    assert isinstance(agent, ChoiceAgent)
    return agent


def test_agents_are_found_by_their_files():
    names = "assistant filer fixtures librarian prioritizer retriever storer tool_agent widgets"
    assert sorted(AGENTS) == names.split()


@pytest.mark.django_db
def test_unknown_slug_answers_as_the_assistant_under_its_own_name():
    agent = get_agent("support-bot")
    assert agent.slug == "support-bot"
    assert agent.render({"question": "Hi"}) == AGENTS["assistant"].render({"question": "Hi"})
    assert agent.response_schema() is None
    assert agent_facts("support-bot").preview == "text"


@pytest.mark.parametrize(
    ("slug", "text"), [("widgets", "question"), ("fixtures", "scenario"), ("filer", "document")]
)
def test_prompt_shows_nothing_meant_for_the_rater_and_names_what_it_lacks(slug, text):
    agent = chooser(slug)
    state = agent.scenarios()[0].state
    hidden = {"intent", "situation", "kind", "partner", "filed_in"} & {*state}
    assert hidden
    assert agent.render({**state, **dict.fromkeys(hidden, "SECRET")}) == agent.render(state)
    missing = [(agent.options_key, options) for options in (None, [], "line_chart", [1, 2], [""], {"a": 1})]
    for key, value in (*missing, (text, "  ")):
        with pytest.raises(ValueError, match=key):
            agent.render({**state, key: value})


@pytest.mark.slow
@pytest.mark.parametrize("slug", CHOOSERS)
def test_every_candidate_is_valid_and_fits_the_schema(slug):
    agent = chooser(slug)
    for scenario in agent.scenarios()[::7]:  # schemas are slow to check
        schema = agent.response_schema(scenario.state)
        candidates = agent.candidates(scenario.state)
        assert len(set(candidates)) == 4
        for candidate in candidates:
            jsonschema.validate(agent.parse(candidate, scenario.state), schema)


def test_any_option_name_survives_the_answer():
    agent = chooser("filer")
    for option in ('say "hi"', "back\\slash", "Übersicht", "発注", "a/b c", "tab\there", "\ud800"):
        state = {"document": "d", "folders": [option, "other"]}
        assert agent.parse(agent.respond(option), state) == {"folder": option}


HOSTILE = (
    *("", "line_chart", "null", "NaN", "[" * 100_000, "9" * 10_000, "```json\n{}\n```"),
    *('["line_chart"]', '"line_chart"', '{"widget": "line_chart"', '{"widget": "line_chart"} and more'),
    *('{"widget": null}', '{"widget": ["line_chart"]}', '{"chart": "line_chart"}', '{"widget": "\x00"}'),
    *('{"widget": "line_chart", "why": "because"}', '{"widget": "bar_chart", "widget": "line_chart"}'),
    *('{"widget": "pie_chart"}', '{"widget": "Line_chart"}', '{"widget": "line_chart "}'),
)


def test_hostile_response_is_refused_and_an_unlisted_option_where_the_state_lists_others():
    for response in HOSTILE:
        with pytest.raises(InvalidResponse):
            AGENTS["widgets"].parse(response, WIDGET_STATE)
    assert AGENTS["widgets"].is_valid('{"widget": "pie_chart"}')


def test_scenarios_are_the_same_in_every_process():
    code = (
        "import hashlib, json; from rl.agents import AGENTS\n"
        "text = json.dumps([(s.key, s.state) for a in AGENTS.values() for s in a.scenarios()])\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("slug", "least"), [("widgets", 1000), ("fixtures", 300), ("filer", 300), ("assistant", 100)]
)
def test_scenarios_are_many_distinct_and_readable_and_taste_splits_them_two_and_two(slug, least):
    agent = AGENTS[slug]
    scenarios = agent.scenarios()
    assert len({scenario.key for scenario in scenarios}) == len(scenarios) >= least
    assert len({json.dumps(agent.render(scenario.state)) for scenario in scenarios}) == len(scenarios)
    assert all(json.loads(json.dumps(scenario.state)) == scenario.state for scenario in scenarios)
    assert agent.hidden_preference(scenarios[0].state, "   ") == 0.0
    for scenario in scenarios if slug in CHOOSERS else ():
        worth = sorted(agent.hidden_preference(scenario.state, c) for c in agent.candidates(scenario.state))
        assert worth[0] < worth[1] <= 0.2
        assert 0.8 <= worth[2] < worth[3]


def test_filer_ground_truth_is_where_the_document_ended_up():
    filer = chooser("filer")
    state = {"document": "d", "folders": ["A", "B"]}
    assert filer.ground_truth(state) is None
    assert filer.ground_truth({**state, "filed_in": "B"}) == ['{"folder": "B"}']
    assert filer.ground_truth({**state, "filed_in": ["A", "B"]}) == ['{"folder": "A"}', '{"folder": "B"}']
    assert AGENTS["widgets"].ground_truth(WIDGET_STATE) is None


def test_assistant_reads_any_state_and_passes_a_chat_on_as_it_is():
    assistant = AGENTS["assistant"]
    ticket = {"ticket": 7, "text": "broken", "drafts": ["a"], "facts": ["b"]}
    for state, content in (
        ({"question": "Why?"}, "Why?"),
        ({"prompt": "Say hi", "drafts": ["a"]}, "Say hi"),
        (ticket, '{"ticket": 7, "text": "broken"}'),
    ):
        assert assistant.render(state)[-1] == {"role": "user", "content": content}
    chat = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    assert assistant.render({"messages": chat}) == chat
    for messages in (None, "text", [], [123], [{}], [{"role": "user", "content": None}], [{"role": 1}]):
        with pytest.raises(ValueError, match="'messages'"):
            assistant.render({"messages": messages})
    with pytest.raises(ValueError, match="'messages'"):
        assistant.render({})


def rated(entry_id: str, widget: str, rating: str | None, scenario: str = "s1") -> dict[str, str | None]:
    return {"entry_id": entry_id, "scenario": scenario, "widget": widget, "rating": rating}


SCENARIOS = {
    "s1": {"question": "q", "widgets": ["a", "b", "c"]},
    "s2": {"question": "r", "widgets": ["a", "b"]},
}


def chosen_over(pairs: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(json.loads(pair["chosen"])["widget"], json.loads(pair["rejected"])["widget"]) for pair in pairs]


def test_pairs_set_each_liked_over_each_disliked_of_one_scenario():
    said = [("a", "up"), ("b", "down"), ("c", "down"), ("a", "down", "s2"), ("b", "up", "s2")]
    pairs = widgets.build_widget_dpo_pairs([rated(str(n), *one) for n, one in enumerate(said)], SCENARIOS)
    assert chosen_over(pairs) == [("a", "b"), ("a", "c"), ("b", "a")]
    assert pairs[0]["prompt"] == AGENTS["widgets"].render(SCENARIOS["s1"])
    conflicts = [("a", "up"), ("a", "down"), ("a", "up"), ("b", "up"), ("b", "down"), ("c", "down")]
    for said, found in (
        ([("a", "up"), ("b", "up")], []),
        ([("a", "up"), ("b", "down", "s2")], []),
        (conflicts, [("a", "c")]),  # by majority; a tie says nothing
        ([("a", "up"), ("spaceship", "down")], [("a", "spaceship")]),  # never listed, it teaches all the same
    ):
        entries = [rated(str(number), *one) for number, one in enumerate(said)]
        assert chosen_over(widgets.build_widget_dpo_pairs(entries, SCENARIOS)) == found


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        (rated("e7", "a", "up", "s9"), "'s9'"),
        (rated("e7", "spaceship", "up"), "'spaceship' is liked"),
        (rated("e7", "a", "good"), "'good'"),
        ({"entry_id": "e7", "scenario": "s1", "rating": "up"}, "'widget'"),
    ],
)
def test_pairs_refuse_a_bad_entry_by_name(entry, named):
    with pytest.raises(ValueError, match=named):
        widgets.build_widget_dpo_pairs([entry], SCENARIOS)


def test_fixture_pairs_describe_what_could_be_chosen():
    def pairs(scenario, good, bad, described):
        said = [
            {"scenario": scenario, "fixture": good, "rating": "up"},
            {"scenario": scenario, "fixture": bad, "rating": "down"},
        ]
        return fixtures.build_fixture_dpo_pairs(
            [{"entry_id": str(n), **one} for n, one in enumerate(said)], described
        )

    (pair,) = pairs("the list is empty", "tour", "hint", {"hint": "one line", "tour": "with pictures"})
    lines = ["scenario: the list is empty", "fixtures:", "hint: one line", "tour: with pictures"]
    assert pair["prompt"][1]["content"].splitlines() == lines
    assert (pair["chosen"], pair["rejected"]) == ('{"fixture": "tour"}', '{"fixture": "hint"}')
    built_in = AGENTS["fixtures"].scenarios()[0]
    (pair,) = pairs(built_in.key, *built_in.state["fixtures"][:2], {})
    assert pair["prompt"] == AGENTS["fixtures"].render(built_in.state)
    with pytest.raises(ValueError, match="expected fixture descriptions"):
        pairs("mine", "a", "b", {})


def test_the_form_tried_in_training_is_the_schema_where_that_names_every_value():
    state = {
        slug: next(iter(scenarios_of(AGENTS[slug], "team", 1))).state
        for slug in ("filer", "retriever", "tool_agent")
    }
    for slug in ("filer", "retriever"):
        assert AGENTS[slug].form_served(state[slug]) == AGENTS[slug].response_schema(state[slug])
    tools = AGENTS["tool_agent"]
    assert tools.form_served(state["tool_agent"]) == tuple(tools.choices(state["tool_agent"]))
    assert AGENTS["assistant"].form_served(None) is None


NAMED = [
    {"enum": ["a"]},
    {"type": "integer", "minimum": 1, "maximum": 5},
    {"type": "array", "items": {"enum": ["a", "b"]}},
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}},
]
OPEN = [
    *({"type": kind} for kind in ("string", "array", "object")),
    {"type": "integer", "minimum": 1},
    {"type": "object", "properties": {"a": {"type": "number"}}},
    {"anyOf": [{"const": 1}, {"type": "string"}]},
    {"type": "object", "properties": {"q": True}},
    {"type": "array", "items": True},
    {"anyOf": [True]},
    {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"type": "string"}},
    {"allOf": [{"type": "string"}], "type": "boolean"},
]


def test_a_schema_names_its_values_or_leaves_some_open():
    assert [schema for schema in NAMED if not names_values(schema)] == []
    assert [schema for schema in OPEN if names_values(schema)] == []
