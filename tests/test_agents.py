"""The built-in agents: prompts, answers, made-up scenarios and the taste of the simulated rater."""

from __future__ import annotations

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
    assert sorted(AGENTS) == [
        "assistant", "filer", "fixtures", "librarian", "prioritizer", "retriever", "storer", "tool_agent", "widgets",
    ]  # fmt: skip


@pytest.mark.django_db
def test_unknown_slug_answers_as_the_assistant_under_its_own_name():
    agent = get_agent("support-bot")
    assert agent.slug == "support-bot"
    assert agent.render({"question": "Hi"}) == AGENTS["assistant"].render({"question": "Hi"})
    assert agent.response_schema() is None
    assert agent_facts("support-bot").preview == "text"


def test_widgets_prompt_reads_as_written():
    system, user = AGENTS["widgets"].render(WIDGET_STATE)
    assert system == {"role": "system", "content": "Pick one listed widget for the question. Answer in JSON."}
    assert user["content"].splitlines() == [
        "question: how did revenue change over last week",
        "on: phone",
        "points: 12",
        "widgets:",
        "line_chart",
        "sparkline",
    ]


@pytest.mark.parametrize("slug", CHOOSERS)
def test_prompt_shows_nothing_meant_for_the_rater_alone(slug):
    scenario = AGENTS[slug].scenarios()[0]
    hidden = {
        key: "SECRET"
        for key in scenario.state
        if key in ("intent", "situation", "kind", "partner", "filed_in")
    }
    assert hidden
    assert AGENTS[slug].render({**scenario.state, **hidden}) == AGENTS[slug].render(scenario.state)


@pytest.mark.parametrize("slug", CHOOSERS)
@pytest.mark.parametrize("options", [None, [], "line_chart", [1, 2], [""], {"a": 1}])
def test_state_without_options_is_refused_by_name(slug, options):
    agent = chooser(slug)
    state = {**agent.scenarios()[0].state, agent.options_key: options}
    with pytest.raises(ValueError, match=agent.options_key):
        agent.render(state)


@pytest.mark.parametrize(
    ("slug", "key"), [("widgets", "question"), ("fixtures", "scenario"), ("filer", "document")]
)
def test_state_without_its_text_is_refused_by_name(slug, key):
    state = {**AGENTS[slug].scenarios()[0].state, key: "  "}
    with pytest.raises(ValueError, match=f"'{key}'"):
        AGENTS[slug].render(state)


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


@pytest.mark.parametrize(
    "option", ['say "hi"', "back\\slash", "Übersicht", "発注", "a/b c", "tab\there", "\ud800"]
)
def test_any_option_name_survives_the_answer(option):
    agent = chooser("filer")
    state = {"document": "d", "folders": [option, "other"]}
    assert agent.parse(agent.respond(option), state) == {"folder": option}


@pytest.mark.parametrize(
    "response",
    [
        "",
        "line_chart",
        '{"widget": "line_chart"',
        '{"widget": "line_chart"} and more',
        '["line_chart"]',
        '"line_chart"',
        "null",
        "NaN",
        '{"widget": null}',
        '{"widget": ["line_chart"]}',
        '{"chart": "line_chart"}',
        '{"widget": "line_chart", "why": "because"}',
        '{"widget": "bar_chart", "widget": "line_chart"}',
        '{"widget": "pie_chart"}',
        '{"widget": "Line_chart"}',
        '{"widget": "line_chart "}',
        "```json\n{}\n```",
        "[" * 100_000,
        "9" * 10_000,
        '{"widget": "\x00"}',
    ],
)
def test_hostile_response_is_refused_in_words(response):
    with pytest.raises(InvalidResponse, match="expected"):
        AGENTS["widgets"].parse(response, WIDGET_STATE)


def test_unlisted_option_is_valid_only_where_no_state_says_otherwise():
    response = '{"widget": "pie_chart"}'
    assert AGENTS["widgets"].is_valid(response)
    assert not AGENTS["widgets"].is_valid(response, WIDGET_STATE)


