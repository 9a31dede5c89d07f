"""Packed rows: the same log-probabilities and gradients as rows that repeat the prompt, or the stock forward."""

from typing import Any

import pytest
import torch
from peft import LoraConfig

from packed_forward import forward, fused_layers, graphs, prefix_attention, selection, selftest
from packed_forward.packing import PackedBatch, Strategy, TokenizedCompletion, pack
from packed_forward.selftest import PackableModel
from random_models import SHAPES, VOCABULARY, a_policy, some_items


def compare(
    policy: PackableModel, items: list[TokenizedCompletion], strategy: Strategy
) -> tuple[float, float]:
    """Largest difference of a token's log-probability, and largest relative difference of a gradient, to stock rows."""
    with selftest.measurement_mode(policy, True):
        expected, wanted = selftest.measure_reference(policy, items, True)
        selftest.install(policy, strategy)
        found, gradients = selftest.measure_packed(policy, items, strategy, True)
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    off = max(
        float((gradients[name] - gradient).norm()) / max(float(gradient.norm()), 0.01 * largest)
        for name, gradient in wanted.items()
    )
    return float((expected - found).abs().max()), off


def test_a_row_of_completions() -> None:
    # a prompt and a completion stand in the row once
    packed = pack([[5, 6], [5, 6], [7]], [[1, 2, 3], [4, 9], [8]], pad_token_id=0)
    assert packed.prompt_ids.tolist() == [[5, 6], [7, 0]]
    # last tokens are not fed, and the second row's only token is a last one
    assert packed.suffix_ids.tolist() == [[1, 2, 4], [0, 0, 0]]
    assert packed.suffix_positions.tolist() == [[2, 3, 2], [0, 0, 0]]
    assert packed.suffix_segments.tolist() == [[0, 0, 1], [-1, -1, -1]]
    assert packed.tokens == 6
    # each token is predicted from the one before it
    packed = pack([[5, 6], [5, 6], [7]], [[1, 2, 3], [4, 9], [8]], pad_token_id=0)
    # kept states: row 0 is [6, 1, 2, 4], row 1 is [7, -, -, -]
    assert packed.sources.tolist() == [[0, 1, 2], [0, 3, 0], [4, 0, 0]]
    assert packed.targets.tolist() == [[1, 2, 3], [4, 9, 0], [8, 0, 0]]
    assert packed.target_mask.tolist() == [[True] * 3, [True, True, False], [True, False, False]]
    # the same completion twice is computed once
    packed = pack([[5]] * 3, [[1, 2], [1, 2], [1, 3]], pad_token_id=0)
    assert packed.suffix_ids.tolist() == [[1, 1]]
    assert packed.sources.tolist() == [[0, 1], [0, 1], [0, 2]]
    # a completion sees the prompt and itself
    packed = pack([[5, 6], [5, 6], [7]], [[1, 2, 3], [4, 9], [8]], pad_token_id=0)
    first = packed.suffix_mask()[0, 0].int().tolist()
    assert first == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
    # an empty completion is refused
    with pytest.raises(ValueError, match="at least one token"):
        pack([[5]], [[]], pad_token_id=0)


@pytest.mark.slow
@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_model_ends_on_the_quickest_rung_that_is_right(shape: str) -> None:
    choice = selection.strategy_select(a_policy(shape), some_items(57, 20), gradients=True)
    assert choice.strategy == SHAPES[shape][2], choice


PACKED = [Strategy.LAST_LAYER, Strategy.SPLIT]
EXACT = [
    (name, strategy)
    for name, (_, _, first) in SHAPES.items()
    if first is not Strategy.STOCK
    for strategy in PACKED[PACKED.index(first) :]
]


@pytest.mark.parametrize(("shape", "strategy"), EXACT)
def test_log_probabilities_and_gradients_are_the_stock_forwards(shape: str, strategy: Strategy) -> None:
    logps, gradients = compare(a_policy(shape), some_items(40, 20, 57), strategy)
    assert logps < 1e-5
    assert gradients < 1e-4


