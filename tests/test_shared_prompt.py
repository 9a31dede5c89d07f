"""Many answers to one prompt, whose keys and values are there once: the tokens drawn are those of repeated ones."""

import pytest
import torch

from packed_forward import selftest
from packed_forward.logps import causal_model
from packed_forward.packing import Strategy
from packed_forward.prefix_attention import SharedPrompt, running_rows
from random_models import SHAPES, a_policy
from rl.training.constrained_generation import Sampling, generate_tokens

PROMPTS = [[5, 9, 40, 7, 13, 28, 61, 17], [33, 4, 19], [70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80]]
OURS = [
    shape for shape, (_, _, strategy) in SHAPES.items() if strategy in (Strategy.LAST_LAYER, Strategy.SPLIT)
]


def drawn(
    shape: str, strategy: Strategy, stops: list[int], temperature: float, asked: list[int]
) -> torch.Tensor:
    policy = a_policy(shape)
    selftest.install(policy, strategy)
    policy.model.eval()
    sampling = Sampling(12, temperature)
    return generate_tokens(
        causal_model(policy.model),
        [PROMPTS[i] for i in asked],
        4,
        sampling,
        stops,
        0,
        torch.Generator().manual_seed(3),
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", OURS)
def test_tokens_are_those_of_repeated_prompts(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    attend = SharedPrompt.attend

    def noted(self: SharedPrompt, *args: object) -> torch.Tensor:
        used.append(self.samples)
        return attend(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(SharedPrompt, "attend", noted)
    stock = drawn(shape, Strategy.STOCK, [], 3.0, [0, 1, 2])
    assert not used
    assert torch.equal(drawn(shape, SHAPES[shape][2], [], 3.0, [0, 1, 2]), stock)
    assert used
    assert len({tuple(row) for row in stock.tolist()}) == 12  # answers differ


def test_answers_that_end_leave_and_the_others_go_on_as_they_were() -> None:
    """One prompt: rows leave in the same order either way, so that the same numbers are drawn for the rest."""
    whole = drawn("llama", Strategy.STOCK, [], 3.0, [0])
    early = sorted({int(whole[row, 2]) for row in range(3)})  # at least two of four end at their third token
    stock = drawn("llama", Strategy.STOCK, early, 3.0, [0])
    assert (stock[:, 3:] == 0).all(1).sum() >= 2
    assert torch.equal(drawn("llama", Strategy.LAST_LAYER, early, 3.0, [0]), stock)


def test_answers_of_several_prompts_end_each_in_its_own_time() -> None:
    """Which rows are left over to draw numbers for differs; greedily nothing is drawn, and all is the same."""
    whole = drawn("llama", Strategy.STOCK, [], 0.0, [0, 1, 2])
    stops = [int(whole[0, 2]), int(whole[4, 5])]
    stock = drawn("llama", Strategy.STOCK, stops, 0.0, [0, 1, 2])
    assert torch.equal(drawn("llama", Strategy.LAST_LAYER, stops, 0.0, [0, 1, 2]), stock)
    assert (stock[:4, 3:] == 0).all()


def test_a_prompt_that_is_answered_leaves_and_the_others_keep_as_many_rows_as_they_need() -> None:
    running = torch.tensor([False, True, False, True] + [False] * 4 + [False, False, True, False])
    rows, prompts, samples = running_rows(running, 4)
    assert (prompts.tolist(), samples) == ([0, 2], 2)
    assert rows.tolist() == [1, 3, 10, 8]  # the last fills up