@pytest.mark.parametrize(
    ("slug", "least"), [("widgets", 1000), ("fixtures", 300), ("filer", 300), ("assistant", 100)]
)
def test_scenarios_are_many_distinct_and_readable_json(slug, least):
    scenarios = AGENTS[slug].scenarios()
    assert len({scenario.key for scenario in scenarios}) == len(scenarios) >= least
    prompts = {json.dumps(AGENTS[slug].render(scenario.state)) for scenario in scenarios}
    assert len(prompts) == len(scenarios)
    assert all(json.loads(json.dumps(scenario.state)) == scenario.state for scenario in scenarios)


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


@pytest.mark.parametrize("slug", CHOOSERS)
def test_simulated_taste_splits_every_scenario_two_and_two(slug):
    agent = AGENTS[slug]
    for scenario in agent.scenarios():
        worth = sorted(agent.hidden_preference(scenario.state, c) for c in agent.candidates(scenario.state))
        assert worth[0] < worth[1] <= 0.2
        assert 0.8 <= worth[2] < worth[3]


@pytest.mark.parametrize("slug", [*CHOOSERS, "assistant"])
def test_answer_nobody_can_act_on_is_worth_nothing(slug):
    state = AGENTS[slug].scenarios()[0].state
    assert AGENTS[slug].hidden_preference(state, "   ") == 0.0


def test_filer_ground_truth_is_where_the_document_ended_up():
    filer = chooser("filer")
    state = {"document": "d", "folders": ["A", "B"]}
    assert filer.ground_truth(state) is None
    assert filer.ground_truth({**state, "filed_in": "B"}) == ['{"folder": "B"}']
    assert filer.ground_truth({**state, "filed_in": ["A", "B"]}) == ['{"folder": "A"}', '{"folder": "B"}']
    assert AGENTS["widgets"].ground_truth(WIDGET_STATE) is None


@pytest.mark.parametrize(
    ("state", "content"),
    [
        ({"question": "Why?"}, "Why?"),
        ({"prompt": "Say hi", "drafts": ["a"]}, "Say hi"),
        ({"ticket": 7, "text": "broken", "drafts": ["a"], "facts": ["b"]}, '{"ticket": 7, "text": "broken"}'),
    ],
)
def test_assistant_reads_any_state(state, content):
    assert AGENTS["assistant"].render(state)[-1] == {"role": "user", "content": content}


def test_assistant_passes_a_chat_on_as_it_is():
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert AGENTS["assistant"].render({"messages": chat}) == chat


@pytest.mark.parametrize(
    "messages", [None, "text", [], [123], [{}], [{"role": "user", "content": None}], [{"role": 1}]]
)
def test_assistant_refuses_a_chat_that_is_none(messages):
    with pytest.raises(ValueError, match="'messages' must be a list"):
        AGENTS["assistant"].render({"messages": messages})


def test_assistant_refuses_an_empty_state():
    with pytest.raises(ValueError, match="needs 'messages'"):
        AGENTS["assistant"].render({})


def test_assistant_taste_counts_direct_friendly_and_brief():
    assistant, state = AGENTS["assistant"], {"question": "How do I reset it?", "facts": ["Security"]}
    assert assistant.hidden_preference(state, "Happy to help! Open Security.") == 1.0
    assert assistant.hidden_preference(state, "Open Security.") == 0.7
    assert assistant.hidden_preference(state, "Happy to help! Please look around.") == 0.4
    assert assistant.hidden_preference(state, "Open security. " + "More words follow. " * 20) == 0.6


def rated(entry_id: str, widget: str, rating: str | None, scenario: str = "s1") -> dict[str, str | None]:
    return {"entry_id": entry_id, "scenario": scenario, "widget": widget, "rating": rating}


SCENARIOS = {
    "s1": {"question": "q", "widgets": ["a", "b", "c"]},
    "s2": {"question": "r", "widgets": ["a", "b"]},
}


def chosen_over(pairs: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(json.loads(pair["chosen"])["widget"], json.loads(pair["rejected"])["widget"]) for pair in pairs]


def test_pairs_set_each_liked_over_each_disliked_of_one_scenario():
    entries = [
        rated("1", "a", "up"),
        rated("2", "b", "down"),
        rated("3", "c", "down"),
        rated("4", "a", "down", "s2"),
        rated("5", "b", "up", "s2"),
    ]
    pairs = widgets.build_widget_dpo_pairs(entries, SCENARIOS)
    assert chosen_over(pairs) == [("a", "b"), ("a", "c"), ("b", "a")]
    assert pairs[0]["prompt"] == AGENTS["widgets"].render(SCENARIOS["s1"])


