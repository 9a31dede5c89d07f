"""KTO and SFT: weights by the paper, runs that learn what was shown, resume, and refuse."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from packed_forward.packing import Strategy, StrategyChoice
from rl.recipes import KTORecipe, RecipeError, SFTRecipe
from rl.training import sft as sft_module
from rl.training import trl_trainer
from rl.training.encoding import batches_within, parts_alike
from rl.training.kto import KTOTrainer, likelihood_loss, logistic_loss
from rl.training.policy import generate, load_policy
from rl.training.result import TrainingRefused, TrainResult
from rl.training.rows import kto_weights
from rl.training.scoring import score_responses
from rl.training.sft import SFTTrainer
from tests.support.dpo_runs import HARDWARE, ListenerCallback, some_pairs

CHART, TABLE = '{"widget": "line_chart"}', '{"widget": "table"}'

KNOBS: dict[str, Any] = {"batch_size": 4, "learning_rate": 5e-3, "lora_r": 4, "lora_alpha": 8}
KNOBS |= {"max_length": 96, "max_completion_length": 32, "logging_steps": 1, "warmup_ratio": 0.0}
KTO = KTORecipe(**KNOBS)
SFT = SFTRecipe(**KNOBS)


def labels(count: int) -> list[dict[str, Any]]:
    """Charts are good and tables bad, each to a prompt of its own."""
    return [
        {"prompt": row["prompt"], "completion": CHART if number % 2 else TABLE, "label": bool(number % 2)}
        for number, row in enumerate(some_pairs(count))
    ]


def demonstrations(count: int) -> list[dict[str, Any]]:
    return [{"prompt": row["prompt"], "completion": CHART} for row in some_pairs(count)]


def kto(base: str, folder: Path, recipe: KTORecipe = KTO, **more: Any) -> KTOTrainer:
    return KTOTrainer(recipe, base, output_dir=folder, hardware=HARDWARE, **more)


def sft(base: str, folder: Path, recipe: SFTRecipe = SFT, **more: Any) -> SFTTrainer:
    return SFTTrainer(recipe, base, output_dir=folder, hardware=HARDWARE, **more)


@pytest.mark.parametrize(
    ("good", "bad", "weights"),
    [
        (100, 100, (1.0, 1.0)),
        (120, 100, (1.0, 1.0)),  # 1.2 lies within [1, 4/3]
        (50, 100, (2.0, 1.0)),  # 2 * 50 = 1 * 100
        (400, 100, (1.0, 3.0)),  # 400 / (3 * 100) = 4/3
    ],
)
def test_the_rarer_side_weighs_more(good: int, bad: int, weights: tuple[float, float]) -> None:
    assert kto_weights(good, bad) == pytest.approx(weights)
    found = kto_weights(good, bad)
    assert 1.0 <= found[0] * good / (found[1] * bad) <= 4 / 3 + 1e-12


def test_one_kind_of_response_is_refused() -> None:
    with pytest.raises(TrainingRefused, match=r"3 good and 0 bad.*train_sft"):
        kto_weights(3, 0)


def test_a_last_batch_of_one_kind_of_response_ends_the_run_in_figures(base: str, tmp_path: Path) -> None:
    """Its other kind has no logits: not a number, which no database takes as JSON."""
    recipe = dataclasses.replace(KTO, epochs=1.0, max_steps=-1, batch_size=4, gradient_accumulation=1)
    result = kto(base, tmp_path, recipe).train(labels(9))
    assert (result.steps, result.status) == (3, "succeeded")
    assert {"loss", "logps/chosen", "logps/rejected"} <= result.metrics.keys()
    assert all(map(math.isfinite, result.metrics.values()))


def test_a_batch_of_one_has_no_reference_point() -> None:
    with pytest.raises(RecipeError, match="at least 2"):
        KTORecipe(batch_size=1)


def preference(base: str, adapter: str | None) -> float:
    """Mean log-probability of the chart over the table, in nats, on prompts not trained on."""
    policy = load_policy(base, adapter, hardware=HARDWARE)
    prompts = [row["prompt"] for row in some_pairs(8, seed=9)]
    charts = score_responses(policy, [(prompt, CHART) for prompt in prompts])
    tables = score_responses(policy, [(prompt, TABLE) for prompt in prompts])
    return sum(a.logp - b.logp for a, b in zip(charts, tables, strict=True)) / len(prompts)


@pytest.mark.training
def test_kto_learns_from_thumbs_what_is_preferred(base: str, tmp_path: Path) -> None:
    follower = ListenerCallback()
    result = kto(base, tmp_path, dataclasses.replace(KTO, epochs=6), listener=follower).train(
        labels(32), labels(6)
    )
    assert preference(base, result.checkpoint) > preference(base, None) + 2
    assert {"loss", "kl", "rewards/chosen", "rewards/rejected", "rewards/margins"} <= result.history.keys()
    assert "eval_loss" in result.metrics
    assert len(follower.rows) >= len(result.history["step"])


def test_the_logistic_loss_by_hand() -> None:
    # -log sigmoid(0) = ln 2 for the good one, -log sigmoid(-ln 3) = ln 4 for the bad one
    rewards, liked = torch.tensor([0.0, math.log(3)]), torch.tensor([True, False])
    assert float(logistic_loss(rewards, liked, (1.0, 1.0))) == pytest.approx(1.5 * math.log(2))
    assert float(logistic_loss(rewards, liked, (2.0, 1.0))) == pytest.approx(2 * math.log(2))


@pytest.mark.campaign
@pytest.mark.training
def test_the_logistic_loss_teaches(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = dataclasses.replace(KTO, loss="logistic", max_steps=6)
    packed = kto(base, tmp_path / "packed", recipe).train(labels(16), labels(4))
    assert packed.history["loss"][0] == pytest.approx(math.log(2), abs=1e-5)  # the policy is its reference
    assert packed.history["loss"][-1] < packed.history["loss"][0]
    assert "kl" not in packed.history  # this loss has no reference point, so that nobody measured one
    assert "kl" not in packed.metrics
    assert preference(base, packed.checkpoint) > preference(base, None)
    # and the library's own rows, one for each response, give the same
    monkeypatch.setattr(
        trl_trainer, "strategy_select", lambda *_, **__: StrategyChoice(Strategy.STOCK, "a test", {})
    )
    stock = kto(base, tmp_path / "stock", recipe).train(labels(16), labels(4))
    assert stock.history["loss"] == pytest.approx(packed.history["loss"], abs=1e-4)


@pytest.mark.training
def test_packed_demonstrations_are_learnt_as_the_librarys_own_rows(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same losses, gradients, distance, accuracy and count of tokens; two demonstrations share a prompt."""
    rows = [*demonstrations(8), {**demonstrations(1)[0], "completion": TABLE}]
    packed = sft(base, tmp_path / "packed").train(rows, demonstrations(4))
    assert any("split+last_layer" in line for line in packed.details)
    monkeypatch.setattr(
        trl_trainer, "strategy_select", lambda *_, **__: StrategyChoice(Strategy.STOCK, "a test", {})
    )
    stock = sft(base, tmp_path / "stock").train(rows, demonstrations(4))
    for name in "loss grad_norm log_ratio mean_token_accuracy eval_loss num_tokens".split():
        assert packed.history[name] == pytest.approx(stock.history[name], rel=1e-3, abs=1e-4), name


