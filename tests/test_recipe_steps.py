"""Number of optimiser steps of a recipe: from passes over many rows, from `min_steps` on few."""

import dataclasses
from random import Random

import pytest

from rl.recipes import RECIPES
from rl.recipes.base import MOST_PASSES, Recipe
from rl.training.rows import LengthGroupedSampler

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


def test_steps_of_few_prompts_and_steps_that_were_named() -> None:
    # steps that were named are left alone
    named = dataclasses.replace(FEW, max_steps=7)
    assert named.fit_to_rows(81) is named
    assert named.steps(81) == 7
    assert dataclasses.replace(FEW, min_steps=0).steps(81) == 12
    assert FEW.steps(0) == 0
    # a few prompts are sampled until there are steps enough
    ppo, grpo = RECIPES["ppo"]["cpu"], RECIPES["grpo"]["cpu"]
    # 204 prompts were 7 steps of PPO at two passes, and orders were not learnt in them
    assert [ppo.steps(rows) for rows in (30, 101, 204, 2000)] == [29, 42, 42, 63]
    assert [grpo.steps(rows) for rows in (30, 101, 204, 2000)] == [48, 156, 156, 500]
    assert [dataclasses.replace(recipe, min_steps=0).steps(204) for recipe in (ppo, grpo)] == [7, 52]


def sampler(lengths: list[int], epoch: int = 0, seed: int = 0) -> list[int]:
    return list(LengthGroupedSampler(lengths, 4, seed, lambda: epoch))


def test_pairs_of_like_length_share_a_batch_and_every_pair_is_visited_once() -> None:
    # an epoch visits every pair once in an order of its own
    lengths = [Random(i).randint(5, 100) for i in range(70)]
    first, second = sampler(lengths, 0), sampler(lengths, 1)
    assert sorted(first) == sorted(second) == list(range(70))
    assert first != second
    assert first == sampler(lengths, 0)
    assert first != sampler(lengths, 0, seed=1)
    # pairs of like length share a batch
    lengths = [Random(i).randint(5, 100) for i in range(64)]

    def padding(order: list[int]) -> int:
        batches = [order[i : i + 4] for i in range(0, 64, 4)]
        return sum(max(lengths[i] for i in batch) * 4 - sum(lengths[i] for i in batch) for batch in batches)

    assert padding(sampler(lengths)) < 0.4 * padding(list(range(64)))


def test_pairs_of_one_prompt_stay_together_and_the_short_batch_comes_last() -> None:
    # pairs of one prompt stay together
    prompts = [7, 8, 9] * 4
    order = list(LengthGroupedSampler([5] * 12, 4, 0, lambda: 0, prompts))
    assert sorted(order) == list(range(12))
    assert [len({prompts[i] for i in order[at : at + 4]}) for at in (0, 4, 8)] == [1, 1, 1]
    # the batch that is not full comes last
    lengths = [1] * 9 + [1000]  # the longest stands alone after sorting only if batches were cut anew
    order = sampler(lengths)
    assert sorted(order) == list(range(10))
    assert len(order[8:]) == 2
