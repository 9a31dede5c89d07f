"""Sides of an evaluation: a language model, a linear policy, recorded answers, a hosted model.

A language model spreads its probability over all texts, a linear policy over the answers there are. Where the two are
compared by how far each moved a rated answer, both are measured among the options of the prompt. Recorded answers and
hosted models give no log-probabilities: they are compared on answers alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from rl.agents.base import UNREADABLE, Agent, Message, Row, answer_plain
from rl.gates.evidence_kinds import CORRECTIONS, LABELS, OUTCOMES, PAIRS
from rl.linear.model import LinearPolicy, LinearPolicyError, log_softmax
from rl.training.chat_template import prompt_messages, response_text
from rl.training.constrained_generation import AnswerForm
from rl.training.held_out import HeldOutPrompt
from rl.training.policy import Generation, LoadedPolicy, generate
from rl.training.scoring import ResponseScore, head_check, score_pairs, score_responses

Options = Callable[[Sequence[Message], Row | None], list[str]]
"""(prompt, state) -> the answers that may be given; empty where nobody knows."""

AGAINST = "against"
"""In place of a side: the one that the policy is compared with."""


@runtime_checkable
class AnswersOnly(Protocol):
    """A side that gives answers and no log-probabilities."""

    @property
    def name(self) -> str:
        """The policy's name."""
        ...

    @property
    def title(self) -> str:
        """Its name in sentences."""
        ...

    def answers(self, prompts: Sequence[HeldOutPrompt]) -> list[Generation | None]:
        """The answer to each prompt; None where there is none."""
        ...


@dataclass(frozen=True)
class RecordedSide:
    """A policy known by its recorded answers."""

    name: str
    title: str
    recorded: Mapping[str, str]
    """Hash of a prompt -> the newest answer recorded to it."""

    def answers(self, prompts: Sequence[HeldOutPrompt]) -> list[Generation | None]:
        found = (self.recorded.get(prompt.row.get("prompt_hash", "")) for prompt in prompts)
        return [None if text is None else Generation(text, 0, "stop") for text in found]


def kinds_scored(agent: Agent) -> tuple[str, ...]:
    """Kinds of evidence that need log-probabilities of both sides."""
    return (PAIRS, LABELS, OUTCOMES, *([] if agent.discrete else [CORRECTIONS]))


