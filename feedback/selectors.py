"""The only readers of feedback: decisions, the ratings that stand, comparisons, counts."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db import connection
from django.db.models import (
    BooleanField,
    Count,
    Exists,
    ExpressionWrapper,
    Max,
    OuterRef,
    Q,
    QuerySet,
    TextField,
    Value,
)
from django.db.models.functions import Cast, StrIndex
from django.db.models.lookups import GreaterThan
from django.utils import timezone

from feedback.cache import CostAwareCache
from feedback.models import SLUG_PATTERN as SLUG_PATTERN
from feedback.models import Comparison, Decision, Outcome, RaterKind, Rating
from feedback.storage.agent_names import prompt_hash as prompt_hash
from feedback.storage.sql import IDS


def ratings_standing(agent: str | None = None, *, of_withdrawn: bool = False) -> QuerySet[Rating]:
    """Ratings that were neither superseded nor withdrawn, oldest first.

    of_withdrawn: those on withdrawn decisions too, to be looked at; nothing counts them or learns from them.
    """
    ratings = Rating.objects.filter(superseded_by__isnull=True, withdrawn=False)
    if not of_withdrawn:
        ratings = ratings.filter(decision__withdrawal=None)
    if agent is not None:
        ratings = ratings.filter(decision__agent=agent)
    return ratings.order_by("created_at", "id")


def comparisons_standing(agent: str | None = None) -> QuerySet[Comparison]:
    """Comparisons that were neither superseded nor withdrawn, oldest first.

    Of one rater's comparisons of the same two decisions with the sides swapped the later one stands: a pair is one
    question, however it is shown. Those with a withdrawn decision on either side are left out.
    """
    standing = Comparison.objects.filter(superseded_by__isnull=True, withdrawn=False)
    swapped_later = standing.filter(
        Q(created_at__gt=OuterRef("created_at"))
        | Q(created_at=OuterRef("created_at"), pk__gt=OuterRef("pk")),
        left=OuterRef("right"),
        right=OuterRef("left"),
        rater=OuterRef("rater"),
    ).order_by()
    comparisons = standing.filter(~Exists(swapped_later), left__withdrawal=None, right__withdrawal=None)
    if agent is not None:
        comparisons = comparisons.filter(left__agent=agent)
    return comparisons.order_by("created_at", "id")


def decisions_of(agent: str) -> QuerySet[Decision]:
    """An agent's decisions, without those that were withdrawn."""
    return Decision.objects.filter(agent=agent, withdrawal=None)


NOT_FROM_APPS = ("simulation", "gateway", "decide", "shadow")
"""Sources of decisions whose answer is not of the app's own model: made up, or given by Ratchet itself."""


class AppAnswer(NamedTuple):
    """An answer that an app recorded, with the policy name it sent; empty where it sent none."""

    prompt_hash: str
    policy: str
    response: str


def app_answers(
    agent: str, *, newest: int | None = None, prompt_hashes: Sequence[str] | None = None
) -> Iterator[AppAnswer]:
    """Answers of an app's own model, the newest first: among its `newest` decisions, or those to certain prompts.

    Left out are answers that no user got: simulated ones, those that Ratchet gave, those that people or a teacher wrote
    (IMITATION_TAGS), and the two sides of an imported comparison.
    """
    rows = decisions_of(agent).order_by("-created_at", "-id")
    if prompt_hashes is not None:
        for start in range(0, len(prompt_hashes), IDS):
            yield from _app_answers(rows.filter(prompt_hash__in=prompt_hashes[start : start + IDS]))
    else:
        yield from _app_answers(rows[:newest])


def policy_answers(agent: str, policy: str, prompt_hashes: Sequence[str]) -> Iterator[AppAnswer]:
    """Answers of a policy by name to certain prompts, the newest first."""
    rows = decisions_of(agent).filter(policy=policy).order_by("-created_at", "-id")
    for start in range(0, len(prompt_hashes), IDS):
        some = rows.filter(prompt_hash__in=prompt_hashes[start : start + IDS])
        yield from map(AppAnswer._make, some.values_list("prompt_hash", "policy", "response"))


