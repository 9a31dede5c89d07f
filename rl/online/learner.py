"""The online learner: a clock over the feedback not learnt from yet. No torch; training is handed to the workers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils import timezone

from backend.isolation import agent_isolated
from feedback.recording.recorder import outbox_replay
from feedback.selectors import agent_slugs, decision_get, feedback_counts
from feedback.services import decision_record, rating_submit
from feedback.storage.factories import identity_of
from rl.datasets import DatasetRefused
from rl.datasets.buffer import buffer_size, buffer_size_fresh, feedback_take
from rl.datasets.gate_distance import gate_distances_cached
from rl.experiments import schedule
from rl.jobs import lifecycle
from rl.jobs.estimates import order_automatic
from rl.models import LearnerSettings, TrainingRun
from rl.models.learning import learner_checked, learner_config, learner_settings, retrain_knobs
from rl.models.runs import LEARNER
from rl.online import champion_monitor
from rl.recipes import DATASET_CONFIG, RecipeError
from rl.recipes.methods import method_named
from rl.registry.incumbents import incumbent_sync

logger = logging.getLogger("rl.online.learner")

Status = TrainingRun.Status
FollowUp = TrainingRun.FollowUp

MAX_FOLLOW_UPS = 3
"""Times that evaluating and exporting a run's policy is begun; what fails so often needs a person."""


class LearnerRefused(ValueError):
    """A retrain that cannot begin now; the message says why and when it can."""


@dataclass(frozen=True)
class OnlineLearner:
    """One agent's learner. Holds no feedback: what it says is asked of the database each time."""

    agent: str
    min_samples: int | None = None
    """In place of the agent's `min_samples_to_retrain`."""

    @property
    def settings(self) -> LearnerSettings:
        found = learner_settings(self.agent)
        if self.min_samples is not None:
            found.min_samples_to_retrain = self.min_samples
        return found

    def add_feedback(self, entry: Mapping[str, Any]) -> str:
        """Record one response and what was thought of it; returns the rating's id.

        entry: `prompt` (text or chat messages) and `response`, or `entry_id`, the id of a recorded decision; and one of
        `thumb` (up, down), `stars` (1 to 5), `score` (0 to 1), `correction`, or `rating`: "up", "down", True or False
        is a thumb, a whole number from 1 to 5 stars, a fraction from 0.0 to 1.0 a score. Optional `rater`, `tags`,
        `notes`. Raises LearnerRefused for other keys and ratings, and what feedback.services raise.
        """
        which = {"entry_id"} if "entry_id" in entry else {"prompt", "response"}
        unknown = sorted(map(str, set(entry) - {*which, "rater", "rating", *FEEDBACK_FIELDS}))
        if unknown or not which <= set(entry):
            raise LearnerRefused(
                f"feedback is {{prompt, response}} or {{entry_id}} with {', '.join(FEEDBACK_FIELDS)} or "
                f"rating, and rater; found {', '.join(map(str, entry))}"
            )
        facts = {name: entry[name] for name in FEEDBACK_FIELDS if entry.get(name) is not None}
        if entry.get("rating") is not None:
            facts |= _verdict(entry["rating"])
        with transaction.atomic():
            if "entry_id" in entry:
                found = decision_get(identity_of(entry["entry_id"]))
                if found is None or found.agent != self.agent:
                    raise LearnerRefused(
                        f"expected the id of a decision of {self.agent}, found {entry['entry_id']}"
                    )
                decision = found
            else:
                decision = decision_record(
                    agent=self.agent, messages=entry["prompt"], response=entry["response"]
                ).row
            rating = rating_submit(decision=decision, rater=str(entry.get("rater") or "online"), **facts).row
        return str(rating.pk)

    def get_status(self) -> dict[str, Any]:
        """buffer_size, new_samples, min_samples, should_retrain and why, the last run, when the clock looks again."""
        learner = self.settings
        size, fresh = buffer_size(self.agent), buffer_size_fresh(self.agent)
        last = self._runs().first()
        should, reason = self._judge(learner, fresh, last)
        champion = incumbent_sync(self.agent)
        distance = gate_distances_cached({self.agent: feedback_counts(self.agent)}).get(self.agent)
        return {
            "agent": self.agent,
            "enabled": settings.ENABLE_ONLINE_LEARNING and learner.enabled,
            "buffer_size": size,
            "new_samples": fresh,
            "min_samples": learner.min_samples_to_retrain,
            "max_buffer_size": learner.max_buffer_size,
            "should_retrain": should,
            "reason": reason,
            "method": learner.method,
            "gate": learner.gate,
            "champion": champion.name if champion else None,
            "evidence": distance.as_dict() if distance else None,
            "last_run": _run_summary(last),
            "next_check": _iso(next_check()),
        }

    def should_retrain(self) -> bool:
        return bool(self.get_status()["should_retrain"])

    def trigger_retrain(self, *, actor: str = LEARNER, force: bool = False) -> TrainingRun:
        """Enter a run with what is in the buffer and hand it to the workers, all or nothing.

        force: whatever the clock thinks of it. Raises LearnerRefused, also where another clock was a moment faster, and
        RecipeError for settings that cannot be followed.
        """
        learner = learner_checked(self.settings)
        size = buffer_size(self.agent)
        should, reason = self._judge(learner, buffer_size_fresh(self.agent), self._runs().first())
        if not should and not force:
            raise LearnerRefused(f"{self.agent}: {reason}")
        if size == 0:
            raise LearnerRefused(f"{self.agent}: there is no new feedback to train on")
        try:
            order = order_automatic(self.agent, learner.method, actor=LEARNER)
        except DatasetRefused as refusal:
            raise LearnerRefused(f"{self.agent}: {refusal}") from refusal
        if not method_named(order.method).policy:
            raise LearnerRefused(f"{self.agent}: {order.method} makes no policy; set another method")
        order.knobs.update({**retrain_knobs(learner, order.method), **order.knobs})
        try:
            with transaction.atomic():
                run = lifecycle.run_enqueue(order)
                TrainingRun.objects.filter(pk=run.pk).update(follow_up=FollowUp.WANTED)
                taken = len(feedback_take(run, newest=learner.max_buffer_size))
                lifecycle.run_dispatch(run)
        except IntegrityError as error:
            raise LearnerRefused(f"{self.agent}: a retrain is queued or running already") from error
        logger.info(
            "run %s: %s retrains on up to %s pieces of feedback, by %s",
            run.pk,
            self.agent,
            taken,
            actor,
        )
        run.refresh_from_db()
        return run

    def _runs(self) -> Any:
        return TrainingRun.objects.filter(agent=self.agent, asked_by=LEARNER).order_by("-pk")

    def _judge(self, wanted: LearnerSettings, size: int, last: TrainingRun | None) -> tuple[bool, str]:
        """True if a retrain is due, with the reason. size: feedback that no retrain has looked at."""
        if not settings.ENABLE_ONLINE_LEARNING:
            return False, "ENABLE_ONLINE_LEARNING is off: no automatic retraining"
        if not wanted.enabled:
            return False, "online learning is switched off for this agent (admin, Learner settings)"
        try:
            learner_checked(wanted)
        except RecipeError as fault:
            return False, str(fault)
        if last is not None and last.is_unfinished:
            return False, f"run {last.pk} is {last.status}"
        pause = timedelta(hours=wanted.retrain_interval_hours)
        due = last.created_at + pause if last else None
        if last is not None and last.status != Status.SUCCEEDED and due and timezone.now() < due:
            # the same feedback would fail the same way: wait for the pause, or for as much again
            fresh = size - last.learnt.count()
            if fresh < wanted.min_samples_to_retrain:
                return False, f"run {last.pk} was {last.status}; tried again at {due:%Y-%m-%d %H:%M} UTC"
        if size >= wanted.min_samples_to_retrain:
            return (
                True,
                f"{size} new pieces of feedback, {wanted.min_samples_to_retrain} start a retrain",
            )
        if due is not None and size >= DATASET_CONFIG["min_samples"] and timezone.now() >= due:
            return (
                True,
                f"{size} new pieces of feedback have waited for {wanted.retrain_interval_hours:g} hours",
            )
        return (
            False,
            f"{size} of {wanted.min_samples_to_retrain} new pieces of feedback needed for a retrain",
        )


