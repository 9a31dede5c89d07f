"""Simulated decisions and, when asked for, simulated ratings: the loop can be seen to turn without users.

Whatever is written here is marked: decisions with source `simulation`, ratings with rater kind `simulated`.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from django.db import transaction

from feedback.models import RaterKind, Thumb
from feedback.services import decisions_record, rating_submit
from rl.agents import AGENTS
from rl.agents.base import Agent, Scenario
from rl.agents.worlds import TEAM, scenarios_of

NAMESPACE = uuid.UUID("5b0e4c1e-8f0a-4b53-9a5c-6d1f0a7c2e10")
"""Ids are UUIDv5 in this namespace, so that simulating again adds nothing twice."""

ALL = 2_000
"""Scenarios of a taste other than the built-in one, where nobody says how many."""

BATCH = 500
"""Decisions written per transaction."""


class SimulationRefused(ValueError):
    """An agent without scenarios, or a number outside its range."""


@dataclass(frozen=True)
class SimulationCounts:
    """Counts of the rows a simulation made."""

    agent: str
    scenarios: int
    decisions: int
    ratings: int
    raters: int
    up_share: float | None
    """Share of thumbs up among the ratings made, or None where none were."""
    decisions_new: int
    ratings_new: int


def simulate(
    agent: str,
    *,
    scenarios: int | None = None,
    taste: str = TEAM,
    rated: bool = False,
    raters: int = 3,
    noise: float = 0.1,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> SimulationCounts:
    """Make every variation of an agent's scenarios a decision, to be rated by people or by simulated raters.

    scenarios: how many, drawn with the seed; None for all built-in ones, 2,000 of another taste. taste: one of
    `rl.agents.worlds.TASTES`; scenarios of another one than `team`, or more than are built in, are made up with the
    seed. rated: let simulated raters answer, each with a thumb that follows the agent's hidden preference (up from 0.5)
    and is flipped with probability `noise` in [0, 0.5]; 0.5 is a coin. Deterministic: the same arguments make the same
    rows, and a second call adds nothing.
    Raises SimulationRefused.
    """
    maker = _agent_with_scenarios(agent)
    if not 0 <= noise <= 0.5:
        raise SimulationRefused(f"noise is the share of flipped ratings, in [0, 0.5]; found {noise}")
    if raters < 1:
        raise SimulationRefused(f"expected at least 1 simulated rater, found {raters}")
    chosen = _scenarios(maker, taste, scenarios, seed)
    facts = [_decision_facts(maker, scenario, response) for scenario, response in maker.variations(chosen)]
    decisions_new = ratings = ratings_new = up_count = 0
    for start in range(0, len(facts), BATCH):
        batch = facts[start : start + BATCH]
        with transaction.atomic():
            written = decisions_record(batch)
            decisions_new += sum(w.created for w in written)
            for decision in written if rated else ():
                for number in range(1, raters + 1):
                    rater = f"simulated-{seed}-{number}"
                    thumb = _thumb(
                        maker, decision.row.state, decision.row.response, decision.row.pk, rater, noise
                    )
                    stored = rating_submit(
                        id=uuid.uuid5(decision.row.pk, f"{rater}/{noise}"),
                        decision=decision.row,
                        rater=rater,
                        rater_kind=RaterKind.SIMULATED,
                        thumb=thumb,
                    )
                    ratings += 1
                    ratings_new += stored.created
                    up_count += thumb == Thumb.UP
        if progress:
            progress(min(start + BATCH, len(facts)), len(facts))
    return SimulationCounts(
        agent=agent,
        scenarios=len(chosen),
        decisions=len(facts),
        ratings=ratings,
        raters=raters if rated else 0,
        up_share=up_count / ratings if ratings else None,
        decisions_new=decisions_new,
        ratings_new=ratings_new,
    )


def _scenarios(maker: Agent, taste: str, count: int | None, seed: int) -> list[Scenario]:
    every = maker.scenarios()
    if taste == TEAM and (count is None or 1 <= count <= len(every)):
        return random.Random(seed).sample(every, count) if count is not None and count < len(every) else every
    try:
        return scenarios_of(maker, taste, ALL if count is None else count, seed)
    except ValueError as error:
        raise SimulationRefused(str(error)) from error


def _agent_with_scenarios(slug: str) -> Agent:
    maker = AGENTS.get(slug)
    simulable = sorted(name for name, known in AGENTS.items() if known.scenarios())
    if maker is None or slug not in simulable:
        raise SimulationRefused(f"no scenarios for agent {slug!r}; there are some for {', '.join(simulable)}")
    return maker


def _decision_facts(maker: Agent, scenario: Scenario, response: str) -> dict[str, object]:
    return {
        "id": uuid.uuid5(NAMESPACE, f"{maker.slug}/{scenario.key}/{response}"),
        "agent": maker.slug,
        "messages": maker.render(scenario.state),
        "response": response,
        "state": dict(scenario.state),
        "candidates": maker.candidates(scenario.state),
        "tags": list(scenario.tags),
        "metadata": {"scenario": scenario.key},
        "source": "simulation",
    }


def _thumb(
    maker: Agent, state: dict[str, object], response: str, decision: uuid.UUID, rater: str, noise: float
) -> Thumb:
    """The simulated rater's thumb; the flip depends on who rates what, not on the order of rating."""
    likes = maker.hidden_preference(state, response) >= 0.5
    flipped = random.Random(f"{decision}/{rater}").random() < noise
    return Thumb.UP if likes != flipped else Thumb.DOWN
