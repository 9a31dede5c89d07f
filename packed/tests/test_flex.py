"""Packed rows laid out one behind the other for FlexAttention: what a token sees, and log-probabilities as ever."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from packed_forward import flex, forward, packing, selection, selftest
from packed_forward.logps import causal_model
from packed_forward.packing import PackedBatch, pack
from packed_forward.strategies import Strategy
from random_models import a_policy, some_items


def two_prompts() -> PackedBatch:
    return pack([[5, 6], [5, 6], [7]], [[1, 2, 3], [4, 9], [8, 9, 3]], pad_token_id=0)


def test_rows_lie_one_behind_the_other_without_padding() -> None:
    row = packing.flatten(two_prompts())
    assert row.ids.shape == (1, packing.FLEX_BLOCK)
    assert row.ids[0, :9].tolist() == [5, 6, 1, 2, 4, 7, 8, 9, 0]
    assert row.positions[0, :9].tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 0]
    assert row.documents[:9].tolist() == [0] * 5 + [1] * 3 + [-1]
    assert row.segments[:9].tolist() == [-1, -1, 0, 0, 1, -1, 0, 0, -1]
    # the last token of a prompt and its completions; row 1 has two of three, the third lies at its prompt's end
    assert row.state_index.tolist() == [[1, 2, 3, 4, 5, 6, 7, 5]]


def test_a_token_sees_its_own_prompt_and_its_own_completion() -> None:
    row = packing.flatten(two_prompts())
    place = torch.arange(9)
    seen = flex.sees(row)(0, 0, place[:, None], place[None]).int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0, 0],  # the second completion, past the first
        [0, 0, 0, 0, 0, 1, 0, 0, 0],  # the second prompt, past everything
        [0, 0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 1],  # what fills up sees itself
    ]
    kept = flex.sees(row, row.state_index[0])(0, 0, place[:8, None], place[None]).int().tolist()
    assert kept == [seen[at] for at in row.state_index[0].tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Strategy.FLEX, Strategy.FLEX_LAST_LAYER])
def test_log_probabilities_are_those_of_the_split_rung(strategy: Strategy) -> None:
    policy, items = a_policy("qwen3"), some_items(57, 20, 33, 90)
    packed = pack([i.prompt_ids for i in items], [i.response_ids for i in items], pad_token_id=0)
    model = causal_model(policy.model)
    with torch.no_grad():
        selftest.install(policy, Strategy.SPLIT)
        expected = forward.packed_logps(model, packed, Strategy.SPLIT)[0]
        selftest.install(policy, strategy)
        laid_before = dataclasses.replace(packed, flat=packing.flatten(packed)).to("cpu")
        found = forward.packed_logps(model, laid_before, strategy)[0]
        assert torch.equal(forward.packed_logps(model, packed, strategy)[0], found)
    assert float((expected - found).abs().max()) < 1e-5


@pytest.mark.slow
def test_on_a_cpu_it_scores_but_does_not_train_and_the_record_says_why() -> None:
    policy, items = a_policy("llama"), some_items(57, 20)
    scored = selection.strategy_select(policy, items, gradients=False, first=Strategy.FLEX_LAST_LAYER)
    assert scored.strategy is Strategy.FLEX_LAST_LAYER
    trained = selection.strategy_select(policy, items, gradients=True, first=Strategy.FLEX_LAST_LAYER)
    assert trained.strategy is Strategy.LAST_LAYER
    assert "FlexAttention has no backward pass on a CPU" in trained.summary


@pytest.mark.slow
def test_a_wrong_block_mask_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        flex, "sees", lambda row, at=None: lambda b, h, q, k: (q if at is None else at[q]) >= k
    )
    choice = selection.strategy_select(
        a_policy("llama"), some_items(57, 20), gradients=False, first=Strategy.FLEX_LAST_LAYER
    )
    assert choice.strategy is Strategy.LAST_LAYER
    assert "log-probabilities within" in choice.agreement[Strategy.FLEX]


@pytest.mark.parametrize(
    ("attention", "device", "prompt", "strategy"),
    [
        ("auto", "cuda", 4095, Strategy.LAST_LAYER),
        ("auto", "cuda", 4096, Strategy.FLEX_LAST_LAYER),
        ("auto", "cpu", 4096, Strategy.LAST_LAYER),
        ("flex", "cuda", 10, Strategy.FLEX_LAST_LAYER),
        ("split", "cuda", 9000, Strategy.LAST_LAYER),
    ],
)
def test_long_prompts_on_a_card_are_tried_with_flexattention(
    attention: str, device: str, prompt: int, strategy: Strategy
) -> None:
    assert selection.first_strategy(attention, device, some_items(prompt)) is strategy
