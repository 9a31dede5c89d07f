"""Reward models: the losses by hand, three objectives that learn, calibration, and reuse by path."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

from packed_forward.packing import Strategy, StrategyChoice
from rl.recipes import RecipeError, RewardModelRecipe
from rl.rewards.base import RewardSample
from rl.statistics import calibration_curve, expected_calibration_error
from rl.training import trl_trainer
from rl.training.loading import PolicyLoadError
from rl.training.result import TrainingRefused
from rl.training.reward_model import (
    RewardModel,
    RewardModelTrainer,
    reward_loss,
    row_accuracy,
    train_reward_model,
)
from rl.training.reward_scores import held_out_metrics
from tests.support.dpo_runs import HARDWARE, some_pairs
from tests.support.tiny_models import tiny_model, tiny_tokenizer

CHART, TABLE = '{"widget": "line_chart"}', '{"widget": "table"}'

RECIPE = RewardModelRecipe(
    batch_size=8,
    learning_rate=5e-3,
    lora_r=4,
    lora_alpha=8,
    max_length=96,
    max_completion_length=32,
    logging_steps=1,
    warmup_ratio=0.0,
    epochs=4,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("base"), "llama"))


def singles(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "prompt": row["prompt"],
            "completion": CHART if number % 2 else TABLE,
            "label": bool(number % 2),
            "score": 0.9 if number % 2 else 0.2,
        }
        for number, row in enumerate(some_pairs(count, seed=seed))
    ]


def test_losses_and_calibration_by_hand() -> None:
    # the losses by hand
    scores = torch.tensor([2.0, 0.0, 1.0, 3.0])
    pairwise = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(3))) / 2
    assert float(reward_loss(scores, torch.ones(2), "pairwise")) == pytest.approx(pairwise, abs=1e-6)
    target = torch.tensor([1.0, 0.0, 0.5, 1.0])
    assert float(reward_loss(scores, target, "regression")) == pytest.approx((1 + 0 + 0.25 + 4) / 4)
    binary = (math.log(1 + math.exp(-2)) + math.log(2)) / 2
    assert float(reward_loss(scores[:2], target[:2], "binary")) == pytest.approx(binary, abs=1e-6)
    # calibration counts each bin by its weight
    predicted, observed = [0.05, 0.07, 0.95, 1.0], [0.0, 1.0, 1.0, 1.0]
    curve = calibration_curve(predicted, observed)
    expected = [(0.06, 0.5, 2.0), (0.975, 1.0, 2.0)]
    assert [(round(b["predicted"], 3), b["observed"], b["count"]) for b in curve] == expected
    assert expected_calibration_error(predicted, observed) == pytest.approx((2 * 0.44 + 2 * 0.025) / 4)


def test_rows_scored_as_people_judged_by_hand() -> None:
    scores = torch.tensor([0.2, 0.7, 0.1, 0.9])
    pairs = row_accuracy(scores, torch.ones(2), "pairwise")  # 0.2 over 0.1; 0.7 under 0.9
    assert pairs.tolist() == [1, 0]
    shown = row_accuracy(scores, torch.tensor([0.1, 0.9, 0.8, 0.3]), "regression")
    assert shown.tolist() == [1, 1, 0, 0]
    thumbs = row_accuracy(torch.tensor([-1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 0.0]), "binary")
    assert thumbs.tolist() == [1, 1, 0]


@pytest.mark.training
@pytest.mark.parametrize("objective", ["pairwise", "binary", "regression"])
def test_each_objective_foretells_held_out_feedback(base: str, tmp_path: Path, objective: str) -> None:
    rows = some_pairs(32) if objective == "pairwise" else singles(32)
    held = some_pairs(12, seed=9) if objective == "pairwise" else singles(12, seed=9)
    recipe = dataclasses.replace(RECIPE, objective=objective, epochs=8)
    model, result = train_reward_model(
        rows, recipe, output_dir=tmp_path, eval_rows=held, base_model=base, agent="widgets", hardware=HARDWARE
    )
    assert result.metrics["accuracy"] > 0.9, result.metrics
    assert result.metrics["brier"] < 0.15
    assert result.metrics["eval_loss"] < result.history["loss"][0]
    assert result.history["rewards/accuracies"][-1] > 0.9
    assert result.history["rewards/std"][-1] > 0
    assert len(result.history["rewards/mean"]) == len(result.history["loss"])
    assert result.metrics["eval_rewards/accuracies"] > 0.9
    result.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1_000
    prompt = [{"role": "user", "content": "how did revenue change"}]
    good, bad = (
        value.raw
        for value in model.score(
            [RewardSample(prompt, CHART, "widgets"), RewardSample(prompt, TABLE, "widgets")]
        )
    )
    assert good is not None
    assert -2 <= bad < good <= 2
    assert sum(bin["count"] for bin in model.facts["held_out"]["curve"]) == len(held)


@pytest.mark.campaign
def test_a_checkpoint_scores_as_it_did_when_it_was_saved(base: str, tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, max_steps=2)
    model, result = train_reward_model(
        some_pairs(8), recipe, output_dir=tmp_path, base_model=base, hardware=HARDWARE
    )
    again = RewardModel.load(result.checkpoint, HARDWARE)
    items = [(row["prompt"], row["chosen"]) for row in some_pairs(5, seed=3)]
    assert again.scores(items) == pytest.approx(model.scores(items), abs=1e-5)
    one_by_one = [again.scores([item])[0] for item in items]
    assert again.scores(items) == pytest.approx(one_by_one, abs=1e-4)  # padding changes nothing
    assert not list(Path(result.checkpoint).glob("*.bin"))


@pytest.mark.campaign
def test_an_encoder_serves_as_backbone(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer("gpt2")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
    config = DebertaV2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    )
    DebertaV2ForSequenceClassification(config).save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    recipe = dataclasses.replace(RECIPE, architecture="encoder", max_steps=2)
    model, result = train_reward_model(
        some_pairs(8),
        recipe,
        output_dir=tmp_path / "run",
        eval_rows=some_pairs(4, seed=2),
        base_model=str(tmp_path / "encoder"),
        hardware=HARDWARE,
    )
    assert 0 <= result.metrics["accuracy"] <= 1
    assert len(model.scores([(some_pairs(1)[0]["prompt"], CHART)])) == 1


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyLoadError, match=r"expected a reward model at .*train_reward_model"):
        RewardModel.load(tmp_path, HARDWARE)


def test_a_score_out_of_range_is_refused_with_its_row(base: str, tmp_path: Path) -> None:
    rows = singles(2)
    rows[1]["score"] = 7
    trainer = RewardModelTrainer(
        dataclasses.replace(RECIPE, objective="regression"), base, output_dir=tmp_path, hardware=HARDWARE
    )
    with pytest.raises(TrainingRefused, match="row 1: expected `score`, a number in"):
        trainer.train(rows)


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(RecipeError, match="one of pairwise, regression, binary"):
        RewardModelRecipe(objective="best")


@pytest.mark.training
def test_a_backbone_in_half_precision_keeps_its_head_in_float32(base: str, tmp_path: Path) -> None:
    hardware = dataclasses.replace(HARDWARE, dtype="bfloat16")
    recipe = dataclasses.replace(RECIPE, max_steps=2)
    model, result = train_reward_model(
        some_pairs(16), recipe, output_dir=tmp_path, base_model=base, hardware=hardware
    )
    assert result.status == "succeeded"
    assert model.model.dtype == torch.bfloat16
    scores = model.scores([(row["prompt"], CHART) for row in some_pairs(4)])
    assert any(score != float(torch.tensor(score).bfloat16()) for score in scores)


@pytest.mark.training
@pytest.mark.parametrize("objective", ["pairwise", "binary"])
def test_packed_scores(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str) -> None:
    """Two responses to one prompt in one row: the prompt is computed once, the losses are the same."""
    recipe = dataclasses.replace(RECIPE, objective=objective, max_steps=6, lora_dropout=0.0, batch_size=4)
    rows = some_pairs(16) if objective == "pairwise" else singles(16)
    found = {}
    for way in ("packed", "plain"):
        if way == "plain":
            stock = StrategyChoice(Strategy.STOCK, "a test", {})
            monkeypatch.setattr(trl_trainer, "strategy_select", lambda *_, kept=stock, **__: kept)
        trainer = RewardModelTrainer(recipe, base, output_dir=tmp_path / way, hardware=HARDWARE)
        found[way] = trainer.train(rows, rows[:4])
    assert any("rows that share a prompt" in note for note in found["packed"].details)
    assert "rows are not packed: a test" in found["plain"].details
    losses = found["plain"].history["loss"]
    assert found["packed"].history["loss"] == pytest.approx(losses, abs=2e-5)
    assert losses[-1] < losses[0]
    assert found["packed"].metrics["brier"] == pytest.approx(found["plain"].metrics["brier"], abs=1e-4)


def test_a_pair_is_foretold_by_the_difference_of_its_scores() -> None:
    held = held_out_metrics([(1.0, 1.0 - math.log(3)), (0.0, math.log(4))], [1.0, 1.0], "pairwise")
    assert held.accuracy == 0.5  # 3 to 1 for the chosen, then 4 to 1 against it
    assert held.brier == pytest.approx((0.25**2 + 0.8**2) / 2)
    # both are sure of themselves, 0.75 and right, 0.8 and wrong: bins of a tenth
    assert held.calibration_error == pytest.approx((0.25 + 0.8) / 2)
