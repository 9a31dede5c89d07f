"""Declarations of what can be recorded: each field of a decision, rating, comparison and outcome stands here once.

A field's annotation says its type for type checkers, its type for validation (`field_types`), and its description. The
column is in `feedback.models`; validation, OpenAPI, answers, imports and exports, forms and the admin read these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any

from feedback.models import Preference, RaterKind, Thumb
from feedback.storage.bodies import Body, Internal, PageInput
from feedback.storage.field_types import (
    MAX_MS,
    Candidates,
    Choice,
    Integer,
    Json,
    JsonObject,
    Measure,
    Messages,
    Name,
    Number,
    ResponseText,
    Slug,
    Steps,
    Tags,
    Text,
    Time,
)
from feedback.storage.responses import Completion, Message

Rater = Annotated[
    str,
    Name(required=True),
    "Who rated; the key's name where left out. Signed in, one rates as oneself.",
]
Kind = Annotated[str, Choice(RaterKind.values)]
MAX_TOKENS = 2**31 - 1
"""Most tokens of a prompt or a response: what the column holds."""
MAX_NOTES = 20_000
"""Longest notes, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFacts:
    """One prompt and the response given to it. An import may bring chat messages as a response, a request a text."""

    agent: Annotated[str, Slug("support-bot")]
    messages: Annotated[
        list[Message],
        Messages(),
        "The prompt: chat messages, or one text. At most 1,000,000 characters as JSON.",
    ]
    response: Annotated[
        Completion,
        ResponseText(),
        "The answer exactly as it was given: a text, or the assistant's message with its calls of tools",
    ]
    reasoning: Annotated[
        str, Text(), "What the model thought before it answered; training leaves it out by default"
    ] = ""
    state: Annotated[Any, Json(), "What the app knew when it asked: any JSON"] = None
    candidates: Annotated[list[Any] | None, Candidates(), "The listed options it was chosen among"] = None
    policy: Annotated[str, Name(), "Name of the policy that answered"] = ""
    unit: Annotated[str, Name(), "The user or session it was decided for; `forget` removes by it"] = ""
    arm: Annotated[str, Name()] = ""
    propensity: Annotated[float | None, Number(0, 1, open_low=True), "Probability of the choice"] = None
    run_id: Annotated[str, Name(), "The app's own id of the run"] = ""
    latency_ms: Annotated[float | None, Number(0, MAX_MS)] = None
    tokens_in: Annotated[int | None, Integer(0, MAX_TOKENS)] = None
    tokens_out: Annotated[int | None, Integer(0, MAX_TOKENS)] = None
    tags: Annotated[tuple[str, ...], Tags()] = ()
    metadata: Annotated[dict[str, Any], JsonObject()] = field(default_factory=dict)
    source: Annotated[str, Name(40), Internal()] = "app"
    """Source of the decision: app, simulation, or the format it came from."""


DECISION = Body(
    DecisionFacts,
    first=(
        "agent", "messages", "response", "state", "candidates", "policy", "unit", "arm", "propensity", "run_id",
        "latency_ms", "tokens_in", "tokens_out", "tags", "metadata", "source",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingFacts:
    """Rating of one decision by one rater."""

    rater: Rater = ""
    rater_kind: Kind = RaterKind.HUMAN.value
    thumb: Annotated[str, Choice(Thumb.values, optional=True)] = ""
    stars: Annotated[int | None, Integer(1, 5)] = None
    score: Annotated[float | None, Number(0, 1)] = None
    correction: Annotated[str | None, Text(required=True), "The response it should have been"] = None
    tags: Annotated[tuple[str, ...], Tags()] = ()
    notes: Annotated[str, Text(MAX_NOTES), PageInput("Notes", "n")] = ""


RATING = Body(
    RatingFacts, first=("rater", "rater_kind", "thumb", "stars", "score", "correction", "tags", "notes")
)
RATING_CONTENT = ("thumb", "stars", "score", "correction", "tags", "notes")
"""A rating says at least one of these, as its table demands (`rating_says_something`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonFacts:
    """One rater's preference between two decisions on the same prompt."""

    preference: Annotated[str, Choice(Preference.values)]
    rater: Rater = ""
    rater_kind: Kind = RaterKind.HUMAN.value
    tags: Annotated[tuple[str, ...], Tags()] = ()
    notes: Annotated[str, Text(MAX_NOTES)] = ""


COMPARISON = Body(ComparisonFacts, first=("preference", "rater", "rater_kind", "tags", "notes"))


@dataclass(frozen=True, slots=True)
class OutcomeFacts:
    """A measured fact about a decision."""

    name: Annotated[str, Slug("ticket_reopened"), "Such as ticket_reopened"]
    value: Annotated[float, Measure(), "true is 1, false is 0"]
    at: Annotated[datetime | None, Time(or_now=True)] = None
    """Time in the app."""


OUTCOME = Body(OutcomeFacts, first=("name", "value", "at"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """An agent's run: its steps in the order they happened."""

    agent: Annotated[str, Slug("support-bot")]
    run_id: Annotated[str, Name()] = ""
    steps: Annotated[list[Any], Steps(), "In the order they happened; at most 1,000,000 characters as JSON"]
    metadata: Annotated[dict[str, Any], JsonObject()] = field(default_factory=dict)
    started_at: Annotated[datetime | None, Time()] = None
    finished_at: Annotated[datetime | None, Time()] = None


TRACE = Body(TraceFacts, first=("agent", "run_id", "steps", "metadata", "started_at", "finished_at"))

BODIES = (DECISION, RATING, COMPARISON, OUTCOME, TRACE)