def _app_answers(rows: QuerySet[Decision]) -> Iterator[AppAnswer]:
    columns = ("pk", "import_batch", "source", "tags", "prompt_hash", "policy", "response")
    found = [
        row
        for row in rows.values_list(*columns)
        if row[2] not in NOT_FROM_APPS and not set(IMITATION_TAGS) & set(row[3] or ())
    ]
    imported = [row[0] for row in found if row[1] is not None]
    compared: set[uuid.UUID] = set()
    for start in range(0, len(imported), IDS):
        some = imported[start : start + IDS]
        for side in ("left", "right"):
            pairs = Comparison.objects.filter(import_batch__isnull=False, **{f"{side}__in": some}).order_by()
            compared |= set(pairs.values_list(f"{side}_id", flat=True))
    yield from (AppAnswer(*row[4:]) for row in found if row[0] not in compared)


def decision_get(pk: uuid.UUID | str) -> Decision | None:
    return Decision.objects.filter(pk=pk).first()


def decision_answered_recently(
    agent: str, messages: list[dict[str, Any]], request: str, *, minutes: float
) -> Decision | None:
    """The newest decision that answered a request of this hash (`metadata.serving.request`) within so many minutes."""
    return (
        Decision.objects.filter(
            agent=agent,
            prompt_hash=prompt_hash(agent, messages),
            created_at__gte=timezone.now() - timedelta(minutes=minutes),
            metadata__serving__request=request,
        )
        .order_by("-created_at")
        .first()
    )


def agent_slugs() -> list[str]:
    """Slugs of the agents that decided anything, in alphabetical order."""
    return _distinct_values("agent")


def agent_has_decisions(agent: str) -> bool:
    """True if an agent decided anything: one look into the index."""
    return Decision.objects.filter(agent=agent).exists()


def policy_names() -> list[str]:
    """Names of the policies that decided anything, in alphabetical order."""
    return [name for name in _distinct_values("policy") if name]


def _distinct_values(column: str) -> list[str]:
    """Every value of an indexed column, one look into the index each: DISTINCT would read every row's entry."""
    least = "SELECT {0} FROM feedback_decision{1} ORDER BY {0} LIMIT 1"
    sql = (
        f"WITH RECURSIVE known(value) AS (SELECT ({least.format(column, '')}) UNION ALL "  # noqa: S608  # our own names
        f"SELECT ({least.format(column, f' WHERE {column} > known.value')}) FROM known "
        "WHERE known.value IS NOT NULL) SELECT value FROM known WHERE value IS NOT NULL"
    )
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return [row[0] for row in cursor.fetchall()]


@dataclass(frozen=True)
class FeedbackCounts:
    """Counts of an agent's standing feedback."""

    decisions: int
    ratings: int
    comparisons: int
    corrections: int
    simulated: int
    newest_at: datetime | None
    outcomes: int = 0
    """Measured outcomes, of whatever name."""
    demonstrations: int = 0
    """Decisions whose response is to be imitated; not looked for among more than MAX_TAG_LOOKUPS."""
    traces: int = 0
    """Decisions with a trace of how they came about."""

    @property
    def feedback(self) -> int:
        """Ratings and comparisons together: the number in a policy's name."""
        return self.ratings + self.comparisons

    @property
    def evidence(self) -> int:
        """All there is to learn from, whether people rated or not."""
        return self.feedback + self.outcomes + self.demonstrations + self.traces


MAX_TAG_LOOKUPS = 20_000
"""Decisions of an agent up to which those to be imitated are counted: each of them is read."""

IMITATION_TAGS = ("demonstration", "teacher")
"""Tags of decisions whose response is to be imitated."""


def feedback_counts(agent: str) -> FeedbackCounts:
    ratings: dict[str, Any] = ratings_standing(agent).aggregate(
        n=Count("pk"),
        corrections=Count("pk", filter=Q(correction__isnull=False)),
        simulated=Count("pk", filter=Q(rater_kind=RaterKind.SIMULATED)),
    )
    comparisons: dict[str, Any] = comparisons_standing(agent).aggregate(
        n=Count("pk"), simulated=Count("pk", filter=Q(rater_kind=RaterKind.SIMULATED))
    )
    newest = (
        Rating.objects.filter(decision__agent=agent)
        .order_by("-created_at")
        .values_list("created_at", flat=True)
        .first()
    )
    decisions = decisions_of(agent).count()
    imitated = decisions_of(agent).order_by().filter(_imitation_condition())
    return FeedbackCounts(
        decisions=decisions,
        ratings=ratings["n"],
        comparisons=comparisons["n"],
        corrections=ratings["corrections"],
        simulated=ratings["simulated"] + comparisons["simulated"],
        newest_at=newest,
        outcomes=Outcome.objects.filter(decision__agent=agent, decision__withdrawal=None).count(),
        demonstrations=imitated.count() if decisions <= MAX_TAG_LOOKUPS else 0,
        traces=decisions_of(agent).filter(trace__isnull=False).count(),
    )


