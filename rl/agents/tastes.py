"""Tastes of simulated raters, and scenarios by the thousand in which what the prompt says decides. Pure.

Three tastes an agent. Each scenario carries what is wanted in keys of its state that no prompt shows, so that
`Agent.hidden_preference` and `Agent.ground_truth` speak of it as of any other. The prompts are the same for all three.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from rl.agents.base import Agent, ChoiceAgent, Scenario
from rl.agents.lists import ListAgent

TEAM, SITUATION, DRIFTING = "team", "situation", "drifting"

TASTES: dict[str, str] = {
    TEAM: "by the question alone, whatever else the prompt says",
    SITUATION: "by what the prompt says beside the question: screen, amount of data, deadline, who reads",
    DRIFTING: "as `team` in the first half of the scenarios, as `situation` in the second",
}

MAX_SCENARIOS = 5_000
"""Scenarios that are made at most; the smallest agent has prompts enough for as many."""

MOST_REPEATS = 1_000
"""Draws in a row without a new prompt after which a world is taken to have no more."""

State = dict[str, Any]


def scenarios_of(agent: Agent, taste: str, count: int, seed: int = 0) -> list[Scenario]:
    """Draw `count` scenarios with different prompts; the same for the same arguments, and the prompts for
    every taste.

    Raises ValueError for an unknown taste, an agent without a world or a count outside [1, MAX_SCENARIOS].
    """
    if taste not in TASTES:
        raise ValueError(f"expected a taste of {', '.join(TASTES)}; found {taste!r}")
    if agent.world is None:
        raise ValueError(
            f"agent {agent.slug!r} has its own scenarios alone, for the taste {TEAM}; other tastes take an "
            "Agent with a `world` (docs/extending.md)"
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
        state = _listed_anew(agent, agent.world.draw(agent, random), random)
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


def _listed_anew(agent: Agent, state: State, random: Random) -> State:
    """The options in another order: it says nothing, and makes further prompts."""
    if isinstance(agent, (ChoiceAgent, ListAgent)):
        options = list(state[agent.options_key])
        random.shuffle(options)
        state[agent.options_key] = options
    return state
