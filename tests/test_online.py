"""The online learner: what is in the buffer, when a retrain starts, and what the clock repairs."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.utils import timezone
from django_q.models import OrmQ, Schedule

from feedback.models import Rating
from feedback.services import decision_record, rating_submit, rating_withdraw
from feedback.storage.validation import FeedbackRefused
from rl.datasets.buffer import buffer_ids, buffer_size, feedback_take
from rl.jobs import lifecycle, progress
from rl.models import LearnerSettings, Learnt, TrainingRun
from rl.models.learning import learner_config
from rl.models.runs import LEARNER, RunRefused
from rl.online import learner
from rl.recipes import RecipeError
from tests.support.figures import figures_of

pytestmark = pytest.mark.django_db

DEAD = "elsewhere:17:1"


@pytest.fixture(autouse=True)
def switched_on(settings: Any) -> None:
    settings.ENABLE_ONLINE_LEARNING = True


def rate(n: int, start: int = 0, agent: str = "widgets") -> list[Any]:
    made = []
    for number in range(start, start + n):
        decision = decision_record(agent=agent, messages=f"prompt {number}", response="r").row
        made.append(rating_submit(decision=decision, rater="ada", thumb="up").row)
    return made


def end(run: TrainingRun, status: str, **facts: Any) -> None:
    TrainingRun.objects.filter(pk=run.pk).update(status=status, finished_at=timezone.now(), **facts)


def widgets_learner(min_samples: int = 3) -> learner.OnlineLearner:
    return learner.init_online_learner(min_samples=min_samples, agent="widgets")


def test_the_buffer_is_what_no_successful_run_learnt_from() -> None:
    rate(4)
    run = widgets_learner().trigger_retrain()
    rate(2, start=4)
    assert buffer_size("widgets") == 2
    run.learnt.update(use=Learnt.Use.TRAINED)
    end(run, "succeeded")
    assert buffer_size("widgets") == 2


@pytest.mark.slow
@pytest.mark.parametrize("status", ["failed", "refused", "cancelled"])
def test_a_run_that_brings_nothing_gives_its_feedback_back(status: str) -> None:
    rate(4)
    end(widgets_learner().trigger_retrain(), status)
    assert buffer_size("widgets") == 4


def test_what_was_taken_back_is_not_in_the_buffer() -> None:
    first, *_ = rate(3)
    rating_withdraw(first)
    assert buffer_size("widgets") == 2


def test_feedback_that_comes_before_the_dataset_is_read_is_taken_with_it() -> None:
    rate(3)
    run = widgets_learner().trigger_retrain()
    rate(1, start=3)
    assert len(feedback_take(run)) == 4
    assert buffer_ids("widgets") == []
    assert Learnt.objects.filter(run=run).count() == 4


def test_too_little_feedback_starts_nothing_and_says_how_much_is_wanted() -> None:
    rate(2)
    status = widgets_learner().get_status()
    assert (status["buffer_size"], status["min_samples"], status["should_retrain"]) == (2, 3, False)
    assert "2 of 3" in status["reason"]
    with pytest.raises(learner.LearnerRefused, match="2 of 3"):
        widgets_learner().trigger_retrain()


def test_the_defaults_are_those_of_the_operators_file_and_then_of_the_agents_row(settings: Any) -> None:
    assert learner.learner_settings("widgets").min_samples_to_retrain == 100
    settings.RATCHET_CONFIG = {"continuous_learning": {"min_samples_to_retrain": 50}}
    assert learner.learner_settings("widgets").min_samples_to_retrain == 50
    LearnerSettings.objects.create(agent="widgets", min_samples_to_retrain=7)
    assert learner.learner_settings("widgets").min_samples_to_retrain == 7
    settings.RATCHET_CONFIG = {"continuous_learning": {"min_sample": 50}}
    with pytest.raises(RecipeError, match="no knob 'min_sample'"):
        learner_config()


def test_nothing_starts_by_itself_unless_it_is_switched_on(settings: Any) -> None:
    rate(3)
    settings.ENABLE_ONLINE_LEARNING = False
    assert "ENABLE_ONLINE_LEARNING" in widgets_learner().get_status()["reason"]
    assert not widgets_learner().should_retrain()


def test_a_second_clock_starts_no_second_retrain() -> None:
    rate(5)
    widgets_learner().trigger_retrain()
    rate(5, start=5)
    with pytest.raises(learner.LearnerRefused, match="is queued"):
        widgets_learner().trigger_retrain()
    with pytest.raises(IntegrityError), transaction.atomic():
        TrainingRun.objects.create(agent="widgets", method="dpo", base_model="bundled", asked_by=LEARNER)
    assert TrainingRun.objects.count() == 1


def test_a_retrain_is_a_run_its_feedback_and_a_message_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rate(3)
    monkeypatch.setattr(lifecycle, "async_task", lambda *_, **__: (_ for _ in ()).throw(OSError("no broker")))
    with pytest.raises(OSError, match="no broker"):
        widgets_learner().trigger_retrain()
    assert (TrainingRun.objects.count(), Learnt.objects.count()) == (0, 0)


def test_the_same_feedback_is_not_tried_again_at_once_after_a_refusal() -> None:
    rate(3)
    run = widgets_learner().trigger_retrain()
    end(run, "refused")
    assert f"run {run.pk} was refused; tried again at" in widgets_learner().get_status()["reason"]
    rate(3, start=3)
    assert widgets_learner().should_retrain()


def test_a_small_buffer_is_learnt_from_when_the_interval_is_over() -> None:
    rate(3)
    end(widgets_learner().trigger_retrain(), "succeeded")
    rate(12, start=3)
    wanted = learner.init_online_learner(min_samples=100, agent="widgets")
    assert not wanted.should_retrain()
    TrainingRun.objects.update(created_at=timezone.now() - timedelta(hours=25))
    status = wanted.get_status()
    assert status["should_retrain"]
    assert "24 hours" in status["reason"]


def test_feedback_from_python_is_recorded_like_any_other() -> None:
    rate(1)
    widgets_learner().add_feedback({"prompt": "which?", "response": "that", "thumb": "down", "rater": "bob"})
    assert buffer_size("widgets") == 2
    with pytest.raises(learner.LearnerRefused, match="feedback is"):
        widgets_learner().add_feedback({"prompt": "which?", "answer": "that"})


@pytest.mark.parametrize(
    ("rating", "said"),
    [
        ("up", ("up", None, None)),
        (False, ("down", None, None)),
        (True, ("up", None, None)),
        (1, ("", 1, None)),
        (5, ("", 5, None)),
        (1.0, ("", None, 1.0)),
        (0.25, ("", None, 0.25)),
    ],
)
def test_a_recorded_decision_is_rated_by_its_id(rating: Any, said: tuple[Any, ...]) -> None:
    row = decision_record(agent="widgets", messages="q", response="r").row
    entry = {"entry_id": str(row.pk), "rating": rating, "tags": ["slow"], "notes": "late"}
    found = Rating.objects.get(pk=widgets_learner().add_feedback(entry))
    assert (found.thumb, found.stars, found.score) == said
    assert (found.decision_id, found.tags, found.notes, found.rater) == (row.pk, ["slow"], "late", "online")


@pytest.mark.parametrize("rating", [0, 6, 1.5, "good", [1]])
def test_a_rating_that_is_none_is_refused_in_words(rating: Any) -> None:
    row = decision_record(agent="widgets", messages="q", response="r").row
    with pytest.raises(learner.LearnerRefused, match="rating: expected"):
        widgets_learner().add_feedback({"entry_id": row.pk, "rating": rating})
    assert not Rating.objects.exists()


def test_a_decision_of_another_agent_is_not_rated() -> None:
    row = decision_record(agent="other", messages="q", response="r").row
    with pytest.raises(FeedbackRefused, match="expected a UUID"):
        widgets_learner().add_feedback({"entry_id": "no-uuid", "rating": "up"})
    for unknown in (row.pk, "00000000-0000-0000-0000-000000000009"):
        with pytest.raises(learner.LearnerRefused, match="expected the id of a decision of widgets"):
            widgets_learner().add_feedback({"entry_id": unknown, "rating": "up"})


def running(**facts: Any) -> TrainingRun:
    given = {"status": "running", "worker": DEAD, "heartbeat_at": timezone.now() - timedelta(hours=1)} | facts
    return TrainingRun.objects.create(agent="widgets", method="dpo", base_model="bundled", **given)


def test_a_run_whose_worker_is_gone_is_queued_and_handed_over_again() -> None:
    run = running(dispatched_at=timezone.now(), asked_by=LEARNER)
    assert [line.partition(":")[0] for line in learner.tick()[:2]] == [f"run {run.pk}"] * 2
    run.refresh_from_db()
    assert (run.status, OrmQ.objects.count()) == ("queued", 1)
    # the clock turns once more before a worker came: nothing is sent twice
    learner.tick()
    assert OrmQ.objects.count() == 1


def test_a_run_that_kills_its_workers_is_not_begun_for_ever() -> None:
    run = running(dispatched_at=timezone.now(), attempts=lifecycle.MAX_ATTEMPTS)
    learner.tick()
    run.refresh_from_db()
    assert run.status == "failed"
    assert run.reason.endswith(DEAD)
    assert figures_of(run.reason)[0] == lifecycle.MAX_ATTEMPTS


def test_a_waiting_run_is_cancelled_at_once_and_never_claimed() -> None:
    run = TrainingRun.objects.create(agent="widgets", method="dpo", base_model="bundled")
    assert lifecycle.run_cancel(run, actor="ann").reason == "cancelled by ann"
    with pytest.raises(RunRefused, match="is cancelled"):
        lifecycle.run_claim(run.pk)
    with pytest.raises(RunRefused, match="only queued and running runs"):
        lifecycle.run_cancel(run, actor="ann")


def test_a_running_run_is_asked_to_stop() -> None:
    run = lifecycle.run_claim(TrainingRun.objects.create(agent="widgets", method="dpo", base_model="b").pk)
    assert lifecycle.run_cancel(run, actor="ann").status == "running"
    with progress.stop_signals() as stop:
        listener = progress.RunListener(run, stop, None)
        listener.on_step(1, 1)
        assert listener.should_stop()


def test_a_run_of_a_dead_worker_is_cancelled_at_once() -> None:
    assert lifecycle.run_cancel(running(), actor="ann").status == "cancelled"


def test_what_follows_a_run_is_handed_over_again_and_not_for_ever() -> None:
    old = timezone.now() - timedelta(hours=1)
    run = running(status="succeeded", finished_at=old, follow_up="wanted")
    (line,) = learner.tick()
    assert line.startswith(f"run {run.pk}: ")
    assert learner.tick() == []
    TrainingRun.objects.update(follow_ups=learner.MAX_FOLLOW_UPS, heartbeat_at=old)
    learner.tick()
    run.refresh_from_db()
    assert run.follow_up == "failed"


def test_a_worker_that_lost_its_run_enters_nothing() -> None:
    run = lifecycle.run_claim(TrainingRun.objects.create(agent="widgets", method="dpo", base_model="b").pk)
    TrainingRun.objects.filter(pk=run.pk).update(worker=DEAD)
    with pytest.raises(RunRefused, match="was taken from"):
        lifecycle.run_finish(run, "succeeded")


def test_the_clock_is_put_into_the_schedule_once() -> None:
    learner.schedule_install()
    learner.schedule_install()
    row = Schedule.objects.get(name=learner.SCHEDULE)
    assert (row.func, row.minutes) == ("rl.tasks.tick", 1)
    assert learner.OnlineLearner("widgets").get_status()["next_check"] == row.next_run.isoformat()


def test_the_next_check_is_that_of_the_clock_that_watches_while_it_lives(ratchet_home: Path) -> None:
    widgets = learner.OnlineLearner("widgets")
    assert widgets.get_status()["next_check"] is None
    learner.next_check_note(5)
    said = datetime.fromisoformat(widgets.get_status()["next_check"])
    assert timedelta(seconds=0) < said - timezone.now() <= timedelta(seconds=5)
    learner.next_check_note(-121)  # it was to look two minutes ago, and did not
    assert widgets.get_status()["next_check"] is None


def test_people_are_told_once_of_a_run_that_died_too_often(settings: Any, mailoutbox: list[Any]) -> None:
    settings.NOTIFY_EMAIL = ["olga@example.com"]
    run = TrainingRun.objects.create(
        agent="widgets",
        method="dpo",
        status="running",
        base_model="bundled",
        asked_by=LEARNER,
        worker="elsewhere:1:1",
        attempts=lifecycle.MAX_ATTEMPTS,
        dispatched_at=timezone.now(),
    )
    learner.tick()
    learner.tick()
    (mail,) = mailoutbox
    assert mail.subject.startswith(f"Ratchet: run {run.pk} of widgets failed: its worker died 5 times")
