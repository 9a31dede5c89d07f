"""A model's self-test is not repeated by a later run unless something it depends on is new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl.training.packed import selection, selftest_cache
from rl.training.packed.prefix_attention import Rung
from rl.training.packed.row_cache import RowCache
from rl.training.policy import LoadedPolicy
from tests.test_prefix_attention import a_policy, some_items


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name per self-test that really ran."""
    ran: list[str] = []
    stock = selection._stock

    def counted(policy: LoadedPolicy, *args: Any, **kwargs: Any) -> Any:
        ran.append(policy.base_model)
        return stock(policy, *args, **kwargs)

    monkeypatch.setattr(selection, "_stock", counted)
    return ran


def kept(shape: str, folder: Path) -> LoadedPolicy:
    policy = a_policy(shape)
    policy.findings = RowCache(folder / "findings.sqlite3")
    return policy


def test_a_later_run_takes_what_an_earlier_one_found_and_says_so(tmp_path: Path, tried: list[str]) -> None:
    first = selection.rung_choose(kept("llama", tmp_path), some_items(40, 20), gradients=True)
    policy = kept("llama", tmp_path)
    second = selection.rung_choose(policy, some_items(30, 10, seed=2), gradients=True)
    assert tried == ["llama"]
    assert second.rung is first.rung is Rung.LAST_LAYER
    assert second.reason == f"{first.reason}; found by an earlier run"
    # and it is installed, not only named
    assert vars(policy.model.base_model.model.model.layers[-1]).get("forward") is not None


@pytest.mark.parametrize("new", ["longer rows", "gradients", "code", "adapter"])
def test_what_is_new_is_tried(
    tmp_path: Path, tried: list[str], new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    selection.rung_choose(kept("llama", tmp_path), some_items(40), gradients=True)
    policy = kept("llama", tmp_path)
    if new == "code":
        monkeypatch.setattr(selftest_cache, "_code", lambda: "of another version")
    if new == "adapter":
        next(p for name, p in policy.model.named_parameters() if "lora_A" in name).requires_grad_(False)
    items = some_items(41 if new == "longer rows" else 40)
    selection.rung_choose(policy, items, gradients=new != "gradients")
    assert len(tried) == 2


def test_what_no_rung_could_do_and_what_failed_is_tried_again(
    tmp_path: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(selection, "_packed", no_memory)
        assert (
            selection.rung_choose(kept("llama", tmp_path), some_items(40), gradients=True).rung is Rung.STOCK
        )
    assert (
        selection.rung_choose(kept("llama", tmp_path), some_items(40), gradients=True).rung is Rung.LAST_LAYER
    )
    assert len(tried) == 2
