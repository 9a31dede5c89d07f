"""What decisions came to that were drawn by chance: experiments' arms, and choices among listed candidates."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from feedback.models import Outcome, RaterKind
from feedback.selectors import CHUNK, IDS, decisions_of, ratings_standing


class Exposure(NamedTuple):
    """A decision of an arm."""

    id: uuid.UUID
    arm: str
    unit: str
    """The decision's own id where it was decided for nobody in particular."""
    latency_ms: float | None
    failed: bool
    """Whether its metadata names an error, or serving says that the arm's policy did not answer to the end."""
    arm_propensity: float | None
    """Probability with which its arm was drawn, where that was recorded."""
    slices: tuple[Any, ...]
    """The values of the columns asked for."""


class Verdict(NamedTuple):
    """What was said of one decision."""

    decision: uuid.UUID
    thumb: str
    stars: int | None
    score: float | None
    simulated: bool


def exposures(agent: str, arms: Sequence[str], columns: Sequence[str] = ()) -> Iterator[Exposure]:
    """The decisions of these arms, in no particular order; `columns` (`tags`, `source`, `metadata__<key>`) beside."""
    rows = _of_arms(agent, arms).values_list(
        "pk", "arm", "unit", "latency_ms", "metadata__arm_propensity",
        "metadata__error", "metadata__serving__fallbacks", "metadata__serving__finish_reason", *columns,
    )  # fmt: skip
    for pk, arm, unit, latency, propensity, error, fallbacks, ended, *values in rows.iterator(
        chunk_size=CHUNK
    ):
        drawn = float(propensity) if isinstance(propensity, (int, float)) and 0 < propensity <= 1 else None
        failed = bool(error) or bool(fallbacks) or ended == "error"
        yield Exposure(pk, arm, unit or str(pk), latency, failed, drawn, tuple(values))


def verdicts(agent: str, arms: Sequence[str]) -> Iterator[Verdict]:
    """Every standing rating of these arms' decisions, in no particular order."""
    rows = ratings_standing().filter(decision__agent=agent, decision__arm__in=arms).order_by()
    for pk, thumb, stars, score, kind in rows.values_list(
        "decision_id", "thumb", "stars", "score", "rater_kind"
    ).iterator(chunk_size=CHUNK):
        yield Verdict(pk, thumb, stars, score, kind == RaterKind.SIMULATED)


def outcomes_of(agent: str, arms: Sequence[str], name: str) -> dict[uuid.UUID, float]:
    """Decision -> the newest value of that outcome, of these arms' decisions that have one."""
    rows = Outcome.objects.filter(
        name=name, decision__agent=agent, decision__arm__in=arms, decision__withdrawal=None
    )
    return dict(rows.order_by("at", "id").values_list("decision_id", "value").iterator(chunk_size=CHUNK))


def outcomes_named(ids: Sequence[uuid.UUID], name: str) -> dict[uuid.UUID, float]:
    """Decision -> the newest value of that outcome, of those of these decisions that have one."""
    found: dict[uuid.UUID, float] = {}
    for start in range(0, len(ids), IDS):
        rows = Outcome.objects.filter(name=name, decision__in=ids[start : start + IDS])
        found |= dict(rows.order_by("at", "id").values_list("decision_id", "value"))
    return found


def decisions_of_arms(agent: str, arms: Sequence[str]) -> Any:
    """Ids of these arms' decisions, as a subquery."""
    return _of_arms(agent, arms).values("pk")


def _of_arms(agent: str, arms: Sequence[str]) -> Any:
    return decisions_of(agent).filter(arm__in=arms).order_by()


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


def verdicts_on(ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, list[Verdict]]:
    """Standing ratings of these decisions."""
    found: dict[uuid.UUID, list[Verdict]] = {}
    for start in range(0, len(ids), IDS):
        rows = ratings_standing().filter(decision__in=ids[start : start + IDS]).order_by()
        for pk, thumb, stars, score, kind in rows.values_list(
            "decision_id", "thumb", "stars", "score", "rater_kind"
        ):
            found.setdefault(pk, []).append(Verdict(pk, thumb, stars, score, kind == RaterKind.SIMULATED))
    return found
