"""Files of prompts with facts train what samples its own answers; recorded decisions keep their facts."""

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
from rl.rewards.answers import AnswerMatchReward, answer_of, facts_of, rows_rewarded
from rl.rewards.base import RewardSample
from rl.rewards.catalogue import rewards_named
from tests.support.formats import written
from tests.support.said import printed as run

pytestmark = pytest.mark.django_db


def prepared(path: Path, **more: Any) -> list[dict[str, Any]]:
    return list(
        prepare_training_dataset("coder", "prompts", source=FeedbackFile(path), min_samples=1, **more).rows()
    )


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


def test_prompts_are_read_in_the_usual_columns(tmp_path: Path) -> None:
    asked, answered = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    for row, facts in (
        ({"question": "q", "answer": "two more\n#### 4"}, {"answer": "two more\n#### 4"}),
        ({"messages": [asked], "answer": 4}, {"answer": 4}),
        ({"messages": [asked, answered], "answer": "x"}, {"answer": "x"}),
        ({"prompt": "q", "completion": "a", "expected_output": "b"}, {"expected_output": "b"}),
        ({"prompt": "q"}, None),
    ):
        (found,) = prepared(written(tmp_path / "p.jsonl", [row]), for_training=False)
        assert (found["prompt"][-1]["content"], found.get("facts")) == ("q", facts)


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


def test_a_file_of_feedback_still_gives_its_prompts_and_a_file_without_any_is_refused(tmp_path: Path) -> None:
    def said(n: int, answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": answer}]

    rows = [{"chosen": said(n, "a"), "rejected": said(n, "b")} for n in range(12)]
    found = prepared(written(tmp_path / "p.jsonl", rows))
    assert sorted(row["prompt"][-1]["content"] for row in found) == sorted(f"q{n}" for n in range(12))
    with pytest.raises(DatasetRefused, match="colour"):
        prepared(written(tmp_path / "p.jsonl", [{"colour": "red"}]))
    # imported, prompts alone say what the file is for
    path = written(
        tmp_path / "p.jsonl", [{"prompt": f"add {n}", "tests": ["assert f(1) == 2"]} for n in range(3)]
    )
    with pytest.raises(CommandError, match="train_grpo --data-file"):
        run("import_feedback", str(path), "--agent", "coder")


@pytest.mark.slow
def test_a_run_learns_from_a_file_of_prompts_and_is_paid_by_its_answers(base: str, tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", [{"prompt": f"say {n}", "answer": str(n)} for n in range(30)])
    small = "--config cpu --batch-size 8 --num-generations 4 --max-new-tokens 4 --max-length 64 --lora-r 2"
    told = ["--agent", "tutor", "--data-file", str(path), "--model", base, "--max-steps", "1"]
    found = json.loads(
        run("train_grpo", *told, "--reward", "answer", "--reward", FEWER, *small.split(), "--json")
    )
    assert (found["status"], sum(found["samples"].values())) == ("succeeded", 30)
    assert found["metrics"]["reward/answer"] == -2.0
    assert TrainingRun.objects.get(pk=found["run"]).snapshot.kind == Snapshot.Kind.PROMPTS


FEWER = "tests.test_prompt_files.fewer"


def fewer(sample: RewardSample) -> float:
    """A reward of a user's own that tells answers apart."""
    return max(-2.0, 2.0 - 0.1 * len(set(sample.response)))


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


def raw(response: str, expected: Any) -> float | None:
    (value,) = AnswerMatchReward().score([RewardSample([], response, "tutor", {"answer": expected})])
    return value.raw


RIGHT: list[tuple[str, Any]] = [
    *(("4", 4), ("4", "4"), ("2 + 2 makes 4", 4), ("So the answer is 1,000.", 1000), ("-3.0", -3)),
    *(("50%", 0.5), ("1/2", "0.5"), ("Answer: B", "b"), ("(B)", "B"), ("true", True)),
    ("First two, then two more.\n#### 4", "2 + 2 = 4\n#### 4"),
    ("\\boxed{\\frac{1}{2}} and not \\boxed{3}.", "3"),
    ("x = \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("The Eiffel Tower!", "eiffel tower"),
    ("Paris", ["London", "Paris"]),
    ('{"a": [1, 2]}', {"a": [1, 2]}),
]
WRONG: list[tuple[str, Any]] = [
    *(("5", 4), ("", 4), ("nan", 4), ("1e999", 4), ("...", "!"), ("[[[", [1]), ("[1]", {"a": 1})),
    ("1 2 3 4 5 6", 4),  # a list of all numbers gives its last
    *(("A B C D", "B"), ("London or Paris", "Paris"), ("4 apples and 5 pears", 4)),
    ("Paris is not the answer. Answer: Rome", "Paris"),
    ("The answer is 4. The answer is 5.", 4),
]


def test_a_right_answer_earns_all_and_a_wrong_one_nothing() -> None:
    assert [case for case in RIGHT if raw(*case) != 2] == []
    assert [case for case in WRONG if raw(*case) != -2] == []
    # without a right answer the reward does not apply
    assert raw("4", None) is None
    assert raw("4", "") is None
    # what was read as the answer is told
    assert answer_of("It is 4 or 5", 4) == "5"
    (value,) = AnswerMatchReward().score([RewardSample([], "It is 4 or 5", "tutor", {"answer": 4})])
    assert value.detail == {"read": "5", "expected": "4"}


@pytest.mark.django_db  # whether an agent has a definition decides what a valid answer is
def test_answers_to_rows_are_judged_without_a_model() -> None:
    rows = [{"prompt": [], "facts": {"answer": 4}}, {"prompt": [], "facts": {"answer": 5}}, {"prompt": []}]
    found = rows_rewarded(rewards_named(["answer"]), rows, ["4", "4", "4"], agent="tutor")
    assert [(reward.passed, reward.value) for reward in found] == [(True, 1.0), (False, 0.0), (None, None)]
    assert found[1].parts["answer"]["detail"]["expected"] == "5"
