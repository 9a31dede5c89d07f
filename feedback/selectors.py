"""The readers of feedback: decisions, standing ratings and comparisons, counts, and rows for datasets."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from django.db import connection
from django.db.models import (
    BooleanField,
    Count,
    Exists,
    ExpressionWrapper,
    F,
    Max,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    TextField,
    Value,
)
from django.db.models.expressions import Combinable
from django.db.models.functions import Cast, StrIndex
from django.db.models.lookups import GreaterThan
from django.utils import timezone

from feedback.cache import CostAwareCache
from feedback.messages import Message
from feedback.models import SHADOW, Comparison, Decision, ImportBatch, Outcome, RaterKind, Rating
from feedback.models import SLUG_PATTERN as SLUG_PATTERN
from feedback.models import prompt_hash as prompt_hash
from feedback.storage.sql import chunks, rows_in


def ratings_standing(agent: str | None = None, *, of_withdrawn: bool = False) -> QuerySet[Rating]:
    """Ratings that were neither superseded nor withdrawn, oldest first.

    of_withdrawn: include ratings of withdrawn decisions and shadow answers. For display only: they are never counted
    or trained on.
    """
    ratings = Rating.objects.filter(superseded_by__isnull=True, withdrawn=False)
    if not of_withdrawn:
        ratings = ratings.filter(decision__withdrawal=None).exclude(decision__source=SHADOW)
    if agent is not None:
        ratings = ratings.filter(decision__agent=agent)
    return ratings.order_by("created_at", "id")


def comparisons_standing(agent: str | None = None) -> QuerySet[Comparison]:
    """Comparisons that were neither superseded nor withdrawn, oldest first, without withdrawn decisions.

    If a rater compared the same two decisions with swapped sides, the later comparison stands.
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
    """An agent's decisions, without withdrawn ones and shadow answers, which no user got."""
    return Decision.objects.filter(agent=agent, withdrawal=None).exclude(source=SHADOW)


def shadow_answers(agent: str, policy: str) -> QuerySet[Decision]:
    """Answers of a policy beside those that users got, without withdrawn ones."""
    return Decision.objects.filter(agent=agent, withdrawal=None, policy=policy, source=SHADOW)


NOT_FROM_APPS = ("simulation", "gateway", "decide", SHADOW)
"""Sources of decisions that the app's own model did not answer: simulated, or answered by Ratchet."""


class AppAnswer(NamedTuple):
    """An answer recorded by an app, with the policy name it sent (may be empty)."""

    prompt_hash: str
    policy: str
    response: str


def app_answers(
    agent: str, *, newest: int | None = None, prompt_hashes: Sequence[str] | None = None
) -> Iterator[AppAnswer]:
    """Answers of an app's own model, newest first: among its `newest` decisions, or to certain prompts.

    Leaves out answers that no user got from that model: simulated ones, Ratchet's own, those written by people or a
    teacher (IMITATION_TAGS), and both sides of imported comparisons.
    """
    rows = decisions_of(agent).order_by("-created_at", "-id")
    if prompt_hashes is not None:
        for chunk in chunks(prompt_hashes):
            yield from _app_answers(rows.filter(prompt_hash__in=chunk))
    else:
        yield from _app_answers(rows[:newest])


def policy_answers(agent: str, policy: str, prompt_hashes: Sequence[str]) -> Iterator[AppAnswer]:
    """A policy's answers to certain prompts, newest first."""
    rows = decisions_of(agent).filter(policy=policy).order_by("-created_at", "-id")
    for chunk in chunks(prompt_hashes):
        some = rows.filter(prompt_hash__in=chunk)
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
    for chunk in chunks(imported):
        for side in ("left", "right"):
            pairs = Comparison.objects.filter(import_batch__isnull=False, **{f"{side}__in": chunk}).order_by()
            compared |= set(pairs.values_list(f"{side}_id", flat=True))
    yield from (AppAnswer(*row[4:]) for row in found if row[0] not in compared)


def decision_get(pk: uuid.UUID | str) -> Decision | None:
    return Decision.objects.filter(pk=pk).first()


def gateway_runs(names: Collection[str]) -> dict[str, str]:
    """App's name of a run -> id of the decision that the gateway recorded under it."""
    rows = rows_in(Decision.objects.filter(source="gateway"), "run_id", names).values_list("run_id", "pk")
    return {name: str(pk) for name, pk in rows}


