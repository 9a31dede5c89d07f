"""Made-up scenarios by the thousand, and the tastes of the simulated raters who judge them. Pure.

An agent has three tastes over the same prompts. What a rater wants stands in keys of the state that no prompt shows;
`Agent.hidden_preference` and `Agent.ground_truth` read them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

from rl.agents.base import (
    Agent,
    JsonObject,
    OptionsAgent,
    Scenario,
    World,
)

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
DESKS = ("north", "south", "east", "west")

Show = Callable[[Random, JsonObject], None]
"""Changes a state in place so that its prompt shows a situation."""

_scenario_states: dict[str, list[JsonObject]] = {}
"""Slug -> states of its scenarios, kept because they take a while to make."""


def scenarios_world(show: Show, want: Callable[[JsonObject], None]) -> World:
    """World of an agent that shows each of its own scenarios in a situation."""

    def draw(agent: Agent, random: Random) -> JsonObject:
        if agent.slug not in _scenario_states:
            _scenario_states[agent.slug] = [dict(scenario.state) for scenario in agent.scenarios()]
        state = copy.deepcopy(random.choice(_scenario_states[agent.slug]))
        show(random, state)
        return state

    return World(draw, want)


def draw_lines(exact: bool = False, **choices: tuple[Any, ...]) -> Show:
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
