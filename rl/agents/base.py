"""Agent: how a state becomes a prompt, and how a response becomes an action. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Protocol

Message = dict[str, str]
"""One chat turn: {"role": "system" | "user" | "assistant", "content": text}."""

JsonObject = dict[str, Any]
"""A JSON object: an action, a JSON schema, a state that is being made."""

State = Mapping[str, Any]
"""State of the app at the time of the prompt, JSON-serialisable; its keys are the agent's own."""


Row = Mapping[str, Any]
"""A row of a dataset: a prompt, and answers with what people said of them; JSON-serialisable."""


UNREADABLE = (ValueError, TypeError, AttributeError, LookupError)
"""Errors an agent may raise over a state that an app sent: a key is missing, or its value has another type."""


class InvalidResponse(ValueError):
    """A response the agent cannot act on. The message says what was expected and what was found."""


@dataclass(frozen=True)
class Scenario:
    """One made-up situation to decide in, for simulation, demo and tests."""

    key: str
    state: State
    tags: tuple[str, ...] = ()


HORIZONS = ("immediate", "delayed", "strategic")
"""When a reward is known: at once; later, from people and the app; in the end."""


@dataclass(frozen=True)
class OutcomeScale:
    """Scale of a measured outcome: quality 1 at `good`, 0 at `bad`, linear between them, clipped outside."""

    good: float
    bad: float
    horizon: str = "delayed"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.good) and math.isfinite(self.bad)) or self.good == self.bad:
            raise ValueError(
                f"good and bad must be two different numbers, found {self.good!r} and {self.bad!r}"
            )
        if self.horizon not in HORIZONS[1:]:
            raise ValueError(f"an outcome's horizon is {' or '.join(HORIZONS[1:])}, found {self.horizon!r}")

    def share(self, value: float) -> float:
        """Quality of a value, in [0, 1]."""
        return min(1.0, max(0.0, (value - self.bad) / (self.good - self.bad)))


@dataclass(frozen=True)
class RewardFacts:
    """Default rewards of an agent's decisions. An operator may change them."""

    functions: Mapping[str, float] = field(default_factory=lambda: {"agent": 1.0, "tool_success": 1.0})
    """Name of a reward function computed at once -> its weight."""
    outcomes: Mapping[str, OutcomeScale] = field(default_factory=dict)
    """Outcome name -> its scale. Other outcomes are recorded and add no reward."""
    weights: Mapping[str, float] = field(
        default_factory=lambda: {"immediate": 0.2, "delayed": 0.6, "strategic": 0.2}
    )
    """Weight of each of HORIZONS, renormalised over the horizons known so far."""


class Drawing(Protocol):
    """Draws a choice as its user would see it."""

    def __call__(
        self, choice: str, *, asked: str, description: str, context: Mapping[str, object], seed: str
    ) -> str | None:
        """One SVG element with every text escaped, or None for a choice without a drawing.

        seed: equal for the choices of one prompt, so that they show the same made-up figures.
        """


@dataclass(frozen=True)
class World:
    """Generator of an agent's situations, for the tastes of the simulated rater (`rl.agents.worlds`)."""

    draw: Callable[[Agent, Random], JsonObject]
    """A new state that shows a situation. It holds what the taste `team` wants."""
    want: Callable[[JsonObject], None]
    """Changes a state in place: wanted becomes what the taste `situation` wants."""


@dataclass(frozen=True)
class AgentFacts:
    """What a page needs to know of an agent."""

    slug: str
    title: str
    description: str
    suggested_tags: tuple[str, ...] = ()
    preview: str = "text"
    """Template under templates/feedback/preview/ that shows a decision as a person would see it."""
    asked_key: str = ""
    """State key of the question; empty: the preview's usual key."""
    listed_key: str = ""
    """State key of the listed options."""
    draw: Drawing | None = None
    """Draws its choices; without it a page shows their names."""


