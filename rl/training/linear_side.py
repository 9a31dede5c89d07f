"""A linear policy as one side of an evaluation, and language models by the same measure: log p of an answer among
options.

A language model spreads its probability over all texts, a linear policy over the answers there are. Where the two are
compared by how far each moved a rated answer, both are measured among the options of the prompt, from their reference:
of a linear policy that is the even choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.agents.base import UNREADABLE, Agent, Message, answer_plain
from rl.linear.model import LinearPolicy, LinearPolicyError, log_softmax
from rl.training.encoding import prompt_messages, response_text
from rl.training.policy import Generation, LoadedPolicy
from rl.training.scoring import ResponseScore, score_responses

Options = Callable[[Sequence[Message], Mapping[str, Any] | None], list[str]]
"""(prompt, state) -> the answers that may be given; empty where nobody knows."""


@dataclass(frozen=True)
class LinearSide:
    """A linear policy with the agent whose answers it chooses among."""

    policy: LinearPolicy
    agent: Agent
    adapter: str = "linear"
    base_model: str = field(default="", init=False)

    def options(self, messages: Sequence[Message], state: Mapping[str, Any] | None) -> list[str]:
        """The agent's closed set, what its state lists, else what the policy was trained on."""
        if self.agent.answers:
            return list(self.agent.answers)
        try:
            listed = self.agent.candidates(state) if state is not None else []
            return list(listed) or self.policy.options(messages)
        except (*UNREADABLE, LinearPolicyError):
            return []

    def logps(self, row: Mapping[str, Any], number: int, sides: Sequence[str]) -> list[ResponseScore]:
        """log p of the responses of a row's sides among the options of its prompt, as one token each."""
        messages = prompt_messages(row, number)
        responses = [response_text(row, side, number) for side in sides]
        among = _options_of_answers(self.options(messages, row.get("state")), responses)
        found = self.policy.log_probabilities(messages, among)
        return [ResponseScore(found[_place(among, text)], 1) for text in responses]

    def pairs(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[ResponseScore, ResponseScore]]:
        """Scores of the chosen and the rejected response of each row."""
        scored = (self.logps(row, number, ("chosen", "rejected")) for number, row in enumerate(rows))
        return [(chosen, rejected) for chosen, rejected in scored]

    def responses(self, rows: Sequence[Mapping[str, Any]]) -> list[ResponseScore]:
        """Scores of the completion of each row."""
        return [self.logps(row, number, ("completion",))[0] for number, row in enumerate(rows)]

    def reference(self, rows: Sequence[Mapping[str, Any]]) -> list[ResponseScore]:
        """Scores of the same completions by the even choice among the options."""
        found = []
        for number, row in enumerate(rows):
            options = self.options(prompt_messages(row, number), row.get("state"))
            among = _options_of_answers(options, [response_text(row, "completion", number)])
            found.append(ResponseScore(-math.log(len(among)), 1))
        return found

    def answers(
        self, prompts: Sequence[tuple[Sequence[Message], Mapping[str, Any] | None]]
    ) -> list[Generation]:
        """The best answer to each (prompt, state); an empty one, which is not valid, where there are no options."""
        found = []
        for messages, state in prompts:
            options = self.options(messages, state)
            scores = self.policy.scores(messages, options)
            best = options[max(range(len(options)), key=scores.__getitem__)] if options else ""
            found.append(Generation(best, 1, "stop"))
        return found


def choice_scores(
    policy: LoadedPolicy, rows: Sequence[Mapping[str, Any]], options: Options, *, batch_size: int = 16
) -> list[ResponseScore]:
    """A language model's log p of each row's completion among the options of its prompt, as one token each."""
    items: list[tuple[list[Message], str]] = []
    choices: list[tuple[list[str], int]] = []
    for number, row in enumerate(rows):
        messages, text = prompt_messages(row, number), response_text(row, "completion", number)
        among = _options_of_answers(options(messages, row.get("state")), [text])
        choices.append((among, _place(among, text)))
        items += [(messages, answer) for answer in among]
    scores = iter(score_responses(policy, items, batch_size=batch_size))
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
