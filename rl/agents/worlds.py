"""Worlds drawn from an agent's own scenarios: each is shown in a situation that lines of its prompt tell. Pure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

from rl.agents.base import Agent, World

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
DESKS = ("north", "south", "east", "west")

Show = Callable[[Random, dict[str, Any]], None]
"""Changes a state in place so that its prompt tells of a situation."""

_scenario_states: dict[str, list[dict[str, Any]]] = {}
"""Slug -> states of its scenarios, which take a while to make."""


def scenarios_world(show: Show, want: Callable[[dict[str, Any]], None]) -> World:
    """World of an agent whose states are those of its scenarios, each shown in a situation."""

    def draw(agent: Agent, random: Random) -> dict[str, Any]:
        if agent.slug not in _scenario_states:
            _scenario_states[agent.slug] = [dict(scenario.state) for scenario in agent.scenarios()]
        state = copy.deepcopy(random.choice(_scenario_states[agent.slug]))
        show(random, state)
        return state

    return World(draw, want)


def draw_lines(exact: bool = False, **choices: tuple[Any, ...]) -> Show:
    """Lines of the prompt (`context`) whose values are drawn. exact: no name too many and none too few is liked."""

    def show(random: Random, state: dict[str, Any]) -> None:
        drawn = {name.replace("_", " "): random.choice(values) for name, values in choices.items()}
        state["context"] = {**(state.get("context") or {}), **drawn}
        if exact:
            state["wanted"] = "exact"

    return show