def decision_answered_recently(
    agent: str, messages: list[Message], request: str, *, minutes: float
) -> Decision | None:
    """The newest decision of the last `minutes` that answered a request with this hash (`metadata.serving.request`)."""
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
    """Slugs of agents with decisions, sorted."""
    return _distinct_values("agent")


def agent_has_decisions(agent: str) -> bool:
    return Decision.objects.filter(agent=agent).exists()


def policy_names() -> list[str]:
    """Names of policies with decisions, sorted."""
    return [name for name in _distinct_values("policy") if name]


def _distinct_values(column: str) -> list[str]:
    """Distinct values of an indexed column, by one index lookup each. DISTINCT would read every row's entry."""
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

    decisions: int = 0
    ratings: int = 0
    comparisons: int = 0
    corrections: int = 0
    simulated: int = 0
    newest_at: datetime | None = None
    """Time of the newest standing rating."""
    outcomes: int = 0
    demonstrations: int = 0
    """Decisions to imitate (IMITATION_TAGS); not counted for agents with more than MAX_TAG_LOOKUPS decisions."""
    traces: int = 0
    """Decisions with a trace."""

    @property
    def feedback(self) -> int:
        """Ratings and comparisons: the number in a policy's name."""
        return self.ratings + self.comparisons

    @property
    def evidence(self) -> int:
        """Everything that training can learn from."""
        return self.feedback + self.outcomes + self.demonstrations + self.traces


MAX_TAG_LOOKUPS = 20_000
"""Most decisions of an agent among which decisions to imitate are counted, because each is read."""

IMITATION_TAGS = ("demonstration", "teacher")
"""Tags of decisions to imitate."""


def feedback_counts(agent: str) -> FeedbackCounts:
    return feedback_counts_by_agent(agent).get(agent, FeedbackCounts())


_counts: CostAwareCache[dict[str, FeedbackCounts]] = CostAwareCache()


MAX_RECOUNTED = 20_000
"""Decisions of an agent up to which a new rating has its feedback counted at once."""


def feedback_counts_cached() -> dict[str, FeedbackCounts]:
    """`feedback_counts_by_agent` from a cache, for pages that are opened often.

    A new agent, an import and the newest rating or comparison are counted at once, whichever process stored them."""
    imports = ImportBatch.objects.values("pk", "undone_at")
    newest = {
        "batch": imports.order_by("-pk").values("pk"),
        "undone": imports.order_by(F("undone_at").desc(nulls_last=True)).values("undone_at"),
        "rating": Rating.objects.order_by("-created_at").values("pk"),
        "comparison": Comparison.objects.order_by("-created_at").values("pk"),
    }
    found = Decision.objects.order_by("pk").annotate(
        **{name: Subquery(rows[:1]) for name, rows in newest.items()}
    )
    batch, undone, rating, comparison = found.values_list(*newest).first() or (None,) * 4
    counts = _counts.get((batch, undone, *agent_slugs()), feedback_counts_by_agent)

    def recount(rows: QuerySet[Any], agent: str) -> dict[str, FeedbackCounts]:
        for slug in rows.values_list(agent, flat=True):
            if slug in counts and counts[slug].decisions <= MAX_RECOUNTED:
                counts[slug] = feedback_counts(slug)
        return counts

    if rating is not None:
        _counts.get(rating, lambda: recount(Rating.objects.filter(pk=rating), "decision__agent"))
    if comparison is not None:
        _counts.get(comparison, lambda: recount(Comparison.objects.filter(pk=comparison), "left__agent"))
    return counts