def _imitation_condition() -> Q:
    wanted = Q()
    for tag in IMITATION_TAGS:
        wanted |= tag_condition(tag)
    return wanted


_counts: CostAwareCache[dict[str, FeedbackCounts]] = CostAwareCache()


def feedback_counts_cached() -> dict[str, FeedbackCounts]:
    """`feedback_counts_by_agent`, a little old where there is much to count: for pages that are looked at often."""
    return _counts.get("all", feedback_counts_by_agent)


def feedback_counts_by_agent() -> dict[str, FeedbackCounts]:
    """The same for every agent that decided anything, in as many passes over the data as for one.

    Here `newest_at` is of the ratings that stand.
    """
    decisions = Decision.objects.order_by().values("agent").annotate(n=Count("pk", filter=Q(withdrawal=None)))
    ratings = (
        ratings_standing()
        .order_by()
        .values("decision__agent")
        .annotate(
            n=Count("pk"),
            corrections=Count("pk", filter=Q(correction__isnull=False)),
            simulated=Count("pk", filter=Q(rater_kind=RaterKind.SIMULATED)),
            newest=Max("created_at"),
        )
    )
    comparisons = (
        comparisons_standing()
        .order_by()
        .values("left__agent")
        .annotate(n=Count("pk"), simulated=Count("pk", filter=Q(rater_kind=RaterKind.SIMULATED)))
    )
    outcomes = Outcome.objects.filter(decision__withdrawal=None).order_by().values("decision__agent")
    outcome_counts = dict(outcomes.annotate(n=Count("pk")).values_list("decision__agent", "n"))
    few = [row["agent"] for row in decisions if row["n"] <= MAX_TAG_LOOKUPS]
    demonstration_counts = _by_agent(Decision.objects.filter(_imitation_condition(), agent__in=few))
    trace_counts = _by_agent(Decision.objects.filter(trace__isnull=False))
    rated: dict[str, dict[str, Any]] = {row["decision__agent"]: dict(row) for row in ratings}
    compared: dict[str, dict[str, Any]] = {row["left__agent"]: dict(row) for row in comparisons}
    nothing: dict[str, Any] = {"n": 0, "corrections": 0, "simulated": 0, "newest": None}
    counts = {}
    for row in decisions:
        slug = row["agent"]
        mine, pairs = rated.get(slug, nothing), compared.get(slug, nothing)
        counts[slug] = FeedbackCounts(
            decisions=row["n"],
            ratings=mine["n"],
            comparisons=pairs["n"],
            corrections=mine["corrections"],
            simulated=mine["simulated"] + pairs["simulated"],
            newest_at=mine["newest"],
            outcomes=outcome_counts.get(slug, 0),
            demonstrations=demonstration_counts.get(slug, 0),
            traces=trace_counts.get(slug, 0),
        )
    return counts


def _by_agent(decisions: QuerySet[Decision]) -> dict[str, int]:
    """Number of these decisions that are not withdrawn, by agent; agents without any are left out."""
    standing = decisions.filter(withdrawal=None).order_by().values("agent").annotate(n=Count("pk"))
    return dict(standing.values_list("agent", "n"))


# --- Facts for datasets: plain rows, streamed, prompts never joined onto ratings ---------------------------

CHUNK = 2000
"""Rows fetched from the database at once."""


class RatingFact(NamedTuple):
    """A standing rating, without its decision."""

    decision: uuid.UUID
    rater: str
    rater_kind: str
    thumb: str
    stars: int | None
    score: float | None
    correction: str | None
    tags: list[str]
    id: uuid.UUID


