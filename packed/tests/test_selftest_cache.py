"""A model's self-test is not repeated by a later run unless something it depends on is new."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from packed_forward import row_cache, selection, selftest
from packed_forward.logps import causal_model
from packed_forward.packing import Strategy
from packed_forward.row_cache import RowCache, SelftestCache
from packed_forward.selftest import PackableModel
from random_models import a_policy, some_items


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name per self-test that really ran."""
    ran: list[str] = []
    stock = selftest.measure_reference

    def counted(policy: PackableModel, *args: Any, **kwargs: Any) -> Any:
        ran.append(causal_model(policy.model).config.model_type)
        return stock(policy, *args, **kwargs)

    monkeypatch.setattr(selftest, "measure_reference", counted)
    return ran


def kept(shape: str, folder: Path) -> PackableModel:
    return a_policy(
        shape, cache=SelftestCache(RowCache(folder / "findings.sqlite3"), "", "none", "a processor")
    )


def test_a_later_run_takes_what_an_earlier_one_found_and_says_so(tmp_path: Path, tried: list[str]) -> None:
    first = selection.strategy_select(kept("llama", tmp_path), some_items(40, 20), gradients=True)
    policy = kept("llama", tmp_path)
    second = selection.strategy_select(policy, some_items(30, 10, seed=2), gradients=True)
    assert tried == ["llama"]
    assert second.strategy is first.strategy is Strategy.LAST_LAYER
    assert second.reason.startswith(f"{first.reason}; ")
    # and it is installed, not only named
    assert vars(policy.model.base_model.model.model.layers[-1]).get("forward") is not None


@pytest.mark.parametrize("new", ["longer rows", "gradients", "code", "adapter"])
def test_new_is_tried(tmp_path: Path, tried: list[str], new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    selection.strategy_select(kept("llama", tmp_path), some_items(40), gradients=True)
    policy = kept("llama", tmp_path)
    if new == "code":
        monkeypatch.setattr(row_cache, "packed_code", lambda: "of another version")
    if new == "adapter":
        next(p for name, p in policy.model.named_parameters() if "lora_A" in name).requires_grad_(False)
    items = some_items(41 if new == "longer rows" else 40)
    selection.strategy_select(policy, items, gradients=new != "gradients")
    assert len(tried) == 2


def test_failures_are_tried_again(tmp_path: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(selftest, "measure_packed", no_memory)
        assert (
            selection.strategy_select(kept("llama", tmp_path), some_items(40), gradients=True).strategy
            is Strategy.STOCK
        )
    assert (
        selection.strategy_select(kept("llama", tmp_path), some_items(40), gradients=True).strategy
        is Strategy.LAST_LAYER
    )
    assert len(tried) == 2


@pytest.mark.parametrize(("rounding", "agrees"), [(0.0, False), (0.12, True), (3.0, True)])
def test_what_rounding_alone_changes_is_no_disagreement(rounding: float, agrees: bool) -> None:
    spread = selftest.Spread(rounding)
    expected, measured = (torch.zeros(6), {}), (torch.full((6,), 0.2), {})
    assert selftest.compare(expected, measured, torch.bfloat16, spread)[0] is agrees
    wrong = (torch.full((6,), 0.5), dict[str, torch.Tensor]())
    assert not selftest.compare(expected, wrong, torch.bfloat16, spread)[0]


def test_long_gradients_are_left_to_shorter_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "GRADIENT_TOKENS", 48)
    policy, items = a_policy("llama"), some_items(100, 30, 12)
    probes = selftest.probe_completions(items)
    assert {len(item.prompt_ids) for item in probes} == {100, 30, 12}
    backward: list[int] = []

    def measured(policy: Any, hidden: Any, targets: Any, gradients: bool) -> Any:
        backward.extend([len(targets)] if gradients else [])
        return torch.zeros(len(targets)), {}

    monkeypatch.setattr(selftest, "_measure_logps", measured)
    found = selftest.measure_reference(policy, probes, True)[0]
    assert len(found) == sum(len(item.response_ids) for item in probes)
    assert backward == [sum(len(item.response_ids) for item in probes if len(item.prompt_ids) < 100)]


@pytest.mark.parametrize(
    ("text", "lengths", "tested"),
    [
        ({}, (100, 30, 12), [30, 12]),
        ({}, (100, 90), [100, 90]),
        ({"sliding_window": 64}, (100, 30), [100, 30]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, (100, 30), [100, 30]),
        ({"layer_types": ["full_attention"], "rope_parameters": {"rope_type": "default"}}, (100, 30), [30]),
        ({"rope_parameters": {"rope_type": "dynamic"}}, (100, 30), [100, 30]),
    ],
)
def test_long_rows_are_tested_only_where_their_length_may_tell(
    monkeypatch: pytest.MonkeyPatch, text: dict[str, Any], lengths: tuple[int, ...], tested: list[int]
) -> None:
    monkeypatch.setattr(selftest, "GRADIENT_TOKENS", 48)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(**text)))
    found = selection._telling(model, some_items(*lengths))
    assert [len(item.prompt_ids) for item in found[::2]] == tested
