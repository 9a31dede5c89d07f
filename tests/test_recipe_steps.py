"""Number of optimiser steps of a recipe: from passes over many rows, from `min_steps` on few."""

from __future__ import annotations

import dataclasses

import pytest

from rl.recipes import RECIPES
from rl.recipes.base import MOST_PASSES, Recipe

FEW = Recipe(epochs=2.0, batch_size=16, min_steps=100)


@pytest.mark.parametrize(
    ("rows", "epochs", "steps"),
    [
        (140, 12.0, 108),  # 9 steps a pass: 12 passes are the first with 100
        (81, 12.0, 72),  # 6 a pass: twelve passes, and no further
        (1000, 2.0, 126),  # 63 a pass: two passes are enough
        (800, 2.0, 100),
        (799, 2.0, 100),
        (400, 4.0, 100),
        (3, float(MOST_PASSES), MOST_PASSES),  # one step a pass
    ],
)
def test_few_rows_are_passed_over_until_there_are_steps_enough(rows: int, epochs: float, steps: int) -> None:
    fitted = FEW.fit_to_rows(rows)
    assert (fitted.epochs, FEW.steps(rows), fitted.steps(rows)) == (epochs, steps, steps)


def test_steps_that_were_named_are_left_alone() -> None:
    named = dataclasses.replace(FEW, max_steps=7)
    assert named.fit_to_rows(81) is named
    assert named.steps(81) == 7
    assert dataclasses.replace(FEW, min_steps=0).steps(81) == 12
    assert FEW.steps(0) == 0


def test_a_few_prompts_are_sampled_until_there_are_steps_enough() -> None:
    ppo, grpo = RECIPES["ppo"]["cpu"], RECIPES["grpo"]["cpu"]
    # 204 prompts were 7 steps of PPO at two passes, and orders were not learnt in them
    assert [ppo.steps(rows) for rows in (30, 101, 204, 2000)] == [29, 42, 42, 63]
    assert [grpo.steps(rows) for rows in (30, 101, 204, 2000)] == [48, 156, 156, 500]
    assert [dataclasses.replace(recipe, min_steps=0).steps(204) for recipe in (ppo, grpo)] == [7, 52]


def test_logged_responses_are_passed_over_as_often_as_epochs_say() -> None:
    logged = dataclasses.replace(RECIPES["grpo"]["cpu"], mode="logged")
    assert logged.fit_to_rows(30) is logged
    assert logged.steps(30) == 8