class ComparisonFact(NamedTuple):
    """A standing comparison, without its decisions."""

    left: uuid.UUID
    right: uuid.UUID
    rater: str
    rater_kind: str
    preference: str
    tags: list[str]
    id: uuid.UUID


class ResponseFact(NamedTuple):
    """A decision without its prompt and state."""

    id: uuid.UUID
    prompt_hash: str
    response: str
    candidates: list[Any] | None
    tags: list[str]
    metadata: dict[str, Any]
    has_state: bool
    reasoning: str
    judged: bool
    """True if it was ever rated or compared; the others are here for their scored candidates alone."""


class PromptFact(NamedTuple):
    """Prompt of a decision, and the facts the app knew."""

    id: uuid.UUID
    prompt_hash: str
    messages: list[dict[str, Any]]
    state: Any
    metadata: dict[str, Any]
    unit: str
    trace: str | None


RATING_COLUMNS = (
    "decision_id", "rater", "rater_kind", "thumb", "stars", "score", "correction", "tags", "id",
)  # fmt: skip
"""Columns of a RatingFact."""


def rating_facts(agent: str) -> Iterator[RatingFact]:
    """Every standing rating of an agent's decisions, in no particular order."""
    rows = ratings_standing(agent).order_by().values_list(*RATING_COLUMNS)
    yield from map(RatingFact._make, rows.iterator(chunk_size=CHUNK))


def comparison_facts(agent: str) -> Iterator[ComparisonFact]:
    """Every standing comparison of an agent's decisions, in no particular order."""
    rows = (
        comparisons_standing(agent)
        .order_by()
        .values_list("left_id", "right_id", "rater", "rater_kind", "preference", "tags", "id")
    )
    yield from map(ComparisonFact._make, rows.iterator(chunk_size=CHUNK))


def response_facts(agent: str) -> Iterator[ResponseFact]:
    """Every decision of an agent that says something of preferences: rated, compared, or with listed candidates."""
    spoken_of = (
        Exists(Rating.objects.filter(decision=OuterRef("pk")))
        | Exists(Comparison.objects.filter(left=OuterRef("pk")))
        | Exists(Comparison.objects.filter(right=OuterRef("pk")))
    )
    rows = (
        decisions_of(agent)
        .annotate(
            judged=ExpressionWrapper(spoken_of, output_field=BooleanField()),
            has_state=ExpressionWrapper(Q(state__isnull=False), output_field=BooleanField()),
        )
        .filter(Q(candidates__isnull=False) | Q(judged=True))
        .order_by()
        .values_list(
            "id",
            "prompt_hash",
            "response",
            "candidates",
            "tags",
            "metadata",
            "has_state",
            "reasoning",
            "judged",
        )
    )
    yield from map(ResponseFact._make, rows.iterator(chunk_size=CHUNK))


def verdict_stands(decision: str = "pk") -> Exists:
    """True if a thumb, stars or a score stands on the decision whose id that column of the outer query
    holds."""
    verdict = ~Q(thumb="") | Q(stars__isnull=False) | Q(score__isnull=False)
    return Exists(ratings_standing().filter(verdict, decision=OuterRef(decision)).order_by())


def responses_without_verdict(ids: Sequence[uuid.UUID]) -> Iterator[ResponseFact]:
    """Decisions among these without a standing thumb, stars or score."""
    for start in range(0, len(ids), IDS):
        rows = Decision.objects.filter(~verdict_stands(), pk__in=ids[start : start + IDS], withdrawal=None)
        yield from _responses(rows.order_by("pk"))


def responses_tagged(agent: str, tags: Sequence[str]) -> Iterator[ResponseFact]:
    """Decisions of an agent that carry one of these tags, rated or not."""
    wanted = Q()
    for tag in tags:
        wanted |= tag_condition(tag)
    yield from _responses(decisions_of(agent).filter(wanted).order_by("pk"))


def _responses(rows: QuerySet[Decision]) -> Iterator[ResponseFact]:
    facts = rows.annotate(
        has_state=ExpressionWrapper(Q(state__isnull=False), output_field=BooleanField())
    ).values_list("id", "prompt_hash", "response", "candidates", "tags", "metadata", "has_state", "reasoning")
    yield from (ResponseFact(*row, judged=False) for row in facts.iterator(chunk_size=CHUNK))


