"""DPO: the loss against named vectors, and runs that learn, stop, resume, refuse and count."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import bitsandbytes
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from rl.agents.base import ChoiceAgent
from rl.recipes import DPORecipe
from rl.training import trl_runs
from rl.training.dpo import DPOTrainer
from rl.training.encoding import EncodedPairs, EncodedResponse
from rl.training.evaluate import evaluate_policy
from rl.training.folder import failures_explained
from rl.training.hardware import Hardware
from rl.training.packed import selection, strategies
from rl.training.packed.trl_forward import EXTRAS, install_forward
from rl.training.pair_trainer import trl_losses
from rl.training.policy import generate, load_policy
from rl.training.progress import Silent, checkpoint_is_whole
from rl.training.result import TrainingFailed, TrainingRefused, TrainResult
from rl.training.run_context import run_context
from rl.training.scoring import score_responses
from tests.support.tiny_models import TOKENIZERS, tiny_model

HARDWARE = Hardware("cpu", "a test", 1.0, 1.0, 1, "a test", "float32", "highest", True, "cpu")

QUICK = DPORecipe(
    batch_size=4, learning_rate=5e-3, lora_r=4, lora_alpha=8, max_length=96, max_completion_length=32,
    logging_steps=1, save_steps=100, warmup_ratio=0.0,
)  # fmt: skip

VECTORS = Path(__file__).parent.parent.parent / "shared" / "data" / "vectors" / "reference_vectors.json"


class ListenerCallback(Silent):
    """Writes down what a run tells it; stops or dies after a given step."""

    def __init__(self, stop_after: int = 10**9, die_after: int = 10**9) -> None:
        self.stop_after, self.die_after = stop_after, die_after
        self.total = 0
        self.steps: list[int] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.notes: list[str] = []

    def on_start(self, total_steps: int) -> None:
        self.total = total_steps

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.rows.append((step, metrics))

    def on_step(self, step: int, total: int) -> None:
        self.steps.append(step)
        if step >= self.die_after:
            raise ConnectionError("the machine went away")

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def should_stop(self) -> bool:
        return bool(self.steps) and self.steps[-1] >= self.stop_after


def some_pairs(
    count: int, prefer: Callable[[Random], bool] = lambda _: True, seed: int = 0
) -> list[dict[str, Any]]:
    """Prompts of random words; where `prefer` says so the chart is chosen over the table, else the reverse."""
    random = Random(seed)
    rows = []
    for _ in range(count):
        words = " ".join(
            random.choice(("how", "did", "revenue", "change", "over", "week"))
            for _ in range(random.randint(2, 9))
        )
        good, bad = ("line_chart", "table") if prefer(random) else ("table", "line_chart")
        rows.append(
            {
                "prompt": [{"role": "user", "content": words}],
                "chosen": f'{{"widget": "{good}"}}',
                "rejected": f'{{"widget": "{bad}"}}',
            }
        )
    return rows


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("base"), "llama"))


def a_trainer(base: str, folder: Path, recipe: DPORecipe = QUICK, **more: Any) -> DPOTrainer:
    return DPOTrainer(recipe, base, output_dir=folder, hardware=HARDWARE, **more)


# The loss ------------------------------------------------------------------------------------------------------

# pytorch/torchtune (BSD-3) tests/torchtune/rlhf/loss/test_dpo_loss.py; the smoothed values by the formulas of
# conservative DPO (Mitchell 2023) and robust DPO (Chowdhury et al. 2024) from the same inputs
POLICY_CHOSEN, POLICY_REJECTED = [-0.5, -10.0, -1.0], [-0.1, -30.0, -21.0]
REFERENCE_CHOSEN, REFERENCE_REJECTED = [-0.5, -10.1, -0.1], [-0.1, -20.1, -0.1]
LOSSES = [
    ({}, [0.6931471805599453, 0.3132616875182229, 0.1269280110429725]),
    ({"label_smoothing": 0.1}, [0.6931471805599453, 0.41326168751822295, 0.32692801104297253]),
    # plus half the chosen response's -log p, one token long here: 0.25, 5, 0.5
    ({"sft_weight": 0.5}, [0.6931471805599453 + 0.25, 0.3132616875182229 + 5.0, 0.1269280110429725 + 0.5]),
    ({"loss": "robust", "label_smoothing": 0.1}, [0.6931471805599452, 0.18826168751822295, -0.12307198895702753]),
]  # fmt: skip


def losses_of(base: str, folder: Path, recipe: DPORecipe) -> tuple[list[float], Any]:
    """Each example's loss by the trainer TRL runs with, its model replaced by one that answers the vectors' values."""
    owner = a_trainer(base, folder, recipe)
    folder.mkdir(exist_ok=True)
    policy = owner.load_base_model()
    pairs = policy.encoder.pairs(some_pairs(1), 96, 32)
    trainer = owner._trainer(policy, owner._arguments(1, 0), pairs, EncodedPairs())
    losses = []
    for i in range(3):

        def answers(i: int = i, **_: Any) -> FusedCausalLMOutput:
            logps = torch.tensor([[POLICY_CHOSEN[i]], [POLICY_REJECTED[i]]])
            return FusedCausalLMOutput(log_probs=logps, entropy=logps, mean_logits=logps, is_top1=logps > 0)

        batch = {
            "input_ids": torch.zeros(2, 2, dtype=torch.long),
            "attention_mask": torch.ones(2, 2, dtype=torch.long),
            "completion_mask": torch.tensor([[0, 1], [0, 1]]),
            "ref_chosen_logps": torch.tensor([REFERENCE_CHOSEN[i]]),
            "ref_rejected_logps": torch.tensor([REFERENCE_REJECTED[i]]),
        }
        losses.append(float(trainer._compute_loss(lambda **k: answers(**k), batch, False)))
    return losses, trainer


@pytest.mark.parametrize(("knobs", "expected"), LOSSES)
def test_the_loss_gives_the_published_values(
    base: str, tmp_path: Path, knobs: dict, expected: list[float]
) -> None:
    losses, _ = losses_of(base, tmp_path / "run", dataclasses.replace(QUICK, beta=0.1, **knobs))
    assert losses == pytest.approx(expected, abs=1e-5)


def test_the_vectors_here_are_the_shared_ones() -> None:
    if not VECTORS.exists():
        pytest.skip("the reference vectors (../shared) are not on this machine")
    vectors = {case["id"]: case for case in json.loads(VECTORS.read_text())}
    given = vectors["dpo-sigmoid"]["input"]
    assert given["policy_chosen_logps"] == POLICY_CHOSEN
    assert given["policy_rejected_logps"] == POLICY_REJECTED
    assert given["ref_chosen_logps"] == REFERENCE_CHOSEN
    assert given["ref_rejected_logps"] == REFERENCE_REJECTED
    assert vectors["dpo-sigmoid"]["expected"]["loss"] == LOSSES[0][1]
    assert vectors["dpo-smoothing"]["expected"]["conservative"] == LOSSES[1][1]
    assert vectors["dpo-smoothing"]["expected"]["robust"] == LOSSES[3][1]


def test_rewards_margins_accuracy_and_kl_give_the_published_values(base: str, tmp_path: Path) -> None:
    _, trainer = losses_of(base, tmp_path / "run", dataclasses.replace(QUICK, beta=0.1))
    metrics = trainer._metrics["train"]
    assert metrics["rewards/chosen"] == pytest.approx([0, 0.01, -0.09], abs=1e-6)
    assert metrics["rewards/rejected"] == pytest.approx([0, -0.99, -2.09], abs=1e-6)
    assert metrics["rewards/margins"] == pytest.approx([0, 1, 2], abs=1e-5)
    assert metrics["rewards/accuracies"] == [0, 1, 1]  # an exact tie is not a preference
    # one token a response: the mean of both log-ratios, (0 + 0)/2, (0.1 - 9.9)/2, (-0.9 - 20.9)/2
    assert metrics["log_ratio"] == pytest.approx([0, -4.9, -10.9], abs=1e-5)


def test_label_smoothing_without_noise_is_plain_dpo() -> None:
    assert trl_losses(dataclasses.replace(QUICK, label_smoothing=0.0)) == (["sigmoid"], [1.0])


# The forward pass ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "opt"])
def test_projecting_only_responses_gives_what_trl_computes_from_everything(
    tmp_path: Path, architecture: str
) -> None:
    folder = tiny_model(tmp_path / architecture, architecture)
    stock, ours = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    add_fused_lm_head(stock, outputs=("log_probs", *EXTRAS))
    install_forward(ours, compact=True)
    ids = torch.randint(0, 300, (4, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :8] = -100
    labels[2, 10:] = -100
    mask = torch.ones_like(ids)
    theirs = stock(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    mine = ours(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    assert (theirs.log_probs != 0).sum() == 14
    for name in ("log_probs", "entropy", "mean_logits"):
        torch.testing.assert_close(mine[name], theirs[name], atol=2e-5, rtol=1e-5)
    assert torch.equal(mine.is_top1.bool(), theirs.is_top1.bool())
    for output in (theirs, mine):
        output.log_probs.sum().backward()
    for (name, a), b in zip(ours.named_parameters(), stock.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(
                a.grad, b.grad, atol=1e-3, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}"
            )


def test_a_weight_multiplies_its_pairs_gradient(base: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    install_forward(model, compact=True)
    ids = torch.randint(0, 300, (4, 10), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :6] = -100

    def gradient(rows: list[int], weights: list[float] | None) -> torch.Tensor:
        model.zero_grad()
        more = {} if weights is None else {"pair_weights": torch.tensor(weights)}
        output = model(input_ids=ids[rows], labels=labels[rows], fused_lm_head=True, **more)
        (output.log_probs.sum() * 1.0).backward()
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    # rows are chosen 0, chosen 1, rejected 0, rejected 1
    first, second = gradient([0, 2], None), gradient([1, 3], None)
    torch.testing.assert_close(
        gradient([0, 1, 2, 3], [3.0, 0.5]), 3 * first + 0.5 * second, atol=1e-4, rtol=1e-4
    )


# Runs -------------------------------------------------------------------------------------------------------------


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
def test_a_result_holds_what_is_needed_to_report_the_run(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    for name in (
        "loss",
        "rewards/accuracies",
        "rewards/margins",
        "log_ratio",
        "learning_rate",
        "tokens_per_second",
    ):
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
    assert (facts["agent"], facts["method"], facts["base_model_hash"]) == (
        "widgets",
        "dpo",
        result.base_model_hash,
    )


WIDGETS = ChoiceAgent(
    slug="widgets",
    title="Widgets",
    description="",
    answer_key="widget",
    options_key="widgets",
    max_new_tokens=12,
)


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
def test_ratings_by_coin_flip_show_no_gain_over_the_base(base: str, tmp_path: Path) -> None:
    def coin(random: Random) -> bool:
        return random.random() < 0.5

    result = a_trainer(base, tmp_path / "run", dataclasses.replace(QUICK, epochs=2)).train(
        some_pairs(64, coin)
    )
    policy = load_policy(base, result.checkpoint, hardware=HARDWARE)
    outcome = evaluate_policy(
        policy, some_pairs(60, coin, seed=7), agent=WIDGETS, against="base", generate_samples=0
    )
    assert outcome["comparison"]["difference"]["low"] <= 0 <= outcome["comparison"]["difference"]["high"]
    assert outcome["comparison"]["p_value"] > 0.05
    assert 0.25 < outcome["preference_accuracy"]["value"] < 0.75


@pytest.mark.training
def test_one_step_of_plain_dpo_is_the_same_with_the_reference_computed_once_or_every_step(
    base: str, tmp_path: Path
) -> None:
    histories = []
    for once in (True, False):
        recipe = dataclasses.replace(QUICK, precompute_reference=once, max_steps=3)
        histories.append(a_trainer(base, tmp_path / str(once), recipe).train(some_pairs(12)).history)
    assert histories[0]["loss"] == pytest.approx(histories[1]["loss"], abs=1e-4)
    assert histories[0]["rewards/margins"] == pytest.approx(histories[1]["rewards/margins"], abs=1e-3)


@pytest.mark.training
def test_4_bit_training_reaches_every_layer_and_keeps_the_adapter_in_full_precision(
    base: str, tmp_path: Path
) -> None:
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
    assert selection.strategy_select(policy, items, gradients=True).strategy is strategies.Strategy.LAST_LAYER


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


@pytest.mark.training
def test_a_killed_run_resumes_to_the_same_steps_and_the_same_weights(base: str, tmp_path: Path) -> None:
    rows, recipe = some_pairs(20), dataclasses.replace(QUICK, epochs=2, save_steps=3)
    whole = a_trainer(base, tmp_path / "whole", recipe).train(rows)
    with pytest.raises(ConnectionError):
        a_trainer(base, tmp_path / "killed", recipe, listener=ListenerCallback(die_after=8)).train(rows)
    follower = ListenerCallback()
    resumed = a_trainer(base, tmp_path / "killed", recipe, listener=follower, resume=True).train(rows)
    assert follower.steps == [7, 8, 9, 10]
    assert (resumed.steps, resumed.status) == (whole.steps, "succeeded")
    assert resumed.history["step"] == whole.history["step"] == list(range(1, 11))
    assert resumed.history["loss"] == pytest.approx(whole.history["loss"], abs=1e-5)
    assert resumed.history["learning_rate"] == whole.history["learning_rate"]
    one = load_file(Path(whole.checkpoint) / "adapter_model.safetensors")
    two = load_file(Path(resumed.checkpoint) / "adapter_model.safetensors")
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-5, rtol=1e-4)


@pytest.mark.training
def test_a_half_written_checkpoint_is_skipped(base: str, tmp_path: Path) -> None:
    rows, recipe = some_pairs(20), dataclasses.replace(QUICK, save_steps=2)
    with pytest.raises(ConnectionError):
        a_trainer(base, tmp_path / "run", recipe, listener=ListenerCallback(die_after=5)).train(rows)
    last = tmp_path / "run" / "checkpoints" / "checkpoint-4"
    assert checkpoint_is_whole(last)
    (last / "optimizer.pt").write_bytes((last / "optimizer.pt").read_bytes()[:100])
    follower = ListenerCallback()
    resumed = a_trainer(base, tmp_path / "run", recipe, listener=follower, resume=True).train(rows)
    assert follower.steps == list(range(3, 16))
    assert resumed.steps == 15
    assert "checkpoint-4 was only half-written or is damaged, and is not used" in follower.notes


@pytest.mark.training
def test_a_run_stopped_on_request_leaves_a_checkpoint_that_answers_and_can_go_on(
    base: str, tmp_path: Path
) -> None:
    rows = some_pairs(20)
    stopped = a_trainer(base, tmp_path / "run", listener=ListenerCallback(stop_after=2)).train(rows)
    assert (stopped.status, stopped.steps, stopped.total_steps) == ("cancelled", 2, 15)
    assert Path(stopped.checkpoint).name == "checkpoint-2"
    policy = load_policy(base, stopped.checkpoint, hardware=HARDWARE)
    assert generate(policy, [rows[0]["prompt"]], max_new_tokens=2)
    finished = a_trainer(base, tmp_path / "run", resume=True).train(rows)
    assert (finished.status, finished.steps) == ("succeeded", 15)


@pytest.mark.training
def test_truncation_and_what_is_left_out_are_counted_and_said(base: str, tmp_path: Path) -> None:
    long = {**some_pairs(1)[0], "prompt": [{"role": "user", "content": "why " * 200}]}
    wordy = {**some_pairs(1)[0], "chosen": "because " * 60}
    same = {**some_pairs(1)[0], "rejected": some_pairs(1)[0]["chosen"]}
    follower = ListenerCallback()
    recipe = dataclasses.replace(QUICK, max_steps=1)
    result = a_trainer(base, tmp_path / "run", recipe, listener=follower).train(
        [*some_pairs(4), long, wordy, same]
    )
    assert result.samples["train"] == 6
    assert result.truncated == {"prompts": 1, "completions": 1}
    assert result.left_out == {"identical responses": 1}
    assert any("1 prompts (oldest tokens), 1 responses (end)" in note for note in follower.notes)


@pytest.mark.training
def test_a_diverging_run_fails_with_what_to_change(base: str, tmp_path: Path) -> None:
    recipe = dataclasses.replace(QUICK, learning_rate=1e30, max_grad_norm=1e30, epochs=5)
    with pytest.raises(TrainingFailed, match=r"diverged\. Lower learning_rate \(now 1e\+30\)"):
        a_trainer(base, tmp_path / "run", recipe).train(some_pairs(16))


def test_a_full_disk_fails_with_what_to_do(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(TrainingFailed, match="is full: free some space and resume"),
        failures_explained(run_context(QUICK, "", output_dir=tmp_path, hardware=HARDWARE)),
    ):
        raise OSError(28, "No space left on device")


def test_no_pairs_are_refused(base: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingRefused, match="at least one preference pair"):
        a_trainer(base, tmp_path / "run").train([])


def test_pairs_that_teach_nothing_are_refused_with_their_count(base: str, tmp_path: Path) -> None:
    same = [{**row, "rejected": row["chosen"]} for row in some_pairs(3)]
    with pytest.raises(TrainingRefused, match="none among 3: 3 identical responses"):
        a_trainer(base, tmp_path / "run").train(same)


def test_a_row_without_a_prompt_is_refused_with_its_number(base: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingRefused, match="row 2: expected `prompt`"):
        a_trainer(base, tmp_path / "run").train([*some_pairs(2), {"chosen": "a", "rejected": "b"}])


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TrainingRefused, match="expected a folder that can be written"):
        a_trainer("no-such-model", tmp_path / "file" / "run").train(some_pairs(1))


def test_a_folder_with_another_runs_checkpoints_is_refused(base: str, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "checkpoint-5").mkdir(parents=True)
    with pytest.raises(TrainingRefused, match="expected a folder without checkpoints"):
        a_trainer(base, tmp_path / "run").train(some_pairs(4))


@pytest.mark.training
def test_a_run_is_not_resumed_with_other_knobs_or_other_pairs(base: str, tmp_path: Path) -> None:
    a_trainer(base, tmp_path / "run", listener=ListenerCallback(stop_after=1)).train(some_pairs(8))
    other = dataclasses.replace(QUICK, beta=0.2)
    with pytest.raises(TrainingRefused, match=r"started with other beta \(0.1, now 0.2\)"):
        a_trainer(base, tmp_path / "run", other, resume=True).train(some_pairs(8))
    with pytest.raises(TrainingRefused, match="started with other pairs"):
        a_trainer(base, tmp_path / "run", resume=True).train(some_pairs(9))


# --- What earlier runs computed -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_retrain_on_grown_data_computes_the_reference_of_what_is_new(base: str, tmp_path: Path) -> None:
    pairs = some_pairs(10)
    cache = tmp_path / "cache"
    first = a_trainer(base, tmp_path / "first", cache_dir=cache)
    first.train(pairs[:8])
    assert any("16 computed, 0 known before" in note for note in first.context.details), first.context.details
    second = a_trainer(base, tmp_path / "second", cache_dir=cache)
    second.train(pairs)
    assert any("4 computed, 16 known before" in note for note in second.context.details), (
        second.context.details
    )


@pytest.mark.slow
def test_a_run_with_what_is_known_is_the_run_without(base: str, tmp_path: Path) -> None:
    pairs = some_pairs(8)
    cache = tmp_path / "cache"
    a_trainer(base, tmp_path / "fills", cache_dir=cache).train(pairs)
    known = a_trainer(base, tmp_path / "known", cache_dir=cache).train(pairs)
    alone = a_trainer(base, tmp_path / "alone").train(pairs)
    assert known.history["loss"] == pytest.approx(alone.history["loss"], abs=1e-6)


@pytest.mark.slow
def test_another_base_model_knows_nothing_of_it(base: str, tmp_path: Path) -> None:
    pairs, cache = some_pairs(8), tmp_path / "cache"
    a_trainer(base, tmp_path / "fills", cache_dir=cache).train(pairs)
    other = a_trainer(str(tiny_model(tmp_path / "other", seed=1)), tmp_path / "out", cache_dir=cache)
    other.train(pairs)
    assert any("16 computed" in note for note in other.context.details), other.context.details


# --- The same steps as TRL's own ----------------------------------------------------------------------------


@pytest.mark.slow
def test_45_steps_over_packed_rows_have_the_losses_of_stock_rows(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = dataclasses.replace(QUICK, max_steps=45, learning_rate=1e-3, logging_steps=1)
    packed = a_trainer(base, tmp_path / "packed", recipe)
    losses = packed.train(some_pairs(30)).history["loss"]
    assert any("split+last_layer" in note for note in packed.context.details), packed.context.details
    stock = selection.StrategyChoice(strategies.Strategy.STOCK, "of a test", {})
    monkeypatch.setattr(trl_runs, "strategy_select", lambda *_, **__: stock)
    plain = a_trainer(base, tmp_path / "plain", recipe)
    expected = plain.train(some_pairs(30)).history["loss"]
    assert any("not packed" in note for note in plain.context.details), plain.context.details
    assert len(losses) == 45
    assert losses == pytest.approx(expected, abs=1e-4)
    assert losses[-1] < losses[0]