def test_pairs_need_both_a_liked_and_a_disliked():
    assert widgets.build_widget_dpo_pairs([rated("1", "a", "up"), rated("2", "b", "up")], SCENARIOS) == []
    assert (
        widgets.build_widget_dpo_pairs([rated("1", "a", "up"), rated("2", "b", "down", "s2")], SCENARIOS)
        == []
    )


def test_pairs_settle_conflicts_by_majority_and_drop_ties():
    entries = [
        *(rated(f"a{i}", "a", rating) for i, rating in enumerate(("up", "down", "up"))),
        *(rated(f"b{i}", "b", rating) for i, rating in enumerate(("up", "down"))),
        rated("c", "c", "down"),
    ]
    assert chosen_over(widgets.build_widget_dpo_pairs(entries, SCENARIOS)) == [("a", "c")]


def test_disliked_answer_that_was_never_listed_still_teaches():
    entries = [rated("1", "a", "up"), rated("2", "spaceship", "down")]
    assert chosen_over(widgets.build_widget_dpo_pairs(entries, SCENARIOS)) == [("a", "spaceship")]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (rated("e7", "a", "up", "s9"), "'s9' is rated but not among the 2"),
        (rated("e7", "spaceship", "up"), "entry e7: 'spaceship' is liked"),
        (rated("e7", "a", "good"), "entry e7: a rating is 'up' or 'down', found 'good'"),
        ({"entry_id": "e7", "scenario": "s1", "rating": "up"}, "entry e7: expected a text under 'widget'"),
    ],
)
def test_pairs_refuse_a_bad_entry_by_name(entry, message):
    with pytest.raises(ValueError, match=message):
        widgets.build_widget_dpo_pairs([entry], SCENARIOS)


def test_fixture_pairs_describe_what_could_be_chosen():
    entries = [
        {"entry_id": "1", "scenario": "the list is empty", "fixture": "tour", "rating": "up"},
        {"entry_id": "2", "scenario": "the list is empty", "fixture": "hint", "rating": "down"},
    ]
    (pair,) = fixtures.build_fixture_dpo_pairs(entries, {"hint": "one line", "tour": "with pictures"})
    assert pair["prompt"][1]["content"].splitlines() == [
        "scenario: the list is empty",
        "fixtures:",
        "hint: one line",
        "tour: with pictures",
    ]
    assert (pair["chosen"], pair["rejected"]) == ('{"fixture": "tour"}', '{"fixture": "hint"}')


def test_fixture_pairs_know_the_built_in_scenarios_by_key():
    scenario = AGENTS["fixtures"].scenarios()[0]
    good, bad = scenario.state["fixtures"][:2]
    entries = [
        {"entry_id": "1", "scenario": scenario.key, "fixture": good, "rating": "up"},
        {"entry_id": "2", "scenario": scenario.key, "fixture": bad, "rating": "down"},
    ]
    (pair,) = fixtures.build_fixture_dpo_pairs(entries, {})
    assert pair["prompt"] == AGENTS["fixtures"].render(scenario.state)


def test_fixture_pairs_refuse_an_own_scenario_without_fixtures():
    entries = [{"entry_id": "1", "scenario": "mine", "fixture": "a", "rating": "up"}]
    with pytest.raises(ValueError, match="expected fixture descriptions"):
        fixtures.build_fixture_dpo_pairs(entries, {})


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


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"enum": ["a"]}, True),
        ({"type": "integer", "minimum": 1, "maximum": 5}, True),
        ({"type": "integer", "minimum": 1}, False),
        ({"type": "string"}, False),
        ({"type": "array", "items": {"enum": ["a", "b"]}}, True),
        ({"type": "array"}, False),
        ({"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}}, True),
        ({"type": "object", "properties": {"a": {"type": "number"}}}, False),
        ({"type": "object"}, False),
        ({"anyOf": [{"const": 1}, {"type": "string"}]}, False),
        ({"type": "object", "properties": {"q": True}}, False),
        ({"type": "array", "items": True}, False),
        ({"anyOf": [True]}, False),
        (
            {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"type": "string"}},
            False,
        ),
        ({"allOf": [{"type": "string"}], "type": "boolean"}, False),
    ],
)
def test_a_schema_names_its_values_or_leaves_some_open(schema, named):
    assert names_values(schema) is named
