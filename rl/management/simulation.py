"""Simulated decisions and ratings, to try the loop without users.

Decisions have the source `simulation`, ratings the rater kind `simulated`.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db import transaction

from feedback.models import RaterKind, Thumb
from feedback.services import decisions_record, rating_submit
from rl.agents import AGENTS
from rl.agents.base import Agent, Scenario
from rl.agents.worlds import TEAM, scenarios_of

NAMESPACE = uuid.UUID("5b0e4c1e-8f0a-4b53-9a5c-6d1f0a7c2e10")
"""Namespace of the UUIDv5 ids, which make a repeated simulation add nothing."""

ALL = 2_000
"""Default number of scenarios with a taste other than the built-in one."""

BATCH = 500
"""Decisions written per transaction."""


class SimulationRefused(ValueError):
    """The agent has no scenarios, or a number is out of range."""


@dataclass(frozen=True)
class SimulationCounts:
    agent: str
    scenarios: int
    decisions: int
    ratings: int
    raters: int
    up_share: float | None
    """Share of thumbs up; None without ratings."""
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
    """Record every variation of an agent's scenarios as a decision. Repeating a call adds nothing.

    Args:
        scenarios: Number drawn with the seed; None: all built-in ones, or 2,000 of another taste.
        taste: One of `rl.agents.worlds.TASTES`. Scenarios of a taste other than `team`, or beyond the built-in ones,
            are generated with the seed.
        rated: Let `raters` simulated raters give thumbs by the agent's hidden preference (up from 0.5).
        noise: Probability that a thumb is flipped, in [0, 0.5]; 0.5 is random.

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


def _thumb(maker: Agent, state: Any, response: str, decision: uuid.UUID, rater: str, noise: float) -> Thumb:
    """A simulated rater's thumb; the flip depends on the rater and the decision, not on the order."""
    likes = maker.hidden_preference(state, response) >= 0.5
    flipped = random.Random(f"{decision}/{rater}").random() < noise
    return Thumb.UP if likes != flipped else Thumb.DOWN
