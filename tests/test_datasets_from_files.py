"""Datasets made of files: trained on without being imported, on the sides that the database's prompts have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from feedback.models import Decision
from rl.datasets import (
    DatasetRefused,
    prepare_training_dataset,
)
from rl.datasets.rows import FeedbackFile
from rl.jobs.lifecycle import TrainOrder
from tests.support.dataset_feedback import rate

pytestmark = pytest.mark.django_db


DPO_EN_DEMO = Path(__file__).parents[2] / "shared" / "data" / "llamafactory" / "dpo_en_demo.json"


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


def test_a_broken_line_is_refused_with_its_number(tmp_path: Path) -> None:
    path = trl_file(tmp_path / "pairs.jsonl")
    path.write_text(path.read_text() + '{"prompt": "cut off\n')
    with pytest.raises(DatasetRefused, match=r"pairs\.jsonl line 31: not JSON"):
        prepare_training_dataset("helper", source=FeedbackFile(path))


def test_an_odd_row_is_left_out_and_counted(tmp_path: Path) -> None:
    path = trl_file(tmp_path / "pairs.jsonl")
    path.write_text(path.read_text() + json.dumps({"prompt": "q", "chosen": "", "rejected": "b"}) + "\n")
    prepared = prepare_training_dataset("helper", source=FeedbackFile(path))
    assert prepared.samples == 30
    assert prepared.left_out == {"refused_row": 1}


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetRefused, match="No such file"):
        prepare_training_dataset("helper", source=FeedbackFile(tmp_path / "none.jsonl"))


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
        "widgets",
        source=FeedbackFile(tmp_path / "entries.json", tmp_path / "ratings.json"),
        min_samples=0,
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


@pytest.mark.skipif(not DPO_EN_DEMO.exists(), reason="outside data ../shared is not here")
def test_the_300_pairs_of_llamafactory_are_read() -> None:
    prepared = prepare_training_dataset("assistant", source=FeedbackFile(DPO_EN_DEMO))
    assert prepared.feedback_count == 300
    # five rows say again what another row says
    assert prepared.samples == 295
    assert prepared.left_out == {"duplicate": 5}


def test_a_file_in_which_nothing_is_said_of_any_response_shows_what_to_imitate(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": f"Where is parcel {i}?", "answer": "At the depot."} for i in range(12)
    ]
    silent = tmp_path / "answers.jsonl"
    silent.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shown = prepare_training_dataset("helper", source=FeedbackFile(silent), kind="corrections", min_samples=1)
    assert sum(shown.counts.values()) == 12
    assert shown.sources == {"demonstration": 12}
    with pytest.raises(DatasetRefused, match=r"0 pairs found .* 12 no_preference"):
        prepare_training_dataset("helper", source=FeedbackFile(silent))


def test_where_one_response_was_judged_silence_about_the_others_is_no_praise(tmp_path: Path) -> None:
    rows = [{"prompt": f"Where is parcel {i}?", "answer": "At the depot.", "thumb": ""} for i in range(12)]
    rows[3]["thumb"] = "up"
    judged = tmp_path / "judged.jsonl"
    judged.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shown = prepare_training_dataset("helper", source=FeedbackFile(judged), kind="corrections", min_samples=1)
    assert sum(shown.counts.values()) == 1
    assert shown.sources == {"ratings": 1}
    assert shown.left_out["no_preference"] == 11


@pytest.mark.parametrize(("source", "named"), [("ether", "db or file"), ("file", "--data-file")])
def test_an_order_without_a_known_source_or_its_file_is_refused(source: str, named: str) -> None:
    with pytest.raises(DatasetRefused, match=named):
        _ = TrainOrder("helper", source=source).feedback_file
