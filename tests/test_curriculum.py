"""Easy to hard: the order itself, the sampler that keeps it, and recipes that ask for it."""

from __future__ import annotations

from typing import Any

import pytest

from rl.recipes import DPORecipe, KTORecipe, RecipeError
from rl.recipes.fit import curriculum_order
from rl.training.adapter_trainer import rows_ordered
from rl.training.dpo import LengthGroupedSampler
from rl.training.result import TrainingRefused

ASK = [{"role": "user", "content": "why"}]
PAIRS = [
    {"prompt": ASK, "chosen": "a b c d", "rejected": "e", "margin": 0.25},
    {"prompt": ASK, "chosen": "a", "rejected": "e", "margin": 1.0},
    {"prompt": ASK, "chosen": "a b", "rejected": "e", "margin": 0.5},
]


def test_pairs_far_apart_come_first() -> None:
    assert curriculum_order(PAIRS, "margin") == [1, 2, 0]


def test_short_rows_come_first() -> None:
    assert curriculum_order(PAIRS, "length") == [1, 2, 0]
    grouped: list[dict[str, Any]] = [
        {"prompt": ASK, "completions": ["long answer", "b"]},
        {"prompt": ASK, "completion": "c"},
    ]
    assert curriculum_order(grouped, "length") == [1, 0]


def test_few_steps_come_first_whether_asked_called_or_traced() -> None:
    called = [{"role": "assistant", "content": "", "tool_calls": [{}, {}]}]
    rows: list[dict[str, Any]] = [
        {"prompt": [*ASK, *ASK, *ASK], "completion": "a"},  # 3 + 1
        {"prompt": ASK, "completion": called},  # 1 + 1 + 2
        {"prompt": ASK, "completion": "a", "state": {"steps": [{}] * 5}},  # 1 + 1 + 5
        {"prompt": ASK, "completion": "a"},  # 1 + 1
    ]
    assert curriculum_order(rows, "steps") == [3, 0, 1, 2]


def test_what_has_no_margin_is_refused() -> None:
    with pytest.raises(ValueError, match="needs rows with a margin"):
        curriculum_order([{"prompt": ASK, "completion": "a"}], "margin")
    with pytest.raises(TrainingRefused, match="use length or steps"):
        rows_ordered([{"prompt": ASK}], KTORecipe(curriculum="margin"))
    with pytest.raises(RecipeError, match="curriculum must be one of none, margin, length, steps"):
        DPORecipe(curriculum="hardest")


def test_the_sampler_keeps_the_order_in_every_epoch_and_pairs_of_a_prompt_together() -> None:
    sampler = LengthGroupedSampler([9, 1, 5, 7], 2, 0, lambda: 0, [10, 20, 10, 30], shuffled=False)
    assert list(sampler) == list(sampler) == [0, 2, 1, 3]
