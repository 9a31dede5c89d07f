"""DPO: runs that learn what can be learnt, on every architecture and in 4 bits."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from safetensors.torch import load_file

from packed_forward import packing, selection
from rl.training import trl_trainer
from rl.training.encoding import EncodedResponse
from rl.training.policy import generate, load_policy
from rl.training.result import TrainResult
from rl.training.scoring import score_responses
from tests.support.dpo_runs import HARDWARE, QUICK, ListenerCallback, a_trainer, some_pairs
from tests.support.tiny_models import TOKENIZERS, tiny_model


@pytest.mark.training
@pytest.mark.parametrize("architecture", TOKENIZERS)
def test_every_architecture_trains_and_its_adapter_answers(tmp_path: Path, architecture: str) -> None:
    folder = str(tiny_model(tmp_path / "base", architecture))
    result = a_trainer(folder, tmp_path / "run", dataclasses.replace(QUICK, max_steps=2)).train(some_pairs(8))
    assert (result.status, result.steps) == ("succeeded", 2)
    weights = load_file(Path(result.checkpoint) / "adapter_model.safetensors")
    assert any(float(w.abs().max()) > 0 for name, w in weights.items() if "lora_B" in name)
    policy = load_policy(folder, result.checkpoint, hardware=HARDWARE)
    (answer,) = generate(policy, [some_pairs(1)[0]["prompt"]], max_new_tokens=4)
    assert answer.tokens >= 1


@pytest.mark.training
def test_a_result_reports_the_run(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    follower = ListenerCallback()
    recipe = dataclasses.replace(QUICK, epochs=2, eval_steps=2)
    result = a_trainer(base, tmp_path / "run", recipe, listener=follower, agent="widgets").train(
        some_pairs(16), some_pairs(5, seed=1)
    )
    assert capsys.readouterr().out == ""
    assert (result.steps, result.total_steps, follower.total) == (8, 8, 8)
    assert follower.steps == list(range(1, 9))
    assert result.samples == {"train": 16, "eval": 5}
    history = result.history
    assert history["step"] == list(range(1, 9))
    assert history["eval_step"] == [2, 4, 6, 8]
    for name in ("loss rewards/accuracies rewards/margins log_ratio learning_rate tokens_per_second").split():
        assert len(history[name]) == 8, name
        assert all(math.isfinite(value) for value in history[name])
    assert len(history["eval_loss"]) == len(history["eval_rewards/accuracies"]) == 4
    # before the first update policy and reference are the same model
    assert history["loss"][0] == pytest.approx(math.log(2), abs=1e-4)
    assert history["log_ratio"][0] == pytest.approx(0, abs=1e-4)
    assert [step for step, row in follower.rows if "loss" in row] == list(range(1, 9))
    assert [step for step, row in follower.rows if "eval_loss" in row] == [2, 4, 6, 8]
    assert result.metrics["loss"] == history["loss"][-1]
    assert result.recipe == recipe.as_dict()
    assert result.hardware["dtype"] == "float32"
    assert result.libraries["trl"].startswith("1.16")
    assert TrainResult.load(result.save(tmp_path / "result.json")) == result
    facts = json.loads((Path(result.checkpoint) / "ratchet.json").read_text())
    expected = ("widgets", "dpo", result.base_model_hash)
    assert (facts["agent"], facts["method"], facts["base_model_hash"]) == expected


@pytest.mark.training
def test_a_preference_that_can_be_learnt_is_learnt(base: str, tmp_path: Path) -> None:
    recipe = dataclasses.replace(QUICK, epochs=3)
    result = a_trainer(base, tmp_path / "run", recipe).train(some_pairs(64))
    assert result.history["rewards/accuracies"][-1] == 1.0
    assert result.history["loss"][-1] < 0.3
    policy = load_policy(base, result.checkpoint, hardware=HARDWARE)
    # the base may already hold either answer more likely; half the pairs have each, so that it can only be right
    # about half of them, and the trained policy too: what must have moved is the margin
    rows = some_pairs(20, seed=9)
    trained = [c.logp - r.logp for c, r in zip(*sides(policy, rows, True), strict=True)]
    before = [c.logp - r.logp for c, r in zip(*sides(policy, rows, False), strict=True)]
    assert all(after > was + 1 for after, was in zip(trained, before, strict=True))


def sides(policy: Any, rows: list[dict[str, Any]], adapter: bool) -> tuple[list[Any], list[Any]]:
    return (
        score_responses(policy, [(row["prompt"], row["chosen"]) for row in rows], adapter=adapter),
        score_responses(policy, [(row["prompt"], row["rejected"]) for row in rows], adapter=adapter),
    )


@pytest.mark.training
def test_the_reference_is_the_same_at_once_or_each_step(base: str, tmp_path: Path) -> None:
    histories = []
    for once in (True, False):
        recipe = dataclasses.replace(QUICK, precompute_reference=once, max_steps=3)
        histories.append(a_trainer(base, tmp_path / str(once), recipe).train(some_pairs(12)).history)
    assert histories[0]["loss"] == pytest.approx(histories[1]["loss"], abs=1e-4)
    assert histories[0]["rewards/margins"] == pytest.approx(histories[1]["rewards/margins"], abs=1e-3)


@pytest.mark.training
def test_4_bit_reaches_every_layer(base: str, tmp_path: Path) -> None:
    recipe = dataclasses.replace(QUICK, quantization="4bit", max_steps=2, gradient_checkpointing=True)
    follower = ListenerCallback()
    result = a_trainer(base, tmp_path / "run", recipe, listener=follower).train(some_pairs(8))
    weights = load_file(Path(result.checkpoint) / "adapter_model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    # B starts at zero, so a layer no gradient came to is zero still
    assert all(float(weight.abs().max()) > 0 for name, weight in weights.items() if "lora_B" in name)
    assert any("4 bits" in note for note in follower.notes)
    # packed rows are held to the stock forward over the same quantised weights
    assert any("share a prompt: split+last_layer" in note for note in follower.notes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_4_bit_bases_pack_their_rows_within_their_type_s_tolerance(base: str, dtype: str) -> None:
    hardware = dataclasses.replace(HARDWARE, dtype=dtype)
    policy = load_policy(base, hardware=hardware, quantization="4bit", trainable=True, recipe=QUICK)
    items = [EncodedResponse([7, 8, 9] * n, answer) for n in (4, 11) for answer in ([5, 6, 7], [9, 4])]
    assert policy.quantization == "4bit"
    assert selection.strategy_select(policy, items, gradients=True).strategy is packing.Strategy.LAST_LAYER


def test_4_bit_weights_pass_gradients_on_after_they_have_been_scored_with(base: str) -> None:
    exact = load_policy(base, hardware=HARDWARE, quantization="4bit")
    score_responses(
        exact, [([{"role": "user", "content": "why"}], "because")]
    )  # a forward in eval mode comes first
    layer = exact.model.model.layers[0].mlp.down_proj
    weight = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    x = torch.randn(3, weight.shape[1], requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, -1), atol=1e-4, rtol=1e-4)


@pytest.mark.campaign
def test_45_packed_steps_are_stock_steps(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = dataclasses.replace(QUICK, max_steps=45, learning_rate=1e-3, logging_steps=1)
    packed = a_trainer(base, tmp_path / "packed", recipe)
    losses = packed.train(some_pairs(30)).history["loss"]
    assert any("split+last_layer" in note for note in packed.context.details), packed.context.details
    stock = packing.StrategyChoice(packing.Strategy.STOCK, "of a test", {})
    monkeypatch.setattr(trl_trainer, "strategy_select", lambda *_, **__: stock)
    plain = a_trainer(base, tmp_path / "plain", recipe)
    expected = plain.train(some_pairs(30)).history["loss"]
    assert any("not packed" in note for note in plain.context.details), plain.context.details
    assert len(losses) == 45
    assert losses == pytest.approx(expected, abs=1e-4)
    assert losses[-1] < losses[0]