@dataclass(frozen=True)
class Agent:
    """A named decision maker. Built-in agents subclass it; any other slug behaves as the assistant."""

    slug: str
    title: str
    description: str
    system_prompt: str = ""
    suggested_tags: tuple[str, ...] = field(default=())
    max_new_tokens: int = 48
    max_prompt_tokens: int | None = None
    """Longest prompt in tokens; None: the recipe's usual limit."""
    preview: str = "text"
    drawing: Drawing | None = field(default=None, compare=False)
    """Draws its choices on pages. Agents without code that have the same preview use it too."""
    world: World | None = field(default=None, compare=False)
    """Situations for `simulate --taste situation`; None: only its own scenarios."""
    reward_facts: RewardFacts = field(default_factory=RewardFacts, compare=False)
    answers: tuple[str, ...] = ()
    """Every response it can give, if they are a closed set; else empty."""

    @property
    def structured(self) -> bool:
        """True if a response must be JSON that `parse` accepts."""
        return False

    @property
    def discrete(self) -> bool:
        """True if answers are actions, equal or different; False if they are wordings."""
        return self.structured or bool(self.answers)

    def facts(self) -> AgentFacts:
        return AgentFacts(
            self.slug, self.title, self.description, self.suggested_tags, self.preview, draw=self.drawing
        )

    def render(self, state: State) -> list[Message]:
        """The prompt for a state, as chat messages. Raises ValueError if the state lacks a key the prompt needs."""
        raise NotImplementedError

    def parse(self, response: str, state: State | None = None) -> JsonObject:
        """The action of a response. Raises InvalidResponse; with a state, also for a choice it does not list."""
        raise NotImplementedError

    def deed(self, response: str) -> object:
        """The part of an answer that decides whether two answers are equal. Raises InvalidResponse."""
        return self.parse(response)

    def response_schema(self, state: State | None = None) -> JsonObject | None:
        """JSON schema of a valid response, or None for free text."""
        return None

    def schema_served(self, state: object) -> JsonObject | None:
        """`response_schema` for any state an app sent; without the state if it cannot be read; None for free text."""
        if not self.structured:
            return None
        try:
            return self.response_schema(state if isinstance(state, Mapping) else None)
        except UNREADABLE:
            return self.response_schema()

    def form_served(self, state: Any) -> JsonObject | tuple[str, ...] | None:
        """Form of the answers sampled in training: the list of choices, a JSON schema, or None for free text.

        It is the choices if there are two or more, and they are a closed set or no schema names every value. Else it is
        `schema_served`, which the gateway uses too.
        """
        choices, schema = tuple(self.choices(state)), self.schema_served(state)
        if len(choices) > 1 and (self.answers or schema is None or not names_values(schema)):
            return choices
        return schema

    def candidates(self, state: State) -> list[str]:
        """Every listed response for a state, in the exact text of an answer; empty for free text."""
        return []

    def choices(self, state: State | None) -> list[str]:
        """The responses to choose among: the closed set, else the state's valid candidates; empty if it must write."""
        if self.answers:
            return list(self.answers)
        if not self.discrete or not isinstance(state, Mapping):
            return []
        try:
            listed = self.candidates(state)
            return [response for response in dict.fromkeys(listed) if self.is_valid(response, state)]
        except UNREADABLE:
            return []

    def ground_truth(self, state: State) -> list[str] | None:
        """The responses known to be right for a state, each of them enough; None if unknown."""
        return None

    def truths(self, state: object) -> list[str]:
        """`ground_truth` for any state an app sent; empty if unknown."""
        try:
            return list(self.ground_truth(state) or ()) if isinstance(state, Mapping) else []
        except UNREADABLE:
            return []  # the state lacks what it takes, or holds something else there

    def quality(self, state: State, response: str) -> float | None:
        """Correctness of a valid response in [0, 1]; None if the right answer is unknown."""
        right = self.ground_truth(state)
        if right is None:
            return None
        action = self.parse(response, state)
        return float(
            any(self.parse(answer, state) == action for answer in right if self.is_valid(answer, state))
        )

    def scenarios(self) -> list[Scenario]:
        """Every made-up scenario, in the same order in every process."""
        return []

    def hidden_preference(self, state: State, response: str) -> float:
        """Value of a response to the SIMULATED rater, in [0, 1]; 0 for an invalid one. Never shown to a policy.

        Raises ValueError if the state lacks a key that taste depends on.
        """
        raise NotImplementedError(f"agent {self.slug!r} has no simulated rater")

    def is_valid(self, response: str, state: State | None = None) -> bool:
        try:
            self.parse(response, state)
        except InvalidResponse:
            return False
        return True

    def variations(self, scenarios: Sequence[Scenario] | None = None) -> Iterator[tuple[Scenario, str]]:
        """Each scenario (None: all of them) with each of its candidate responses, for people to rate."""
        for scenario in self.scenarios() if scenarios is None else scenarios:
            for response in self.candidates(scenario.state):
                yield scenario, response


def state_text(state: State, key: str, slug: str) -> str:
    """A required text of a state. Raises ValueError if it is missing or blank."""
    value = state.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{slug}: the state needs {key!r}, a text; found {value!r}")
    return value


