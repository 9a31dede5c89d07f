"""Made-up scenarios by the thousand, and the tastes of the simulated raters who judge them. Pure.

An agent has three tastes over the same prompts. What a rater wants stands in keys of the state that no prompt shows;
`Agent.hidden_preference` and `Agent.ground_truth` read them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random

from rl.agents.base import (
    Agent,
    ChoiceAgent,
    JsonObject,
    OptionsAgent,
    Scenario,
    State,
    World,
    state_text,
)

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
DESKS = ("north", "south", "east", "west")

Show = Callable[[Random, JsonObject], None]
"""Changes a state in place so that its prompt shows a situation."""

_scenario_states: dict[str, list[JsonObject]] = {}
"""Slug -> states of its scenarios, kept because they take a while to make."""


@dataclass(frozen=True)
class TwoKinds(ChoiceAgent):
    """Chooses among options of two kinds; a made-up team wants one kind for each group of states.

    State, for the simulated rater alone, never shown: `group_key`, a key of `taste`; "wanted", the kind wanted if not
    the taste's.
    """

    group_key: str = "group"
    taste: Mapping[str, str] = field(default_factory=dict)
    """Group -> the kind that the team wants."""
    scenarios_per_group: int = 60

    def kinds(self, state: State) -> dict[str, Iterable[str]]:
        """Kind -> its three options, liked most first."""
        raise NotImplementedError

    def draw(self, random: Random, group: str) -> JsonObject:
        """A made-up state of a group."""
        raise NotImplementedError

    def worth(self, state: State, option: str | None) -> float:
        """1, 0.9, 0.8 for an option of the wanted kind, 0.2, 0.1, 0 for the other kind; 0 for anything else."""
        kinds = self.kinds(state)
        wanted = state.get("wanted", self.taste[state[self.group_key]])
        (unwanted,) = kinds.keys() - {wanted}
        ranked = zip((*kinds[wanted], *kinds[unwanted]), (1.0, 0.9, 0.8, 0.2, 0.1, 0.0), strict=True)
        return dict(ranked).get(option or "", 0.0)

    def hidden_preference(self, state: State, response: str) -> float:
        if (group := state_text(state, self.group_key, self.slug)) not in self.taste:
            known = ", ".join(self.taste)
            raise ValueError(f"{self.slug}: {self.group_key!r} must be one of {known}; found {group!r}")
        return self.worth(state, self.option_chosen(state, response))

    def scenarios(self) -> list[Scenario]:
        """The same ones in every process; no two of a group have an equal prompt."""
        made: list[Scenario] = []
        for group in self.taste:
            random = Random(f"{self.slug}/{group}")
            seen: set[str] = set()
            while len(seen) < self.scenarios_per_group:
                state = self.draw(random, group)
                shown = self.distinct_by(state)
                if shown in seen:
                    continue
                seen.add(shown)
                made.append(Scenario(f"{group}-{len(seen):03d}", state, tags=(group,)))
        return made

    def distinct_by(self, state: State) -> str:
        """What no two scenarios of a group may share."""
        return json.dumps([state[self.asked_key], state.get("context")])


def two_of_each(random: Random, one: Iterable[str], other: Iterable[str]) -> list[str]:
    """Two options of each kind, in random order."""
    options = random.sample(tuple(one), 2) + random.sample(tuple(other), 2)
    random.shuffle(options)
    return options


def draw_any(agent: Agent, random: Random) -> JsonObject:
    """State of any group of a TwoKinds agent, for its `world`."""
    assert isinstance(agent, TwoKinds)
    return agent.draw(random, random.choice(tuple(agent.taste)))


def scenarios_world(show: Show, want: Callable[[JsonObject], None]) -> World:
    """World of an agent that shows each of its own scenarios in a situation."""

    def draw(agent: Agent, random: Random) -> JsonObject:
        if agent.slug not in _scenario_states:
            _scenario_states[agent.slug] = [dict(scenario.state) for scenario in agent.scenarios()]
        state = copy.deepcopy(random.choice(_scenario_states[agent.slug]))
        show(random, state)
        return state

    return World(draw, want)


def draw_lines(exact: bool = False, **choices: tuple[object, ...]) -> Show:
    """Context lines with drawn values. exact: the rater likes no answer with a name too many or too few."""

    def show(random: Random, state: JsonObject) -> None:
        drawn = {name.replace("_", " "): random.choice(values) for name, values in choices.items()}
        state["context"] = {**(state.get("context") or {}), **drawn}
        if exact:
            state["wanted"] = "exact"

    return show


TEAM, SITUATION, DRIFTING = "team", "situation", "drifting"

TASTES: dict[str, str] = {
    TEAM: "by the question alone",
    SITUATION: "by the rest of the prompt: screen, amount of data, deadline, reader",
    DRIFTING: "as `team` in the first half of the scenarios, as `situation` in the second",
}

MAX_SCENARIOS = 5_000
"""Most scenarios made; every agent has at least as many different prompts."""

MOST_REPEATS = 1_000
"""Draws in a row without a new prompt after which a world counts as exhausted."""


def scenarios_of(agent: Agent, taste: str, count: int, seed: int = 0) -> list[Scenario]:
    """`count` scenarios with different prompts: the same ones for equal arguments, and equal prompts for every taste.

    Raises ValueError for an unknown taste, an agent without a world or a count outside [1, MAX_SCENARIOS].
    """
    if taste not in TASTES:
        raise ValueError(f"expected a taste of {', '.join(TASTES)}; found {taste!r}")
    if agent.world is None:
        raise ValueError(
            f"agent {agent.slug!r} has only its own scenarios, for the taste {TEAM}; for other tastes give the Agent "
            "a `world` (docs/extending.md)"
        )
    if not 1 <= count <= MAX_SCENARIOS:
        raise ValueError(
            f"agent {agent.slug} has {MAX_SCENARIOS:,} scenarios; expected 1 to {MAX_SCENARIOS:,}, found {count:,}"
        )
    random = Random(f"tastes/{agent.slug}/{seed}")
    scenarios: list[Scenario] = []
    prompts: set[str] = set()
    repeats = 0
    while len(scenarios) < count:
        state = _shuffled_options(agent, agent.world.draw(agent, random), random)
        shown = json.dumps(agent.render(state))
        repeats = repeats + 1 if shown in prompts else 0
        if repeats == MOST_REPEATS:
            raise ValueError(
                f"agent {agent.slug!r}: expected {count:,} different prompts of its world, found {len(scenarios):,}; "
                f"ask for fewer (--scenarios {len(scenarios)})"
            )
        if repeats:
            continue
        prompts.add(shown)
        if taste == SITUATION or (taste == DRIFTING and 2 * len(scenarios) >= count):
            agent.world.want(state)
        scenarios.append(Scenario(f"{taste}-{seed}-{len(scenarios) + 1:04d}", state))
    return scenarios


def _shuffled_options(agent: Agent, state: JsonObject, random: Random) -> JsonObject:
    if isinstance(agent, OptionsAgent):
        options = list(state[agent.options_key])
        random.shuffle(options)
        state[agent.options_key] = options
    return state