def feedback_counts_by_agent(agent: str | None = None) -> dict[str, FeedbackCounts]:
    """Counts of every agent with decisions, or of one, in a fixed number of queries."""
    simulated = Count("pk", filter=Q(rater_kind=RaterKind.SIMULATED))
    rows = Decision.objects.exclude(source=SHADOW)
    if agent is not None:
        rows = rows.filter(agent=agent)
    decisions = _by_agent(rows)
    ratings = ratings_standing(agent).order_by().values("decision__agent")
    ratings = ratings.annotate(
        n=Count("pk"),
        corrections=Count("pk", filter=Q(correction__isnull=False)),
        simulated=simulated,
        newest=Max("created_at"),
    )
    comparisons = comparisons_standing(agent).order_by().values("left__agent")
    comparisons = comparisons.annotate(n=Count("pk"), simulated=simulated)
    outcomes = Outcome.objects.filter(decision__withdrawal=None, decision__agent__in=list(decisions))
    outcome_counts = outcomes.order_by().values("decision__agent").annotate(n=Count("pk"))
    few = [slug for slug, count in decisions.items() if count <= MAX_TAG_LOOKUPS]
    rated: dict[str, dict[str, Any]] = {row["decision__agent"]: dict(row) for row in ratings}
    compared: dict[str, dict[str, Any]] = {row["left__agent"]: dict(row) for row in comparisons}
    measured = dict(outcome_counts.values_list("decision__agent", "n"))
    imitated = _by_agent(Decision.objects.filter(tag_condition(*IMITATION_TAGS), agent__in=few))
    traced = _by_agent(rows.filter(trace__isnull=False))
    counts = {}
    for slug, count in decisions.items():
        mine, pairs = rated.get(slug, {}), compared.get(slug, {})
        counts[slug] = FeedbackCounts(
            decisions=count,
            ratings=mine.get("n", 0),
            comparisons=pairs.get("n", 0),
            corrections=mine.get("corrections", 0),
            simulated=mine.get("simulated", 0) + pairs.get("simulated", 0),
            newest_at=mine.get("newest"),
            outcomes=measured.get(slug, 0),
            demonstrations=imitated.get(slug, 0),
            traces=traced.get(slug, 0),
        )
    return counts


def _by_agent(decisions: QuerySet[Decision]) -> dict[str, int]:
    """Agent -> number of these decisions that are not withdrawn; 0 if all of its decisions are."""
    standing = decisions.order_by().values("agent").annotate(n=Count("pk", filter=Q(withdrawal=None)))
    return dict(standing.values_list("agent", "n"))


# --- Rows for datasets: streamed; prompts are never joined onto ratings --------------------------------------

CHUNK = 2000
"""Rows per fetch."""
HAS_STATE = ExpressionWrapper(Q(state__isnull=False), output_field=BooleanField())


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
    candidates: list[object] | None
    tags: list[str]
    metadata: dict[str, object]
    has_state: bool
    reasoning: str
    judged: bool
    """True if it was ever rated or compared; False if only its scored candidates count."""


class PromptFact(NamedTuple):
    """A decision's prompt, state and metadata."""

    id: uuid.UUID
    prompt_hash: str
    messages: list[Message]
    state: Any
    metadata: Mapping[str, object]
    unit: str
    trace: str | None


RATING_COLUMNS = ("decision_id", "rater", "rater_kind", "thumb", "stars", "score", "correction", "tags", "id")
"""Columns of a RatingFact."""


def rating_facts(agent: str) -> Iterator[RatingFact]:
    """Standing ratings of an agent's decisions, in no particular order."""
    rows = ratings_standing(agent).order_by().values_list(*RATING_COLUMNS)
    yield from map(RatingFact._make, rows.iterator(chunk_size=CHUNK))


def comparison_facts(agent: str) -> Iterator[ComparisonFact]:
    """Standing comparisons of an agent's decisions, in no particular order."""
    rows = (
        comparisons_standing(agent)
        .order_by()
        .values_list("left_id", "right_id", "rater", "rater_kind", "preference", "tags", "id")
    )
    yield from map(ComparisonFact._make, rows.iterator(chunk_size=CHUNK))


def response_facts(agent: str) -> Iterator[ResponseFact]:
    """Decisions of an agent that were rated or compared, or that list candidates."""
    rows = (
        decisions_of(agent)
        .annotate(
            judged=ExpressionWrapper(_judged(), output_field=BooleanField()),
            has_state=HAS_STATE,
        )
        .filter(Q(candidates__isnull=False) | Q(judged=True))
        .order_by()
        .values_list(*ResponseFact._fields)
    )
    yield from map(ResponseFact._make, rows.iterator(chunk_size=CHUNK))


def _judged() -> Combinable | Q:
    """Condition: the decision of the outer query was ever rated or compared."""
    return (
        Exists(Rating.objects.filter(decision=OuterRef("pk")))
        | Exists(Comparison.objects.filter(left=OuterRef("pk")))
        | Exists(Comparison.objects.filter(right=OuterRef("pk")))
    )


def unjudged_counts(agent: str) -> dict[str, int]:
    """Policy -> its decisions that nobody rated or compared, most first; without simulations and demonstrations."""
    rows = _unjudged(agent).order_by().values_list("policy").annotate(count=Count("pk"))
    return dict(sorted(rows, key=lambda row: (-row[1], row[0])))


def answers_unjudged(agent: str, policy: str) -> Iterator[ResponseFact]:
    """A policy's answers that nobody rated or compared, newest first, at most MOST_UNJUDGED."""
    rows = _unjudged(agent).filter(policy=policy).exclude(response="").order_by("-created_at", "-id")
    yield from _responses(rows[:MOST_UNJUDGED])


