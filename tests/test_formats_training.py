"""Files of training libraries, read to the letter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from feedback.transfer import formats
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
)
from tests.support.formats import (
    ASKED,
    HERE,
    one,
    refusal,
)

# --- TRL --------------------------------------------------------------------------------------------------


def test_tools_as_one_json_text_are_the_same_tools(tmp_path: Path) -> None:
    row = json.loads((HERE / "trl_preference_tools.jsonl").read_text())
    as_text = one(tmp_path, {**row, "tools": json.dumps(row["tools"])})
    assert isinstance(as_text, ImportedComparison)
    assert isinstance(as_text.left, ImportedDecision)
    assert as_text.left.metadata["tools"] == row["tools"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "chosen": "", "rejected": "b"}, "chosen: is empty"),
        ({"prompt": "q", "chosen": None, "rejected": "b"}, "chosen: expected a list"),
        ({"prompt": "q", "chosen": ["a"], "rejected": "b"}, "chosen: expected a conversation that ends with"),
        ({"chosen": ["a"], "rejected": "b"}, "one of each"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "prompt: is empty"),
        ({"prompt": "q", "chosen": "a\x00", "rejected": "b"}, "NUL"),
        ({"prompt": "q", "chosen": "a", "rejected": "\ud800"}, "lone surrogate"),
        ({"chosen": "abc", "rejected": "xyz"}, "no common beginning"),
        ({"chosen": "same", "rejected": "same"}, "same text"),
        (
            {"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]},
            "share no turn",
        ),
        (
            {"prompt": "q", "completion": "a", "label": "yes"},
            "label: expected true or false (1 or 0), found 'yes'",
        ),
        ({"prompt": "q", "completion": "a", "label": 2}, "label: expected true or false (1 or 0), found 2"),
        (
            {"prompt": [{"role": "user"}, 5], "completion": "a"},
            "prompt[1]: expected a message {role, content}",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "completion": "a"},
            "only text parts can be read, found one of type 'image'",
        ),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "tools": "[broken"}, "tools: expected a list"),
        (5, "expected an object, found 5"),
    ],
)
def test_an_odd_trl_row_is_refused_with_its_reason(tmp_path: Path, row: Any, reason: str) -> None:
    assert reason in refusal(tmp_path, row, "trl")


def test_conversations_that_differ_before_the_response_are_no_pair(tmp_path: Path) -> None:
    row = {
        side: [
            *ASKED,
            {"role": "assistant", "content": "Which?"},
            {"role": "user", "content": model},
            {"role": "assistant", "content": "Hm."},
        ]
        for side, model in (("chosen", "The red ones."), ("rejected", "The blue ones."))
    }
    assert "in turn 3: not the same prompt" in refusal(tmp_path, row, "trl")


# --- OpenAI, hh, LLaMA-Factory ----------------------------------------------------------------------------


def test_hh_rows_without_an_answer_or_with_other_prompts_are_refused(tmp_path: Path) -> None:
    start = "\n\nHuman: Hi\n\nAssistant:"
    assert "chosen: is empty" in refusal(tmp_path, {"chosen": start, "rejected": f"{start} a"}, "hh")
    other = "\n\nHuman: Ho\n\nAssistant: b"
    assert "not two responses to the same prompt" in refusal(
        tmp_path, {"chosen": f"{start} a", "rejected": other}, "hh"
    )
    assert "expected a turn" in refusal(tmp_path, {"chosen": "hi", "rejected": "ho"}, "hh")


def test_a_dataset_info_beside_the_file_names_its_columns(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(
        json.dumps([{"q": "Can I?", "yes": "Sure.", "no": "No.", "sys": "Be brief."}])
    )
    info = {
        "mine": {
            "file_name": "mine.json",
            "ranking": True,
            "columns": {"prompt": "q", "chosen": "yes", "rejected": "no", "system": "sys"},
        }
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    assert formats.detect(tmp_path / "mine.json") == "llamafactory"
    (record,) = formats.read(tmp_path / "mine.json")
    assert isinstance(record, ImportedComparison)
    assert isinstance(record.left, ImportedDecision)
    assert record.left.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Can I?"},
    ]
    assert record.left.response == "Sure."


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": [{"from": "elf", "value": "x"}], "chosen": {}, "rejected": {}}, "found 'elf'"),
        ({"conversations": [], "chosen": {}, "rejected": {}}, "expected at least one turn"),
        ({"conversations": [{"from": "human", "value": 3}]}, "expected a text, found 3"),
        ({"instruction": "", "chosen": "a", "rejected": "b"}, "instruction: is empty"),
        ({"instruction": "q", "chosen": "a", "rejected": "b", "history": [["a"]]}, "[question, answer]"),
    ],
)
def test_an_odd_llamafactory_row_is_refused_with_its_reason(tmp_path: Path, row: Any, reason: str) -> None:
    assert reason in refusal(tmp_path, row, "llamafactory")
