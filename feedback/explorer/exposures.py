"""Bulk reader of randomised decisions and their outcomes: experiments' arms, choices among listed candidates."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from django.db.models import Q, QuerySet

from feedback.models import Decision, Outcome, RaterKind, Rating
from feedback.selectors import CHUNK, decisions_of, ratings_standing
from feedback.storage.sql import IDS


@dataclass(frozen=True)
class DecisionSet:
    """An agent's decisions that meet conditions on their columns, and what was said of them before a moment."""

    agent: str
    conditions: Mapping[str, Any]
    """Look-up -> value, as a filter on decisions takes them."""
    cutoff: datetime | None = None
    """Ratings, outcomes and rewards that came later do not count; None: all do."""

    def rows(self) -> QuerySet[Decision]:
        return decisions_of(self.agent).filter(**self.conditions).order_by()

    def ids(self) -> Any:
        """Ids as a subquery."""
        return self.rows().values("pk")

    def ratings(self) -> QuerySet[Rating]:
        """Ratings that stand, or stood at `before`."""
        if self.cutoff is None:
            rows = ratings_standing()
        else:
            stood = Q(superseded_by__isnull=True) | Q(superseded_by__created_at__gte=self.cutoff)
            rows = Rating.objects.filter(
                stood, withdrawn=False, created_at__lt=self.cutoff, decision__withdrawal=None
            )
        return rows.filter(decision__agent=self.agent, **self._relation_condition()).order_by()

    def outcomes(self, name: str) -> QuerySet[Outcome]:
        """Outcomes of a name, oldest first."""
        rows = Outcome.objects.filter(
            name=name, decision__agent=self.agent, decision__withdrawal=None, **self._relation_condition()
        )
        if self.cutoff is not None:
            rows = rows.filter(created_at__lt=self.cutoff)
        return rows.order_by("at", "id")

    def _relation_condition(self) -> dict[str, Any]:
        return {f"decision__{column}": value for column, value in self.conditions.items()}


def arms_set(agent: str, arms: Sequence[str]) -> DecisionSet:
    """The decisions of these arms."""
    return DecisionSet(agent, {"arm__in": list(arms)})


def past_set(agent: str, arms: Sequence[str], since: datetime, before: datetime) -> DecisionSet:
    """The decisions that units of these arms got from one moment to another, and what was said of them by then."""
    units = arms_set(agent, arms).rows().exclude(unit="").values("unit")
    return DecisionSet(agent, {"created_at__gte": since, "created_at__lt": before, "unit__in": units}, before)


class Exposure(NamedTuple):
    """A decision of an arm, or of a unit's past."""

    id: uuid.UUID
    arm: str
    unit: str
    """The decision's own id where it was decided for nobody in particular."""
    exposed_at: datetime
    latency_ms: float | None
    failed: bool
    """True if its metadata names an error, or serving says that the arm's policy did not answer to the
    end."""
    arm_propensity: float | None
    """Probability with which its arm was drawn, where that was recorded."""
    slices: tuple[Any, ...]
    """The values of the columns asked for."""


class RatingValue(NamedTuple):
    """Value of a standing rating of one decision."""

    decision: uuid.UUID
    thumb: str
    stars: int | None
    score: float | None
    simulated: bool


def exposures(decisions: DecisionSet, columns: Sequence[str] = ()) -> Iterator[Exposure]:
    """Read exposures of these decisions, in no particular order; `columns` (`tags`, `source`,
    `metadata__<key>`) beside."""
    rows = decisions.rows().values_list(
        "pk", "arm", "unit", "created_at", "latency_ms", "metadata__arm_propensity",
        "metadata__error", "metadata__serving__fallbacks", "metadata__serving__finish_reason", *columns,
    )  # fmt: skip
    for pk, arm, unit, at, latency, propensity, error, fallbacks, ended, *values in rows.iterator(
        chunk_size=CHUNK
    ):
        drawn = float(propensity) if isinstance(propensity, (int, float)) and 0 < propensity <= 1 else None
        failed = bool(error) or bool(fallbacks) or ended == "error"
        yield Exposure(pk, arm, unit or str(pk), at, latency, failed, drawn, tuple(values))


