"""Declarations of what can be recorded: each field of a decision, rating, comparison, outcome and trace, once.

A field's annotation says its type for type checkers and for pydantic (`fields`), and its description. The column is in
`feedback.models`; validation, OpenAPI, answers, imports and exports, and the admin read these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from feedback.storage.bodies import Body, Internal, Later
from feedback.storage.fields import (
    Candidates,
    Duration,
    Json,
    JsonObject,
    Measure,
    Messages,
    Name,
    Notes,
    OneOf,
    Propensity,
    Response,
    SaidName,
    SaidText,
    Share,
    Slug,
    Source,
    Stars,
    Steps,
    Tags,
    Text,
    TimeSent,
    Tokens,
)

Kind = Annotated[str, OneOf(["human", "simulated"])]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFacts:
    """One prompt and the response given to it. An import may bring chat messages as a response, a request a text."""

    agent: Slug
    messages: Messages
    """The prompt: chat messages, or one text. At most 1,000,000 characters as JSON."""
    response: Response
    """The answer exactly as it was given: a text, or the assistant's message with its calls of tools."""
    reasoning: Annotated[Text, Later()] = ""
    """What the model thought before it answered; training leaves it out by default."""
    state: Json = None
    """What the app knew when it asked: any JSON."""
    candidates: Candidates | None = None
    """The listed options it was chosen among."""
    policy: Name = ""
    """Name of the policy that answered."""
    unit: Name = ""
    """The user or session it was decided for; `forget` removes by it."""
    arm: Name = ""
    propensity: Propensity | None = None
    """Probability of the choice."""
    run_id: Name = ""
    """The app's own id of the run."""
    latency_ms: Duration | None = None
    tokens_in: Tokens | None = None
    tokens_out: Tokens | None = None
    tags: Tags = ()
    metadata: JsonObject = field(default_factory=dict)
    source: Annotated[Source, Internal()] = "app"
    """Source of the decision: app, simulation, or the format it came from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingFacts:
    """Rating of one decision by one rater."""

    rater: SaidName = ""
    """Who rated; the key's name where left out. Signed in, one rates as oneself."""
    rater_kind: Kind = "human"
    thumb: Annotated[str, OneOf(["", "up", "down"])] = ""
    stars: Stars | None = None
    score: Share | None = None
    correction: SaidText | None = None
    """The response it should have been."""
    tags: Tags = ()
    notes: Notes = ""


RATING_CONTENT = ("thumb", "stars", "score", "correction", "tags", "notes")
"""A rating says at least one of these, as its table demands (`rating_says_something`)."""


def rating_share(thumb: str, stars: int | None, score: float | None) -> float | None:
    """Value of a rating on a scale from 0 (bad) to 1 (good), by its finest part; None where it has no
    verdict."""
    if score is not None:
        return score
    if stars is not None:
        return (stars - 1) / 4
    return {"up": 1.0, "down": 0.0}.get(thumb)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonFacts:
    """One rater's preference between two decisions on the same prompt."""

    preference: Annotated[str, OneOf(["left", "right", "tie", "both_bad"])]
    rater: SaidName = ""
    """Who compared; the key's name where left out. Signed in, one compares as oneself."""
    rater_kind: Kind = "human"
    tags: Tags = ()
    notes: Notes = ""


@dataclass(frozen=True, slots=True)
class OutcomeFacts:
    """A measured fact about a decision."""

    name: Slug
    """Such as ticket_reopened."""
    value: Measure
    """true is 1, false is 0."""
    at: TimeSent | None = None
    """Time in the app."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """An agent's run: its steps in the order they happened."""

    agent: Slug
    run_id: Name = ""
    steps: Steps
    """In the order they happened; at most 1,000,000 characters as JSON."""
    metadata: JsonObject = field(default_factory=dict)
    started_at: TimeSent | None = None
    finished_at: TimeSent | None = None


DECISION = Body(DecisionFacts)
RATING = Body(RatingFacts)
COMPARISON = Body(ComparisonFacts)
OUTCOME = Body(OutcomeFacts)
TRACE = Body(TraceFacts)
BODIES = (DECISION, RATING, COMPARISON, OUTCOME, TRACE)
