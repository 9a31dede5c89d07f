"""Agents that pick several names or put them in order, the storer, and the one that calls tools."""

import json
from typing import Any

import jsonschema
import pytest

from feedback.explorer.previews import preview_of
from feedback.models import Decision
from rl.agents import AGENTS
from rl.agents.base import InvalidResponse
from rl.agents.lists import ListAgent, f1, in_order
from rl.agents.tool_agent import AGENT as TOOL_AGENT
from rl.agents.tool_agent import states_of_trace
from rl.rewards.answers import AgentReward
from rl.rewards.base import RewardSample
from rl.rewards.horizons import outcomes_parsed

LISTS = ("librarian", "retriever", "prioritizer")
NEW = (*LISTS, "storer", "tool_agent")
HIDDEN = ("catalogued_under", "helped", "done_in_order", "kept_in", "expected_call", "drafts")


def lister(slug: str) -> ListAgent:
    agent = AGENTS[slug]
    assert isinstance(agent, ListAgent)
    return agent


def state_of(slug: str, *names: str, **more: Any) -> dict[str, Any]:
    agent = lister(slug)
    return {agent.asked_key: "what?", agent.options_key: list(names), **more}


def test_the_prompt_reads_as_written() -> None:
    told = {"descriptions": {"p1": "Parcels leave at noon."}, "context": {"in": "help"}}
    system, user = AGENTS["retriever"].render(state_of("retriever", "p2", "p1", **told))
    assert system["content"] == "Pick the listed passages that help to answer. Answer in JSON."
    lines = ["question: what?", "in: help", "passages:", "p2", "p1: Parcels leave at noon."]
    assert user["content"].splitlines() == lines


@pytest.mark.parametrize("slug", NEW)
def test_scenarios_are_distinct_show_nothing_meant_for_the_rater_and_have_a_right_answer(slug: str) -> None:
    agent = AGENTS[slug]
    scenarios = agent.scenarios()
    assert len(scenarios) >= 60
    assert len({s.key for s in scenarios}) == len({json.dumps(agent.render(s.state)) for s in scenarios})
    for scenario in scenarios if slug in LISTS else ():
        worth = [agent.hidden_preference(scenario.state, c) for c in agent.candidates(scenario.state)]
        assert sum(value >= 0.5 for value in worth) == 2
    for state in (scenario.state for scenario in scenarios[::7]):
        shown = {key: value for key, value in state.items() if key not in HIDDEN}
        assert agent.render(shown) == agent.render(state)
        assert json.loads(json.dumps(state)) == state
        right, candidates = agent.ground_truth(state), agent.candidates(state)
        assert right
        assert len(set(candidates)) == len(candidates) == 4
        assert {agent.quality(state, c) for c in candidates if agent.is_valid(c, state)} > {1.0}
        assert any(agent.parse(c) == agent.parse(right[0]) for c in candidates)
        jsonschema.validate(json.loads(right[0]), agent.response_schema(state))
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"no": "such key"}, agent.response_schema(state))


HOSTILE = (
    *(
        "",
        "a",
        "[]",
        '["a"]',
        "[" * 100_000,
        '{"subjects": ["a"], "why": 1}',
        '{"subjects": ["a"], "subjects": ["b"]}',
    ),
    *(
        f'{{"subjects": {value}}}'
        for value in ('"a"', "[]", '["a", "a"]', "[1]", '["z"]', json.dumps([*"abcdef"]))
    ),
)


def test_a_state_without_names_and_hostile_lists_are_refused() -> None:
    for slug in LISTS:
        agent = lister(slug)
        for options in (None, [], "a", [1], ["a", "a"]):
            with pytest.raises(ValueError, match=agent.options_key):
                agent.render({agent.asked_key: "x", agent.options_key: options})
    for response in HOSTILE:
        with pytest.raises(InvalidResponse):
            AGENTS["librarian"].parse(response, state_of("librarian", *"abcdef"))


