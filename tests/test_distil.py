"""`--method distil`: SFT on the unrated answers of one policy, then preferences."""

import dataclasses

import pytest

from feedback.services import decision_record, rating_submit
from rl.datasets import DatasetRefused, prepare_training_dataset
from rl.datasets.examples import MOST_OF_CLUSTER, Example, answers_thinned
from rl.datasets.pairs import RowSet
from rl.datasets.prompt_clusters import ClusteredPrompt
from rl.datasets.rows import RowRules
from rl.datasets.teachers import TeacherLog, coverage, teacher_log
from rl.jobs import stages
from rl.jobs.estimates import order_automatic, order_estimate
from rl.jobs.lifecycle import TrainOrder, run_enqueue
from rl.jobs.method_selection import method_chosen, training_plan
from rl.jobs.stages import StageRunner, start_stage_run
from rl.models import Policy, TrainingRun
from rl.models.learning import method_choices
from rl.online.pipeline import TrainingPipeline
from rl.recipes.sft import ANSWER, EXAMPLE_SOURCES, FEEDBACK_SOURCES, SFTRecipe
from tests.support.experiments import policy_of

pytestmark = pytest.mark.django_db

AGENT = "support-bot"
TOWNS = ["Rome", "Oslo", "Lima", "Bonn", "Kyiv", "Bern", "Riga", "Baku", "Doha", "Suva"]


def answered(n: int, response: str = "", **facts: object) -> object:
    asked = (
        f"Which {TOWNS[n % 10]} shop {'abcdefghij'[n // 10 % 10] * 3} sells {TOWNS[n // 7 % 10]} lamps {n}?"
    )
    facts.setdefault("policy", "shop-gpt")
    facts |= {"agent": AGENT, "messages": asked, "response": response or f"Answer {n}"}
    return decision_record(**facts).row  # type: ignore[arg-type]


def rated(n: int, response: str = "", **said: object) -> None:
    rating_submit(decision=answered(n, response), rater="ada", **said)  # type: ignore[arg-type]


def rows_of(sources: tuple[str, ...] = EXAMPLE_SOURCES) -> list[dict[str, object]]:
    prepared = prepare_training_dataset(
        AGENT, "corrections", rules=RowRules(sources=sources), min_samples=1, for_training=False
    )
    return list(prepared.rows())


def test_the_teacher_is_the_policy_with_most_unrated_answers_and_no_policy_of_ours() -> None:
    assert teacher_log(AGENT) is None
    for n in range(12):
        answered(n, policy="support-bot-v9")
    for n in range(12, 20):
        answered(n)
    answered(30, policy="base")
    answered(31, source="simulation")
    policy_of("support-bot-v9", Policy.Stage.CHALLENGER, AGENT)
    assert teacher_log(AGENT) == TeacherLog("shop-gpt", 8)


def test_disliked_answers_are_left_out_and_corrected_ones_replaced() -> None:
    for n in range(20):
        answered(n)
    rated(20, "bad", thumb="down")
    rated(21, "wrong", thumb="down", correction="right")
    rated(22, "liked", thumb="up")
    answered(20, "bad")  # the disliked text again, unrated
    answered(21, "wrong")
    found = {row["completion"]: row["source"] for row in rows_of()}
    assert "bad" not in found
    assert "wrong" not in found
    assert (found["right"], found["liked"], found["Answer 3"]) == ("correction", "ratings", ANSWER)
    assert set(found.values()) == {"correction", "ratings", ANSWER}


def test_of_several_answers_to_a_prompt_the_most_frequent_one_is_shown() -> None:
    for response in ("seldom", "often", "often"):
        answered(1, response)
    assert [row["completion"] for row in rows_of()] == ["often"]


def test_sft_on_feedback_reads_no_unrated_answer() -> None:
    for n in range(20):
        answered(n)
    rated(22, "liked", thumb="up")
    assert [row["source"] for row in rows_of(FEEDBACK_SOURCES)] == ["ratings"]
    assert SFTRecipe().source_names == FEEDBACK_SOURCES
    assert SFTRecipe(sources="distil").source_names == EXAMPLE_SOURCES