def tag_condition(tag: str) -> Q:
    """Condition on a decision or a rating: it carries this tag."""
    if connection.vendor == "postgresql":
        return Q(tags__contains=[tag])
    # SQLite keeps the list as its text, in which a tag stands between quotes, its own ones escaped
    return Q(GreaterThan(StrIndex(Cast("tags", TextField()), Value(json.dumps(tag))), 0))


class DecisionPrompt(NamedTuple):
    """A decision by its prompt alone."""

    id: uuid.UUID
    prompt_hash: str
    has_state: bool


def decision_prompts(agent: str) -> Iterator[DecisionPrompt]:
    """Every decision of an agent, judged or not, in no particular order."""
    rows = (
        decisions_of(agent)
        .annotate(has_state=ExpressionWrapper(Q(state__isnull=False), output_field=BooleanField()))
        .order_by()
        .values_list("id", "prompt_hash", "has_state")
    )
    yield from map(DecisionPrompt._make, rows.iterator(chunk_size=CHUNK))


def prompt_facts(ids: Sequence[uuid.UUID]) -> Iterator[PromptFact]:
    """The prompts and states of these decisions, in no particular order."""
    for start in range(0, len(ids), IDS):
        rows = Decision.objects.filter(pk__in=ids[start : start + IDS]).order_by()
        yield from map(
            PromptFact._make,
            rows.values_list(
                "id", "prompt_hash", "messages", "state", "metadata", "unit", "trace_id"
            ).iterator(),
        )


def raters_by_prompt(agent: str, prompt_hashes: Sequence[str]) -> dict[str, set[str]]:
    """Prompt hash -> who rated or compared responses to it, by what stands."""
    found: dict[str, set[str]] = {}
    for start in range(0, len(prompt_hashes), IDS):
        chunk = list(prompt_hashes[start : start + IDS])
        ratings = ratings_standing(agent).filter(decision__prompt_hash__in=chunk).order_by()
        comparisons = comparisons_standing(agent).filter(left__prompt_hash__in=chunk).order_by()
        for prompt, rater in (
            *ratings.values_list("decision__prompt_hash", "rater").distinct(),
            *comparisons.values_list("left__prompt_hash", "rater").distinct(),
        ):
            found.setdefault(prompt, set()).add(rater)
    return found


class PolicyRating(NamedTuple):
    """One standing rating of a policy's decision."""

    decision: uuid.UUID
    thumb: str
    stars: int | None
    score: float | None


def policy_verdicts(
    agent: str, policy: str, since: datetime | None = None, *, recorded: bool = False
) -> Iterator[PolicyRating]:
    """Ratings by people of a policy's decisions, oldest decision first; of decisions from `since` on
    alone. recorded: of an app's own model, under the name that it sends."""
    rows = ratings_standing(agent).filter(decision__policy=policy)
    if recorded:
        rows = rows.exclude(decision__source__in=NOT_FROM_APPS)
    if since is not None:
        rows = rows.filter(decision__created_at__gte=since)
    ordered = rows.order_by("decision__created_at", "decision_id")
    yield from map(PolicyRating._make, ordered.values_list("decision_id", "thumb", "stars", "score"))


def prompts_of_feedback(ids: Sequence[uuid.UUID], newest: int | None = None) -> set[str]:
    """Hashes of the prompts that these ratings, comparisons, outcomes and decisions are about; of the `newest` of them
    alone."""
    dated_prompts: list[tuple[datetime, str]] = []
    for start in range(0, len(ids), IDS):
        chunk = list(ids[start : start + IDS])
        ratings = Rating.objects.filter(pk__in=chunk).order_by()
        comparisons = Comparison.objects.filter(pk__in=chunk).order_by()
        dated_prompts += ratings.values_list("created_at", "decision__prompt_hash")
        dated_prompts += comparisons.values_list("created_at", "left__prompt_hash")
        outcomes = Outcome.objects.filter(pk__in=chunk).order_by()
        dated_prompts += outcomes.values_list("created_at", "decision__prompt_hash")
        dated_prompts += (
            Decision.objects.filter(pk__in=chunk).order_by().values_list("created_at", "prompt_hash")
        )
    if newest is not None and len(dated_prompts) > newest:
        dated_prompts = sorted(dated_prompts, reverse=True)[:newest]
    return {prompt for _, prompt in dated_prompts}