FEEDBACK_FIELDS = ("thumb", "stars", "score", "correction", "tags", "notes")


def _verdict(rating: Any) -> dict[str, Any]:
    """A rating by its type: a thumb, stars or a score. Raises LearnerRefused for any other."""
    thumbs = {"up": "up", "down": "down", True: "up", False: "down"}
    if isinstance(rating, (bool, str)) and rating in thumbs:
        return {"thumb": thumbs[rating]}
    if isinstance(rating, int) and 1 <= rating <= 5:
        return {"stars": rating}
    if isinstance(rating, float) and 0 <= rating <= 1:
        return {"score": rating}
    raise LearnerRefused(
        'rating: expected "up" or "down", True or False, stars from 1 to 5 as a whole number, or a score from 0.0 to '
        f"1.0; found {rating!r}"
    )


def get_online_learner(agent: str | None = None) -> OnlineLearner:
    """The learner of an agent; without one, of the only agent there is. Raises LearnerRefused."""
    known = agent_slugs()
    if agent is None:
        if len(known) != 1:
            raise LearnerRefused(f"expected an agent, one of {', '.join(known) or 'none yet'}")
        agent = known[0]
    return OnlineLearner(agent)


def init_online_learner(min_samples: int | None = None, agent: str | None = None) -> OnlineLearner:
    """The same, with another number of samples that start a retrain."""
    if min_samples is not None and min_samples < 1:
        raise LearnerRefused(f"min_samples must be at least 1, found {min_samples}")
    return replace(get_online_learner(agent), min_samples=min_samples)


# --- The clock ----------------------------------------------------------------------------------------------


