"""Compiled decoder layers: the same log-probabilities and gradients, in few compiled forms, and a reason either way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from packed_forward import forward, layer_compilation, selection, selftest
from packed_forward.layer_compilation import Buckets, widths_fit
from packed_forward.logps import causal_model
from packed_forward.packing import pack
from packed_forward.strategies import Strategy
from random_models import a_policy, some_items


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def found(policy: Any, strategy: Strategy, sizes: tuple[int, ...], buckets: Buckets | None) -> Any:
    items = some_items(*sizes)
    packed = pack(
        [i.prompt_ids for i in items],
        [i.response_ids for i in items],
        pad_token_id=0,
        fit=buckets.fit if buckets else None,
    )
    policy.model.zero_grad(set_to_none=True)
    logps = forward.packed_logps(causal_model(policy.model), packed, strategy)[0]
    logps.sum().backward()
    return logps.detach(), selftest.gradients_of(policy)


# --- Widths -------------------------------------------------------------------------------------------------


def test_widths_are_those_that_pad_least() -> None:
    lengths = [10, 15, 17, 40, 61, 64, 64, 100, 130, 131]

    def padded(widths: tuple[int, ...]) -> int:
        return sum(min(width for width in widths if width >= length) for length in lengths)

    rounded = sorted({-(-length // 8) * 8 for length in lengths})
    least = min(padded((*chosen, rounded[-1])) for chosen in itertools.combinations(rounded[:-1], 2))
    widths = widths_fit(lengths, 3)
    assert padded(widths) == least
    assert len(widths) == 3


def test_equal_lengths_have_one_width() -> None:
    assert widths_fit([384] * 9, 4) == (384,)
    assert widths_fit([385], 4) == (392,)


def test_a_row_wider_than_all_widths_goes_to_a_multiple_of_the_widest() -> None:
    assert Buckets((64, 128), (24,)).fit(65, 49) == (128, 72)
    assert Buckets((64, 128), (24,)).fit(129, 1) == (256, 24)


def test_padding_to_a_width_changes_nothing_but_the_padding() -> None:
    packed = pack([[5, 6], [7]], [[1, 2, 3], [8]], pad_token_id=0, fit=lambda prompt, suffix: (4, 6))
    assert packed.prompt_ids.tolist() == [[5, 6, 0, 0], [7, 0, 0, 0]]
    assert packed.suffix_ids.tolist() == [[1, 2, 0, 0, 0, 0], [0] * 6]
    assert packed.sources.tolist() == [[0, 1, 2], [7, 0, 0]]  # a row keeps 1 + 6 states


# --- Layers -------------------------------------------------------------------------------------------------


@pytest.mark.campaign
def test_compiled_layers_agree_and_are_compiled_once_for_each_width() -> None:
    strategy = Strategy.LAST_LAYER
    policy, buckets = a_policy("llama"), Buckets((32, 64), (24,))
    model = causal_model(policy.model)
    forms = []
    with selftest.measurement_mode(policy, True):
        for sizes in ((57, 20), (60, 33, 20), (20, 21), (22, 25, 30)):
            selftest.install(policy, strategy)
            logps, gradients = found(policy, strategy, sizes, None)
            layer_compilation.compile_layers(model, "aot_eager")
            compiled, theirs = found(policy, strategy, sizes, buckets)
            assert torch.allclose(logps, compiled, atol=1e-5)
            assert gradients.keys() == theirs.keys()
            largest = max(float(gradient.norm()) for gradient in gradients.values())
            for name, gradient in gradients.items():
                assert float((theirs[name] - gradient).norm()) < 1e-4 * largest, name
            forms.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    # the first layer's input needs no gradient, and the last one is cut: three forms, however many layers and rows, and
    # the same again for the second width
    assert forms == [3, 3, 6, 6]


def test_another_rung_is_not_compiled_any_more() -> None:
    policy = a_policy("llama")
    layers = causal_model(policy.model).base_model.layers
    selftest.install(policy, Strategy.LAST_LAYER)
    cut = layers[-1].forward
    layer_compilation.compile_layers(causal_model(policy.model), "aot_eager")
    assert layers[-1].forward != cut
    layer_compilation.uncompile_layers(causal_model(policy.model))
    assert layers[-1].forward == cut
    layer_compilation.compile_layers(causal_model(policy.model), "aot_eager")
    selftest.install(policy, Strategy.STOCK)
    assert all("forward" not in vars(layer) for layer in layers)


# --- The choice ---------------------------------------------------------------------------------------------


def choose(
    policy: Any, wish: str, strategy: Strategy = Strategy.LAST_LAYER, step_s: float = 1.0, steps: int = 10**6
) -> Any:
    return selection.compile_choose(
        policy, strategy, some_items(57, 20), wish=wish, steps=steps, step_s=lambda: step_s
    )


@pytest.mark.parametrize("mistake", ["wrong", "raises"])
def test_compiled_layers_that_disagree_are_not_used(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    def badly(own: Any, backend: str) -> Any:
        def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if mistake == "raises":
                raise RuntimeError("the compiler gave up")
            return own(hidden, *args, **kwargs) * 1.05

        return forward

    monkeypatch.setattr(layer_compilation, "_compile_forward", badly)
    policy = a_policy("llama")
    choice = choose(policy, "on")
    assert choice.buckets is None
    assert "do not match the model's own forward pass" in choice.summary
    assert not hasattr(causal_model(policy.model).base_model.layers[0], "ratchet_compiled")
    with selftest.measurement_mode(policy, False):  # and the strategy is as right as it was
        assert forward.strategy_of(causal_model(policy.model)) is Strategy.LAST_LAYER


@pytest.mark.parametrize(
    ("wish", "strategy", "reason"),
    [
        ("off", Strategy.SPLIT, "asked not to be"),
        ("auto", Strategy.SPLIT, "only on CUDA"),
        ("on", Strategy.STOCK, "rows are not packed"),
        ("on", Strategy.FLEX, "its own kernel"),
    ],
)
def test_why_layers_are_not_compiled_is_said(wish: str, strategy: Strategy, reason: str) -> None:
    choice = choose(a_policy("llama"), wish, strategy)
    assert choice.buckets is None
    assert reason in choice.summary


def test_on_a_card_a_short_run_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = a_policy("llama")
    monkeypatch.setattr(selection, "_impossible", lambda *_: "")  # as on a card
    monkeypatch.setattr(selection, "compiled_agrees", lambda *_: (True, "log-probabilities agree"))
    # a tenth of 100 steps of half a second is 5 s; two widths are taken to cost a minute
    short = choose(policy, "auto", step_s=0.5, steps=100)
    assert short.buckets is None
    assert "100 steps of 0.5 s, of which a tenth is 5 s, against 60 s for compiling 2 widths" in short.summary
    # 17 tokens of completions are fed: 7 + 12, without their last ones
    assert choose(policy, "auto", step_s=0.5, steps=10_000).buckets == Buckets((24, 64), (24,))