@pytest.mark.training
def test_a_long_row_has_the_same_loss(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = demonstrations(4)
    rows[2]["prompt"] = [{"role": "user", "content": "a b c " * 60}]
    computed: list[tuple[int, ...]] = []
    log = sft_module._SFTTrainer._log_distance
    monkeypatch.setattr(
        sft_module._SFTTrainer,
        "_log_distance",
        lambda self, loss, reference, items, *rest: (
            computed.append(
                (len(items), max(len(item.prompt_ids) + len(item.response_ids) for item in items))
            ),
            log(self, loss, reference, items, *rest),
        ),
    )
    recipe = SFT.with_knobs(max_steps=1, max_length=256)
    found = [
        sft(base, tmp_path / str(most), recipe.with_knobs(micro_tokens=most)).train(rows).history
        for most in (0, 300)
    ]
    (_, width), *parts = computed
    assert computed[0][0] == 4
    assert sorted(number for number, _ in parts) == [1, 3]
    assert max(number * wide for number, wide in parts) <= 300
    assert max(wide for _, wide in parts) == width
    for name in ("loss", "grad_norm"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4), name


@pytest.mark.parametrize(
    ("lengths", "parts"), [([9, 2, 3, 2], [[1, 3, 2], [0]]), ([4, 4], [[0, 1]]), ([20], [[0]]), ([], [])]
)
def test_rows_of_like_length_make_a_part(lengths: list[int], parts: list[list[int]]) -> None:
    assert parts_alike(lengths, 9) == parts


def test_batches_hold_so_many_rows_and_tokens() -> None:
    lengths = [2, 2, 3, 8, 20]
    assert list(batches_within([0, 1, 2, 3, 4], lengths, 2, 0)) == [[0, 1], [2, 3], [4]]
    assert list(batches_within([0, 1, 2, 3, 4], lengths, 9, 9)) == [[0, 1, 2], [3], [4]]
    assert list(batches_within([], lengths, 9, 9)) == []


@pytest.mark.training
def test_sft_reproduces_what_was_shown(base: str, tmp_path: Path) -> None:
    result = sft(base, tmp_path, dataclasses.replace(SFT, epochs=10)).train(
        demonstrations(24), demonstrations(4)
    )
    policy = load_policy(base, result.checkpoint, hardware=HARDWARE)
    answers = generate(policy, [row["prompt"] for row in some_pairs(8, seed=9)], max_new_tokens=32)
    assert [answer.text for answer in answers] == [CHART] * 8
    assert result.metrics["eval_loss"] < 0.1
    assert result.history["mean_token_accuracy"][-1] > 0.95
    # LoRA starts as nothing, so the first step is taken at the base; what is shown then becomes likelier than it was
    assert result.history["log_ratio"][0] == pytest.approx(0, abs=1e-4)
    rewards, distances = result.history["rewards/demonstrations"], result.history["log_ratio"]
    assert rewards[-1] > 10
    tokens = rewards[-1] / distances[-1]
    assert tokens == pytest.approx(round(tokens), abs=1e-3)  # each demonstration is the same words
    base_loss = result.history["loss"][0]
    assert distances[-1] == pytest.approx(base_loss - result.history["loss"][-1], abs=0.5)
    assert result.history["eval_log_ratio"][-1] > 0
    result.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1_000


@pytest.mark.slow
def test_a_result_loads_and_draws_itself(base: str, tmp_path: Path) -> None:
    result = kto(base, tmp_path / "run", dataclasses.replace(KTO, max_steps=2)).train(labels(8))
    result.save(tmp_path / "result.json")
    again = TrainResult.load(tmp_path / "result.json")
    assert again == result
    again.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1_000


def test_nothing_to_show_is_refused(base: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingRefused, match="at least one demonstration"):
        sft(base, tmp_path).train([])


@pytest.mark.slow
def test_known_references_are_not_computed_again(base: str, tmp_path: Path) -> None:
    recipe = dataclasses.replace(KTO, max_steps=1)
    kto(base, tmp_path / "one", recipe, cache_dir=tmp_path / "cache").train(labels(8))
    again = kto(base, tmp_path / "two", recipe, cache_dir=tmp_path / "cache")
    again.train(labels(8))
    assert any(note.startswith("reference log-probabilities: 0 computed") for note in again.context.details)


def test_the_likelihood_of_the_good_responses_is_a_mean_over_their_tokens() -> None:
    """Two good responses of 2 and 1 tokens, -1, -2 and -3 nats: 6 / 3. The bad one counts for nothing."""
    log_probs = torch.tensor([[-1.0, -2.0], [-9.0, -9.0], [-3.0, 0.0]])
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    assert likelihood_loss(log_probs, mask, torch.tensor([True, False, True])) == pytest.approx(2.0)
    assert likelihood_loss(log_probs, mask, torch.tensor([False, False, False])) == 0.0


@pytest.mark.campaign
@pytest.mark.training
def test_packed_rows_lose_as_trls(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL computes each prompt twice, once for the reference point; packed, it is computed once. The same losses."""
    recipe = dataclasses.replace(KTO, max_steps=6, lora_dropout=0.0, sft_weight=0.5)
    rows = [row | {"completion": CHART, "label": True} for row in labels(16)]
    rows[3] |= {"completion": TABLE, "label": False}
    packed = kto(base, tmp_path / "packed", recipe).train(rows, rows[:4])
    assert any("rows that share a prompt" in note for note in packed.details)
    stock = StrategyChoice(Strategy.STOCK, "a test", {})
    monkeypatch.setattr(trl_trainer, "strategy_select", lambda *_, **__: stock)
    plain = kto(base, tmp_path / "plain", recipe).train(rows, rows[:4])
    assert "rows are not packed: a test" in plain.details
    for name in ("loss", "kl", "rewards/chosen", "rewards/rejected"):
        assert packed.history[name] == pytest.approx(plain.history[name], abs=2e-5, nan_ok=True), name
    assert packed.metrics["eval_loss"] == pytest.approx(plain.metrics["eval_loss"], abs=2e-5)
    assert max(plain.history["kl"]) > 1e-4  # the reference point moved