MOST_UNJUDGED = 20_000
"""Newest unrated answers of a policy that are read."""


def _unjudged(agent: str) -> QuerySet[Decision]:
    rows = decisions_of(agent).exclude(source="simulation")
    return rows.filter(~_judged()).exclude(tag_condition(*IMITATION_TAGS))


def verdict_stands(decision: str = "pk") -> Exists:
    """Condition: the decision whose id is in this column of the outer query has a standing thumb, stars or score."""
    verdict = ~Q(thumb="") | Q(stars__isnull=False) | Q(score__isnull=False)
    return Exists(ratings_standing().filter(verdict, decision=OuterRef(decision)).order_by())


def responses_without_verdict(ids: Sequence[uuid.UUID]) -> Iterator[ResponseFact]:
    """The decisions without a standing thumb, stars or score."""
    for chunk in chunks(ids):
        rows = Decision.objects.filter(~verdict_stands(), pk__in=chunk, withdrawal=None)
        yield from _responses(rows.order_by("pk"))


def responses_tagged(agent: str, tags: Sequence[str]) -> Iterator[ResponseFact]:
    """Decisions of an agent with one of these tags."""
    yield from _responses(decisions_of(agent).filter(tag_condition(*tags)).order_by("pk"))


def _responses(rows: QuerySet[Decision]) -> Iterator[ResponseFact]:
    facts = rows.annotate(has_state=HAS_STATE).values_list(*ResponseFact._fields[:-1])
    yield from (ResponseFact._make((*row, False)) for row in facts.iterator(chunk_size=CHUNK))


def tag_condition(*tags: str) -> Q:
    """Condition on a decision or rating: it has one of these tags."""
    if connection.vendor == "postgresql":
        return reduce(or_, (Q(tags__contains=[tag]) for tag in tags))
    # SQLite stores the list as JSON text: look for the quoted and escaped tag.
    text = Cast("tags", TextField())
    return reduce(or_, (Q(GreaterThan(StrIndex(text, Value(json.dumps(tag))), 0)) for tag in tags))


class DecisionPrompt(NamedTuple):
    """A decision and the hash of its prompt."""

    id: uuid.UUID
    prompt_hash: str
    has_state: bool


def decision_prompts(agent: str) -> Iterator[DecisionPrompt]:
    """Every decision of an agent, in no particular order."""
    rows = (
        decisions_of(agent)
        .annotate(has_state=HAS_STATE)
        .order_by()
        .values_list("id", "prompt_hash", "has_state")
    )
    yield from map(DecisionPrompt._make, rows.iterator(chunk_size=CHUNK))


def answers_recorded(agent: str, facts: Sequence[str], *, in_state: bool) -> bool:
    """True if a decision's metadata has one of these keys, or `in_state`, if a decision has a state."""
    told = Q(metadata__has_any_keys=list(facts))
    return decisions_of(agent).filter(told | Q(state__isnull=False) if in_state else told).exists()


def prompt_facts(ids: Sequence[uuid.UUID]) -> Iterator[PromptFact]:
    """Prompts and states of these decisions, in no particular order."""
    for chunk in chunks(ids):
        rows = Decision.objects.filter(pk__in=chunk).order_by()
        yield from map(
            PromptFact._make,
            rows.values_list(
                "id", "prompt_hash", "messages", "state", "metadata", "unit", "trace_id"
            ).iterator(),
        )


def raters_by_prompt(agent: str, prompt_hashes: Sequence[str]) -> dict[str, set[str]]:
    """Prompt hash -> raters with a standing rating or comparison of its responses."""
    found: dict[str, set[str]] = {}
    for chunk in chunks(prompt_hashes):
        ratings = ratings_standing(agent).filter(decision__prompt_hash__in=chunk).order_by()
        comparisons = comparisons_standing(agent).filter(left__prompt_hash__in=chunk).order_by()
        for prompt, rater in (
            *ratings.values_list("decision__prompt_hash", "rater").distinct(),
            *comparisons.values_list("left__prompt_hash", "rater").distinct(),
        ):
            found.setdefault(prompt, set()).add(rater)
    return found


def prompts_of_feedback(ids: Sequence[uuid.UUID], newest: int | None = None) -> set[str]:
    """Prompt hashes of the `newest` of these ratings, comparisons, outcomes and decisions."""
    dated_prompts: list[tuple[datetime, str]] = []
    for chunk in chunks(ids):
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
