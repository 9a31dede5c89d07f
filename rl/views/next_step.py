"""Progress of an agent through the loop and the recommended next action. Derived from its AgentCard; runs no query."""

from __future__ import annotations

from dataclasses import dataclass

from rl.gates.figures import headline_of
from rl.models import Policy, TrainingRun
from rl.recipes import DATASET_CONFIG
from rl.selectors import AgentCard

DONE, NOW, OPEN, FAULT = "done", "now", "open", "fault"
"""How a station is drawn: passed, being worked at or the next to reach, not reached, stopped there."""

STOPPED = (TrainingRun.Status.FAILED, TrainingRun.Status.REFUSED, TrainingRun.Status.CANCELLED)


@dataclass(frozen=True)
class Stations:
    """The state of each station of the loop."""

    decisions: str
    ratings: str
    training: str
    judged: str
    answers: str


@dataclass(frozen=True)
class LoopStep:
    """Next step of an agent: `kind` is what the page offers for it, `words` why."""

    kind: str
    """record, rate, train, watch, look, judge or promote"""
    words: str
    policy: str = ""
    """Of judge and promote: which."""


def stations_of(card: AgentCard) -> Stations:
    """What is reached, and the first that is not as NOW."""
    reached = {
        "decisions": card.counts.decisions > 0,
        "ratings": card.newest is not None or card.counts.evidence >= needed(),
        "training": card.newest is not None,
        "judged": card.headline is not None,
        "answers": card.policy is not None and card.policy.stage == Policy.Stage.CHAMPION,
    }
    first = next((name for name, done in reached.items() if not done), None)
    states = {name: DONE if done else NOW if name == first else OPEN for name, done in reached.items()}
    if card.works:
        states["training"] = NOW
    elif card.run is not None and card.run.status in STOPPED:
        states["training"] = FAULT
    return Stations(**states)


def step_next(card: AgentCard) -> LoopStep:
    """The one thing that brings this agent on."""
    feedback, newest, run = card.counts.feedback, card.newest, card.run
    if card.works:
        waits = run is not None and run.status == TrainingRun.Status.QUEUED
        return LoopStep("watch", "Its training waits for a worker." if waits else "It is being trained.")
    if newest is None and not card.counts.decisions:
        return LoopStep("record", "No decision was recorded yet.")
    if newest is None and card.counts.evidence < needed():
        further = needed() - card.counts.evidence
        return LoopStep("rate", f"{further} more {card.noun} make a first training possible.")
    if run is not None and run.status in STOPPED:
        return LoopStep("look", f"The newest training was {run.status}; its page says why.")
    if newest is None and feedback < needed():
        return LoopStep("train", _unrated(card))
    if newest is None:
        return LoopStep("train", "There are ratings enough for a first training.")
    if headline_of(newest.metrics) is None:
        return LoopStep("judge", f"{newest.name} was not judged on held-out prompts yet.", newest.name)
    refused = newest.stage in (Policy.Stage.CANDIDATE, Policy.Stage.REJECTED) and card.closed
    if newest.stage == Policy.Stage.CANDIDATE and not refused:
        return LoopStep("promote", f"{newest.name} is judged: promote or reject it.", newest.name)
    before = f"The gate stayed closed to {newest.name}: {card.closed}. " if refused else ""
    if card.buffer >= card.wanted:
        return LoopStep("train", f"{before}{card.buffer:,} {card.noun} are new since the last training.")
    return LoopStep(
        "rate", f"{before}{card.wanted - card.buffer:,} more {card.noun} make the next training worth it."
    )


def _unrated(card: AgentCard) -> str:
    """What a first training learns from where hardly anybody rates."""
    counts = card.counts
    if counts.demonstrations >= needed():
        return f"{counts.demonstrations:,} demonstrations show what to answer: enough for a first training."
    found = " and ".join(f"{count:,} {name}" for name, count in card.evidence)
    return f"{found} are recorded: run manage.py calculate_rewards, then train."


def needed() -> int:
    """Pieces of feedback below which no training is begun."""
    return int(DATASET_CONFIG["min_samples"])
