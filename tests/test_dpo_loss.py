"""DPO's loss, metrics and forward pass against named vectors and TRL's own."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from packed_forward.dpo_trainer import EXTRAS, install_forward
from rl.recipes import DPORecipe
from tests.support.dpo_runs import QUICK, a_trainer, some_pairs
from tests.support.tiny_models import tiny_model

# pytorch/torchtune (BSD-3) tests/torchtune/rlhf/loss/test_dpo_loss.py; the smoothed values by the formulas of
# conservative DPO (Mitchell 2023) and robust DPO (Chowdhury et al. 2024) from the same inputs
POLICY_CHOSEN, POLICY_REJECTED = [-0.5, -10.0, -1.0], [-0.1, -30.0, -21.0]
REFERENCE_CHOSEN, REFERENCE_REJECTED = [-0.5, -10.1, -0.1], [-0.1, -20.1, -0.1]
LOSSES = [
    ({}, [0.6931471805599453, 0.3132616875182229, 0.1269280110429725]),
    ({"label_smoothing": 0.1}, [0.6931471805599453, 0.41326168751822295, 0.32692801104297253]),
    # plus half the chosen response's -log p, one token long here: 0.25, 5, 0.5
    ({"sft_weight": 0.5}, [0.6931471805599453 + 0.25, 0.3132616875182229 + 5.0, 0.1269280110429725 + 0.5]),
    (
        {"loss": "robust", "label_smoothing": 0.1},
        [0.6931471805599452, 0.18826168751822295, -0.12307198895702753],
    ),
]


def losses_of(base: str, folder: Path, recipe: DPORecipe) -> tuple[list[float], Any]:
    """Each example's loss by the trainer TRL runs with, its model replaced by one that answers the vectors' values."""
    owner = a_trainer(base, folder, recipe)
    folder.mkdir(exist_ok=True)
    policy = owner.load_base_model()
    rows = owner.encode(policy, some_pairs(1), [])
    trainer = owner.build(policy, owner.arguments(rows), rows)
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
def test_the_published_values(base: str, tmp_path: Path, knobs: dict, expected: list[float]) -> None:
    losses, _ = losses_of(base, tmp_path / "run", dataclasses.replace(QUICK, beta=0.1, **knobs))
    assert losses == pytest.approx(expected, abs=1e-5)


def test_rewards_margins_accuracy_and_kl_give_the_published_values(base: str, tmp_path: Path) -> None:
    _, trainer = losses_of(base, tmp_path / "run", dataclasses.replace(QUICK, beta=0.1))
    metrics = trainer._metrics["train"]
    assert metrics["rewards/chosen"] == pytest.approx([0, 0.01, -0.09], abs=1e-6)
    assert metrics["rewards/rejected"] == pytest.approx([0, -0.99, -2.09], abs=1e-6)
    assert metrics["rewards/margins"] == pytest.approx([0, 1, 2], abs=1e-5)
    assert metrics["rewards/accuracies"] == [0, 1, 1]  # an exact tie is not a preference
    # one token a response: the mean of both log-ratios, (0 + 0)/2, (0.1 - 9.9)/2, (-0.9 - 20.9)/2
    assert metrics["log_ratio"] == pytest.approx([0, -4.9, -10.9], abs=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "opt"])
def test_projecting_responses_alone_gives_trls_loss(tmp_path: Path, architecture: str) -> None:
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
