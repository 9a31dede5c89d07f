"""The online learner: starts retrains from new feedback. No torch; workers do the training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Q
from django.utils import timezone
from django_q.tasks import async_task

from backend.installation import file_replace
from backend.isolation import agent_isolated
from backend.notifications import webhooks_send
from feedback.recording.recorder import outbox_replay
from feedback.selectors import agent_slugs, decision_get, feedback_counts, shadow_answers
from feedback.services import decision_record, rating_submit
from feedback.storage.factories import identity_of
from feedback.storage.facts import RATING_CONTENT
from rl.datasets import DatasetRefused
from rl.datasets.buffer import buffer_size, buffer_size_fresh, feedback_take
from rl.datasets.gate_distance import gate_distances_cached
from rl.evaluation.judging import PROMPTS as JUDGED_PROMPTS
from rl.evaluation.judging import round_create, round_dispatch
from rl.experiments import schedule
from rl.experiments.traffic import experiments_running
from rl.jobs import lifecycle
from rl.jobs.estimates import order_automatic
from rl.models import Experiment, JudgingRound, LearnerSettings, TrainingRun
from rl.models.learning import learner_checked, learner_config, learner_settings, retrain_knobs
from rl.models.runs import LEARNER
from rl.online import champion_monitor
from rl.recipes import DATASET_CONFIG, RecipeError
from rl.registry.incumbents import incumbent_sync
from rl.serving.publication import reconcile
from rl.serving.routes import routes_reset
from rl.serving.routing import budgets_notice
from rl.serving.shadow import challenger_of

logger = logging.getLogger("rl.online.learner")

Status = TrainingRun.Status
FollowUp = TrainingRun.FollowUp

MAX_FOLLOW_UPS = 3
"""Attempts to evaluate and export a run's policy before it counts as failed."""


class LearnerRefused(ValueError):
    """The retrain cannot begin now."""


