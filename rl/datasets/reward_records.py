"""Rewards of decisions: calculated if missing or outdated by new feedback, stored as a history, read back."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from django.conf import settings
from django.db import Error as DjangoDatabaseError
from django.db import InterfaceError, OperationalError
from django.db.models import Avg, Count, Exists, F, OuterRef, Q, QuerySet, Subquery

from backend.bodies import Answer
from feedback.cache import CostAwareCache
from feedback.explorer.bulk_readers import (
    FeedbackBundle,
    RunFacts,
    annotate_feedback_count,
    feedback_bundles,
    outcomes_standing,
    runs_of,
)
from feedback.models import Decision, Outcome, RaterKind
from feedback.selectors import agent_slugs, decisions_of, verdict_stands
from feedback.storage.problem_rows import RowReader, problem_ids, unreadable_summary
from feedback.storage.sql import chunks
from rl.agents import get_agent
from rl.agents.base import OutcomeScale, RewardFacts
from rl.datasets.feedback_types import rating_value
from rl.models import RewardRecord, RewardSettings
from rl.recipes import DATASET_CONFIG
from rl.rewards.base import RAW_LOW, RewardSample
from rl.rewards.catalogue import reward_named
from rl.rewards.horizons import (
    DecisionFeedback,
    HorizonPlan,
    RewardBreakdown,
    outcomes_parsed,
    rewards_over_time,
)
from rl.rewards.sandbox import IsolationUnavailable

logger = logging.getLogger("rl.rewards")

CHUNK = 400
"""Decisions whose prompts and traces are in memory at a time."""

READER = "rewards"
"""Name of this reader on `/problems/`."""


class RewardsRefused(ValueError):
    """The rewards cannot be calculated."""


class RewardsCalculated(Answer):
    calculated: int
    """Decisions whose reward was calculated."""
    written: int
    """Those whose reward is new or has changed."""
    pending: int
    """Decisions that still wait."""
    unreadable: dict[str, str]
    """Decisions that cannot be read and were skipped, the first of them, and why."""
    unreadable_count: int
    """How many were skipped: /problems/ lists them."""
    refused: dict[str, str]
    """Agents whose rewards cannot be calculated as they are set, and why."""


def reward_settings(agent: str) -> RewardFacts:
    """Reward settings of an agent's definition, overridden by its RewardSettings. Raises RewardsRefused.

    An outcome named `reward` is a reward from 0 to 1 by default.
    """
    facts = get_agent(agent).reward_facts
    row = RewardSettings.objects.filter(agent=agent).first()
    outcomes = {"reward": OutcomeScale(good=1, bad=0), **facts.outcomes}
    if row is None:
        return replace(facts, outcomes=outcomes)
    try:
        return replace(
            facts,
            functions=row.functions or facts.functions,
            outcomes={**outcomes, **outcomes_parsed(row.outcomes)},
            weights=row.weights,
        )
    except ValueError as error:
        raise RewardsRefused(f"rewards of agent {agent}: {error}") from error


def reward_threshold(agent: str) -> float:
    """Lowest reward in [0, 1] of a good response that nobody rated; below it the response is bad."""
    row = RewardSettings.objects.filter(agent=agent).first()
    return float(DATASET_CONFIG["reward_threshold"]) if row is None else row.threshold


def reward_labels(agent: str) -> dict[str, Any]:
    """Decisions without a verdict that are good and bad by their reward, and the threshold in [0, 1]."""
    threshold = reward_threshold(agent)
    records = RewardRecord.objects.filter(agent=agent, superseded_by__isnull=True, measured=True).order_by()
    unrated = records.filter(~verdict_stands("decision"))
    good = unrated.filter(value__gte=threshold).count()
    return {"threshold": threshold, "good": good, "bad": unrated.filter(value__lt=threshold).count()}


def reward_plan(agent: str) -> HorizonPlan:
    """Reward plan by `reward_settings`. Raises RewardsRefused."""
    facts = reward_settings(agent)
    try:
        functions = [
            reward_named(name, code_execution=settings.ENABLE_CODE_EXECUTION) for name in facts.functions
        ]
        return HorizonPlan(functions, replace(facts, functions=_by_name(functions, facts.functions)))
    except ValueError as error:
        raise RewardsRefused(f"rewards of agent {agent}: {error}") from error


def outcomes_without_value(agent: str) -> dict[str, int]:
    """Name of an outcome without a scale -> decisions with it."""
    counts = outcomes_standing(agent).order_by().values_list("name").annotate(n=Count("decision"))
    scales = reward_settings(agent).outcomes
    return {name: n for name, n in sorted(counts) if name not in scales}


def outcome_value_set(agent: str, spec: str) -> str:
    """Store an outcome's scale, `name=GOOD:BAD[:strategic]`; returns its name. Raises RewardsRefused."""
    name, _, value_text = spec.partition("=")
    parts = value_text.split(":")
    form = "expected NAME=GOOD:BAD or NAME=GOOD:BAD:strategic, GOOD and BAD two different numbers"
    if not name.strip() or len(parts) not in (2, 3):
        raise RewardsRefused(f"{form}; found {spec!r}")
    row = RewardSettings.objects.filter(agent=agent).first() or RewardSettings(agent=agent)
    try:
        scale = {"good": float(parts[0]), "bad": float(parts[1])} | (
            {"horizon": parts[2]} if len(parts) == 3 else {}
        )
        outcomes_parsed({name.strip(): scale})
    except ValueError as error:
        raise RewardsRefused(f"{form}; found {spec!r} ({error})") from error
    row.outcomes = {**row.outcomes, name.strip(): scale}
    row.full_clean()
    row.save()
    return name.strip()