@dataclass(frozen=True)
class LinearSide:
    """A linear policy with the agent whose answers it chooses among."""

    policy: LinearPolicy
    agent: Agent
    adapter: str = "linear"
    base_model: str = field(default="", init=False)

    is_base = has_reference = False

    @property
    def name(self) -> str:
        return self.adapter

    def speaking(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def shares_reference(self, other: Measurable) -> bool:
        return False

    def options(self, messages: Sequence[Message], state: Row | None) -> list[str]:
        """The agent's closed set, what its state lists, else what the policy was trained on."""
        if self.agent.answers:
            return list(self.agent.answers)
        try:
            listed = self.agent.candidates(state) if state is not None else []
            return list(listed) or self.policy.options(messages)
        except (*UNREADABLE, LinearPolicyError):
            return []

    def logps(self, row: Row, number: int, sides: Sequence[str]) -> list[ResponseScore]:
        """log p of the responses of a row's sides among the options of its prompt, as one token each."""
        messages = prompt_messages(row, number)
        responses = [response_text(row, side, number) for side in sides]
        among = _options_of_answers(self.options(messages, row.get("state")), responses)
        found = self.policy.log_probabilities(messages, among)
        return [ResponseScore(found[_place(among, text)], 1) for text in responses]

    def pairs(self, rows: Sequence[Row]) -> list[tuple[ResponseScore, ResponseScore]]:
        """Scores of the chosen and the rejected response of each row."""
        scored = (self.logps(row, number, ("chosen", "rejected")) for number, row in enumerate(rows))
        return [(chosen, rejected) for chosen, rejected in scored]

    def responses(self, rows: Sequence[Row]) -> list[ResponseScore]:
        """Scores of the completion of each row."""
        return [self.logps(row, number, ("completion",))[0] for number, row in enumerate(rows)]

    def reference(self, rows: Sequence[Row]) -> list[ResponseScore]:
        """Scores of the same completions by the even choice among the options."""
        found = []
        for number, row in enumerate(rows):
            options = self.options(prompt_messages(row, number), row.get("state"))
            among = _options_of_answers(options, [response_text(row, "completion", number)])
            found.append(ResponseScore(-math.log(len(among)), 1))
        return found

    def answers(self, prompts: Sequence[tuple[Sequence[Message], Row | None]]) -> list[Generation]:
        """The best answer to each (prompt, state); an empty one, which is not valid, where there are no options."""
        found = []
        for messages, state in prompts:
            options = self.options(messages, state)
            scores = self.policy.scores(messages, options)
            best = options[max(range(len(options)), key=scores.__getitem__)] if options else ""
            found.append(Generation(best, 1, "stop"))
        return found


@dataclass(frozen=True)
class ModelSide:
    """A language model with the agent that it answers for."""

    policy: LoadedPolicy
    agent: Agent
    bare: bool = False
    """True of the base model, the same without its adapter."""
    options: Options | None = None
    """Options that rated answers are measured among, where the other side is linear."""

    @property
    def name(self) -> str:
        return "base" if self.bare else self.policy.adapter or self.policy.base_model

    @property
    def is_base(self) -> bool:
        return self.bare or self.policy.adapter is None

    @property
    def has_reference(self) -> bool:
        """True if the adapter was trained against another model than its base."""
        return not self.bare and self.policy.reference is not None

    def shares_reference(self, other: Measurable) -> bool:
        """True if both sides were trained from one base, and against it."""
        if not isinstance(other, ModelSide) or self.has_reference or other.has_reference:
            return False
        mine, theirs = self.policy, other.policy
        return (mine.base_model_hash, mine.quantization) == (theirs.base_model_hash, theirs.quantization)

    def speaking(self) -> contextlib.AbstractContextManager[None]:
        """Inside, this side answers."""
        return self.policy.without_adapter() if self.bare else contextlib.nullcontext()

    def forms(self, rows: Sequence[Row]) -> list[AnswerForm]:
        """Schema that the answers to each row's prompt are written within when they are served; None of free text, and
        where they are chosen: by the likelihood of free text."""
        states = (row.get("state") for row in rows)
        return [None if self.agent.choices(state) else self.agent.schema_served(state) for state in states]

    def pairs(self, rows: Sequence[Row]) -> list[tuple[ResponseScore, ResponseScore]]:
        """Scores of the chosen and the rejected response of each row."""
        return score_pairs(self.policy, rows, forms=self.forms(rows))

    def responses(self, rows: Sequence[Row]) -> list[ResponseScore]:
        """Scores of the completion of each row; among their options where the other side is linear."""
        return self._responses(self.policy, rows)

    def reference(self, rows: Sequence[Row]) -> list[ResponseScore]:
        """Scores of the same completions by the model that the adapter was trained against."""
        if (reference := self.policy.reference) is not None:
            return self._responses(reference, rows)
        with self.policy.without_adapter():
            return self._responses(self.policy, rows)

    def _responses(self, policy: LoadedPolicy, rows: Sequence[Row]) -> list[ResponseScore]:
        if self.options is not None:
            return choice_scores(policy, rows, self.options)
        items = [(prompt_messages(row, n), response_text(row, "completion", n)) for n, row in enumerate(rows)]
        return score_responses(policy, items, forms=self.forms(rows))


Measurable = ModelSide | LinearSide
"""A side with log-probabilities."""


def side_of(policy: LoadedPolicy | LinearSide, agent: Agent, options: Options | None) -> Measurable:
    """The side of a loaded policy, whose quick log-probabilities are checked first. Raises ScoringError."""
    if isinstance(policy, LinearSide):
        return policy
    head_check(policy)
    return ModelSide(policy, agent, options=options)


def generate_answers(
    policy: LoadedPolicy | LinearSide,
    prompts: Sequence[Sequence[Message]],
    agent: Agent,
    *,
    states: Sequence[Row | None] | None = None,
) -> list[Generation]:
    """The likeliest answer to each prompt as the agent is served: chosen out of its closed set, or of what its state
    lists, else written greedily within its schema; of a linear policy the best of what may be answered. states: of the
    prompts."""
    prompt_states = states or [None] * len(prompts)
    if isinstance(policy, LinearSide):
        return policy.answers(list(zip(prompts, prompt_states, strict=True)))
    choices = [agent.choices(state) for state in prompt_states]
    chosen = iter(_likeliest_choices(policy, prompts, choices))
    free = [i for i, listed in enumerate(choices) if not listed]
    written = iter(
        generate(
            policy,
            [prompts[i] for i in free],
            max_new_tokens=agent.max_new_tokens,
            forms=[agent.schema_served(prompt_states[i]) for i in free],
        )
    )
    return [next(chosen) if listed else next(written) for listed in choices]


def _likeliest_choices(
    policy: LoadedPolicy, prompts: Sequence[Sequence[Message]], choices: Sequence[Sequence[str]]
) -> list[Generation]:
    """The likeliest of the listed answers to each prompt that has some."""
    items = [(prompt, answer) for prompt, listed in zip(prompts, choices, strict=True) for answer in listed]
    scores = iter(score_responses(policy, items) if items else ())
    found = []
    for listed in filter(None, choices):
        scored = [next(scores) for _ in listed]
        best = max(range(len(listed)), key=lambda place: scored[place].logp)
        found.append(Generation(listed[best], scored[best].tokens, "stop"))
    return found


def choice_scores(policy: LoadedPolicy, rows: Sequence[Row], options: Options) -> list[ResponseScore]:
    """A language model's log p of each row's completion among the options of its prompt, as one token each."""
    items: list[tuple[list[Message], str]] = []
    choices: list[tuple[list[str], int]] = []
    for number, row in enumerate(rows):
        messages, text = prompt_messages(row, number), response_text(row, "completion", number)
        among = _options_of_answers(options(messages, row.get("state")), [text])
        choices.append((among, _place(among, text)))
        items += [(messages, answer) for answer in among]
    scores = iter(score_responses(policy, items))
    found = []
    for among, place in choices:
        logps = log_softmax([next(scores).logp for _ in among])
        found.append(ResponseScore(logps[place], 1))
    return found


def _options_of_answers(options: Sequence[str], asked: Sequence[str]) -> list[str]:
    """The options, with those of the answers asked about that are not among them."""
    known = {answer_plain(option) for option in options}
    return [*options, *(text for text in dict.fromkeys(asked) if answer_plain(text) not in known)]


def _place(among: Sequence[str], text: str) -> int:
    plain = answer_plain(text)
    return next(place for place, option in enumerate(among) if answer_plain(option) == plain)