@dataclass(frozen=True)
class OnlineLearner:
    """One agent's learner. It has no state: every answer comes from the database."""

    agent: str
    min_samples: int | None = None
    """Overrides the agent's `min_samples_to_retrain`."""

    @property
    def settings(self) -> LearnerSettings:
        found = learner_settings(self.agent)
        if self.min_samples is not None:
            found.min_samples_to_retrain = self.min_samples
        return found

    def add_feedback(self, entry: Mapping[str, Any]) -> str:
        """Record a response and its rating; returns the rating's id.

        entry: `prompt` (text or chat messages) and `response`, or `entry_id` of a recorded decision. One of `thumb`
        (up, down), `stars` (1 to 5), `score` (0 to 1), `correction`, or `rating`, whose type decides: "up", "down" or a
        bool is a thumb, an int stars, a float a score. Optional: `rater`, `tags`, `notes`.

        Raises LearnerRefused for other keys and ratings, and what feedback.services raise.
        """
        which = {"entry_id"} if "entry_id" in entry else {"prompt", "response"}
        unknown = sorted(map(str, set(entry) - {*which, "rater", "rating", *RATING_CONTENT}))
        if unknown or not which <= set(entry):
            raise LearnerRefused(
                f"feedback is {{prompt, response}} or {{entry_id}} with {', '.join(RATING_CONTENT)} or "
                f"rating, and rater; found {', '.join(map(str, entry))}"
            )
        facts = {name: entry[name] for name in RATING_CONTENT if entry.get(name) is not None}
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

    def get_status(self) -> dict[str, object]:
        """State of the buffer, whether and why a retrain is due, the last run and the next check."""
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
            "evidence": distance.model_dump() if distance else None,
            "last_run": _run_summary(last),
            "next_check": _iso(next_check()),
        }

    def should_retrain(self) -> bool:
        return bool(self.get_status()["should_retrain"])

    def trigger_retrain(self, *, actor: str = LEARNER, force: bool = False) -> TrainingRun:
        """Queue a run on the feedback in the buffer; `force` ignores whether it is due.

        Raises LearnerRefused, also if another scheduler was faster, and RecipeError for invalid settings.
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
        if not order.definition.policy:
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
        """(is a retrain due, reason). size: feedback that no retrain has read."""
        if not settings.ENABLE_ONLINE_LEARNING:
            return False, "ENABLE_ONLINE_LEARNING is off: no automatic retraining"
        if not wanted.enabled:
            return False, "online learning is off for this agent (admin, Learner settings)"
        try:
            learner_checked(wanted)
        except RecipeError as fault:
            return False, str(fault)
        if last is not None and last.is_unfinished:
            return False, f"run {last.pk} is {last.status}"
        pause = timedelta(hours=wanted.retrain_interval_hours)
        due = last.created_at + pause if last else None
        if last is not None and last.status != Status.SUCCEEDED and due and timezone.now() < due:
            # The same feedback would fail again: wait for the interval or for enough new feedback.
            fresh = size - last.learnt.count()
            if fresh < wanted.min_samples_to_retrain:
                return False, f"run {last.pk} was {last.status}; tried again at {due:%Y-%m-%d %H:%M} UTC"
        if size >= wanted.min_samples_to_retrain:
            return True, f"{size} new pieces of feedback, {wanted.min_samples_to_retrain} start a retrain"
        if due is not None and size >= DATASET_CONFIG["min_samples"] and timezone.now() >= due:
            hours = f"{wanted.retrain_interval_hours:g} hours"
            return True, f"{size} new pieces of feedback have waited for {hours}"
        return False, f"{size} of {wanted.min_samples_to_retrain} new pieces of feedback needed for a retrain"


def _verdict(rating: object) -> dict[str, object]:
    """A rating as a thumb, stars or a score, by its type. Raises LearnerRefused."""
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
    """The learner of an agent; None: of the only agent. Raises LearnerRefused."""
    known = agent_slugs()
    if agent is None:
        if len(known) != 1:
            raise LearnerRefused(f"expected an agent, one of {', '.join(known) or 'none yet'}")
        agent = known[0]
    return OnlineLearner(agent)


def init_online_learner(min_samples: int | None = None, agent: str | None = None) -> OnlineLearner:
    """As `get_online_learner`, with another number of samples that start a retrain."""
    if min_samples is not None and min_samples < 1:
        raise LearnerRefused(f"min_samples must be at least 1, found {min_samples}")
    return replace(get_online_learner(agent), min_samples=min_samples)


# --- The scheduler ------------------------------------------------------------------------------------------


def tick() -> list[str]:
    """Reclaim runs of dead workers, dispatch waiting ones, start due retrains, watch champions, check experiments.

    Every part may be repeated and may run in two schedulers at once. A fault in one part or agent is logged and
    reported; the others go on. Returns a line per action.
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


SHADOW_LEASE = timedelta(minutes=5)
"""Time after which a worker's turn with a shadow counts as lost, from its handing over and again from its start."""


def _shadows() -> list[str]:
    """Hand each running shadow to a worker that is not at it, and open its judging round once it has enough answers."""
    done = []
    for experiment in experiments_running():
        if experiment.shadow:
            done += agent_isolated(
                f"shadow {experiment.pk}", experiment.agent, partial(_shadow_look, experiment)
            )
    return done


def _shadow_look(experiment: Experiment) -> list[str]:
    now = timezone.now()
    free = Q(shadow_until=None) | Q(shadow_until__lt=now)
    lease = now + SHADOW_LEASE
    # Compare-and-swap: only one scheduler hands it over.
    if Experiment.objects.filter(free, pk=experiment.pk).update(shadow_until=lease):
        name = f"shadow {experiment.name}"
        async_task("rl.tasks.shadow_answer", experiment.pk, lease.isoformat(), task_name=name)
    policy = challenger_of(experiment)
    ended = Q(status__in=(JudgingRound.Status.ENDED, JudgingRound.Status.FAILED))
    rounds = JudgingRound.objects.filter(~ended | Q(created_at__gte=experiment.started_at), policy=policy)
    if rounds.exists() or shadow_answers(experiment.agent, policy.name).count() < JUDGED_PROMPTS:
        return []
    control = next(arm for arm in experiment.arms.all() if arm.is_control)
    judging = round_create(policy, against=control.policy_name, actor=schedule.CLOCK)
    round_dispatch(judging)
    return [f"experiment {experiment.name}: judging round {judging.pk} judges its shadow answers"]


