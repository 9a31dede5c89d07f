"""Rewards for form: code and JSON that parse, and answers that are valid for the agent."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rl.agents import get_agent
from rl.agents.base import Agent, InvalidResponse
from rl.rewards.base import RAW_HIGH, RAW_LOW, RewardSample, RewardValue
from rl.rewards.code_execution import code_of

RIGHT_FROM = -1.0
"""Raw reward of a valid answer that is known to be entirely wrong."""

LONGEST = 100_000
"""Longest code in characters that is parsed."""

PARSE_ATTEMPTS = 5
"""Attempts to parse a text, because of a CPython fault (see `parse_python`)."""


@dataclass(frozen=True)
class SyntaxValidationReward:
    """2 if the response parses as `language` (python or json), else -2. Nothing is run."""

    language: str = "python"
    name: str = "syntax"

    def __post_init__(self) -> None:
        if self.language not in ("python", "json"):
            raise ValueError(f"syntax is checked for python and json, found {self.language!r}")

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        return [self._value(sample.response) for sample in samples]

    def constant(self, sample: RewardSample) -> str:
        """Why every valid answer earns the same."""
        return f"each that parses as {self.language} earns 2"

    def _value(self, response: str) -> RewardValue:
        if len(response) > LONGEST:
            return RewardValue(
                RAW_LOW, {"fault": f"{len(response):,} characters, at most {LONGEST:,} are parsed"}
            )
        try:
            if self.language == "json":
                json.loads(response)
            else:
                found = code_of(response)
                if found is None or found[0] != "python":
                    return RewardValue(RAW_LOW, {"fault": "no Python in the response"})
                parse_python(found[1])
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return RewardValue(RAW_LOW, {"fault": f"{type(error).__name__}: {error}"[:300]})
        return RewardValue(RAW_HIGH)


def parse_python(text: str) -> ast.Module:
    """Syntax tree of Python source. Raises what `ast.parse` raises.

    CPython 3.11 counts the depth of a tree once for all threads (gh-106905). Two concurrent parses may therefore fail
    without a fault in the text, so it tries again.
    """
    for _ in range(PARSE_ATTEMPTS):
        try:
            return ast.parse(text)
        except SystemError as error:
            fault = error
    raise ValueError(f"cannot be parsed: {fault}")


@dataclass(frozen=True)
class FormatComplianceReward:
    """2 if the response is valid for the agent, else -2; free text must only not be empty."""

    name: str = "format"

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        return [_acted_on(get_agent(sample.agent), sample, RAW_HIGH) for sample in samples]

    def constant(self, sample: RewardSample) -> str:
        return "each that the agent can act on earns 2"


@dataclass(frozen=True)
class AgentReward:
    """The agent's own judgement: -2 for an invalid answer, -1 (wrong) to 2 (right) for a known one, 1 if unknown."""

    name: str = "agent"

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        return [self._value(sample) for sample in samples]

    def constant(self, sample: RewardSample) -> str:
        """Why every valid answer to a prompt earns the same: the right one is unknown. Empty if it is known."""
        agent, state = get_agent(sample.agent), sample.facts.get("state")
        if not isinstance(state, dict):
            return "each earns 1, as the prompts have no state that could say which is right"
        if type(agent).quality is not Agent.quality or agent.ground_truth(state) is not None:
            return ""
        return f"each earns 1, as agent {sample.agent} does not know which is right"

    def _value(self, sample: RewardSample) -> RewardValue:
        agent = get_agent(sample.agent)
        value = _acted_on(agent, sample, 1.0)
        state = sample.facts.get("state")
        if value.raw != 1.0 or not isinstance(state, dict):
            return value
        quality = agent.quality(state, sample.response)
        if quality is None:
            return value
        return RewardValue(RIGHT_FROM + (RAW_HIGH - RIGHT_FROM) * quality, {"right": quality})


def _acted_on(agent: Agent, sample: RewardSample, good: float) -> RewardValue:
    if not sample.response.strip():
        return RewardValue(RAW_LOW, {"fault": "an empty response"})
    try:
        agent.parse(sample.response, sample.facts.get("state"))
    except InvalidResponse as error:
        return RewardValue(RAW_LOW, {"fault": str(error)[:300]})
    return RewardValue(good)


# --- The floor of invalid answers ---


def invalid_reason(sample: RewardSample) -> str:
    """Why a response is invalid for an agent with discrete answers; empty if it is valid, and for free text."""
    agent = get_agent(sample.agent or "assistant")
    if not agent.discrete:
        return ""
    try:
        agent.parse(sample.response, sample.facts.get("state"))
    except InvalidResponse as error:
        return str(error)[:300]
    return ""


def reward_with_validity(raw: float, sample: RewardSample) -> float:
    """The raw reward, but -2 for a response that is invalid for its agent.

    Reward models were trained on valid answers. Without this floor a policy may earn more by breaking the format than
    by answering well.
    """
    return RAW_LOW if invalid_reason(sample) else raw
