"""Agent `tool_agent`: which tool to call next, with which arguments, or the answer itself. Works from traces."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from rl.agents.base import (
    Agent,
    AgentFacts,
    InvalidResponse,
    JsonObject,
    Message,
    OutcomeScale,
    RewardFacts,
    Scenario,
    State,
    state_text,
    unique_keys,
)
from rl.agents.template import arguments_fault
from rl.agents.worlds import scenarios_world

RESULT_LENGTH = 400
"""Characters shown of one earlier result."""

TOOLS: list[JsonObject] = [
    {
        "name": "search_orders",
        "description": "find orders of a customer",
        "parameters": {
            "type": "object",
            "properties": {"customer": {"type": "string"}},
            "required": ["customer"],
            "additionalProperties": False,
        },
    },
    {
        "name": "refund",
        "description": "give money back for an order",
        "parameters": {
            "type": "object",
            "properties": {"order": {"type": "integer"}, "amount": {"type": "number", "minimum": 0}},
            "required": ["order", "amount"],
            "additionalProperties": False,
        },
    },
    {
        "name": "send_mail",
        "description": "write to a customer",
        "parameters": {
            "type": "object",
            "properties": {"to": {"type": "string"}, "text": {"type": "string"}},
            "required": ["to", "text"],
            "additionalProperties": False,
        },
    },
]
PEOPLE = ("ines", "jonas", "priya", "tom", "aiko", "lena", "omar", "rosa")
PER_TOOL = 20


@dataclass(frozen=True)
class ToolAgent(Agent):
    """Calls a tool, or answers.

    State: "goal": text; "tools": [{"name", "description"?, "parameters"?: JSON schema of its arguments}]; "steps": the
    trace so far (kind, name, arguments, result, error, text). Never shown: "expected_call", the right {"tool",
    "arguments"} if known; "drafts", responses to choose from in a simulation. Response: {"tool": "<name>", "arguments":
    {...}} or {"answer": "<text>"}. The providers' forms are understood too: {"name", "arguments"}, {"tool_calls":
    [{"function": {...}}]} and an answer in plain words.
    """

    @property
    def structured(self) -> bool:
        return True

    def facts(self) -> AgentFacts:
        return dataclasses.replace(super().facts(), asked_key="goal")

    def render(self, state: State) -> list[Message]:
        lines = [f"goal: {state_text(state, 'goal', self.slug)}", "tools:"]
        for tool in self.tools(state):
            properties = (tool.get("parameters") or {}).get("properties") or {}
            description = f": {tool['description']}" if tool.get("description") else ""
            lines.append(f"{tool['name']}({', '.join(properties)}){description}")
        steps = [line for step in state.get("steps") or () if (line := _step_line(step))]
        if steps:
            lines += ["so far:", *steps]
        return [
            {"role": "system", "content": self.system_prompt},
            {"role": "user", "content": "\n".join(lines)},
        ]

    def tools(self, state: State) -> Sequence[Mapping[str, Any]]:
        """The tools of a state. Raises ValueError."""
        tools = state.get("tools")
        if (
            not isinstance(tools, (list, tuple))
            or not tools
            or not all(isinstance(tool, Mapping) and isinstance(tool.get("name"), str) for tool in tools)
        ):
            raise ValueError(
                f"{self.slug}: the state needs 'tools', a list of {{'name', ...}}; found {tools!r:.80}"
            )
        return tools

    def respond(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """The exact response text of a call."""
        return json.dumps({"tool": tool, "arguments": dict(arguments)}, ensure_ascii=False)

    def parse(self, response: str, state: State | None = None) -> JsonObject:
        """{"tool", "arguments"} or {"answer"}; with a state, a tool that it lists, called as its schema says."""
        if not response.strip():
            raise InvalidResponse("expected a call or an answer, found nothing but blanks")
        if not response.lstrip().startswith("{"):
            return {"answer": response.strip()}
        try:
            value = json.loads(response, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise InvalidResponse(f"expected JSON, found {response[:80]!r} ({error})") from error
        if set(value) == {"answer"} and isinstance(value["answer"], str) and value["answer"].strip():
            return {"answer": value["answer"].strip()}
        call = _call(value)
        if call is None:
            raise InvalidResponse(
                f'expected {{"tool": "...", "arguments": {{...}}}} or {{"answer": "..."}}, found {response[:80]!r}'
            )
        if state is not None:
            schemas = {tool["name"]: tool.get("parameters") for tool in self.tools(state)}
            if call["tool"] not in schemas:
                raise InvalidResponse(f"expected a tool of {', '.join(schemas)}; found {call['tool']!r}")
            fault = arguments_fault(call["arguments"], schemas[call["tool"]] or {"type": "object"})
            if fault:
                raise InvalidResponse(f"arguments of {call['tool']}: {fault}")
        return call

    def response_schema(self, state: State | None = None) -> JsonObject | None:
        answer = _exact_object({"answer": {"type": "string", "minLength": 1}})
        if state is None:
            return {
                "anyOf": [
                    _exact_object({"tool": {"type": "string"}, "arguments": {"type": "object"}}),
                    answer,
                ]
            }
        calls = [
            _exact_object(
                {"tool": {"const": tool["name"]}, "arguments": tool.get("parameters") or {"type": "object"}}
            )
            for tool in self.tools(state)
        ]
        return {"anyOf": [*calls, answer]}

    def candidates(self, state: State) -> list[str]:
        return list(state.get("drafts") or ())

    def ground_truth(self, state: State) -> list[str] | None:
        call = state.get("expected_call")
        if not isinstance(call, Mapping) or "tool" not in call:
            return None
        return [self.respond(call["tool"], call.get("arguments") or {})]

    def quality(self, state: State, response: str) -> float | None:
        """1 for the right call, 0.5 for the right tool with other arguments, 0 for anything else."""
        right = state.get("expected_call")
        if not isinstance(right, Mapping) or "tool" not in right:
            return None
        done = self.parse(response, state)
        if done.get("tool") != right["tool"]:
            return 0.0
        return 1.0 if done["arguments"] == (right.get("arguments") or {}) else 0.5

    def scenarios(self) -> list[Scenario]:
        made = []
        for tool in TOOLS:
            random = Random(f"tool_agent/{tool['name']}")
            for number in range(1, PER_TOOL + 1):
                state = self._state(random, tool["name"], number)
                made.append(Scenario(f"{tool['name']}-{number:03d}", state, tags=(tool["name"],)))
        return made

    def _state(self, random: Random, tool: str, number: int) -> JsonObject:
        person, order, amount = (
            random.choice(PEOPLE),
            100 * number + random.randint(0, 99),
            random.randint(5, 90),
        )
        calls: dict[str, JsonObject] = {
            "search_orders": {"customer": person},
            "refund": {"order": order, "amount": amount},
            "send_mail": {"to": person, "text": f"About order {order}."},
        }
        goals = {
            "search_orders": f"find what {person} bought, case {order}",
            "refund": f"give {person} back {amount} euros for order {order}",
            "send_mail": f"tell {person} that we write about order {order}",
        }
        wrong = random.choice([name for name in calls if name != tool])
        drafts = [
            self.respond(tool, calls[tool]),
            self.respond(wrong, calls[wrong]),
            self.respond(tool, {}),
            json.dumps({"answer": "I cannot do that."}),
        ]
        random.shuffle(drafts)
        return {
            "goal": goals[tool],
            "tools": TOOLS,
            "steps": [],
            "expected_call": {"tool": tool, "arguments": calls[tool]},
            "drafts": drafts,
        }

    def hidden_preference(self, state: State, response: str) -> float:
        """Correctness of the call; 0 for an invalid response."""
        if not self.is_valid(response, state):
            return 0.0
        quality = self.quality(state, response)
        if quality is None:
            raise ValueError(f"{self.slug}: taste needs 'expected_call' in the state, found none")
        return quality


def states_of_trace(
    steps: Sequence[Mapping[str, object]], goal: str, tools: Sequence[Mapping[str, object]]
) -> list[tuple[JsonObject, str]]:
    """(state before it, response that makes it) for each tool call of a trace.

    Failed calls are included: the reward function tool_success reads their errors.
    """
    made = []
    for number, step in enumerate(steps):
        if step.get("kind") == "tool_call":
            arguments = step.get("arguments")
            state = {"goal": goal, "tools": list(tools), "steps": [dict(before) for before in steps[:number]]}
            response = AGENT.respond(
                str(step.get("name", "")), arguments if isinstance(arguments, Mapping) else {}
            )
            made.append((state, response))
    return made


def _call(said: Any) -> JsonObject | None:
    if "tool_calls" in said:
        calls = said["tool_calls"]
        if not isinstance(calls, list) or len(calls) != 1 or not isinstance(calls[0], dict):
            return None
        said = calls[0].get("function", calls[0])
    if not isinstance(said, dict):
        return None
    name, arguments = said.get("tool", said.get("name")), said.get("arguments", {})
    if isinstance(arguments, str):  # as OpenAI sends them
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return {"tool": name, "arguments": arguments}


def _exact_object(properties: JsonObject) -> JsonObject:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _step_line(step: object) -> str:
    if not isinstance(step, Mapping):
        return ""
    if step.get("kind") == "tool_call":
        arguments = json.dumps(step.get("arguments") or {}, ensure_ascii=False, default=str)
        result: object = f"error {step['error']}" if step.get("error") else step.get("result")
        result_text = (
            result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        )
        return f"{step.get('name')}{arguments[:RESULT_LENGTH]} -> {result_text[:RESULT_LENGTH]}"
    text = step.get("text")
    return text[:RESULT_LENGTH] if isinstance(text, str) else ""


FIRST = {
    "search_orders": "; write to them first",
    "refund": "; look at the orders first",
    "send_mail": "; look first",
}
"""Tool that a goal asks for -> words that put another call before it."""


def _situation_prompt(random: Random, state: JsonObject) -> None:
    """Half of the goals ask for another call first. The drafts of every goal hold that call."""
    tool = state["expected_call"]["tool"]
    who = next(name for name in PEOPLE if name in state["goal"])
    order = random.randint(100, 9_999)
    state["goal"] = re.sub(r"(case|order) \d+", rf"\1 {order}", state["goal"])
    call = dict(state["expected_call"]["arguments"])
    call |= {"order": order} if "order" in call else {}
    call |= {"text": f"About order {order}."} if "text" in call else {}
    before: JsonObject = (
        {"tool": "send_mail", "arguments": {"to": who, "text": f"About order {order}."}}
        if tool == "search_orders"
        else {"tool": "search_orders", "arguments": {"customer": who}}
    )
    state |= {"expected_call": {"tool": tool, "arguments": call}, "before": before}
    agent = AGENT
    drafts = [
        agent.respond(tool, call),
        agent.respond(before["tool"], before["arguments"]),
        agent.respond(tool, {}),
        json.dumps({"answer": "I cannot do that."}),
    ]
    random.shuffle(drafts)
    state["drafts"] = drafts
    if random.random() < 0.5:
        state["goal"] += FIRST[tool]


def _situation_answer(state: JsonObject) -> None:
    if state["goal"].endswith("first"):
        state["expected_call"] = state["before"]


AGENT = ToolAgent(
    slug="tool_agent",
    title="Tool agent",
    description="Calls the next tool towards a goal, or answers; learns from its traces.",
    system_prompt="Call one listed tool or answer. Answer in JSON.",
    suggested_tags=("wrong tool", "wrong arguments", "not needed", "should have asked"),
    max_new_tokens=128,
    preview="tool",
    reward_facts=RewardFacts(
        functions={"agent": 1.0, "tool_success": 1.0, "efficiency": 0.5},
        outcomes={
            "undone_by_a_person": OutcomeScale(good=0, bad=1),
            "goal_reached": OutcomeScale(good=1, bad=0, horizon="strategic"),
        },
    ),
    world=scenarios_world(_situation_prompt, _situation_answer),
)