def tick() -> list[str]:
    """Reclaim runs whose worker died, hand over what waits, finish what follows, start the retrains that are due, roll
    back the champions that people rate worse, look at the experiments.

    Every part may be repeated and may meet another clock doing the same. A fault in one part, or of one agent, is named
    among what was done, logged and told; the other parts and agents go on. Returns what was done, a line each.
    """
    done = []
    for task, part in _PARTS:
        done += agent_isolated(task, "all agents", part)
    if settings.ENABLE_ONLINE_LEARNING:
        for agent in agent_slugs():
            done += agent_isolated("retrain", agent, partial(_retrain_due, agent))
    done += agent_isolated("champion watch", "all agents", champion_monitor.champions_watch)
    for line in done:
        logger.info("tick: %s", line)
    return [*done, *agent_isolated("experiments", "all agents", schedule.tick)]


def _reclaim_runs() -> list[str]:
    return [f"run {run.pk}: queued again" for run in lifecycle.runs_reclaim()]


def _redispatch_runs() -> list[str]:
    return [f"run {run.pk}: handed to the workers again" for run in lifecycle.runs_redispatch()]


def _lines_of_follow_ups() -> list[str]:
    return [f"run {run.pk}: evaluation and export are handed to the workers" for run in _follow_ups()]


def _replay_journals() -> list[str]:
    replayed = outbox_replay()
    return [f"{replayed} decisions were replayed from the outbox"] if replayed else []


_PARTS: tuple[tuple[str, Callable[[], list[str]]], ...] = (
    ("reclaim", _reclaim_runs),
    ("dispatch", _redispatch_runs),
    ("follow-up", _lines_of_follow_ups),
    ("spool", _replay_journals),
)
"""Parts of a tick that serve all agents alike, by name."""


def _retrain_due(agent: str) -> list[str]:
    try:
        return [f"run {OnlineLearner(agent).trigger_retrain().pk}: {agent} retrains"]
    except LearnerRefused:
        return []  # the usual answer of a clock: not now


def _follow_ups() -> list[TrainingRun]:
    """Successful runs whose policy was not judged to the end, where nobody is at it."""
    before = timezone.now() - lifecycle.REDISPATCH_AFTER
    waiting = TrainingRun.objects.filter(status=Status.SUCCEEDED, follow_up__in=TrainingRun.FOLLOW_UP_PENDING)
    runs = []
    for run in waiting.filter(finished_at__lt=before):
        if run.heartbeat_at is not None and timezone.now() - run.heartbeat_at < lifecycle.REDISPATCH_AFTER:
            continue  # somebody gives signs of life
        if run.follow_ups >= MAX_FOLLOW_UPS:
            run.reason = f"evaluation and export were started {run.follow_ups} times and never finished"
            held = TrainingRun.objects.filter(pk=run.pk, follow_up__in=TrainingRun.FOLLOW_UP_PENDING)
            if held.update(follow_up=FollowUp.FAILED, reason=run.reason):
                lifecycle.run_failed_notify(run)
            continue
        # of two clocks one hands it over
        if TrainingRun.objects.filter(pk=run.pk, heartbeat_at=run.heartbeat_at).update(
            heartbeat_at=timezone.now()
        ):
            lifecycle.follow_up_dispatch(run)
            runs.append(run)
    return runs


def next_check() -> datetime | None:
    """Time of the next check: that of the schedule, or of `online_learner watch`; None where neither runs."""
    from django_q.models import Schedule

    found = list(Schedule.objects.filter(name=SCHEDULE).values_list("next_run", flat=True))
    try:
        noted = datetime.fromisoformat(_clock_file().read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return min(found, default=None)
    if timezone.now() - noted < SILENT_AFTER:  # else nobody watches any more
        found.append(noted)
    return min(found, default=None)


def next_check_note(seconds: float) -> None:
    """Say that a clock of this data folder looks again after so long."""
    file = _clock_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_name(f".{file.name}.{os.getpid()}")
    half.write_text((timezone.now() + timedelta(seconds=seconds)).isoformat(), "utf-8")
    half.replace(file)


def _clock_file() -> Path:
    return Path(settings.RATCHET_HOME) / "cache" / "next_check"


SCHEDULE = "online learner tick"
SILENT_AFTER = timedelta(minutes=2)
"""A clock that is so late is taken to be dead."""


def schedule_install() -> Any:
    """Put the clock into the workers' schedule: every `tick_seconds`, rounded up to minutes. Returns the Schedule."""
    from django_q.models import Schedule

    minutes = max(1, -(-int(learner_config()["tick_seconds"]) // 60))
    row, _ = Schedule.objects.update_or_create(
        name=SCHEDULE,
        defaults={
            "func": "rl.tasks.tick",
            "schedule_type": Schedule.MINUTES,
            "minutes": minutes,
            "repeats": -1,
        },
    )
    return row


def _run_summary(run: TrainingRun | None) -> dict[str, Any] | None:
    if run is None:
        return None
    policy = getattr(run, "policy", None)
    return {
        "id": run.pk,
        "status": str(run.status),
        "reason": run.reason,
        "created_at": _iso(run.created_at),
        "finished_at": _iso(run.finished_at),
        "policy": policy.name if policy else None,
        "stage": str(policy.stage) if policy else None,
    }


def _iso(at: datetime | None) -> str | None:
    return at.isoformat() if at else None
