"""Real files of others, against what is known to be in them."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from feedback.transfer import formats
from feedback.transfer.formats.records import (
    ImportedComparison,
    RowRefused,
)
from tests.support.formats import (
    outside,
)


def counted(path: Path, **how: Any) -> Counter[str]:
    return Counter(type(record).__name__ for record in formats.read(path, **how))


def test_llamafactory_dpo_en_demo_holds_300_pairs_80_with_a_system_turn() -> None:
    found = list(formats.read(outside("llamafactory/dpo_en_demo.json")))
    assert counted(outside("llamafactory/dpo_en_demo.json")) == {"ImportedComparison": 300}
    assert sum(r.left.messages[0]["role"] == "system" for r in found) == 80  # type: ignore[union-attr]


def test_llamafactory_kto_en_demo_holds_150_good_and_150_bad() -> None:
    found = formats.read(outside("llamafactory/kto_en_demo.json"))
    assert Counter(r.ratings[0].thumb for r in found) == {"up": 150, "down": 150}  # type: ignore[union-attr]


def test_hh_harmless_refuses_four_empty_answers_and_five_other_prompts() -> None:
    found = list(formats.read(outside("hh-rlhf/harmless-base.test.jsonl.gz")))
    refused = [r for r in found if isinstance(r, RowRefused)]
    assert len(found) == 2312
    # rows 86, 516, 925 and 1103 counted from 0
    assert [r.line for r in refused if "empty" in r.reason] == [87, 517, 926, 1104]
    assert sum("same prompt" in r.reason for r in refused) == 5
    assert len(refused) == 9


def test_open_assistant_trees_give_754_ordered_pairs_of_212_ranked_sets() -> None:
    found = list(formats.read(outside("open-assistant/en_100_tree.jsonl")))
    pairs = [record for record in found if isinstance(record, ImportedComparison)]
    assert (len(found), len(pairs)) == (754, 754)
    assert {pair.preference for pair in pairs} == {"left"}
    # a set is the replies to one message: to one conversation of one tree
    asked = Counter((pair.line, json.dumps(pair.left.messages)) for pair in pairs)
    assert len(asked) == 212
    # of n ranked replies n (n - 1) / 2 pairs
    replies = {key: round((1 + math.sqrt(1 + 8 * pairs_of)) / 2) for key, pairs_of in asked.items()}
    keys = {(pair.line, side.key) for pair in pairs for side in (pair.left, pair.right)}  # type: ignore[union-attr]
    assert len(keys) == sum(replies.values())


def test_open_assistant_trees_hold_100_trees_of_1167_messages() -> None:
    lines = outside("open-assistant/en_100_tree.jsonl").read_text("utf-8").splitlines()
    waiting = [json.loads(line)["prompt"] for line in lines]
    assert len(waiting) == 100
    messages = 0
    while waiting:
        messages += 1
        waiting += waiting.pop()["replies"]
    assert messages == 1167


def test_the_reference_vectors_are_46_cases() -> None:
    cases = json.loads(outside("vectors/reference_vectors.json").read_text("utf-8"))
    assert len({case["id"] for case in cases}) == len(cases) == 46


@pytest.mark.parametrize("policy", ["random", "bts"])
def test_the_open_bandit_logs_are_10000_choices_each_with_its_propensity(policy: str) -> None:
    with outside(f"open-bandit/men/{policy}/men.csv").open(newline="") as file:
        found = [float(row["propensity_score"]) for row in csv.DictReader(file)]
    assert len(found) == 10_000
    assert all(0 < propensity <= 1 for propensity in found)


def test_pandalm_test_set_holds_999_rows_six_with_an_answer_that_is_no_text() -> None:
    found = list(formats.read(outside("pandalm/testset-v1.json")))
    refused = [r for r in found if isinstance(r, RowRefused)]
    assert len(refused) == 6
    assert all("expected a text, found True" in r.reason for r in refused)
    assert len({r.line for r in found}) == 999
    assert len(found) - len(refused) == (999 - 6) * 3
    pairs = [r for r in found if isinstance(r, ImportedComparison)]
    empty = {r.key for r in pairs if "" in (r.left.response, r.right.response)}  # type: ignore[union-attr]
    assert len(empty) == 54


def test_tensorzero_tables_hold_997_decisions_84_good_and_416_bad() -> None:
    path = outside("tensorzero-haiku/ChatInference.jsonl")
    found = list(formats.read(path, ratings_path=outside("tensorzero-haiku/BooleanMetricFeedback.jsonl")))
    assert len(found) == 997
    thumbs = Counter(r.ratings[0].thumb if r.ratings else "" for r in found)  # type: ignore[union-attr]
    assert thumbs == {"up": 84, "down": 416, "": 497}
    assert found[0].messages == [{"role": "user", "content": '{"topic": "devastation"}'}]  # type: ignore[union-attr]
