"""Files of prompts with facts train what samples its own answers; recorded decisions keep their facts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError

from feedback.services import decision_record, rating_submit
from rl.datasets import DatasetRefused, prepare_training_dataset
from rl.datasets.rows import FeedbackFile
from rl.models import Snapshot, TrainingRun
from rl.rewards.answers import AnswerMatchReward, answer_of
from rl.rewards.base import RewardSample
from rl.rewards.catalogue import rewards_named
from rl.rewards.rows import facts_of, rows_rewarded
from tests.test_commands import run
from tests.test_train_ppo import base

__all__ = ["base"]


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(path: Path, **more: Any) -> list[dict[str, Any]]:
    return list(
        prepare_training_dataset("coder", "prompts", source=FeedbackFile(path), min_samples=1, **more).rows()
    )


# --- Files ------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_every_column_beside_the_prompt_is_a_fact(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": f"add {n}",
            "tests": [f"assert f({n}) == {n}"],
            "level": n,
            "facts": {"entry_point": "f"},
            "id": n,
        }
        for n in range(12)
    ]
    found = {row["prompt"][0]["content"]: row for row in prepared(written(tmp_path / "p.jsonl", rows))}
    assert len(found) == 12
    row = found["add 3"]
    assert row["prompt"] == [{"role": "user", "content": "add 3"}]
    assert row["facts"] == {"tests": ["assert f(3) == 3"], "level": 3, "entry_point": "f"}
    assert row["split"] in ("train", "eval", "holdout")


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("row", "prompt", "facts"),
    [
        ({"question": "2+2?", "answer": "two more\n#### 4"}, "2+2?", {"answer": "two more\n#### 4"}),
        ({"messages": [{"role": "user", "content": "q"}], "answer": 4}, "q", {"answer": 4}),
        (
            {
                "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
                "answer": "x",
            },
            "q",
            {"answer": "x"},
        ),
        ({"prompt": "q", "completion": "a", "expected_output": "b"}, "q", {"expected_output": "b"}),
        ({"prompt": "q"}, "q", None),
    ],
)
def test_prompts_are_read_in_the_usual_columns(tmp_path: Path, row: Any, prompt: str, facts: Any) -> None:
    (found,) = prepared(written(tmp_path / "p.jsonl", [row]), for_training=False)
    assert (found["prompt"][-1]["content"], found.get("facts")) == (prompt, facts)


@pytest.mark.django_db
def test_a_zipped_file_a_repeated_prompt_and_a_broken_row(tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": f"q{n}", "answer": n} for n in range(12)]
    path = tmp_path / "p.jsonl.gz"
    lines = [*rows, {"prompt": "q1", "answer": 7}, {"prompt": ""}, [1]]
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in lines).encode()))
    made = prepare_training_dataset("coder", "prompts", source=FeedbackFile(path), min_samples=1)
    assert made.samples == 12
    # a row that is no prompt at the end of a file of prompts is refused, and the file is not
    assert made.left_out == {"repeated_prompt": 1, "refused_row": 2}
    assert {row["prompt"][0]["content"]: row["facts"]["answer"] for row in made.rows()}["q1"] == 1


@pytest.mark.django_db
def test_a_file_of_feedback_still_gives_its_prompts(tmp_path: Path) -> None:
    rows = [
        {"chosen": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}],
         "rejected": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "b"}]}
        for n in range(12)
    ]  # fmt: skip
    found = prepared(written(tmp_path / "p.jsonl", rows))
    assert sorted(row["prompt"][-1]["content"] for row in found) == sorted(f"q{n}" for n in range(12))


@pytest.mark.django_db
def test_a_file_without_prompts_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(DatasetRefused, match="found rows with colour"):
        prepared(written(tmp_path / "p.jsonl", [{"colour": "red"}]))


@pytest.mark.slow
@pytest.mark.django_db
def test_a_run_learns_from_a_file_of_prompts_and_is_paid_by_its_answers(base: str, tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", [{"prompt": f"say {n}", "answer": str(n)} for n in range(30)])
    found = json.loads(
        run(
            "train_grpo", "--agent", "tutor", "--data-file", str(path), "--reward", "answer", "--reward", FEWER,
            "--config", "cpu", "--model", base, "--batch-size", "8", "--num-generations", "4", "--max-new-tokens", "4",
            "--max-length", "64", "--lora-r", "2", "--max-steps", "1", "--json",
        )
    )  # fmt: skip
    assert (found["status"], sum(found["samples"].values())) == ("succeeded", 30)
    assert found["metrics"]["reward/answer"] == -2.0
    entered = TrainingRun.objects.get(pk=found["run"])
    assert entered.snapshot is not None
    assert entered.snapshot.kind == Snapshot.Kind.PROMPTS


FEWER = "tests.test_prompt_files.fewer"


def fewer(sample: RewardSample) -> float:
    """A reward of a user's own that tells answers apart."""
    return max(-2.0, 2.0 - 0.1 * len(set(sample.response)))