def test_names_picked_and_ordered() -> None:
    # picked names say the same in any order and ordered ones do not
    librarian, prioritizer = AGENTS["librarian"], AGENTS["prioritizer"]
    assert librarian.parse('{"subjects": ["b", "a"]}') == librarian.parse('{"subjects": ["a", "b"]}')
    assert prioritizer.parse('{"order": ["b", "a"]}') != prioritizer.parse('{"order": ["a", "b"]}')
    with pytest.raises(InvalidResponse, match="all 3 names in order, found 2"):
        prioritizer.parse('{"order": ["b", "a"]}', state_of("prioritizer", *"abc"))
    # f1 and order by hand
    # one of two right ones and one wrong one: precision 1/2, recall 1/2
    assert f1(["a", "x"], ["a", "b"]) == 0.5
    assert f1(["a"], ["a", "b"]) == pytest.approx(2 / 3)
    assert (f1(["x"], ["a"]), f1(["b", "a"], ["a", "b"])) == (0.0, 1.0)
    # of six pairs one stands the wrong way round
    assert in_order(list("abdc"), list("abcd")) == pytest.approx(5 / 6)
    assert (in_order(list("dcba"), list("abcd")), in_order(list("abcd"), list("abcd"))) == (0.0, 1.0)


def test_an_answer_that_is_partly_right_is_partly_rewarded() -> None:
    state = state_of("librarian", "a", "b", "x", catalogued_under=["a", "b"])

    def raw(response: str) -> float | None:
        (value,) = AgentReward().score([RewardSample([], response, "librarian", {"state": state})])
        return value.raw

    # -1 for all wrong up to 2 for all right: F1 of 1/2 is in the middle
    assert raw('{"subjects": ["b", "a"]}') == 2.0
    assert raw('{"subjects": ["a", "x"]}') == pytest.approx(0.5)
    assert raw('{"subjects": ["x"]}') == -1.0
    assert raw('{"subjects": ["nowhere"]}') == -2.0


def test_what_agents_say_outcomes_are_worth_can_be_written_as_settings() -> None:
    for agent in AGENTS.values():
        worth = agent.reward_facts.outcomes
        written = {name: {"good": w.good, "bad": w.bad, "horizon": w.horizon} for name, w in worth.items()}
        assert outcomes_parsed(written) == dict(worth)


SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
SCHEMA |= {"additionalProperties": False}
TOOL_STATE = {"goal": "find it", "tools": [{"name": "search", "description": "looks", "parameters": SCHEMA}]}


def test_a_call_is_understood_however_a_provider_writes_it_and_words_are_an_answer() -> None:
    for response in (
        '{"tool": "search", "arguments": {"q": "x"}}',
        '{"name": "search", "arguments": {"q": "x"}}',
        '{"tool_calls": [{"function": {"name": "search", "arguments": "{\\"q\\": \\"x\\"}"}}]}',
    ):
        assert TOOL_AGENT.parse(response, TOOL_STATE) == {"tool": "search", "arguments": {"q": "x"}}
    answers = [TOOL_AGENT.parse(text, TOOL_STATE) for text in ("It is Porto.", '{"answer": "It is Porto."}')]
    assert answers[0] == answers[1]


IMPOSSIBLE = {
    "  ": "nothing but blanks",
    '{"tool": "delete", "arguments": {}}': "'delete'",
    '{"tool": "search", "arguments": {}}': "'q'",
    '{"tool": "search", "arguments": {"q": 1}}': "q: 1",
    '{"tool": "search", "arguments": {"q": "x", "z": 1}}': "'z'",
    '{"tool": "search", "arguments": "no json"}': "expected",
    '{"tool_calls": [{}, {}]}': "expected",
    '{"tool_calls": 7}': "expected",
    "{": "expected JSON",
    '{"tool": "a", "tool": "b"}': "twice",
}


def test_a_call_that_cannot_be_made_is_refused() -> None:
    for response, said in IMPOSSIBLE.items():
        with pytest.raises(InvalidResponse, match=said):
            TOOL_AGENT.parse(response, TOOL_STATE)


