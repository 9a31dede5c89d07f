"""Datasets made of files, and the statistics of a dataset."""

import json
from pathlib import Path
from typing import Any

import pytest

from feedback.models import Decision
from feedback.services import rating_submit
from rl.datasets import DatasetRefused, get_training_stats, prepare_training_dataset
from rl.datasets.rows import FeedbackFile
from rl.jobs.lifecycle import TrainOrder
from tests.support.dataset_feedback import decide, feed, prompts_in, rate

pytestmark = pytest.mark.django_db


def test_statistics_count_balance_raters_lengths_and_duplicates() -> None:
    prompt = prompts_in("train", 1)[0]
    rate(prompt, "yes!", "up")
    rate(prompt, "yes!", "up", rater="bob")
    rate(prompt, "no", "down")
    rating_submit(decision=decide(prompt, "hm"), rater="robot", stars=3, rater_kind="simulated")
    stats = get_training_stats("helper")
    assert (stats["decisions"], stats["ratings"], stats["comparisons"]) == (4, 4, 0)
    assert stats["simulated_share"] == 0.25
    assert stats["balance"]["good"] == 2
    assert stats["balance"]["bad"] == 1
    assert stats["balance"]["neutral"] == 1
    assert stats["balance"]["good_share"]["value"] == pytest.approx(2 / 3)
    # verdicts 1, 1, 0, 0.5: mean 0.625, squared deviations 2 * 0.140625 + 0.390625 + 0.015625 = 0.6875, over 3
    assert stats["scores"]["mean"] == 0.625
    assert stats["scores"]["std"] == pytest.approx((0.6875 / 3) ** 0.5)
    assert stats["scores"]["histogram"] == [1, 0, 0, 0, 0, 1, 0, 0, 0, 2]
    assert stats["raters"]["ann"] == {"ratings": 2, "comparisons": 0, "simulated": False, "mean_value": 0.5}
    assert stats["raters"]["robot"]["simulated"] is True
    assert stats["duplicate_responses"] == 1
    # means yes! 1, hm 0.5, no 0: three pairs
    assert stats["pairs"] == {"train": 3, "eval": 0, "holdout": 0}
    assert stats["prompts"] == 1
    assert stats["length_chars"]["chosen"] == {"min": 2, "median": 4, "p95": 4, "max": 4}
    assert stats["chosen_longer"]["value"] == pytest.approx(2 / 3)


def test_statistics_of_all_agents_are_keyed_by_agent() -> None:
    decide("q", "a", agent="one")
    decide("q", "a", agent="two")
    assert sorted(get_training_stats()["agents"]) == ["one", "two"]


def test_preparing_asks_the_database_a_fixed_number_of_questions(django_assert_max_num_queries: Any) -> None:
    feed(train=40, eval=4, holdout=4)
    with django_assert_max_num_queries(25):
        prepare_training_dataset("helper")


def score_of(prompt: str) -> tuple[float, int]:
    dataset = prepare_training_dataset("helper", "scores", min_samples=1, dry_run=True)
    (row,) = [row for row in dataset.rows() if row["prompt"][0]["content"] == prompt]
    return row["score"], row["votes"]


def test_one_against_one_decides_nothing() -> None:
    (prompt,) = prompts_in("train", 1)
    row = decide(prompt, "disputed")
    for rater, thumb in (("ann", "down"), ("eve", "up")):
        rating_submit(decision=row, rater=rater, thumb=thumb)
    assert score_of(prompt) == (0.5, 2)


