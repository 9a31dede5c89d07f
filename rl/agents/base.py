"""What an agent is to Ratchet: how a state becomes a prompt, and how a response becomes an action. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

Message = dict[str, str]
"""One chat turn: {"role": "system" | "user" | "assistant", "content": text}."""

State = Mapping[str, Any]
"""What the app knew when it asked, JSON-serialisable; its keys are the agent's own."""


class InvalidResponse(ValueError):
    """A response the agent cannot act on; the message says what was expected and what was found."""


@dataclass(frozen=True)
class Scenario:
    """One situation to decide in, made up for simulation, demo and tests."""

    key: str
    state: State
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class AgentFacts:
    """What a page needs to know of an agent, without importing it."""

    slug: str
    title: str
    description: str
    suggested_tags: tuple[str, ...] = ()
    preview: str = "text"
    """Name of the template under templates/feedback/preview/ that shows a decision as a person would see it."""


@dataclass(frozen=True)
class Agent:
    """A named decision maker. Built-in agents subclass it; any other slug gets the assistant's behaviour."""

    slug: str
    title: str
    description: str
    system_prompt: str = ""
    suggested_tags: tuple[str, ...] = field(default=())
    max_new_tokens: int = 48
    preview: str = "text"

    structured: ClassVar[bool] = False
    """True where a response must be JSON that `parse` accepts."""

    def facts(self) -> AgentFacts:
        return AgentFacts(self.slug, self.title, self.description, self.suggested_tags, self.preview)

    def render(self, state: State) -> list[Message]:
        """The prompt for a state, as chat messages. Raises ValueError when the state lacks what it needs."""
        raise NotImplementedError

    def parse(self, response: str, state: State | None = None) -> dict[str, Any]:
        """The action a response stands for. Raises InvalidResponse; with a state, also for an unlisted choice."""
        raise NotImplementedError

    def response_schema(self, state: State | None = None) -> dict[str, Any] | None:
        """JSON schema of a valid response, or None for free text."""
        return None

    def candidates(self, state: State) -> list[str]:
        """Every listed response for a state, as the exact text a policy would answer; empty for free text."""
        return []

    def ground_truth(self, state: State) -> list[str] | None:
        """The responses known to be right for a state (any of them), or None where nobody knows."""
        return None

    def scenarios(self) -> list[Scenario]:
        """Every made-up scenario, always the same and in the same order."""
        return []

    def hidden_preference(self, state: State, response: str) -> float:
        """How much the SIMULATED rater likes a response, in [0, 1]. Never shown to a policy, never a person's word."""
        raise NotImplementedError(f"agent {self.slug!r} has no simulated rater")

    def is_valid(self, response: str, state: State | None = None) -> bool:
        try:
            self.parse(response, state)
        except InvalidResponse:
            return False
        return True


@dataclass(frozen=True)
class ChoiceAgent(Agent):
    """An agent that answers with one of the options its state lists: {"<answer_key>": "<option>"}."""

    answer_key: str = "choice"
    options_key: str = "options"
    """State key under which the options are listed, as strings, in the order shown."""

    structured: ClassVar[bool] = True

    def respond(self, option: str) -> str:
        """The exact response text for an option."""
        return json.dumps({self.answer_key: option}, ensure_ascii=False)

    def options(self, state: State) -> Sequence[str]:
        options = state.get(self.options_key)
        if (
            not isinstance(options, (list, tuple))
            or not options
            or not all(isinstance(o, str) for o in options)
        ):
            raise ValueError(
                f"{self.slug}: the state needs {self.options_key!r}, a list of at least one option name; "
                f"found {options!r}"
            )
        return options

    def parse(self, response: str, state: State | None = None) -> dict[str, Any]:
        try:
            answer = json.loads(response)
        except json.JSONDecodeError as error:
            raise InvalidResponse(
                f"expected JSON like {self.respond('...')}, found {response[:80]!r} ({error.msg} at {error.pos})"
            ) from error
        if (
            not isinstance(answer, dict)
            or set(answer) != {self.answer_key}
            or not isinstance(answer[self.answer_key], str)
        ):
            raise InvalidResponse(
                f"expected one key {self.answer_key!r} with a name, found {response[:80]!r}"
            )
        if state is not None and answer[self.answer_key] not in self.options(state):
            raise InvalidResponse(
                f"expected one of {', '.join(self.options(state))}; "
                f"found {answer[self.answer_key]!r}, which was not listed"
            )
        return answer

    def response_schema(self, state: State | None = None) -> dict[str, Any] | None:
        choice: dict[str, Any] = {"type": "string"}
        if state is not None:
            choice["enum"] = list(self.options(state))
        return {
            "type": "object",
            "properties": {self.answer_key: choice},
            "required": [self.answer_key],
            "additionalProperties": False,
        }

    def candidates(self, state: State) -> list[str]:
        return [self.respond(option) for option in self.options(state)]

    def variations(self) -> Iterator[tuple[Scenario, str]]:
        """Every scenario with each of its candidate responses: the decisions a person is asked to rate."""
        for scenario in self.scenarios():
            for response in self.candidates(scenario.state):
                yield scenario, response
