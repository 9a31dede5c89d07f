"""From a trace to a dataset: what a run's steps say of its answers, and that none of it is lost on the way."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from feedback.models import Decision
from feedback.recording.ingest import trace_record
from feedback.recording.recorder import outbox_of
from feedback.services import comparison_submit, decision_record, outcome_record, rating_submit
from ratchet_client import TraceCollector, hook_into_agent, records_decision
from rl.datasets import get_training_stats, prepare_training_dataset
from rl.datasets.gate_distance import gate_distance
from rl.datasets.reward_records import decisions_pending, rewards_calculate
from rl.datasets.rows import FeedbackFile, RowRules
from rl.models import RewardRecord, RewardSettings
from rl.rewards.base import RewardSample
from rl.rewards.traces import TaskCompletionReward, ToolSuccessReward
from tests.support.said import printed

pytestmark = pytest.mark.django_db


def raw(function: Any, *steps: dict[str, Any], **facts: Any) -> float | None:
    sample = RewardSample([{"role": "user", "content": "?"}], "x", "desk", {"steps": list(steps), **facts})
    value: float | None = function.score([sample])[0].raw
    return value


def call(name: str = "search", **facts: Any) -> dict[str, Any]:
    return {"kind": "tool_call", "name": name, **facts}


def task(status: str = "", **facts: Any) -> dict[str, Any]:
    return {"kind": "task", "name": "t", "status": status, **facts}


DECISION = {"kind": "decision", "messages": "Where is order 7?", "response": "I do not know."}


@pytest.mark.parametrize("status", ["", "returned", "running", "open", "ended"])
def test_a_task_of_which_nobody_says_how_it_ended_is_neither_done_nor_failed(status: str) -> None:
    assert raw(TaskCompletionReward(), task(status)) is None
    assert raw(TaskCompletionReward(), task(status), task("completed")) == 2.0
    assert raw(TaskCompletionReward(), task(status), task("failed")) == -2.0


def test_a_run_that_ended_with_an_error_failed_unless_its_tasks_say_otherwise() -> None:
    assert raw(TaskCompletionReward(), call(), trace_status="failed") == -2.0
    assert raw(TaskCompletionReward(), task("completed"), trace_status="failed") == 2.0
    assert raw(TaskCompletionReward(), call(), trace_status="ended") is None


def test_failed_tools_cost_also_where_a_retry_worked() -> None:
    # one of two worked: half of [-2, 2] is 0; one of three: -2 + 4 / 3
    assert raw(ToolSuccessReward(), call(error="timeout"), call()) == 0.0
    assert raw(ToolSuccessReward(), call(error="a"), call(error="b"), call()) == pytest.approx(-2 / 3)


@pytest.mark.parametrize(
    "result", [{"error": "gone"}, {"ok": False}, {"success": False}, {"is_error": True, "content": "x"}]
)
def test_a_tool_that_returns_its_error_failed_like_one_that_raised(result: dict[str, Any]) -> None:
    assert raw(ToolSuccessReward(), call(result=result)) == -2.0
    assert raw(ToolSuccessReward(), call(result={"error": None, "ok": True})) == 2.0


def test_asking_again_for_what_is_known_costs_and_a_call_nobody_saw_end_counts_for_nothing() -> None:
    again = call(arguments={"order": 7}, result="sent")
    assert raw(ToolSuccessReward(), again, again) == 0.0
    assert raw(ToolSuccessReward(), again, call(arguments={"order": 8}, result="sent")) == 2.0
    assert raw(ToolSuccessReward(), again, call(unfinished=True)) == 2.0
    assert raw(ToolSuccessReward(), call(unfinished=True)) is None


class Bot:
    def run(self, question: str) -> str:
        try:
            return self.search_tool(question)
        except OSError:
            return "I do not know."

    def search_tool(self, query: str) -> str:
        raise OSError("gone")


def sent(spool: Path) -> None:
    """Record what lies in a spool, as its sender would over REST."""
    for record in outbox_of(spool).pending():
        trace_record(**record.body["body"])


@pytest.mark.parametrize(
    ("completed", "value"),
    [
        (None, 0.375),  # at once (1 - 2) / 2 = -0.5, nothing else known: (-0.5 + 2) / 4
        (
            lambda result: "know" not in result,
            0.1875,
        ),  # with the task failed: (-0.5 * 0.2 - 2 * 0.2) / 0.4 = -1.25
    ],
)
def test_a_returned_answer_is_not_good_by_itself(tmp_path: Path, completed: Any, value: float) -> None:
    with TraceCollector("desk", spool_dir=tmp_path) as collector:
        bot = Bot()
        with hook_into_agent(bot, collector, completed=completed):
            assert bot.run("Where is order 7?") == "I do not know."
    sent(tmp_path)
    rewards_calculate("desk")
    assert RewardRecord.objects.get().value == pytest.approx(value)
    kept = prepare_training_dataset("desk", kind="labels", min_samples=1, dry_run=True, for_training=False)
    assert [row["label"] for row in kept.rows()] == [False]


def test_a_decorated_function_says_whether_its_task_is_done(tmp_path: Path) -> None:
    with TraceCollector("desk", spool_dir=tmp_path) as collector:

        @records_decision(collector, prompt=lambda text: text, completed=lambda answer: answer != "?")
        def answer(text: str) -> str:
            return "?" if "hard" in text else "42"

        answer("easy")
        answer("hard")
    sent(tmp_path)
    rewards_calculate("desk")
    values = {row.pk: row.messages[0]["content"] for row in Decision.objects.all()}
    expected = {"easy": 2.0, "hard": -2.0}
    assert {values[record.decision]: record.strategic for record in RewardRecord.objects.all()} == expected


def test_what_is_known_at_once_is_no_merit_of_a_run_that_failed() -> None:
    """The best answer and every tool at work, 2 at once; the task failed: (0 * 0.2 - 2 * 0.2) / 0.4 = -1."""
    RewardSettings.objects.create(agent="desk", functions={"tool_success": 1})
    trace_record(agent="desk", steps=[call(result="sent"), task("failed"), DECISION])
    rewards_calculate("desk")
    record = RewardRecord.objects.get()
    assert (record.raw, record.value) == (pytest.approx(-1.0), pytest.approx(0.25))
    # what people say of it goes before that: (2 * 0.2 + 2 * 0.6 - 2 * 0.2) / 1
    rating_submit(decision=Decision.objects.get(), rater="ada", thumb="up")
    rewards_calculate("desk")
    assert RewardRecord.objects.first().raw == pytest.approx(1.2)  # type: ignore[union-attr]


def test_a_trace_that_arrives_after_its_decision_was_rewarded_is_not_lost() -> None:
    row = decision_record(agent="desk", messages="q", response="r", run_id="run-1").row
    rewards_calculate("desk")
    trace_record(agent="desk", run_id="run-1", steps=[task("failed")])
    assert list(decisions_pending("desk").values_list("pk", flat=True)) == [row.pk]
    rewards_calculate("desk")
    assert RewardRecord.objects.first().strategic == -2.0  # type: ignore[union-attr]
    assert not decisions_pending("desk").exists()


def test_a_trace_in_parts_is_one_run() -> None:
    parts = {"trace": "whole", "part": 1}
    trace_record(agent="desk", run_id="r", steps=[call(error="x"), DECISION], metadata=parts)
    trace_record(agent="desk", run_id="r", steps=[call(), task("completed")], metadata=parts | {"part": 2})
    rewards_calculate("desk")
    record = RewardRecord.objects.first()
    # at once the mean of the agent's 1 and one of two tools, 0
    assert (record.immediate, record.strategic) == (0.5, 2.0)


def test_other_traces_of_a_run_say_how_its_task_ended_and_traces_of_other_runs_do_not() -> None:
    trace_record(agent="desk", run_id="session", steps=[DECISION])
    trace_record(agent="desk", run_id="session", steps=[task("completed"), call(error="later")])
    trace_record(agent="desk", run_id="other", steps=[task("failed")])
    trace_record(agent="elsewhere", run_id="session", steps=[task("failed")])
    rewards_calculate("desk")
    record = RewardRecord.objects.first()
    assert (record.immediate, record.strategic) == (1.0, 2.0)


def traces(n: int) -> None:
    """Runs of a small tool agent, each on a question of its own: a third fail, and a failed run answers so."""
    for number in range(n):
        good = number % 3 > 0
        steps = [
            *([] if good else [call(error="timeout"), call(error="timeout")]),
            call(arguments={"order": number}, **({"result": "sent"} if good else {"error": "timeout"})),
            {
                "kind": "decision",
                "messages": f"Where is order {number}?",
                "response": "It is on its way." if good else "I do not know.",
            },
            task("completed" if good else "failed"),
        ]
        trace_record(agent="desk", steps=steps)


@pytest.mark.slow
def test_traces_become_labels_both_ways_and_every_kind_says_by_what() -> None:
    traces(30)
    assert get_training_stats("desk")["kinds"]["labels"]["left_out"] == {"reward_pending": 30}
    rewards_calculate("desk")
    labels = prepare_training_dataset("desk", kind="labels", dry_run=True)
    assert labels.balance["good"] == 20
    assert labels.balance["bad"] == 10
    assert labels.balance["by_reward"] == {"good": 20, "bad": 10}
    assert labels.query["threshold"] == 0.5
    assert set(labels.sources) == {"reward"}
    shown = prepare_training_dataset("desk", kind="corrections", dry_run=True)
    assert {row["completion"] for row in shown.rows()} == {"It is on its way."}
    assert prepare_training_dataset("desk", kind="scores", dry_run=True).samples == 30
    assert prepare_training_dataset("desk", kind="prompts", dry_run=True).samples == 30
    assert get_training_stats("desk")["kinds"]["labels"]["reward_threshold"] == 0.5


def test_an_operator_sets_the_threshold_and_a_training_may_set_another() -> None:
    traces(30)
    rewards_calculate("desk")
    RewardSettings.objects.create(agent="desk", threshold=0.99)
    assert prepare_training_dataset("desk", kind="labels", dry_run=True).balance["good"] == 0
    again = prepare_training_dataset(
        "desk", kind="labels", rules=RowRules(reward_threshold=0.5), dry_run=True
    )
    assert again.balance["good"] == 20


def test_decisions_give_prompts_whether_rated_or_not() -> None:
    for number in range(12):
        row = decision_record(agent="desk", messages=f"q{number}", response="r", state={"n": number}).row
        if number % 2:
            rating_submit(decision=row, rater="ada", thumb="up")
    found = prepare_training_dataset("desk", kind="prompts", dry_run=True)
    assert sorted(row["state"]["n"] for row in found.rows()) == list(range(12))


def measured(n: int = 40, name: str = "solved") -> None:
    """Two answers to each question, of which one solves it, as the app measures."""
    for number in range(n // 2):
        for good in (1, 0):
            row = decision_record(agent="desk", messages=f"q{number}", response=f"answer {good}").row
            outcome_record(decision=row, name=name, value=good)


@pytest.mark.slow
def test_outcomes_alone_make_every_kind_of_dataset() -> None:
    measured()
    told = printed("calculate_rewards", "--agent", "desk")
    assert "solved was measured 40 times" in " ".join(told.split())
    assert told.count("Next: ") == 1
    assert "Next: python manage.py calculate_rewards --agent desk --outcome solved=GOOD:BAD" in " ".join(
        told.split()
    )
    found = json.loads(printed("calculate_rewards", "--agent", "desk", "--outcome", "solved=1:0", "--json"))
    # valid at once 1 at 0.2 and 2 or -2 at 0.6: values 0.9375 and 0.1875
    assert found["labels"] == {"desk": {"threshold": 0.5, "good": 20, "bad": 20}}
    assert found["outcomes_without_worth"] == {}
    assert found["next"] == "python manage.py train_kto --agent desk --dry-run"
    # the distance to the gate is shown as it is to raters' agents
    status = json.loads(printed("online_learner", "status", "--agent", "desk", "--json"))
    assert status["evidence"] == gate_distance("desk").model_dump()
    assert (status["evidence"]["kind"], status["evidence"]["needed"]) == ("pairs", 30)
    assert status["evidence"]["found"] > 0
    counts = Counter(
        {
            kind: prepare_training_dataset("desk", kind=kind, dry_run=True).samples
            for kind in ("pairs", "labels", "scores", "corrections", "prompts")
        }
    )
    assert counts == {"pairs": 20, "labels": 40, "scores": 40, "corrections": 20, "prompts": 20}
    pairs = prepare_training_dataset("desk", dry_run=True)
    assert {(row["chosen"], row["rejected"], row["margin"], row["votes"]) for row in pairs.rows()} == {
        ("answer 1", "answer 0", 0.75, 0)
    }


def test_an_outcome_called_reward_is_its_own_worth() -> None:
    measured(name="reward")
    assert json.loads(printed("calculate_rewards", "--json"))["outcomes_without_worth"] == {}
    assert prepare_training_dataset("desk", kind="labels", dry_run=True).balance["good"] == 20


@pytest.mark.parametrize(
    "spec", ["solved", "solved=1", "solved=1:1", "solved=a:b", "=1:0", "solved=1:0:soon"]
)
def test_a_worth_that_says_nothing_is_refused(spec: str) -> None:
    measured(2)
    from django.core.management import CommandError

    with pytest.raises(CommandError, match="NAME=GOOD:BAD"):
        printed("calculate_rewards", "--agent", "desk", "--outcome", spec)
    assert not RewardSettings.objects.exists()


def test_comparisons_are_not_said_twice_by_their_rewards() -> None:
    """A decision whose reward knows nothing but comparisons makes a score, and no label or further pair."""
    one, two, three = (decision_record(agent="desk", messages="q", response=r).row for r in "abc")
    comparison_submit(left=one, right=two, preference="left", rater="ada")
    comparison_submit(left=two, right=three, preference="left", rater="ada")
    rewards_calculate("desk")
    asked: dict[str, Any] = {"dry_run": True, "min_samples": 0, "for_training": False}
    assert {row["source"] for row in prepare_training_dataset("desk", **asked).rows()} == {"comparison"}
    assert prepare_training_dataset("desk", kind="labels", **asked).samples == 0
    assert prepare_training_dataset("desk", kind="scores", **asked).samples == 3


def test_a_file_of_traces_and_outcomes_teaches_what_the_database_teaches(tmp_path: Path) -> None:
    traces(30)
    rewards_calculate("desk")
    here = prepare_training_dataset("desk", kind="labels", dry_run=True)
    file = tmp_path / "desk.jsonl"
    printed("export_training_data", "--agent", "desk", "--format", "ratchet", "--output", str(file))
    there = prepare_training_dataset("desk", kind="labels", source=FeedbackFile(file), dry_run=True)
    shown = ("prompt", "completion", "label", "source")
    assert sorted([str([row[name] for name in shown]) for row in there.rows()]) == sorted(
        str([row[name] for name in shown]) for row in here.rows()
    )


def test_imported_demonstrations_and_marked_answers_are_shown() -> None:
    decision_record(agent="desk", messages="q1", response="brought", tags=["demonstration"])
    decision_record(agent="desk", messages="q2", response="taught", tags=["teacher"])
    marked = decision_record(agent="desk", messages="q3", response="marked").row
    rating_submit(decision=marked, rater="ms-may", notes="like this", tags=["teacher"])
    disliked = decision_record(agent="desk", messages="q4", response="bad", tags=["demonstration"]).row
    rating_submit(decision=disliked, rater="ada", thumb="down")
    liked = decision_record(agent="desk", messages="q5", response="liked").row
    rating_submit(decision=liked, rater="ada", stars=5)
    asked: dict[str, Any] = {"kind": "corrections", "dry_run": True, "min_samples": 1, "for_training": False}
    found = prepare_training_dataset("desk", **asked)
    expected = {"brought": "demonstration", "taught": "teacher", "marked": "teacher", "liked": "ratings"}
    assert {row["completion"]: row["source"] for row in found.rows()} == expected
    assert found.left_out["disliked"] == 1
    assert found.sources == {"demonstration": 1, "teacher": 2, "ratings": 1}
    only = prepare_training_dataset("desk", rules=RowRules(sources=("demonstration",)), **asked)
    assert only.sources == {"demonstration": 1}
    # nothing is said of any other answer: no other kind has them
    assert "demonstration" not in prepare_training_dataset("desk", **(asked | {"kind": "labels"})).sources


def test_a_file_of_demonstrations_is_learnt_from(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]}
        for n in range(12)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    found = prepare_training_dataset("desk", kind="corrections", source=FeedbackFile(file), dry_run=True)
    assert (found.samples, found.sources) == (12, {"demonstration": 12})
    assert sum(map(len, found.feedback.values())) == 12
