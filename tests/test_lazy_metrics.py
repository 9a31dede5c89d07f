"""Metrics lazy on the device: TRL's own numbers, read in one go when they are logged."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from torch.utils._python_dispatch import TorchDispatchMode

from rl.training.packed import forward, selftest
from rl.training.packed.lazy_metrics import LazyMetrics, LazyScalar, LazyTensor
from rl.training.packed.logps import causal_model
from rl.training.packed.packing import pack
from rl.training.packed.strategies import Strategy
from rl.training.packed.trl_forward import EXTRAS
from rl.training.pair_trainer import PairTrainer
from rl.training.result import TrainingFailed
from tests.support.dpo_runs import QUICK, a_trainer, some_pairs
from tests.support.tiny_models import tiny_model
from tests.test_prefix_attention import a_policy, some_items


class Reads(TorchDispatchMode):
    """Counts what makes a program wait for its device: reading a number, and counting what a mask selects."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "item")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in self.WAITING or masks:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("base"), "llama"))


def history(base: str, folder: Path, monkeypatch: pytest.MonkeyPatch, later: bool, **knobs: Any) -> Any:
    monkeypatch.setattr(PairTrainer, "defer_metrics", later)
    recipe = dataclasses.replace(QUICK, gradient_accumulation=2, logging_steps=2, max_steps=6, **knobs)
    return a_trainer(base, folder, recipe).train(some_pairs(16), some_pairs(4, seed=1)).history


@pytest.mark.training
def test_what_is_logged_is_what_trl_logs(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = history(base, tmp_path / "at once", monkeypatch, False, eval_steps=3)
    later = history(base, tmp_path / "later", monkeypatch, True, eval_steps=3)
    timed = {"tokens_per_second", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    assert later.keys() == at_once.keys()
    assert {
        "rewards/margins",
        "entropy",
        "mean_token_accuracy",
        "logits/chosen",
        "log_ratio",
        "num_tokens",
    } < later.keys()
    for name in later.keys() - timed:
        assert later[name] == at_once[name], name  # not nearly: the same


@pytest.mark.training
def test_a_step_waits_for_its_device_only_where_something_is_logged(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, reads = trl.DPOTrainer.training_step, []  # from the batch to its gradients

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Reads() as seen:
            loss = stock(self, *args, **kwargs)
        reads.append(seen.found)
        return loss

    monkeypatch.setattr(trl.DPOTrainer, "training_step", counted)
    history(base, tmp_path / "later", monkeypatch, True)
    later, reads = reads, []
    history(base, tmp_path / "at once", monkeypatch, False)
    assert later == [[]] * 12
    assert all(len(found) >= 15 for found in reads), reads


@pytest.mark.training
def test_a_run_that_diverged_is_found_when_its_losses_are_read(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TrainingFailed, match=r"at step [12] of 6: training diverged"):
        history(base, tmp_path / "run", monkeypatch, True, learning_rate=1e30, max_grad_norm=1e30)


def test_one_transfer_fetches_all_numbers_of_a_type() -> None:
    pending = LazyMetrics()
    numbers = [pending.wrap(torch.tensor([1.0, 2.0, float(i)])).mean().item() for i in range(9)]
    tokens = pending.wrap(torch.tensor([3, 4])).sum().item()
    mean = sum(numbers) / len(numbers)
    assert (float(mean), int(tokens // 2)) == (pytest.approx(7 / 3), 3)
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
@pytest.mark.parametrize("strategy", [Strategy.LAST_LAYER, Strategy.SPLIT, Strategy.DENSE, Strategy.CACHE])
def test_packed_rows_are_computed_where_they_lie_and_nothing_is_read(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
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