@pytest.mark.django_db
def test_an_import_of_prompts_alone_says_what_the_file_is_for(tmp_path: Path) -> None:
    path = written(
        tmp_path / "p.jsonl", [{"prompt": f"add {n}", "tests": ["assert f(1) == 2"]} for n in range(3)]
    )
    with pytest.raises(CommandError) as refused:
        run("import_feedback", str(path), "--agent", "coder")
    assert "train_grpo --data-file" in str(refused.value)


# --- Decisions --------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_decisions_keep_their_facts_for_rewards() -> None:
    for n in range(12):
        metadata = {"facts": {"answer": n}, "tests": "assert f() == 1", "client": "web"}
        row = decision_record(agent="coder", messages=f"q{n}", response="a", metadata=metadata).row
        rating_submit(decision=row, rater="ada", thumb="up")
    rows = list(prepare_training_dataset("coder", "prompts", min_samples=1).rows())
    assert len(rows) == 12
    assert {json.dumps(sorted(row["facts"])) for row in rows} == {'["answer", "tests"]'}
    assert {row["facts"]["answer"] for row in rows} == set(range(12))


def test_facts_stand_under_their_key_or_beside_it_and_the_key_counts() -> None:
    assert facts_of({"facts": {"answer": 1}, "answer": 2, "tests": "", "client": "web"}) == {"answer": 1}
    assert facts_of({"facts": "text"}) == {}


# --- The answer reward ------------------------------------------------------------------------------------------


def raw(response: str, expected: Any) -> float | None:
    (value,) = AnswerMatchReward().score([RewardSample([], response, "tutor", {"answer": expected})])
    return value.raw


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("4", 4),
        ("4", "4"),
        ("First two, then two more.\n#### 4", "2 + 2 = 4\n#### 4"),
        ("So the answer is 1,000.", 1000),
        ("2 + 2 makes 4", 4),
        ("\\boxed{\\frac{1}{2}} and not \\boxed{3}.", "3"),
        ("x = \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("50%", 0.5),
        ("1/2", "0.5"),
        ("The Eiffel Tower!", "eiffel tower"),
        ("Answer: B", "b"),
        ("(B)", "B"),
        ("Paris", ["London", "Paris"]),
        ('{"a": [1, 2]}', {"a": [1, 2]}),
        ("true", True),
        ("-3.0", -3),
    ],
)
def test_a_right_answer_earns_all(response: str, expected: Any) -> None:
    assert raw(response, expected) == 2


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("5", 4),
        ("", 4),
        ("1 2 3 4 5 6", 4),  # a list of all numbers gives its last
        ("A B C D", "B"),
        ("London or Paris", "Paris"),
        ("Paris is not the answer. Answer: Rome", "Paris"),
        ("The answer is 4. The answer is 5.", 4),
        ("nan", 4),
        ("1e999", 4),
        ("[1]", {"a": 1}),
        ("[[[", [1]),
        ("...", "!"),
        ("4 apples and 5 pears", 4),
    ],
)
def test_a_wrong_answer_earns_nothing(response: str, expected: Any) -> None:
    assert raw(response, expected) == -2


def test_without_a_right_answer_the_reward_does_not_apply() -> None:
    assert raw("4", None) is None
    assert raw("4", "") is None


def test_what_was_read_as_the_answer_is_told() -> None:
    assert answer_of("It is 4 or 5", 4) == "5"
    (value,) = AnswerMatchReward().score([RewardSample([], "It is 4 or 5", "tutor", {"answer": 4})])
    assert value.detail == {"read": "5", "expected": "4"}


@pytest.mark.django_db  # whether an agent has a definition decides what a valid answer is
def test_answers_to_rows_are_judged_without_a_model() -> None:
    rows = [{"prompt": [], "facts": {"answer": 4}}, {"prompt": [], "facts": {"answer": 5}}, {"prompt": []}]
    found = rows_rewarded(rewards_named(["answer"]), rows, ["4", "4", "4"], agent="tutor")
    assert [(reward.passed, reward.value) for reward in found] == [(True, 1.0), (False, 0.0), (None, None)]
    assert found[1].parts["answer"]["detail"]["expected"] == "5"
