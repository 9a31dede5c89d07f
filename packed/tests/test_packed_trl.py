"""Use of the packed forward from outside: in plain TRL (`PackedDPOTrainer`), in a notebook, in the example."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from trl.trainer.dpo_trainer import DataCollatorForPreference

import packed_forward as packed
from packed_forward.dpo_trainer import PackedDPOTrainer, PreferenceCollator
from packed_forward.packing import Strategy

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "packed_dpo.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("packed_dpo", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["packed_dpo"] = module
    spec.loader.exec_module(module)
    return module


ROWS = [
    {"prompt": "a long question, asked twice:", "chosen": " yes, certainly", "rejected": " no"},
    {"prompt": "a long question, asked twice:", "chosen": " yes", "rejected": " never"},
    {"prompt": "short:", "chosen": " this one is good", "rejected": " that"},
]


def a_trainer(
    example: ModuleType, folder: Path, kind: type[trl.DPOTrainer], *, lora: bool = True, **config: Any
) -> trl.DPOTrainer:
    """A trainer whose policy differs from its reference, the same for both kinds."""
    model, tokenizer = example.tiny_model()
    reference = None
    if not lora:
        reference = example.tiny_model()[0]
    arguments = trl.DPOConfig(
        str(folder),
        per_device_train_batch_size=3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        **{"bf16": False, **config},
    )
    trainer = kind(
        model=model,
        ref_model=reference,
        args=arguments,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules="all-linear") if lora else None,
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            if weight.requires_grad and weight.ndim > 1 and "lora_A" not in name:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)
    return trainer


def loss_and_gradients(trainer: trl.DPOTrainer) -> tuple[float, dict[str, torch.Tensor]]:
    """Of the one batch that all rows make."""
    trainer.model.train()
    batch = trainer.data_collator([trainer.train_dataset[n] for n in range(len(ROWS))])
    loss = trainer.compute_loss(trainer.model, batch)
    trainer.model.zero_grad(set_to_none=True)
    loss.backward()
    named = trainer.model.named_parameters()
    return float(loss.detach()), {name: weight.grad for name, weight in named if weight.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"lora": True},
        {"lora": True, "max_length": 34, "truncation_mode": "keep_start", "gradient_checkpointing": False},
        {"lora": True, "max_length": 30, "truncation_mode": "keep_end", "precompute_ref_log_probs": True},
        {"lora": False, "loss_type": ["ipo"]},
    ],
    ids=["lora", "cut at the end", "cut at the start, reference computed before", "full fine-tuning, IPO"],
)
def test_loss_and_gradients_are_trls(example: ModuleType, tmp_path: Path, config: dict[str, Any]) -> None:
    loss, gradients = loss_and_gradients(a_trainer(example, tmp_path, trl.DPOTrainer, **config))
    ours = a_trainer(example, tmp_path, PackedDPOTrainer, **config)
    assert isinstance(ours, PackedDPOTrainer)
    assert ours.strategy_choice.strategy is Strategy.LAST_LAYER
    packed_loss, packed_gradients = loss_and_gradients(ours)
    assert abs(loss - math.log(2)) > 1e-4  # the policy is not the reference
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    assert packed_gradients.keys() == gradients.keys()
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert float((packed_gradients[name] - gradient).norm()) < 1e-4 * max(float(gradient.norm()), largest)


def test_bfloat16_autocast_is_part_of_the_self_test(example: ModuleType, tmp_path: Path) -> None:
    loss, _ = loss_and_gradients(a_trainer(example, tmp_path, trl.DPOTrainer, bf16=True))
    ours = a_trainer(example, tmp_path, PackedDPOTrainer, bf16=True)
    assert loss_and_gradients(ours)[0] == pytest.approx(loss, abs=0.02)


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"use_weighting": True}, "use_weighting"), ({"torch_compile": True}, "replace the model's forward")],
)
def test_what_stays_trls(example: ModuleType, tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    trainer = a_trainer(example, tmp_path, PackedDPOTrainer, **config)
    assert isinstance(trainer, PackedDPOTrainer)
    assert trainer.strategy_choice.strategy is Strategy.STOCK
    assert reason in trainer.strategy_choice.reason
    assert type(trainer.data_collator) is DataCollatorForPreference


def test_a_row_longer_than_the_tested_ones_goes_unpacked() -> None:
    collator = PreferenceCollator(pad_token_id=0, strategy=Strategy.SPLIT, tested_tokens=5)
    row = {"prompt_ids": [5, 6, 7], "chosen_ids": [8, 1], "rejected_ids": [1]}
    assert "packed" in collator([row])
    batch = collator([{**row, "rejected_ids": [9, 9, 1]}])
    assert "packed" not in batch
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 1, 0], [5, 6, 7, 9, 9, 1]]


@pytest.mark.parametrize(
    ("mode", "expected"), [("keep_start", ([5, 6, 7], [8])), ("keep_end", ([7], [8, 9, 1]))]
)
def test_rows_are_cut_as_trl_cuts_them(mode: str, expected: tuple[list[int], list[int]]) -> None:
    row = {"prompt_ids": [5, 6, 7], "chosen_ids": [8, 9, 1], "rejected_ids": [1]}
    cut = {"pad_token_id": 0, "max_length": 4, "truncation_mode": mode}
    assert PreferenceCollator(**cut).cut(row, "chosen_ids") == expected
    trls = DataCollatorForPreference(**cut)([row])
    assert trls["input_ids"][0].tolist() == expected[0] + expected[1]
    assert int(trls["completion_mask"][0].sum()) == len(expected[1])


def test_any_model_scores_packed_rows_as_its_own_logits_do(example: ModuleType) -> None:
    model, _ = example.tiny_model()
    model.eval()
    prompts = [[5, 6, 7, 8], [5, 6, 7, 8], [9, 9]]
    completions = [[10, 11, 1], [12, 1], [13, 14, 15, 1]]
    rows = packed.pack(prompts, completions, pad_token_id=0)
    with torch.no_grad():
        unprepared = packed.completion_logps(model, rows)
        choice = packed.prepare(model, prompts, completions, pad_token_id=0, gradients=False)
        prepared = packed.completion_logps(model, rows)
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            ids = torch.tensor([prompt + completion])
            logps = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)
            own = logps.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
            for found in (unprepared, prepared):
                torch.testing.assert_close(found[number, : len(completion)], own, rtol=1e-4, atol=1e-4)
                assert found[number, len(completion) :].abs().sum() == 0
    assert choice.strategy is Strategy.LAST_LAYER
    assert rows.tokens == (4 + 2) + (2 + 1 + 3)  # each prompt once; completions without their last token
    assert [(row.prompt_ids, row.response_ids) for row in rows.unpack()] == list(
        zip(prompts, completions, strict=True)
    )


@pytest.mark.training
def test_the_example_trains_to_the_same_losses(example: ModuleType) -> None:
    stock, ours = example.compare("tiny", 2)
    assert (stock.strategy, ours.strategy) == ("trl", "split+last_layer")
    assert stock.losses[0] == pytest.approx(
        math.log(2), abs=1e-5
    )  # policy and reference are one at the start
    assert ours.losses == pytest.approx(stock.losses, rel=1e-4)
    assert ours.losses[1] < ours.losses[0]
