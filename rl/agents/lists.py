"""Agents that answer with several of the names they were shown: picked out, or all of them put in order. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Any

from rl.agents.base import Agent, AgentFacts, InvalidResponse, Message, State, answer_under, state_text


@dataclass(frozen=True)
class ListAgent(Agent):
    """Answers {"<answer_key>": ["<name>", ...]} with names its state lists.

    State: `asked_key`: text; `options_key`: names, in the order shown; "descriptions": name -> what it is, for any of
    them; "context": name -> text or number, one prompt line each; `truth_key` (never shown): the right names, where
    they are known; "drafts" (never shown): lists of names to choose from in a simulation.
    """

    asked_key: str = "question"
    options_key: str = "options"
    answer_key: str = "picked"
    truth_key: str = "right"
    ordered: bool = False
    """True: every name must stand in the answer once, and their order is the answer. False: some of them, and their
    order says nothing."""
    min_items: int = 1
    max_items: int | None = None

    @property
    def structured(self) -> bool:
        return True

    def facts(self) -> AgentFacts:
        return AgentFacts(
            self.slug,
            self.title,
            self.description,
            self.suggested_tags,
            self.preview,
            self.asked_key,
            self.options_key,
            self.drawing,
        )

    def options(self, state: State) -> Sequence[str]:
        options = state.get(self.options_key)
        if (
            not isinstance(options, (list, tuple))
            or not options
            or not all(isinstance(option, str) and option for option in options)
            or len(set(options)) != len(options)
        ):
            raise ValueError(
                f"{self.slug}: the state needs {self.options_key!r}, a list of different names; found {options!r}"
            )
        return options

    def render(self, state: State) -> list[Message]:
        context, descriptions = state.get("context") or {}, state.get("descriptions") or {}
        for key, value in (("context", context), ("descriptions", descriptions)):
            if not isinstance(value, Mapping):
                raise ValueError(f"{self.slug}: {key!r} must map a name to a text, found {value!r}")
        lines = [f"{self.asked_key}: {state_text(state, self.asked_key, self.slug)}"]
        lines += [f"{name}: {value}" for name, value in context.items()]
        lines.append(f"{self.options_key}:")
        for name in self.options(state):
            lines.append(f"{name}: {descriptions[name]}" if name in descriptions else name)
        return [
            {"role": "system", "content": self.system_prompt},
            {"role": "user", "content": "\n".join(lines)},
        ]

    def respond(self, names: Sequence[str]) -> str:
        """The exact response text for these names."""
        return json.dumps({self.answer_key: list(names)}, ensure_ascii=False)

    def parse(self, response: str, state: State | None = None) -> dict[str, Any]:
        """Parse a response like Agent; where order says nothing the names come sorted, so that two answers
        that do the same are equal."""
        found = repr(response[:80])
        names = answer_under(self.answer_key, response, like=self.respond(["..."]))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidResponse(f"expected a list of names under {self.answer_key!r}, found {found}")
        if len(set(names)) != len(names):
            raise InvalidResponse(f"expected each name once, found {found}")
        if len(names) < self.min_items or (self.max_items is not None and len(names) > self.max_items):
            up_to = f" to {self.max_items}" if self.max_items else " or more"
            raise InvalidResponse(f"expected {self.min_items}{up_to} names, found {len(names)}")
        if state is not None:
            listed = self.options(state)
            strange = [name for name in names if name not in listed]
            if strange:
                raise InvalidResponse(
                    f"expected names of {', '.join(listed)}; found {strange[0]!r}, which was not listed"
                )
            if self.ordered and len(names) != len(listed):
                raise InvalidResponse(f"expected all {len(listed)} names in order, found {len(names)}")
        return {self.answer_key: names if self.ordered else sorted(names)}

    def response_schema(self, state: State | None = None) -> dict[str, Any] | None:
        item: dict[str, Any] = {"type": "string"}
        names: dict[str, Any] = {
            "type": "array", "items": item, "uniqueItems": True, "minItems": self.min_items
        }  # fmt: skip
        if self.max_items is not None:
            names["maxItems"] = self.max_items
        if state is not None:
            item["enum"] = list(self.options(state))
            if self.ordered:
                names["minItems"] = names["maxItems"] = len(item["enum"])
        return {
            "type": "object",
            "properties": {self.answer_key: names},
            "required": [self.answer_key],
            "additionalProperties": False,
        }

    def candidates(self, state: State) -> list[str]:
        return [self.respond(names) for names in state.get("drafts") or ()]

    def truth(self, state: State) -> list[str] | None:
        """The right names where they are known."""
        right = state.get(self.truth_key)
        return list(right) if isinstance(right, (list, tuple)) and right else None

    def ground_truth(self, state: State) -> list[str] | None:
        right = self.truth(state)
        return None if right is None else [self.respond(right)]

    def quality(self, state: State, response: str) -> float | None:
        """In order: the share of pairs of names that stand in the right order (Kendall's tau onto [0, 1]). Picked out:
        the F1 of the names picked."""
        right = self.truth(state)
        if right is None:
            return None
        names = self.parse(response, state)[self.answer_key]
        return in_order(names, right) if self.ordered else f1(names, right)

    def hidden_preference(self, state: State, response: str) -> float:
        """Correctness of the answer in [0, 1]; 0 for what cannot be acted on. Squared where the state says
        that what is "wanted" is "exact": one name too many, or too few, of two is not liked then."""
        if not self.is_valid(response, state):
            return 0.0
        quality = self.quality(state, response)
        if quality is None:
            raise ValueError(f"{self.slug}: taste needs {self.truth_key!r} in the state, found none")
        return quality**2 if state.get("wanted") == "exact" else quality


def f1(picked: Sequence[str], right: Sequence[str]) -> float:
    """Twice the names both hold over the names of each together; van Rijsbergen 1979, at equal weight."""
    both = len(set(picked) & set(right))
    return 2 * both / (len(set(picked)) + len(set(right)))


def in_order(names: Sequence[str], right: Sequence[str]) -> float:
    """Share of pairs of the right names that `names` has in the same order: (1 + Kendall's tau) / 2."""
    place = {name: number for number, name in enumerate(names)}
    pairs = list(combinations([name for name in right if name in place], 2))
    if not pairs:
        return 1.0
    return sum(place[before] < place[after] for before, after in pairs) / len(pairs)


def drafts_of(random: Random, right: Sequence[str], others: Sequence[str]) -> list[list[str]]:
    """Four answers to choose from: the right one, half of it, and two of wrong names, in random order."""
    drafts = [list(right), list(right[:1]), list(others[: len(right)]), list(others[-1:])]
    random.shuffle(drafts)
    return drafts
