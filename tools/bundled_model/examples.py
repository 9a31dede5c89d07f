"""Training target of one generated prompt: several right answers, and the distribution of each next token. Pure.

Where an answer is drawn evenly among options, the model is not shown one draw but the whole distribution: after
each token the options that are still possible are counted. That says "each alike, and nothing else" without noise,
and one prompt teaches the copying of all its options.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from rl.agents.base import Message

WeightedText = tuple[str, float]
"""A text and its share."""


@dataclass(frozen=True)
class TargetAnswer:
    """A right answer, and at each of its choices the texts it might have been up to there, with their shares."""

    text: str
    choices: tuple[tuple[WeightedText, ...], ...] = ()


@dataclass(frozen=True)
class BaseExample:
    """One chat to learn from: the prompt's messages and right answers to it; plain text has no messages."""

    messages: tuple[Message, ...]
    answers: tuple[TargetAnswer, ...]

    @property
    def response(self) -> str:
        return self.answers[0].text


MOST_ANSWERS = 5
"""Answers of one prompt that are learnt from; the shares count all of them."""


def one_answer(messages: Sequence[Message], text: str) -> BaseExample:
    """An example with a single right answer."""
    return BaseExample(tuple(messages), (TargetAnswer(text),))


def chat(system: str, user: str) -> tuple[Message, ...]:
    """The two messages of a prompt; without a system prompt only the user's."""
    turns: list[Message] = [{"role": "system", "content": system}] if system else []
    return (*turns, {"role": "user", "content": user})


def choice(
    random: Random, messages: Sequence[Message], responses: Sequence[str], most: int = MOST_ANSWERS
) -> BaseExample:
    """Any one of the responses, each alike; `most`: so many of them are learnt from."""
    every = tuple((response, 1 / len(responses)) for response in responses)
    shown = random.sample(list(responses), min(most, len(responses)))
    return BaseExample(tuple(messages), tuple(TargetAnswer(text, (every,)) for text in shown))


FOLLOWING_SHARE = 0.5
"""Share of the answers of several names that go on, after a name, with the one listed below it."""


def names_picked(random: Random, key: str, names: Sequence[str], sizes: Sequence[int]) -> TargetAnswer:
    """Different names in any order, {"<key>": [...]}; each number of names in `sizes` is alike likely.

    names: in the order in which the prompt lists them. The first is any of them, each alike. What follows a name is,
    in `FOLLOWING_SHARE` of the answers, the next one listed (after the last the first), else any that is left: to go
    on in a list is learnt long before it is learnt to tell what was written already, and each name stays as likely
    as another at every place.
    """
    left, size = list(names), random.choice(list(sizes))
    text, choices = json.dumps({key: []}, ensure_ascii=False)[:-2], []
    following = ""
    for place in range(size):
        # sizes that are still possible say whether this name may be the last
        open_sizes = [other for other in sizes if other > place]
        last = sum(other == place + 1 for other in open_sizes) / len(open_sizes)
        even = (1 - FOLLOWING_SHARE if following in left else 1.0) / len(left)
        shares = {name: even + FOLLOWING_SHARE * (name == following) for name in left}
        every = []
        for name, share in shares.items():
            quoted = text + json.dumps(name, ensure_ascii=False)
            if last:
                every.append((quoted + "]}", share * last))
            if last < 1:
                every.append((quoted + ",", share * (1 - last)))
        choices.append(tuple(every))
        name = random.choices(list(shares), list(shares.values()))[0]
        left.remove(name)
        following = names[(names.index(name) + 1) % len(names)]
        text += json.dumps(name, ensure_ascii=False) + ("]}" if place + 1 == size else ", ")
    return TargetAnswer(text, tuple(choices))


def object_of(random: Random, fields: Sequence[tuple[str, Sequence[Any]]]) -> TargetAnswer:
    """An object with these keys, in this order, each with one of its values, each value alike."""
    text, choices = "{", []
    for number, (key, values) in enumerate(fields):
        text += json.dumps(key, ensure_ascii=False) + ": "
        after = "}" if number + 1 == len(fields) else ","
        written = [json.dumps(value, ensure_ascii=False) for value in values]
        choices.append(tuple((text + value + after, 1 / len(written)) for value in written))
        text += random.choice(written) + after + ("" if after == "}" else " ")
    return TargetAnswer(text, tuple(choices))


def call_of(random: Random, tools: Sequence[tuple[str, Sequence[tuple[str, Sequence[Any]]]]]) -> TargetAnswer:
    """A call of one of the tools, each alike, with one of the values of each argument: {"tool", "arguments"}."""
    openings = [f'{{"tool": {json.dumps(name, ensure_ascii=False)}, "arguments": ' for name, _ in tools]
    first = tuple((text.removesuffix(" "), 1 / len(openings)) for text in openings)
    place = random.randrange(len(tools))
    arguments = tools[place][1]
    if not arguments:
        return TargetAnswer(openings[place] + "{}}", (first,))
    inner = object_of(random, arguments)
    return TargetAnswer(
        openings[place] + inner.text + "}",
        (
            first,
            *(
                tuple(
                    (openings[place] + text + ("}" if text.endswith("}") else ""), share)
                    for text, share in every
                )
                for every in inner.choices
            ),
        ),
    )
