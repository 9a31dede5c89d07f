"""One base, several roles, and what they sample: who is computed, who is trained, what is drawn."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from packed_forward.logps import collate, token_logps
from packed_forward.packing import Strategy
from packed_forward.prefix_attention import ATTENTION
from rl.recipes import PPORecipe
from rl.training import constrained_generation
from rl.training.constrained_generation import Sampling, draw, generate_tokens
from rl.training.encoding import EncodedResponse
from rl.training.policy import load_policy
from rl.training.rollout import sample_responses
from rl.training.shared_base import POLICY, VALUE, SharedBase
from tests.support.tiny_models import HARDWARE

QUICK = PPORecipe(lora_r=4, lora_alpha=8, max_length=128, max_new_tokens=12)


def shared_base(path: Path, **knobs: object) -> SharedBase:
    base = SharedBase(load_policy(str(path), hardware=HARDWARE), QUICK.with_knobs(**knobs))
    disturb(base, seed=1)
    return base


def disturb(base: SharedBase, seed: int) -> None:
    """Give every trained matrix something to say: LoRA's B and the value's head start at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for role in (POLICY, VALUE):
            for parameter in base.parameters_of(role).values():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


@pytest.fixture(scope="module")
def base(base_path: Path) -> SharedBase:
    return shared_base(base_path)


@pytest.fixture
def trained(base: SharedBase) -> Iterator[SharedBase]:
    """The shared base, its gradients gone afterwards."""
    yield base
    base.model.zero_grad(set_to_none=True)
    base.value_head.zero_grad(set_to_none=True)


ITEMS = [
    EncodedResponse([5, 6, 7, 8, 9], [20, 21, 1]),
    EncodedResponse([5, 6, 7, 8, 9], [30, 31, 32, 33, 1]),
    EncodedResponse([40, 41], [50]),
]


def test_the_reference_is_the_bare_base(base: SharedBase, base_path: Path) -> None:
    alone = load_policy(str(base_path), hardware=HARDWARE).model
    batch = collate(ITEMS, 0)
    expected = token_logps(alone, **batch)[batch["completion_mask"][:, 1:].bool()]
    micro = base.micro_batch([0, 1, 2], ITEMS)
    torch.testing.assert_close(base.reference_logps(micro)[micro.mask], expected, atol=2e-5, rtol=0)
    assert (base.policy_tokens(micro)[0] - base.reference_logps(micro)).abs().max() > 0.1


def test_the_policy_loss_reaches_the_policy_alone(trained: SharedBase) -> None:
    trained.policy_tokens(trained.micro_batch([0, 1, 2], ITEMS))[0].sum().backward()
    assert all(p.grad is not None for p in trained.parameters_of(POLICY).values())
    assert all(p.grad is None for p in trained.parameters_of(VALUE).values())


def test_the_value_loss_reaches_the_value_alone(trained: SharedBase) -> None:
    trained.values(trained.micro_batch([0, 1, 2], ITEMS)).sum().backward()
    assert all(p.grad is not None for p in trained.parameters_of(VALUE).values())
    assert all(p.grad is None for p in trained.parameters_of(POLICY).values())


def test_a_shared_trunk_takes_both_losses(base_path: Path) -> None:
    base = shared_base(base_path, value_backbone="shared")
    micro = base.micro_batch([0, 1, 2], ITEMS)
    logps, entropy, values = base.policy_and_values(micro)
    assert torch.equal(logps, base.policy_tokens(micro)[0])
    assert torch.equal(values, base.values(micro))
    assert (entropy[micro.mask] > 0).all()
    values.sum().backward()
    assert all(p.grad is not None for p in base.parameters_of(POLICY).values())
    assert set(base.parameters_of(VALUE)) == {"value_head.weight", "value_head.bias"}


@pytest.mark.parametrize("strategy", [Strategy.LAST_LAYER, Strategy.STOCK])
def test_packed_and_plain_rows_say_the_same(base_path: Path, strategy: Strategy) -> None:
    from packed_forward.selection import install

    base = shared_base(base_path)
    plain = base.micro_batch([0, 1, 2], ITEMS)
    assert plain.padded is not None
    expected = (*base.policy_tokens(plain), base.values(plain), base.reference_logps(plain))
    install(base.policy, strategy)
    base.strategy = strategy
    micro = base.micro_batch([0, 1, 2], ITEMS)
    found = (*base.policy_tokens(micro), base.values(micro), base.reference_logps(micro))
    for before, after in zip(expected, found, strict=True):
        torch.testing.assert_close(after, before, atol=5e-5, rtol=0)


def test_the_quickest_forward_is_found_with_two_adapters_on_the_base(base_path: Path) -> None:
    base = shared_base(base_path)
    before = {name: p.clone() for name, p in base.model.named_parameters()}
    said = base.strategy_find(ITEMS)
    assert base.strategy is Strategy.LAST_LAYER, said
    assert all(torch.equal(p, before[name]) for name, p in base.model.named_parameters())


PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [40, 41], [60, 61, 62, 63]]
GREEDY = Sampling(max_new_tokens=8, temperature=0.0)


def sampled(
    base: SharedBase, prompts: list[list[int]], samples: int, sampling: Sampling, seed: int = 0
) -> list[list[int]]:
    with base.speaking_as(POLICY) as model:
        rollouts = sample_responses(
            model, base.policy.encoder, prompts, samples, sampling, torch.Generator().manual_seed(seed)
        )
    assert [rollout.prompt for rollout in rollouts] == [
        i for i in range(len(prompts)) for _ in range(samples)
    ]
    return [rollout.item.response_ids for rollout in rollouts]


def test_prompts_of_different_lengths_are_answered_as_each_alone(base: SharedBase) -> None:
    together = sampled(base, PROMPTS, 1, GREEDY)
    assert together == [sampled(base, [prompt], 1, GREEDY)[0] for prompt in PROMPTS]
    assert len({tuple(answer) for answer in together}) > 1


def test_greedy_answers_are_those_of_a_forward_without_cache(base: SharedBase) -> None:
    for prompt, answer in zip(PROMPTS, sampled(base, PROMPTS, 1, GREEDY), strict=True):
        ids = torch.tensor([prompt + answer])
        with base.speaking_as(POLICY) as model, torch.no_grad():
            likeliest = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert likeliest.tolist() == answer


def test_rows_that_ended_leave_and_the_others_are_not_disturbed(base: SharedBase) -> None:
    whole = generate(base, stop=())
    stop = whole[0][2]  # ends the first row early; the others go on
    found = generate(base, stop=(stop,))
    for alone, row in zip(whole, found, strict=True):
        cut = alone.index(stop) + 1 if stop in alone else len(alone)
        assert row[:cut] == alone[:cut]
        assert set(row[cut:]) <= {0}


def generate(base: SharedBase, stop: tuple[int, ...]) -> list[list[int]]:
    with base.speaking_as(POLICY) as model:
        tokens = generate_tokens(model, PROMPTS, 1, GREEDY, stop, 0, torch.Generator())
    found: list[list[int]] = tokens.tolist()
    return found


@pytest.mark.parametrize("samples", [1, 3])
def test_steps_over_a_cache_of_fixed_length_are_those_of_a_growing_one(
    samples: int, base: SharedBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA device captures such steps as a graph: `tests/test_gpu.py`."""
    with base.speaking_as(POLICY) as model:
        model.set_attn_implementation(ATTENTION)
    sampling = Sampling(max_new_tokens=10)
    grown = sampled(base, PROMPTS, samples, sampling, seed=1)
    made: list[object] = []
    steps = constrained_generation.CapturedSteps
    monkeypatch.setattr(constrained_generation, "is_captured", lambda *_: True)
    monkeypatch.setattr(
        constrained_generation, "CapturedSteps", lambda *given: made.append(given) or steps(*given)
    )
    assert sampled(base, PROMPTS, samples, sampling, seed=1) == grown
    assert made


def test_the_seed_alone_decides_what_is_drawn(base: SharedBase) -> None:
    sampling = Sampling(max_new_tokens=8)
    first = sampled(base, PROMPTS, 2, sampling, seed=1)
    torch.manual_seed(99)
    assert sampled(base, PROMPTS, 2, sampling, seed=1) == first
    assert sampled(base, PROMPTS, 2, sampling, seed=2) != first
    assert first[0] != first[1]


def drawn(probs: list[float], **knobs: float) -> set[int]:
    """Every token drawn in 400 tries."""
    logits = torch.tensor([probs]).log().expand(400, -1)
    return set(draw(logits, Sampling(1, **knobs), torch.Generator().manual_seed(0)).tolist())  # type: ignore[arg-type]


def test_top_k_and_top_p_leave_the_likeliest_tokens() -> None:
    probs = [0.1, 0.5, 0.15, 0.25]
    assert drawn(probs) == {0, 1, 2, 3}
    assert drawn(probs, top_k=2) == {1, 3}
    assert drawn(probs, top_p=0.75) == {1, 3}
    assert drawn(probs, top_p=0.76) == {1, 2, 3}
    assert drawn(probs, top_p=0.01) == {1}
    assert drawn(probs, temperature=0.0) == {1}
    assert drawn(probs, temperature=0.01) == {1}


def test_the_end_of_a_turn_is_told_from_the_length_limit(base: SharedBase) -> None:
    with base.speaking_as(POLICY) as model:
        rollouts = sample_responses(
            model,
            base.policy.encoder,
            PROMPTS,
            8,
            Sampling(6, temperature=4.0),
            torch.Generator().manual_seed(3),
        )
    stops = set(base.policy.encoder.stop_ids)
    for rollout in rollouts:
        assert rollout.ended == (rollout.item.response_ids[-1] in stops)
        assert not stops & set(rollout.item.response_ids[:-1])
        assert rollout.ended or len(rollout.item.response_ids) == 6