_PARTS: tuple[tuple[str, Callable[[], list[str]]], ...] = (
    ("reclaim", _reclaim_runs),
    ("dispatch", _redispatch_runs),
    ("follow-up", _lines_of_follow_ups),
    ("spool", _replay_journals),
    ("webhooks", lambda: [f"{key}: taken by NOTIFY_WEBHOOK" for key in webhooks_send()]),
    ("budgets", budgets_notice),
    ("shadows", _shadows),
    ("routes", routes_reset),
    ("engines", reconcile),
)
"""Parts of a tick that are not per agent."""


def _retrain_due(agent: str) -> list[str]:
    try:
        return [f"run {OnlineLearner(agent).trigger_retrain().pk}: {agent} retrains"]
    except LearnerRefused:
        return []  # Not due.


def _follow_ups() -> list[TrainingRun]:
    """Dispatch evaluation and export of successful runs where no worker is at it; returns the runs."""
    before = timezone.now() - lifecycle.REDISPATCH_AFTER
    waiting = TrainingRun.objects.filter(status=Status.SUCCEEDED, follow_up__in=TrainingRun.FOLLOW_UP_PENDING)
    runs = []
    for run in waiting.filter(finished_at__lt=before):
        if run.heartbeat_at is not None and timezone.now() - run.heartbeat_at < lifecycle.REDISPATCH_AFTER:
            continue  # A worker is at it.
        if run.follow_ups >= MAX_FOLLOW_UPS:
            run.reason = f"evaluation and export were started {run.follow_ups} times and never finished"
            held = TrainingRun.objects.filter(pk=run.pk, follow_up__in=TrainingRun.FOLLOW_UP_PENDING)
            if held.update(follow_up=FollowUp.FAILED, reason=run.reason):
                lifecycle.run_failed_notify(run)
            continue
        # Compare-and-swap: only one scheduler dispatches it.
        if TrainingRun.objects.filter(pk=run.pk, heartbeat_at=run.heartbeat_at).update(
            heartbeat_at=timezone.now()
        ):
            lifecycle.follow_up_dispatch(run)
            runs.append(run)
    return runs


def next_check() -> datetime | None:
    """Next check by the schedule or by `online_learner watch`; None if neither runs."""
    from django_q.models import Schedule

    found = list(Schedule.objects.filter(name=SCHEDULE).values_list("next_run", flat=True))
    try:
        noted = datetime.fromisoformat(_clock_file().read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return min(found, default=None)
    if timezone.now() - noted < SILENT_AFTER:  # Else `watch` has ended.
        found.append(noted)
    return min(found, default=None)


def next_check_note(seconds: float) -> None:
    """Store that the next check of this data folder is in `seconds`."""
    file = _clock_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file_replace(file, (timezone.now() + timedelta(seconds=seconds)).isoformat())


def _clock_file() -> Path:
    return Path(settings.RATCHET_HOME) / "cache" / "next_check"


SCHEDULE = "online learner tick"
SILENT_AFTER = timedelta(minutes=2)
"""A scheduler that is this late counts as ended."""


def schedule_install() -> Any:
    """Schedule `tick` every `tick_seconds`, rounded up to minutes; returns the Schedule."""
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


def _run_summary(run: TrainingRun | None) -> dict[str, object] | None:
    if run is None:
        return None
    policy = getattr(run, "policy", None)
    return {
        "id": run.pk,
        "status": str(run.status),
        "reason": run.reason_and_step,
        "created_at": _iso(run.created_at),
        "finished_at": _iso(run.finished_at),
        "policy": policy.name if policy else None,
        "stage": str(policy.stage) if policy else None,
    }


def _iso(at: datetime | None) -> str | None:
    return at.isoformat() if at else None
