"""Agents that answer with several of the listed names: a selection, or all of them in order. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random

from rl.agents.base import (
    InvalidResponse,
    JsonObject,
    OptionsAgent,
    State,
    answer_under,
)


@dataclass(frozen=True)
class ListAgent(OptionsAgent):
    """Answers {"<answer_key>": ["<name>", ...]} with names its state lists.

    State: as in `OptionsAgent`; `truth_key` (never shown): the right names, where they are known; "drafts" (never
    shown): lists of names to choose from in a simulation.
    """

    answer_key: str = "picked"
    truth_key: str = "right"
    ordered: bool = False
    """True: the answer holds every name once, and their order counts. False: it holds some, in any order."""
    min_items: int = 1
    max_items: int | None = None

    def options(self, state: State) -> Sequence[str]:
        options = super().options(state)
        if len(set(options)) != len(options):
            raise ValueError(
                f"{self.slug}: the state needs {self.options_key!r}, a list of different names; found {options!r}"
            )
        return options

    def respond(self, names: Sequence[str]) -> str:
        """The exact response text for these names."""
        return json.dumps({self.answer_key: list(names)}, ensure_ascii=False)

    def parse(self, response: str, state: State | None = None) -> JsonObject:
        """The names under `answer_key`, sorted unless `ordered`, so that equal answers are equal."""
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

    def response_schema(self, state: State | None = None) -> JsonObject | None:
        item: JsonObject = {"type": "string"}
        names: JsonObject = {
            "type": "array",
            "items": item,
            "uniqueItems": True,
            "minItems": self.min_items,
        }
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
        """The right names, or None if unknown."""
        right = state.get(self.truth_key)
        return list(right) if isinstance(right, (list, tuple)) and right else None

    def ground_truth(self, state: State) -> list[str] | None:
        right = self.truth(state)
        return None if right is None else [self.respond(right)]

    def quality(self, state: State, response: str) -> float | None:
        """Quality in [0, 1]: F1 of the names picked, or with `ordered` the share of pairs in the right order."""
        right = self.truth(state)
        if right is None:
            return None
        names = self.parse(response, state)[self.answer_key]
        return in_order(names, right) if self.ordered else f1(names, right)

    def hidden_preference(self, state: State, response: str) -> float:
        """Quality of the answer in [0, 1], 0 if invalid. Squared where the state's "wanted" is "exact"."""
        if not self.is_valid(response, state):
            return 0.0
        quality = self.quality(state, response)
        if quality is None:
            raise ValueError(f"{self.slug}: taste needs {self.truth_key!r} in the state, found none")
        return quality**2 if state.get("wanted") == "exact" else quality


def f1(picked: Sequence[str], right: Sequence[str]) -> float:
    """F1 of the names picked: 2 |picked and right| / (|picked| + |right|) (van Rijsbergen 1979)."""
    both = len(set(picked) & set(right))
    return 2 * both / (len(set(picked)) + len(set(right)))


def in_order(names: Sequence[str], right: Sequence[str]) -> float:
    """Share of pairs in the right order: (1 + Kendall's tau) / 2."""
    place = {name: number for number, name in enumerate(names)}
    pairs = list(combinations([name for name in right if name in place], 2))
    if not pairs:
        return 1.0
    return sum(place[before] < place[after] for before, after in pairs) / len(pairs)


def drafts_of(random: Random, right: Sequence[str], others: Sequence[str]) -> list[list[str]]:
    """Four answers in random order: the right one, its first name, and two of wrong names."""
    drafts = [list(right), list(right[:1]), list(others[: len(right)]), list(others[-1:])]
    random.shuffle(drafts)
    return drafts
