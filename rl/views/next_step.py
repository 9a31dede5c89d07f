"""Progress of an agent through the loop and the recommended next action. Derived from its AgentCard; runs no query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rl.gates.headlines import headline_of
from rl.models import Policy, TrainingRun
from rl.recipes import DATASET_CONFIG
from rl.selectors import STOPPED_STATUSES, AgentCard

DONE, NOW, OPEN, FAULT = "done", "now", "open", "fault"
"""Drawn states of a station: passed, being worked at or the next to reach, not reached, stopped there."""


@dataclass(frozen=True)
class Stations:
    """The state of each station of the loop."""

    decisions: str
    ratings: str
    training: str
    evaluation: str
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
    """Stations of the loop: those reached, and the first that is not as NOW."""
    reached = {
        "decisions": card.counts.decisions > 0,
        "ratings": card.newest is not None or card.counts.evidence >= feedback_minimum(),
        "training": card.newest is not None,
        "evaluation": card.headline is not None,
        "answers": card.policy is not None and card.policy.stage == Policy.Stage.CHAMPION,
    }
    first = next((name for name, done in reached.items() if not done), None)
    states = {name: DONE if done else NOW if name == first else OPEN for name, done in reached.items()}
    if card.works:
        states["training"] = NOW
    elif card.run is not None and card.run.status in STOPPED_STATUSES:
        states["training"] = FAULT
    return Stations(**states)


class GuideStep(NamedTuple):
    """One step of the guided start."""

    key: str
    title: str
    state: str
    """DONE, NOW, OPEN or FAULT."""
    effect: str
    """Effect of the step."""
    takes: str
    """About how long it takes."""


GUIDE = (
    (
        "connect",
        "Connect your app",
        "Its answers are recorded as decisions; then you rate them.",
        "two minutes",
    ),
    ("rate", "Rate", "A first training needs {needed} ratings.", "5 seconds a rating"),
    ("train", "Train", "The new policy is then evaluated on held-out prompts.", "a few minutes"),
    ("compare", "Compare", "The gate says whether the new policy is shown to be better.", "a minute"),
    ("promote", "Promote", "From then on the champion answers for the agent.", "seconds"),
    ("ask", "Ask it", "Each answer is recorded as a decision and can be rated in turn.", "seconds"),
)
"""Steps of the guided start: key, title, what happens after it, about how long it takes."""

ENOUGH = "There is enough feedback for a first training."
"""Effect of rating where nothing more is needed."""


def guide_of(card: AgentCard | None) -> tuple[GuideStep, ...]:
    """The guided start as far as this agent has come (None: no agent yet); exactly one step is NOW or FAULT. Read off
    what is stored, so that who left goes on where they were."""
    steps_done = dict.fromkeys((step[0] for step in GUIDE), False)
    fault = ""
    if card is not None:
        newest, run = card.newest, card.run
        champion = card.policy is not None and card.policy.stage == Policy.Stage.CHAMPION
        trained = newest is not None and not card.works
        is_evaluated = trained and newest is not None and headline_of(newest.metrics) is not None
        # between a champion and a newer candidate it is the candidate that is led on
        answers = champion and (newest == card.policy or newest is None or newest.stage in FINAL_STAGES)
        steps_done |= {
            "connect": card.counts.decisions > 0,
            "rate": newest is not None or card.works or card.counts.evidence >= feedback_minimum(),
            "train": trained,
            "compare": is_evaluated or (trained and answers),
            "promote": trained and answers,
        }
        if newest is None and run is not None and run.status in STOPPED_STATUSES:
            fault = "train"
    at = next(key for key, done in steps_done.items() if not done)
    return tuple(
        GuideStep(
            key,
            title,
            (FAULT if key == fault else NOW) if key == at else DONE if steps_done[key] else OPEN,
            ENOUGH if key == "rate" and steps_done["rate"] else after.format(needed=feedback_minimum()),
            takes,
        )
        for key, title, after, takes in GUIDE
    )


FINAL_STAGES = (Policy.Stage.REJECTED, Policy.Stage.RETIRED)
"""Stages of a policy that is led no further."""


def step_next(card: AgentCard) -> LoopStep:
    """The one thing that brings this agent on."""
    feedback, newest, run = card.counts.feedback, card.newest, card.run
    if card.works:
        waits = run is not None and run.status == TrainingRun.Status.QUEUED
        return LoopStep("watch", "Its training waits for a worker." if waits else "It is being trained.")
    if newest is None and not card.counts.decisions:
        return LoopStep("record", "No decisions are recorded yet.")
    if newest is None and card.counts.evidence < feedback_minimum():
        further = feedback_minimum() - card.counts.evidence
        return LoopStep("rate", f"{further} more {card.noun} are needed for a first training.")
    if run is not None and run.status in STOPPED_STATUSES:
        return LoopStep("look", f"The newest training was {run.status}; its page has the reason.")
    if newest is None and feedback < feedback_minimum():
        return LoopStep("train", _unrated_source(card))
    if newest is None:
        return LoopStep("train", "There are enough ratings for a first training.")
    if headline_of(newest.metrics) is None:
        return LoopStep("judge", f"{newest.name} was not evaluated on held-out prompts yet.", newest.name)
    refused = newest.stage in (Policy.Stage.CANDIDATE, Policy.Stage.REJECTED) and card.gate_refusal
    if newest.stage == Policy.Stage.CANDIDATE and not refused:
        return LoopStep("promote", f"{newest.name} is evaluated; promote or reject it.", newest.name)
    before = f"{newest.name} did not pass the gate: {card.gate_refusal}. " if refused else ""
    if card.buffer >= card.retrain_threshold:
        return LoopStep("train", f"{before}{card.buffer:,} {card.noun} are new since the last training.")
    if not card.learns_by_itself:
        return LoopStep("rate", f"{before}Rate more, then train again: nothing starts by itself.")
    return LoopStep(
        "rate",
        f"{before}{card.retrain_threshold - card.buffer:,} more {card.noun} until the next training.",
    )


def _unrated_source(card: AgentCard) -> str:
    """Source of a first training where hardly anybody rates."""
    counts = card.counts
    if counts.demonstrations >= feedback_minimum():
        return f"{counts.demonstrations:,} demonstrations are recorded, enough for a first training."
    found = " and ".join(f"{count:,} {name}" for name, count in card.evidence)
    return f"{found} are recorded: calculate the rewards on the agent's page, then train."


def feedback_minimum() -> int:
    """Pieces of feedback below which no training is begun."""
    return int(DATASET_CONFIG["min_samples"])