def with_parameters(parameters: Any) -> dict[str, Any]:
    return {**TOOL_STATE, "tools": [{"name": "search", "parameters": parameters}]}


def test_a_schema_an_app_sent_is_never_fetched_and_a_broken_one_is_named() -> None:
    outside = {"properties": {"q": {"$ref": "file:///etc/passwd"}}}
    for parameters in ({"$ref": "http://127.0.0.1:9/schema"}, {"type": "nonsense"}, outside, 7):
        with pytest.raises(InvalidResponse, match="schema cannot be used"):
            TOOL_AGENT.parse('{"tool": "search", "arguments": {"q": "x"}}', with_parameters(parameters))
    # a pattern that never ends is not looked at
    evil = {"type": "object", "properties": {"q": {"type": "string", "pattern": "^(a+)+$"}}}
    assert TOOL_AGENT.is_valid(TOOL_AGENT.respond("search", {"q": "a" * 60 + "!"}), with_parameters(evil))


def test_a_trace_becomes_a_state_and_a_response_per_call() -> None:
    steps = [
        {"kind": "reasoning", "text": "look first"},
        {"kind": "tool_call", "name": "search", "arguments": {"q": "x"}, "result": [1, 2]},
        {"kind": "tool_call", "name": "search", "arguments": {"q": "y"}, "error": "timeout"},
    ]
    (first, one), (second, two) = states_of_trace(steps, "find it", TOOL_STATE["tools"])  # type: ignore[arg-type]
    assert (json.loads(one)["arguments"], json.loads(two)["arguments"]) == ({"q": "x"}, {"q": "y"})
    assert TOOL_AGENT.is_valid(one, first)
    lines = [
        "goal: find it",
        "tools:",
        "search(q): looks",
        "so far:",
        "look first",
        'search{"q": "x"} -> [1, 2]',
    ]
    assert TOOL_AGENT.render(second)[-1]["content"].splitlines() == lines


def test_the_right_tool_with_other_arguments_is_half_right() -> None:
    state = {**TOOL_STATE, "expected_call": {"tool": "search", "arguments": {"q": "x"}}}
    calls = [TOOL_AGENT.respond("search", {"q": text}) for text in "xz"]
    assert [TOOL_AGENT.quality(state, response) for response in (*calls, "in words")] == [1.0, 0.5, 0.0]
    assert TOOL_AGENT.quality(TOOL_STATE, "in words") is None


def shown(slug: str, response: str, state: dict[str, Any], **more: Any) -> Any:
    facts = AGENTS[slug].facts()
    row = Decision(agent=slug, messages=AGENTS[slug].render(state), response=response, state=state, **more)
    return preview_of(row, facts)


def test_picked_names_come_first_and_in_their_order() -> None:
    state = state_of("retriever", "p1", "p2", "p3", descriptions={"p3": "three"})
    preview = shown("retriever", '{"passages": ["p3", "p1"]}', state)
    picks = [(p.name, p.place, p.description) for p in preview.picks]
    assert picks == [("p3", 1, "three"), ("p1", 2, ""), ("p2", 0, "")]
    assert (preview.question, preview.in_order, preview.fault) == ("what?", False, "")
    assert shown("prioritizer", '{"order": ["b", "a"]}', state_of("prioritizer", "a", "b")).in_order
    unread = shown("retriever", '{"passages": 7}', state)  # shown as it is
    assert (unread.choice, bool(unread.fault)) == ("", True)


def test_a_call_is_shown_with_its_arguments() -> None:
    preview = shown("tool_agent", TOOL_AGENT.respond("search", {"q": "x"}), TOOL_STATE)
    assert (preview.call.tool, json.loads(preview.call.arguments)) == ("search", {"q": "x"})
    assert preview.question == "find it"
    assert shown("tool_agent", "in words", TOOL_STATE).call is None
