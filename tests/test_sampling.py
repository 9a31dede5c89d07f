"""The order in which a run sees its rows: of seed and epoch alone, like lengths and one prompt's pairs together."""

from __future__ import annotations

from random import Random

from rl.training.dpo import LengthGroupedSampler


def sampler(lengths: list[int], epoch: int = 0, seed: int = 0) -> list[int]:
    return list(LengthGroupedSampler(lengths, 4, seed, lambda: epoch))


def test_an_epoch_visits_every_pair_once_in_an_order_of_its_own() -> None:
    lengths = [Random(i).randint(5, 100) for i in range(70)]
    first, second = sampler(lengths, 0), sampler(lengths, 1)
    assert sorted(first) == sorted(second) == list(range(70))
    assert first != second
    assert first == sampler(lengths, 0)
    assert first != sampler(lengths, 0, seed=1)


def test_pairs_of_like_length_share_a_batch() -> None:
    lengths = [Random(i).randint(5, 100) for i in range(64)]

    def padding(order: list[int]) -> int:
        batches = [order[i : i + 4] for i in range(0, 64, 4)]
        return sum(max(lengths[i] for i in batch) * 4 - sum(lengths[i] for i in batch) for batch in batches)

    assert padding(sampler(lengths)) < 0.4 * padding(list(range(64)))


def test_pairs_of_one_prompt_stay_together() -> None:
    prompts = [7, 8, 9] * 4
    order = list(LengthGroupedSampler([5] * 12, 4, 0, lambda: 0, prompts))
    assert sorted(order) == list(range(12))
    assert [len({prompts[i] for i in order[at : at + 4]}) for at in (0, 4, 8)] == [1, 1, 1]


def test_the_batch_that_is_not_full_comes_last() -> None:
    lengths = [1] * 9 + [1000]  # the longest stands alone after sorting only if batches were cut anew
    order = sampler(lengths)
    assert sorted(order) == list(range(10))
    assert len(order[8:]) == 2
