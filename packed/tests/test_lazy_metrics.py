"""Metrics lazy on the device: TRL's own numbers, read in one go when they are logged."""

import pytest
import torch

from packed_forward import forward, selftest
from packed_forward.dpo_trainer import EXTRAS
from packed_forward.lazy_metrics import LazyMetrics, LazyScalar, LazyTensor
from packed_forward.logps import causal_model
from packed_forward.packing import Strategy, pack
from random_models import Reads, a_policy, some_items


def test_one_transfer_fetches_all_numbers_of_a_type() -> None:
    pending = LazyMetrics()
    numbers = [pending.wrap(torch.tensor([1.0, 2.0, float(i)])).mean().item() for i in range(9)]
    tokens = pending.wrap(torch.tensor([3, 4])).sum().item()
    assert (float(sum(numbers) / len(numbers)), int(tokens // 2)) == (pytest.approx(7 / 3), 3)
    assert pending.transfers == 2
    assert pending.entries == []


def test_a_count_that_was_taken_to_be_above_zero_gives_zero_where_it_is_not() -> None:
    pending = LazyMetrics()
    for count, expected in ((torch.tensor(4), 0.5), (torch.tensor(0), 0.0)):
        total, tokens = pending.wrap(torch.tensor(2.0)), pending.wrap(count)
        share = (total / tokens).item() if tokens > 0 else -1.0
        numbers = total.item(), tokens.item()
        assert float(numbers[0] / numbers[1] if numbers[1] > 0 else -1.0) == expected
        assert float(share) == expected


def test_a_branch_taken_wrongly_is_loud() -> None:
    pending = LazyMetrics()
    count = pending.wrap(torch.tensor(0)).item()
    assert count > 0  # not known yet
    with pytest.raises(RuntimeError, match="taken to be above 0"):
        pending.read()


def test_what_a_kept_tensor_does_not_know_is_done_by_the_tensor() -> None:
    lazy = LazyMetrics().wrap(torch.tensor([1.0, float("nan")]))
    assert isinstance(lazy, LazyTensor)
    assert lazy.nansum().item() == 1.0
    assert torch.equal(torch.isnan(lazy), torch.tensor([False, True]))
    assert not isinstance(torch.zeros(1) + lazy, LazyScalar)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Strategy.LAST_LAYER, Strategy.SPLIT])
def test_packed_rows_are_computed_in_place(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device `meta` has shapes but no values: a mask made elsewhere, or a number read, would raise."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # it does not know this device
    policy, items = a_policy("llama"), some_items(20, 31)
    packed = pack([i.prompt_ids for i in items], [i.response_ids for i in items], pad_token_id=0)
    selftest.install(policy, strategy)
    model = causal_model(policy.model.to("meta"))
    with Reads() as seen:
        logps = forward.packed_logps(model, packed.to("meta"), strategy, EXTRAS)[0]
        logps.sum().backward()
    assert logps.device.type == "meta"
    assert logps.shape == packed.targets.shape
    assert seen.found == []
