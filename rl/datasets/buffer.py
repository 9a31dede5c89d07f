"""The buffer: feedback that no policy was trained on yet, and the record of what each run read."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Mapping

from django.db import transaction
from django.db.models import Count, Exists, Model, OuterRef, Q, QuerySet

from feedback.cache import CostAwareCache
from feedback.explorer.bulk_readers import outcomes_standing
from feedback.models import Outcome
from feedback.selectors import (
    agent_slugs,
    comparisons_standing,
    ratings_standing,
    verdict_stands,
)
from feedback.storage.sql import chunks
from rl.datasets import PreparedDataset
from rl.datasets.reward_records import RewardsRefused, reward_settings
from rl.models import Learnt, RewardModelVersion, RewardRecord, TrainingRun
from rl.models.runs import LEARNER
from rl.recipes import BasicRecipe
from rl.recipes.methods import JUDGES
from rl.rewards.catalogue import MODEL

Status, Use = TrainingRun.Status, Learnt.Use
AT_WORK = (Status.QUEUED, Status.RUNNING)

ROWS_PER_WRITE = 2000


def _outside_buffer(
    column: str, *, clock: bool = False, but: TrainingRun | None = None, at_work: bool = True
) -> Exists:
    """Condition: the feedback in this column is not in the buffer.

    A succeeded run that made a policy trained on it or held it out, or (`at_work`) a queued or running run has it. Runs
    that failed, were refused or cancelled, made no policy, or are a stage of another run give their feedback back.

    clock: also feedback that a retrain of the online learner read without making a row of it, so that it does not start
        the next retrain.
    but: a run whose feedback does not count.
    """
    read = Q(run__status=Status.SUCCEEDED, use__in=(Use.TRAINED, Use.HELD_OUT))
    if clock:
        read |= Q(run__status=Status.SUCCEEDED, run__asked_by=LEARNER)
    # Excluding JUDGES, not listing policy methods: a plugin's method still counts after its package is removed.
    rows = Learnt.objects.filter(~Q(run__method__in=JUDGES), feedback=OuterRef(column), run__stage_of=None)
    if but is not None:
        rows = rows.exclude(run=but)
    return Exists(rows.filter(read | Q(run__status__in=AT_WORK) if at_work else read))


def _unrated_feedback(agent: str) -> tuple[QuerySet[Outcome], QuerySet[RewardRecord]]:
    """Feedback on unrated decisions: outcomes with a known value, and reward records of decisions without such one."""
    try:
        outcome_names = list(reward_settings(agent).outcomes)
    except RewardsRefused:
        # calculate_rewards reports the faulty settings; until they are fixed no outcome counts.
        outcome_names = []
    outcomes = outcomes_standing(agent).order_by().filter(~verdict_stands("decision"), name__in=outcome_names)
    records = RewardRecord.objects.filter(agent=agent, superseded_by__isnull=True, measured=True).order_by()
    known = Exists(Outcome.objects.filter(decision=OuterRef("decision"), name__in=outcome_names))
    return outcomes, records.filter(~known, ~verdict_stands("decision"))


def _buffer_rows(
    agent: str, *, clock: bool = False, but: TrainingRun | None = None, at_work: bool = True
) -> Iterator[tuple[QuerySet[Model], str]]:
    """(rows in the buffer, column of the feedback's id), one query per kind of feedback."""
    outcomes, records = _unrated_feedback(agent)
    kinds: tuple[tuple[QuerySet[Model], str], ...] = (
        (ratings_standing(agent).order_by(), "pk"),
        (comparisons_standing(agent).order_by(), "pk"),
        (outcomes, "pk"),
        (records, "decision"),
    )
    for rows, column in kinds:
        yield rows.filter(~_outside_buffer(column, clock=clock, but=but, at_work=at_work)), column


def buffer_ids(
    agent: str, *, but: TrainingRun | None = None, newest: int | None = None, at_work: bool = True
) -> list[uuid.UUID]:
    """Ids of the feedback in the buffer, at most the `newest`; `at_work` leaves out what unfinished runs have."""
    found: list[tuple[object, uuid.UUID]] = []
    for rows, column in _buffer_rows(agent, but=but, at_work=at_work):
        found += rows.values_list("created_at", column)
    if newest is not None and len(found) > newest:
        found = sorted(found, reverse=True)[:newest]
    return [pk for _, pk in found]


def buffer_size(agent: str) -> int:
    """Ratings, comparisons, outcomes with a value and rewarded decisions in the buffer."""
    return sum(rows.count() for rows, _ in _buffer_rows(agent))


def buffer_size_fresh(agent: str) -> int:
    """Feedback in the buffer that the online learner has not read yet; enough of it starts a retrain."""
    return sum(rows.count() for rows, _ in _buffer_rows(agent, clock=True))


def buffer_sizes(*, clock: bool = False) -> dict[str, int]:
    """Agent -> size of its buffer; with `clock`, as `buffer_size_fresh`."""
    sizes: dict[str, int] = {}
    for standing, agent in ((ratings_standing(), "decision__agent"), (comparisons_standing(), "left__agent")):
        rows = (
            standing.order_by()
            .filter(~_outside_buffer("pk", clock=clock))
            .values(agent)
            .annotate(n=Count("pk"))
        )
        for row in rows:
            sizes[row[agent]] = sizes.get(row[agent], 0) + row["n"]
    for slug in agent_slugs():
        outcomes, records = _unrated_feedback(slug)
        n = outcomes.filter(~_outside_buffer("pk", clock=clock)).count()
        n += records.filter(~_outside_buffer("decision", clock=clock)).count()
        if n:
            sizes[slug] = sizes.get(slug, 0) + n
    return sizes


_sizes: CostAwareCache[dict[str, int]] = CostAwareCache()


def buffer_sizes_cached() -> dict[str, int]:
    """`buffer_sizes` from a cache, for pages that are opened often."""
    return _sizes.get("all", buffer_sizes)


def fresh_sizes_cached() -> dict[str, int]:
    """`buffer_sizes(clock=True)` from a cache."""
    return _sizes.get("fresh", lambda: buffer_sizes(clock=True))


def feedback_take(run: TrainingRun, *, newest: int | None = None) -> list[uuid.UUID]:
    """Reserve the feedback in the buffer for a run, before its dataset is read; replaces an earlier reservation.

    Feedback that arrives while the dataset is read belongs to the next run.
    """
    ids = buffer_ids(run.agent, but=run, newest=newest)
    with transaction.atomic():
        run.learnt.all().delete()
        _note(run, dict.fromkeys(ids, Use.LEFT_OUT))
    return ids


def feedback_resolve(
    run: TrainingRun,
    new: Collection[uuid.UUID],
    rows: Mapping[str, Collection[uuid.UUID]],
    *,
    left_out: bool,
) -> None:
    """Record how a run uses the feedback that is new to it.

    rows: split -> ids of the feedback behind the dataset's rows. left_out: also record feedback without a row.
    """
    uses = dict.fromkeys(new, Use.LEFT_OUT) if left_out else {}
    fresh = set(new)
    for split, ids in rows.items():
        if split != "train":
            uses |= dict.fromkeys(fresh.intersection(ids), Use.HELD_OUT)
    uses |= dict.fromkeys(fresh.intersection(rows.get("train", ())), Use.TRAINED)
    with transaction.atomic():
        run.learnt.all().delete()
        _note(run, uses)


def feedback_release(run: TrainingRun) -> None:
    """Drop a resumed run's claim on feedback that other runs took while it was stopped."""
    others = Learnt.objects.filter(
        ~Q(run__method__in=JUDGES), feedback=OuterRef("feedback"), run__stage_of=None
    )
    taken = others.exclude(run=run).filter(
        Q(run__status=Status.SUCCEEDED, use__in=(Use.TRAINED, Use.HELD_OUT)) | Q(run__status__in=AT_WORK)
    )
    ids = list(run.learnt.filter(Exists(taken)).values_list("pk", flat=True))
    for chunk in chunks(ids, ROWS_PER_WRITE // 4):
        Learnt.objects.filter(pk__in=chunk).delete()


def feedback_read(run: TrainingRun) -> dict[str, set[uuid.UUID]]:
    """Feedback that a run read first: {"train": ids, "holdout": ids of the eval and holdout splits}."""
    found: dict[str, set[uuid.UUID]] = {"train": set(), "holdout": set()}
    for pk, use in run.learnt.exclude(use=Use.LEFT_OUT).values_list("feedback", "use"):
        found["train" if use == Use.TRAINED else "holdout"].add(pk)
    return found


def _note(run: TrainingRun, uses: Mapping[uuid.UUID, str]) -> None:
    rows = [Learnt(run=run, feedback=pk, use=use) for pk, use in uses.items()]
    Learnt.objects.bulk_create(rows, batch_size=ROWS_PER_WRITE, ignore_conflicts=True)


def run_feedback_resolve(
    run: TrainingRun, prepared: PreparedDataset, recipe: BasicRecipe, new: Collection[uuid.UUID]
) -> None:
    """Record the feedback that a run reads and its number; `new`: ids in the buffer that it may read first.

    A policy trained on a reward model has learnt from that model's feedback. Reward functions add no feedback.
    """
    rows = {split: set(ids) for split, ids in prepared.feedback.items()}
    _run_settle(run, rows, str(recipe.as_dict().get("reward", "")), new)


def run_rewards_resolve(run: TrainingRun) -> None:
    """As `run_feedback_resolve`, for a run whose reward `auto` was just resolved to a reward model."""
    learner = run.asked_by == LEARNER
    new = run.learnt.values_list("feedback", flat=True) if learner else buffer_ids(run.agent, but=run)
    _run_settle(run, {}, str(run.recipe.get("reward", "")), list(new))


def _run_settle(
    run: TrainingRun, rows: dict[str, set[uuid.UUID]], specs: str, new: Collection[uuid.UUID]
) -> None:
    count = len(rows.get("train", ()))
    for model in reward_models(specs):
        for split, ids in feedback_read(model).items():
            rows.setdefault(split, set()).update(ids)
        count += model.feedback_count
    for stage in run.stages.filter(method="sft", status=TrainingRun.Status.SUCCEEDED):
        for split, ids in feedback_read(stage).items():
            rows.setdefault(split, set()).update(ids)
        count = max(count, stage.feedback_count)  # Mostly the reward model's feedback.
    run.feedback_count = count
    run.save(update_fields=["feedback_count"])
    if new:
        feedback_resolve(run, new, rows, left_out=run.asked_by == LEARNER)


def reward_models(specs: str) -> list[TrainingRun]:
    """Runs of the reward models in comma-separated reward specs (`model:RUN`, `model:NAME`)."""
    names = [spec.strip().removeprefix(MODEL) for spec in specs.split(",") if spec.strip().startswith(MODEL)]
    runs = {int(name) for name in names if name.isdigit()}
    registered = RewardModelVersion.objects.filter(name__in=names, run__isnull=False)
    runs |= {run for run in registered.values_list("run", flat=True) if run is not None}
    return list(TrainingRun.objects.filter(pk__in=runs))