def _by_name(functions: Sequence[Any], weights: Mapping[str, float]) -> dict[str, float]:
    return {f.name: weight for f, weight in zip(functions, weights.values(), strict=True)}


def rewards_calculate(
    agent: str | None = None,
    *,
    everything: bool = False,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RewardsCalculated:
    """Calculate pending rewards of an agent or of all agents; with `everything`, calculated ones too.

    Safe to repeat and to run twice at once: an unchanged reward adds nothing. Processes at most `limit` decisions.
    Raises RewardsRefused for an unknown agent or faulty settings; among all agents, a faulty one is skipped and named.
    """
    known = agent_slugs()
    if agent is not None and agent not in known:
        raise RewardsRefused(
            f"no decision of agent {agent!r} is recorded; known are {', '.join(known) or 'none yet'}"
        )
    waiting = {slug: _ids_waiting(slug, everything) for slug in ([agent] if agent else known)}
    total = sum(map(len, waiting.values()))
    todo = total if limit is None else min(limit, total)
    refusals: dict[str, str] = {}
    unreadable: dict[uuid.UUID, str] = {}
    count = record_count = 0
    for slug, ids in waiting.items():
        rows = RowReader(slug, READER, fatal=(RewardsRefused, IsolationUnavailable))
        try:
            plan = reward_plan(slug) if ids else None
            for start in range(0, len(ids), CHUNK):
                chunk = ids[start : start + min(CHUNK, todo - count)]
                if not chunk:
                    break
                assert plan is not None
                record_count += _write(slug, plan, chunk, rows)
                count += len(chunk)
                if progress is not None:
                    progress(count, todo)
        except (OperationalError, InterfaceError):
            raise  # A fault of the database affects every agent.
        except Exception as fault:
            expected = isinstance(fault, (RewardsRefused, IsolationUnavailable))
            why = str(fault) if expected else f"{type(fault).__name__}: {fault}"
            if agent is not None:
                if expected:
                    raise RewardsRefused(why) from fault
                raise
            # One agent's settings or reward function must not stop the others.
            logger.warning("rewards of %s: %s", slug, why, exc_info=not expected)
            refusals[slug] = why
            total -= len(ids)
        if agent is None and len(rows.unreadable) == len(ids) > 1:
            # If every row fails, the agent's settings or reward function are at fault.
            refusals[slug] = f"none of {len(ids):,} decisions: {next(iter(rows.unreadable.values()))}"
            total, count = total - len(ids), count - len(ids)
        if ids:
            rows.save(looked_at=ids)
            unreadable |= rows.unreadable
    return RewardsCalculated(
        calculated=count,
        written=record_count,
        pending=max(total - count, 0),
        unreadable=unreadable_summary(unreadable),
        unreadable_count=len(unreadable),
        refused=refusals,
    )


def _ids_waiting(agent: str, everything: bool) -> list[uuid.UUID]:
    """Ids of decisions to calculate. Those unreadable last time come last, so that `limit` reaches the others."""
    decisions = decisions_of(agent) if everything else decisions_pending(agent)
    ids: list[uuid.UUID] = list(decisions.order_by().values_list("pk", flat=True))
    return sorted(ids, key=problem_ids(agent, READER).__contains__)


def decisions_pending(agent: str) -> QuerySet[Decision]:
    """Decisions without a reward or with newer feedback."""
    newest = RewardRecord.objects.filter(decision=OuterRef("pk")).order_by("-id").values("rows_said")[:1]
    found = annotate_feedback_count(decisions_of(agent)).annotate(counted=Subquery(newest))
    return found.filter(Q(counted=None) | ~Q(counted=F("rows_said")))


def pending_with_evidence(agent: str) -> QuerySet[Decision]:
    """Pending decisions with a trace or an outcome with a scale."""
    outcome_names = list(reward_settings(agent).outcomes)
    measured = Exists(Outcome.objects.filter(decision=OuterRef("pk"), name__in=outcome_names))
    return decisions_pending(agent).filter(Q(trace__isnull=False) | measured)


def _write(agent: str, plan: HorizonPlan, ids: Sequence[uuid.UUID], reader: RowReader) -> int:
    """Calculate rewards and add new or changed ones; returns how many."""
    rows = list(annotate_feedback_count(Decision.objects.filter(pk__in=ids)).select_related("trace"))
    newest = records_newest(ids)
    new = []
    for row, reward in _rewards_of(plan, rows, reader):
        before = newest.get(row.pk)
        if before is None or (before.basis, before.rows_said) != (reward.basis, row.rows_said):
            new.append(_record(agent, row, reward, before))
    RewardRecord.objects.bulk_create(new, ignore_conflicts=True)
    return len(new)


def _rewards_of(
    plan: HorizonPlan, rows: list[Any], reader: RowReader
) -> Iterator[tuple[Any, RewardBreakdown]]:
    """(decision, reward). After a failure, halves the batch until the failing decisions are skipped one by one."""
    try:
        yield from zip(rows, _rewards(plan, rows), strict=True)
    except Exception as error:
        if len(rows) == 1:
            reader.skip(rows[0].pk, error)
            return
        if isinstance(error, (DjangoDatabaseError, OSError, RewardsRefused, IsolationUnavailable)):
            raise
        half = len(rows) // 2
        yield from _rewards_of(plan, rows[:half], reader)
        yield from _rewards_of(plan, rows[half:], reader)


def _rewards(plan: HorizonPlan, rows: list[Decision]) -> list[RewardBreakdown]:
    # Read after the rows were counted: feedback that arrives in between makes them pending again.
    bundles = feedback_bundles([row.pk for row in rows])
    done = runs_of(rows)
    samples = [sample_of(row, done[row.pk]) for row in rows]
    return rewards_over_time(plan, samples, [known_feedback(bundles[row.pk]) for row in rows])


def _record(agent: str, row: Any, reward: RewardBreakdown, before: RewardRecord | None) -> RewardRecord:
    return RewardRecord(
        decision=row.pk,
        agent=agent,
        raw=reward.raw,
        value=reward.value,
        **reward.horizons,
        components=reward.components,
        simulated=reward.simulated,
        measured=reward.measured,
        rows_said=row.rows_said,
        basis=reward.basis,
        supersedes=before,
    )


def sample_of(row: Decision, run: RunFacts) -> RewardSample:
    """A decision as reward functions get it, with the steps of its run."""
    metadata = row.metadata if isinstance(row.metadata, dict) else {}
    facts: dict[str, Any] = {
        name: metadata[name] for name in ("tests", "expected_output") if name in metadata
    }
    facts |= {"state": row.state, "candidates": row.candidates, "steps": run.steps}
    facts |= {"trace_status": run.status} if run.status else {}
    if row.tokens_out is not None:
        facts["tokens"] = row.tokens_out
    return RewardSample(prompt=row.messages, response=row.response, agent=row.agent, facts=facts)


def known_feedback(said: FeedbackBundle) -> DecisionFeedback:
    valued = [(rating_value(fact.thumb, fact.stars, fact.score), fact.rater_kind) for fact in said.ratings]
    verdicts = [(value, kind) for value, kind in valued if value is not None]
    return DecisionFeedback(
        verdicts=[value for value, _ in verdicts],
        comparisons=[ended for ended, _ in said.comparisons],
        outcomes=said.outcomes,
        simulated=any(kind == RaterKind.SIMULATED for _, kind in (*verdicts, *said.comparisons)),
    )


# --- Reading ------------------------------------------------------------------------------------------------


def records_newest(ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, RewardRecord]:
    """Decision -> newest record, for decisions with one."""
    found: dict[uuid.UUID, RewardRecord] = {}
    for chunk in chunks(ids):
        rows = RewardRecord.objects.filter(decision__in=chunk, superseded_by__isnull=True)
        found |= {row.decision: row for row in rows.order_by()}
    return found


def rewarded_at_least(decisions: QuerySet[Decision], least: float) -> QuerySet[Decision]:
    """FEEDBACK_REWARDED: decisions whose newest raw reward is at least `least`, in [-2, 2]. Raises RewardsRefused."""
    if not RAW_LOW <= least <= -RAW_LOW:
        raise RewardsRefused(f"a raw reward lies in [-2, 2], found {least!r}")
    newest = RewardRecord.objects.filter(decision=OuterRef("pk")).order_by("-id").values("raw")[:1]
    return decisions.alias(reward_raw=Subquery(newest)).filter(reward_raw__gte=least)


def raw_rewards(ids: Iterable[uuid.UUID]) -> dict[uuid.UUID, float]:
    """Decision -> newest raw reward in [-2, 2], for decisions with one."""
    return {pk: row.raw for pk, row in records_newest(list(ids)).items() if row.raw is not None}


_means: CostAwareCache[Mapping[str, object]] = CostAwareCache()


def reward_summary(slug: str) -> dict[str, object]:
    """Mean rewards of an agent's decisions (cached) and how they are calculated, for its page."""
    newest = RewardRecord.objects.filter(agent=slug, superseded_by__isnull=True)
    means = _means.get(
        slug,
        lambda: newest.order_by().aggregate(
            n=Count("raw"),
            raw=Avg("raw"),
            immediate=Avg("immediate"),
            delayed=Avg("delayed"),
            strategic=Avg("strategic"),
            simulated=Count("pk", filter=Q(simulated=True)),
        ),
    )
    try:
        facts = reward_plan(slug).facts
    except RewardsRefused as refusal:
        return {**means, "fault": str(refusal)}
    horizons = [(name, weight, means[name]) for name, weight in facts.weights.items()]
    return {**means, "horizons": horizons, "functions": facts.functions, "outcomes": facts.outcomes}
