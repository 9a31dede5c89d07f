"""Declarations of what can be recorded: each field of a decision, rating, comparison and outcome stands here once.

A field's annotation says its type for type checkers, its type for validation (`field_types`), and its description. The
column is in `feedback.models`; validation, OpenAPI, answers, imports and exports, forms and the admin read these.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from feedback.models import Preference, RaterKind, Thumb
from feedback.storage.bodies import Body, PageInput
from feedback.storage.field_types import Choice, Measure, Name, Number, Slug, Tags, Text, Time, Whole

Rater = Annotated[
    str,
    Name(required=True),
    "Who rated; the key's name where left out. Signed in, one rates as oneself.",
]
Kind = Annotated[str, Choice(RaterKind.values)]
MAX_NOTES = 20_000
"""Longest notes, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingFacts:
    """What one rater says of one decision."""

    rater: Rater = ""
    rater_kind: Kind = RaterKind.HUMAN.value
    thumb: Annotated[str, Choice(Thumb.values, optional=True)] = ""
    stars: Annotated[int | None, Whole(1, 5)] = None
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
    """When it happened in the app."""


OUTCOME = Body(OutcomeFacts, first=("name", "value", "at"))