def test_a_window_is_found_on_the_longest_row_only() -> None:
    policy = a_policy("mistral, windowed")
    assert selection.strategy_select(policy, some_items(4), gradients=False).strategy is Strategy.LAST_LAYER
    assert selection.strategy_select(policy, some_items(4, 40, 4), gradients=False).strategy is Strategy.STOCK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_that_leaks_is_caught(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    def plainly_causal(self: PackedBatch) -> torch.Tensor:
        prompt, suffix = self.prompt_ids.shape[1], self.suffix_ids.shape[1]
        mask = torch.ones(suffix, prompt + suffix, dtype=torch.bool).tril(prompt)
        return mask[None, None].expand(self.prompt_ids.shape[0], 1, -1, -1)

    monkeypatch.setattr(PackedBatch, "suffix_mask", plainly_causal)
    choice = selection.strategy_select(a_policy("llama", dtype), some_items(57, 20), gradients=False)
    assert choice.strategy is Strategy.STOCK
    assert "no packed forward pass matches" in choice.reason


def test_bfloat16_differs_by_its_rounding_alone() -> None:
    choice = selection.strategy_select(a_policy("llama", torch.bfloat16), some_items(57, 20), gradients=True)
    assert choice.strategy is Strategy.LAST_LAYER


def test_half_precision_is_held_to_no_more_than_it_knows_itself() -> None:
    """A gradient that moves much when the input is rounded otherwise says little; the others still must agree."""
    logps = torch.zeros(3)
    expected = logps, {name: torch.full((4,), 1.0) for name in "abc"}
    found = logps, {"a": torch.full((4,), 1.4), "b": torch.full((4,), 1.01), "c": torch.full((4,), 1.01)}
    assert not selftest.compare(expected, found, torch.bfloat16)[0]
    assert selftest.compare(
        expected, found, torch.bfloat16, selftest.Spread(gradients={"a": 0.25, "b": 0.0, "c": 0.0})
    )[0]
    assert not selftest.compare(
        expected, found, torch.bfloat16, selftest.Spread(gradients={"a": 0.15, "b": 0.0, "c": 0.0})
    )[0]
    missing = logps, {"a": torch.full((4,), 1.4), "b": torch.full((4,), 1.4), "c": torch.full((4,), 1.01)}
    assert not selftest.compare(
        expected, missing, torch.bfloat16, selftest.Spread(gradients=dict.fromkeys("abc", 9.0))
    )[0]


@pytest.mark.slow
def test_what_half_precision_cannot_tell_is_packed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if two right ways differed by more than the tolerance: what the stock forward moves by itself is allowed."""
    policy, items = a_policy("llama", torch.bfloat16), some_items(57, 20)
    with selftest.measurement_mode(policy, True):
        expected = selftest.measure_reference(policy, selftest.probe_completions(items), True)
        selftest.install(policy, Strategy.LAST_LAYER)
        found = selftest.measure_packed(policy, selftest.probe_completions(items), Strategy.LAST_LAYER, True)
    apart = sorted(selftest.gradient_differences(expected, found).values())
    monkeypatch.setitem(selftest.TOLERANCE, torch.bfloat16, (0.08, (apart[len(apart) // 2] + apart[-1]) / 2))
    choice = selection.strategy_select(policy, items, gradients=True)
    assert choice.strategy is Strategy.LAST_LAYER
    assert "of rounding alone" in choice.reason
    assert policy.model.get_base_model().config._attn_implementation == prefix_attention.ATTENTION


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_pass_that_is_wrong_is_caught(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    right = prefix_attention.BlockAttention.backward

    def wrong(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, *others = right(ctx, *grads)
        return query, 2 * key, *others

    monkeypatch.setattr(prefix_attention.BlockAttention, "backward", staticmethod(wrong))
    choice = selection.strategy_select(a_policy("llama", dtype), some_items(57, 20), gradients=True)
    assert choice.strategy is Strategy.STOCK


def test_the_test_leaves_the_policy_as_it_was() -> None:
    policy = a_policy("llama")
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    policy.model.train()
    selection.strategy_select(policy, some_items(20), gradients=True)
    assert policy.model.training
    assert all(torch.equal(value, before[name]) for name, value in policy.model.state_dict().items())
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_stock_restores_the_stock_forward() -> None:
    policy = a_policy("llama")
    selftest.install(policy, Strategy.LAST_LAYER)
    selftest.install(policy, Strategy.STOCK)
    model = policy.model.get_base_model()
    assert model.config._attn_implementation == "sdpa"
    assert "forward" not in vars(model.base_model.layers[-1].self_attn.q_proj)


@pytest.mark.campaign
def test_blocked_attention_is_attention_under_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_attention.BlockAttention, "WIDTH", 4)  # 4, 4 and 3 of 11
    packed = pack([[5] * 11, [6] * 9], [[1, 2, 3, 4], [4, 9]], pad_token_id=0)
    length, generator = 11 + packed.suffix_ids.shape[1], torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, length, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(2, 2, length, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )

    def blocks(*states: torch.Tensor) -> Any:
        return prefix_attention.BlockAttention.apply(*states, 11, packed.suffix_mask(), 0.3, 0)

    causal = torch.ones(11, length, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    mask = torch.cat([causal, packed.suffix_mask()], 2)
    whole = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    assert torch.allclose(blocks(query, key, value), whole.transpose(1, 2), atol=1e-12)
    assert torch.autograd.gradcheck(blocks, (query, key, value))


@pytest.mark.parametrize("shape", ["llama", "phi3"])
def test_rows_padded_further_have_the_same_states(shape: str) -> None:
    policy, strategy, items = a_policy(shape), SHAPES[shape][2], some_items(40, 20)
    selftest.install(policy, strategy)
    packed = pack([i.prompt_ids for i in items], [i.response_ids for i in items], pad_token_id=0)
    suffix = packed.suffix_ids.shape[1]
    with torch.no_grad():
        hidden = forward.packed_hidden(policy.model.get_base_model(), packed, strategy)
        wide = packed.widened(graphs.grid(40), graphs.grid(suffix) + 16)
        found = forward.packed_hidden(policy.model.get_base_model(), wide, strategy)[:, : 1 + suffix]
    real = torch.cat([torch.ones(2, 1, dtype=torch.bool), packed.suffix_segments >= 0], 1)
    torch.testing.assert_close(found[real], hidden[real], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("shape", ["llama", "qwen3", "gpt2"])
def test_leading_tokens_of_all_rows_are_computed_once(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        prefix_attention.BlockAttention, "WIDTH", 8
    )  # blocks of the common tokens and of the rest
    policy, strategy = a_policy(shape), SHAPES[shape][2]
    policy.model.eval()  # GPT-2 has dropout
    selftest.install(policy, strategy)
    for name, weight in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05, generator=torch.Generator().manual_seed(1))
    model = policy.model.get_base_model()
    system = list(range(3, 23))
    prompts = [[*system, 30, 31, 32], [*system, 40], system + [50] * 9]
    packed = pack([*prompts, prompts[0]], [[5, 6, 7], [8, 9], [3] * 6, [4]], pad_token_id=0)
    fed: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: fed.append(given[0].numel()))

    def measured() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        policy.model.zero_grad()
        logps = forward.packed_logps(model, packed, strategy)[0]
        logps.square().sum().backward()
        trained = policy.model.named_parameters()
        return logps.detach(), {n: p.grad.clone() for n, p in trained if p.grad is not None}

    once = measured()
    monkeypatch.setattr(forward, "common_tokens", lambda *_: 0)
    repeated = measured()
    assert fed == [20 + 3 * (9 + 5), 3 * (29 + 5)]
    torch.testing.assert_close(once[0], repeated[0], atol=1e-4, rtol=1e-5)
    for name, gradient in repeated[1].items():
        assert (once[1][name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def test_few_common_tokens_and_the_last_of_a_prompt_stay_with_their_rows() -> None:
    model = a_policy("llama").model.get_base_model().train()
    system = list(range(3, 3 + forward.COMMON_LEAST))

    def common(*prompts: list[int]) -> int:
        return forward.common_tokens(model, pack(prompts, [[5]] * len(prompts), pad_token_id=0))

    assert common([*system, 40], [*system, 50, 51]) == len(system)
    assert common([*system], [*system, 50]) == 0  # its last token predicts an answer: one less is too few
    assert common([*system[:-1], 40], [*system[:-1], 50]) == 0
    assert common([*system, 40]) == 0
    model.config.attention_dropout = 0.1
    assert common([*system, 40], [*system, 50, 51]) == 0


def test_a_root_mean_square_norm_has_the_gradient_of_its_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, generator=generator, requires_grad=True)
    weight, grad = torch.randn(2, 7, generator=generator)
    found = torch.autograd.grad(fused_layers.RmsNormFunction.apply(x, weight, 1e-5), x, grad.expand(3, 7))[0]
    plain = weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    assert torch.allclose(fused_layers.RmsNormFunction.apply(x, weight, 1e-5), plain, atol=1e-6)
    assert torch.allclose(found, torch.autograd.grad(plain, x, grad.expand(3, 7))[0], atol=1e-6)


def test_a_gated_mlp_has_the_gradients_of_its_formula() -> None:
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    frozen = [matrix(6, 4), matrix(6, 4), matrix(4, 6)]
    lora = [matrix(2, 4), matrix(6, 2), matrix(2, 4), matrix(6, 2), matrix(2, 6), matrix(4, 2)]
    x = matrix(5, 4)
    for trained in (x, *lora):
        trained.requires_grad_()

    def mlp(x: torch.Tensor, *lora: torch.Tensor) -> Any:
        parts = [p for i in range(3) for p in (frozen[i], lora[2 * i], lora[2 * i + 1])]
        return fused_layers.GatedMlpFunction.apply(x, *parts, 0.5, 1.0, 2.0)

    gate, up, down = (
        frozen[i] + scale * lora[2 * i + 1] @ lora[2 * i] for i, scale in enumerate((0.5, 1.0, 2.0))
    )
    plain = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    assert torch.allclose(mlp(x, *lora), plain, atol=1e-12)
    assert torch.autograd.gradcheck(mlp, (x, *lora))


def test_a_fused_lora_layer_has_pefts_output_and_gradients() -> None:
    policy = a_policy("llama")
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    with selftest.measurement_mode(policy, True):
        grads = []
        for fused in (False, True):
            fused_layers.fuse_layers(policy.model) if fused else fused_layers.restore_layers(policy.model)
            policy.model.zero_grad()
            out = policy.model(input_ids=ids).logits
            out.square().mean().backward()
            grads.append(
                (
                    out.detach(),
                    {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None},
                )
            )
    (plain, wanted), (fused_out, found) = grads
    assert torch.allclose(plain, fused_out, atol=1e-4, rtol=1e-5)
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max())), name


@pytest.mark.parametrize("what", ["dropout", "adapter off", "two adapters"])
def test_a_layer_that_is_more_than_plain_lora_goes_back_to_peft(what: str) -> None:
    policy = a_policy("llama")
    layer = policy.model.get_base_model().base_model.layers[0].self_attn.q_proj
    x = torch.zeros(1, 64)
    assert fused_layers.plain_adapter(layer, x) == "default"
    if what == "dropout":
        layer.lora_dropout["default"] = torch.nn.Dropout(0.1)
    elif what == "adapter off":
        layer.enable_adapters(False)
    else:
        policy.model.add_adapter("second", LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
        policy.model.base_model.set_adapter(["default", "second"])
    assert fused_layers.plain_adapter(layer, x) is None


def test_autocast_to_the_type_of_the_base_leaves_the_fused_layers_in_place() -> None:
    """On a GPU a run in bfloat16 trains under autocast: LoRA stays without passes of its own, and as right."""
    policy, items = a_policy("llama", torch.bfloat16), some_items(40, 20)
    layer = policy.model.get_base_model().base_model.layers[0].self_attn.q_proj
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert fused_layers.plain_adapter(layer, x) == "default"
        assert selection.strategy_select(policy, items, gradients=True).strategy is Strategy.LAST_LAYER
    with torch.autocast("cpu", torch.float16):
        assert fused_layers.plain_adapter(layer, x) is None