def unique_keys(pairs: list[tuple[str, object]]) -> JsonObject:
    """Hook for `json.loads` that refuses a repeated key, of which json would silently keep the last."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def names_values(schema: object) -> bool:
    """True of a JSON schema with a finite set of values: enums, bounded integers, booleans, lists and objects of them.

    Any other keyword counts as open.
    """
    if not isinstance(schema, Mapping) or OPENING & schema.keys():
        return False
    if schema.get("additionalProperties", False) is not False:
        return False
    if "const" in schema or schema.get("enum"):
        return True
    for several in ("anyOf", "oneOf"):
        if schema.get(several):
            return all(names_values(one) for one in schema[several])
    kind = schema.get("type")
    if kind == "object":
        inner = schema.get("properties") or {}
        return bool(inner) and all(names_values(one) for one in inner.values())
    if kind == "array":
        return names_values(schema.get("items") or {})
    return kind in ("boolean", "null") or (kind == "integer" and {"minimum", "maximum"} <= schema.keys())


OPENING = {"$ref", "$dynamicRef", "allOf", "if", "patternProperties", "prefixItems", "not"}
"""Keywords of a JSON schema that may allow values it does not name."""


def answer_plain(answer: str) -> str:
    """An answer without surrounding blanks; of JSON, in canonical spacing and key order."""
    text = answer.strip()
    if text[:1] in ("{", "["):
        try:
            return json.dumps(json.loads(text), ensure_ascii=False, sort_keys=True)
        except (ValueError, RecursionError):
            return text
    return text


def answer_under(key: str, response: str, *, like: str) -> object:
    """Value under the only key of a JSON response. Raises InvalidResponse for anything not of the form `like`."""
    found = repr(response[:80])
    try:
        answer = json.loads(response, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        # ValueError: not JSON, a key twice, or a number too long to read; RecursionError: nested too deep
        raise InvalidResponse(f"expected JSON like {like}, found {found} ({error})") from error
    if not isinstance(answer, dict) or set(answer) != {key}:
        raise InvalidResponse(f"expected one key {key!r}, found {found}")
    return answer[key]


@dataclass(frozen=True)
class OptionsAgent(Agent):
    """An agent that answers out of the options its state lists.

    State: `asked_key`: text; `options_key`: names, in the order shown; "descriptions": name -> what it is, for any of
    them; "context": name -> text or number, one prompt line each.
    """

    asked_key: str = "question"
    options_key: str = "options"
    answer_key: str = "choice"
    """Key of the answer in a response."""

    @property
    def structured(self) -> bool:
        return True

    def facts(self) -> AgentFacts:
        return replace(super().facts(), asked_key=self.asked_key, listed_key=self.options_key)

    def options(self, state: State) -> Sequence[str]:
        """The names that a state lists. Raises ValueError for a state without any."""
        options = state.get(self.options_key)
        if (
            not isinstance(options, (list, tuple))
            or not options
            or not all(isinstance(option, str) and option for option in options)
        ):
            raise ValueError(
                f"{self.slug}: the state needs {self.options_key!r}, a list of at least one option name; "
                f"found {options!r}"
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


@dataclass(frozen=True)
class ChoiceAgent(OptionsAgent):
    """An agent that answers with one of the options its state lists: {"<answer_key>": "<option>"}."""

    def respond(self, option: str) -> str:
        """The exact response text for an option."""
        return json.dumps({self.answer_key: option}, ensure_ascii=False)

    def parse(self, response: str, state: State | None = None) -> JsonObject:
        option = answer_under(self.answer_key, response, like=self.respond("..."))
        if not isinstance(option, str):
            raise InvalidResponse(f"expected a name under {self.answer_key!r}, found {response[:80]!r}")
        if state is not None and option not in self.options(state):
            raise InvalidResponse(
                f"expected one of {', '.join(self.options(state))}; found {option!r}, which was not listed"
            )
        return {self.answer_key: option}

    def response_schema(self, state: State | None = None) -> JsonObject | None:
        choice: JsonObject = {"type": "string"}
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

    def option_chosen(self, state: State, response: str) -> str | None:
        """The listed option a response chose, or None for an invalid response."""
        try:
            return self.parse(response, state)[self.answer_key]
        except InvalidResponse:
            return None

    def dpo_pairs(
        self, entries: Iterable[Mapping[str, Any]], state_of: Callable[[str], State]
    ) -> list[JsonObject]:
        """Preference pairs from thumbs: within each scenario, every option rated up over every option rated down.

        entries: {"entry_id", "scenario": key, <answer_key>: option, "rating": "up" | "down", ...}; entries without a
        rating are skipped. The majority decides between ratings of one option; ties are left out. state_of: scenario
        key -> state. Returns {"prompt": messages, "chosen": response, "rejected": response} dicts, in the entries'
        order. Raises ValueError, naming the entry, for a missing key, another rating, or a liked option the scenario
        does not list: a policy must not learn to answer it.
        """
        states: dict[str, State] = {}
        votes: dict[str, dict[str, int]] = {}
        for entry in entries:
            name = entry.get("entry_id", "?")
            if entry.get("rating") is None:
                continue
            missing = [key for key in ("scenario", self.answer_key) if not isinstance(entry.get(key), str)]
            if missing:
                raise ValueError(f"entry {name}: expected a text under {' and '.join(map(repr, missing))}")
            key, option, rating = entry["scenario"], entry[self.answer_key], entry["rating"]
            if rating not in ("up", "down"):
                raise ValueError(f"entry {name}: a rating is 'up' or 'down', found {rating!r}")
            if key not in states:
                states[key] = state_of(key)
            if rating == "up" and option not in self.options(states[key]):
                listed = ", ".join(self.options(states[key]))
                raise ValueError(f"entry {name}: {option!r} is liked, but scenario {key!r} lists {listed}")
            tally = votes.setdefault(key, {})
            tally[option] = tally.get(option, 0) + (1 if rating == "up" else -1)
        return [
            {
                "prompt": self.render(states[key]),
                "chosen": self.respond(liked),
                "rejected": self.respond(disliked),
            }
            for key, tally in votes.items()
            for liked in tally
            if tally[liked] > 0
            for disliked in tally
            if tally[disliked] < 0
        ]