def test_a_frequent_question_does_not_drown_the_others() -> None:
    rows = [
        Example(f"p{n}", {"completion": str(n)}, "ratings" if n == 0 else ANSWER, 0, "train")
        for n in range(10)
    ]
    clusters = {f"p{n}": "p0" for n in range(8)}
    thinned = answers_thinned(RowSet(tuple(rows), {}), clusters)
    assert len(thinned.rows) == 1 + MOST_OF_CLUSTER + 2
    assert thinned.left_out == {"near_identical_answer": 7 - MOST_OF_CLUSTER}
    assert answers_thinned(RowSet(tuple(rows), {}), {}).rows == tuple(rows)


def test_coverage_counts_clusters_of_the_traffic() -> None:
    prompts = {name: ClusteredPrompt(name, "", "") for name in "abcd"}
    assert coverage(prompts, {"a", "b"}, ["a", "b", "c", "d"]) == 0.5
    assert coverage(prompts, {"a"}, []) is None


def test_held_out_prompts_stay_held_out() -> None:
    for n in range(60):
        answered(n)
    for n in range(60, 120):
        rated(n, thumb="up" if n % 2 else "down")
    assert {row["split"] for row in rows_of()} == {"train", "eval", "holdout"}


def test_without_ratings_it_is_sft_on_the_answers() -> None:
    for n in range(40):
        answered(n)
    chosen = method_chosen(AGENT, "distil")
    assert (chosen.method, chosen.knobs) == ("sft", {"sources": "distil"})
    assert "40 unrated answers of shop-gpt" in chosen.reason
    assert "100 % of the clusters" in chosen.reason


def test_with_ratings_a_preference_method_follows_in_one_policy() -> None:
    for n in range(40):
        answered(n)
    for n in range(40, 80):
        rated(n, thumb="up" if n % 2 else "down")
    plan = training_plan(AGENT, "distil")
    assert [one.method for one in plan.trainings] == ["sft", "kto"]
    assert plan.trainings[0].knobs == {"sources": "distil"}
    assert plan.main.knobs == {"start_from": "distil"}
    assert TrainingPipeline(AGENT, method="distil").order(plan.main).knobs["start_from"] == "distil"


def test_the_stage_is_trained_on_the_answers_and_the_run_starts_from_it(base: str) -> None:
    for n in range(40):
        answered(n)
    for n in range(40, 80):
        rated(n, thumb="up" if n % 2 else "down")
    order = TrainOrder(AGENT, "kto", base_model=base, knobs={"start_from": "distil", "max_steps": 1})
    run = run_enqueue(order)
    seen: list[TrainOrder] = []

    def enter(wanted: TrainOrder) -> TrainingRun:
        seen.append(wanted)
        raise stages.StageStopped(run)

    with pytest.raises(stages.StageStopped):
        start_stage_run(run, StageRunner(enter, lambda stage: {}))
    expected = ("sft", "distil", "base")
    assert (seen[0].method, seen[0].knobs["sources"], seen[0].knobs["start_from"]) == expected


def test_auto_names_it_where_one_policy_gave_many_unrated_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.jobs.method_selection.MANY_ANSWERS", 30)
    for n in range(30):
        rated(n, thumb="up" if n % 2 else "down")
    assert "--method distil" not in method_chosen(AGENT).reason
    for n in range(30, 60):
        answered(n)
    assert "30 unrated answers of shop-gpt could teach it too: --method distil" in method_chosen(AGENT).reason


def test_without_an_answer_of_another_policy_it_is_refused() -> None:
    decision_record(agent=AGENT, messages="hello", response="hi", policy="base")
    with pytest.raises(DatasetRefused, match="nothing can be distilled"):
        method_chosen(AGENT, "distil")


def test_an_agent_may_learn_by_it_itself() -> None:
    assert ("distil", "distil") in method_choices()


def test_the_choice_can_be_replaced() -> None:
    assert dataclasses.replace(TeacherLog("", 3)).title == "your app's model"


def test_a_run_without_any_rating_may_be_ordered(base: str) -> None:
    for n in range(40):
        answered(n)
    with pytest.raises(ValueError, match="expected at least 10 ratings"):
        order_estimate(TrainOrder(AGENT, "sft", base_model=base))
    found = order_estimate(order_automatic(AGENT, "distil", base_model=base))
    assert found.refusal == ""
    assert found.stages[0].samples >= 20