def trl_file(path: Path, count: int = 30) -> Path:
    rows = [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_becomes_a_dataset_without_being_imported(tmp_path: Path) -> None:
    prepared = prepare_training_dataset("helper", source=FeedbackFile(trl_file(tmp_path / "pairs.jsonl")))
    assert prepared.samples == 30
    assert prepared.sources == {"comparison": 30}
    assert prepared.query["format"] == "trl"
    assert prepared.query["files"][0]["name"] == "pairs.jsonl"
    assert Decision.objects.count() == 0
    row = next(prepared.rows())
    number = row["prompt"][0]["content"].split()[1]
    assert (row["chosen"], row["rejected"]) == (f"good {number}", f"bad {number}")


def test_a_prompt_stands_on_the_same_side_from_a_file_as_from_the_database(tmp_path: Path) -> None:
    file = trl_file(tmp_path / "pairs.jsonl")
    prepared = prepare_training_dataset("helper", source=FeedbackFile(file))
    from_file = {row["prompt_hash"]: row["split"] for row in prepared.rows()}
    for number in range(40):
        rate(f"question {number}", "yes", "up")
        rate(f"question {number}", "no", "down")
    rows = list(prepare_training_dataset("helper").rows())
    recorded = {row["prompt_hash"]: row["split"] for row in rows}
    assert len(from_file) == 30
    assert {name: recorded[name] for name in from_file} == from_file


def test_a_broken_line_and_a_missing_file_are_refused_and_an_odd_row_is_left_out(tmp_path: Path) -> None:
    path = trl_file(tmp_path / "pairs.jsonl")
    whole = path.read_text()
    path.write_text(whole + '{"prompt": "cut off\n')
    with pytest.raises(DatasetRefused, match=r"pairs\.jsonl line 31: not JSON"):
        prepare_training_dataset("helper", source=FeedbackFile(path))
    with pytest.raises(DatasetRefused, match="No such file"):
        prepare_training_dataset("helper", source=FeedbackFile(tmp_path / "none.jsonl"))
    path.write_text(whole + json.dumps({"prompt": "q", "chosen": "", "rejected": "b"}) + "\n")
    prepared = prepare_training_dataset("helper", source=FeedbackFile(path))
    assert (prepared.samples, prepared.left_out) == (30, {"refused_row": 1})


def test_entries_that_name_a_scenario_are_asked_as_the_agent_asks(tmp_path: Path) -> None:
    from rl.agents import get_agent

    agent = get_agent("widgets")
    scenario = agent.scenarios()[0]
    liked, disliked = scenario.state["widgets"][:2]
    entries = [
        {"entry_id": "1", "scenario": scenario.key, "widget": liked},
        {"entry_id": "2", "scenario": scenario.state, "widget": disliked},
    ]
    (tmp_path / "entries.json").write_text(json.dumps(entries))
    (tmp_path / "ratings.json").write_text(
        json.dumps([{"entry_id": "1", "rating": "up"}, {"entry_id": "2", "rating": "down", "tags": ["odd"]}])
    )
    prepared = prepare_training_dataset(
        "widgets", source=FeedbackFile(tmp_path / "entries.json", tmp_path / "ratings.json"), min_samples=0
    )
    (row,) = prepared.rows()
    assert row["prompt"] == agent.render(scenario.state)
    assert json.loads(row["chosen"]) == {"widget": liked}
    assert json.loads(row["rejected"]) == {"widget": disliked}
    assert row["tags"] == ["odd"]


def test_rows_with_tools_keep_messages_and_tools(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    call = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "weather", "arguments": {}}}],
        },
        {"role": "tool", "name": "weather", "content": "4 C"},
        {"role": "assistant", "content": "4 C."},
    ]
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Weather in {city}?"}],
            "chosen": call,
            "rejected": [{"role": "assistant", "content": "Warm."}],
            "tools": tools,
        }
        for city in ("Oslo", "Rome", "Lima", "Cairo", "Hanoi", "Quito")
    ]
    (tmp_path / "tools.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = prepare_training_dataset(
        "helper", source=FeedbackFile(tmp_path / "tools.jsonl"), min_samples=1
    )
    row = next(prepared.rows())
    assert [message["role"] for message in row["chosen"]] == ["assistant", "tool", "assistant"]
    assert row["chosen"][0]["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}
    assert row["rejected"] == [{"role": "assistant", "content": "Warm."}]
    assert row["tools"] == tools


def test_a_file_in_which_nothing_is_said_of_any_response_shows_what_to_imitate(tmp_path: Path) -> None:
    def shown(name: str, rows: list[dict[str, Any]]) -> Any:
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return prepare_training_dataset(
            "helper", source=FeedbackFile(path), kind="corrections", min_samples=1
        )

    rows = [{"prompt": f"Where is parcel {i}?", "answer": "At the depot."} for i in range(12)]
    silent = shown("silent.jsonl", rows)
    assert (sum(silent.counts.values()), silent.sources) == (12, {"demonstration": 12})
    with pytest.raises(
        DatasetRefused, match=r"0 pairs found .* rows of the file without a preference .*\(12\)"
    ):
        prepare_training_dataset("helper", source=FeedbackFile(tmp_path / "silent.jsonl"))
    # where one response was judged, silence about the others is no praise
    judged = shown("judged.jsonl", [{**row, "thumb": "" if i != 3 else "up"} for i, row in enumerate(rows)])
    assert (sum(judged.counts.values()), judged.sources) == (1, {"ratings": 1})
    assert judged.left_out["no_preference"] == 11
    for source, named in (("ether", "db or file"), ("file", "--data-file")):
        with pytest.raises(DatasetRefused, match=named):
            _ = TrainOrder("helper", source=source).feedback_file