def verdicts(decisions: DecisionSet) -> Iterator[RatingValue]:
    """Every standing rating of these decisions, in no particular order."""
    rows = decisions.ratings().values_list("decision_id", "thumb", "stars", "score", "rater_kind")
    for pk, thumb, stars, score, kind in rows.iterator(chunk_size=CHUNK):
        yield RatingValue(pk, thumb, stars, score, kind == RaterKind.SIMULATED)


def outcomes_of(decisions: DecisionSet, name: str) -> dict[uuid.UUID, float]:
    """Decision -> the newest value of that outcome, of these decisions that have one."""
    return dict(decisions.outcomes(name).values_list("decision_id", "value").iterator(chunk_size=CHUNK))


class PromptText(NamedTuple):
    """Facts of a decision that were known before it was answered."""

    messages: list[dict[str, Any]]
    source: str
    tags: list[str]


def prompts_of(ids: Sequence[uuid.UUID]) -> Iterator[tuple[uuid.UUID, PromptText]]:
    """Read the prompts of these decisions, in no particular order."""
    for start in range(0, len(ids), IDS):
        rows = Decision.objects.filter(pk__in=ids[start : start + IDS]).order_by()
        for pk, messages, source, tags in rows.values_list("pk", "messages", "source", "tags"):
            yield pk, PromptText(messages, source, tags)


def outcomes_named(ids: Sequence[uuid.UUID], name: str) -> dict[uuid.UUID, float]:
    """Decision -> the newest value of that outcome, of those of these decisions that have one."""
    found: dict[uuid.UUID, float] = {}
    for start in range(0, len(ids), IDS):
        rows = Outcome.objects.filter(name=name, decision__in=ids[start : start + IDS])
        found |= dict(rows.order_by("at", "id").values_list("decision_id", "value"))
    return found


def prompts_named(agent: str, hashes: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Hash -> messages of these prompts of an agent's decisions, at most IDS of them; erased ones are missing."""
    rows = decisions_of(agent).filter(prompt_hash__in=list(hashes)[:IDS]).order_by()
    return dict(rows.values_list("prompt_hash", "messages"))


class ListedChoice(NamedTuple):
    """A decision that was drawn from listed candidates with a known probability."""

    id: uuid.UUID
    prompt_hash: str
    messages: list[dict[str, Any]]
    response: str
    candidates: list[Any]
    propensity: float
    policy: str


def listed_choices(agent: str) -> Iterator[ListedChoice]:
    """The agent's decisions with candidates and a propensity, newest first."""
    rows = decisions_of(agent).filter(propensity__isnull=False, candidates__isnull=False)
    columns = ("pk", "prompt_hash", "messages", "response", "candidates", "propensity", "policy")
    yield from map(
        ListedChoice._make,
        rows.order_by("-created_at", "-id").values_list(*columns).iterator(chunk_size=CHUNK),
    )


def listed_prompts(agent: str) -> set[str]:
    """Hashes of the prompts of `listed_choices`."""
    rows = decisions_of(agent).filter(propensity__isnull=False, candidates__isnull=False)
    return set(rows.order_by().values_list("prompt_hash", flat=True).distinct())


def verdicts_on(ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, list[RatingValue]]:
    """Standing ratings of these decisions."""
    found: dict[uuid.UUID, list[RatingValue]] = {}
    for start in range(0, len(ids), IDS):
        rows = ratings_standing().filter(decision__in=ids[start : start + IDS]).order_by()
        for pk, thumb, stars, score, kind in rows.values_list(
            "decision_id", "thumb", "stars", "score", "rater_kind"
        ):
            found.setdefault(pk, []).append(RatingValue(pk, thumb, stars, score, kind == RaterKind.SIMULATED))
    return found
