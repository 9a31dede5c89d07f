"""On a CUDA device: packed rows agree with the stock forward there, and with the CPU; the trainer with TRL's."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig

from packed_forward import selection, selftest
from packed_forward.dpo_trainer import PackedDPOTrainer
from packed_forward.packing import Strategy
from random_models import SHAPES, a_policy, some_items

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# heads as wide as published models have them: then the fused kernels of a GPU run
WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
PUBLISHED = ("llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "olmo2", "smollm3")
EXACT = [name for name, (_, _, first) in SHAPES.items() if first is not Strategy.STOCK]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_ends_on_the_rung_it_has_on_a_cpu(shape: str, dtype: str) -> None:
    policy = a_policy(shape, DTYPES[dtype], device="cuda")
    choice = selection.strategy_select(policy, some_items(57, 20), gradients=True)
    assert choice.strategy == SHAPES[shape][2], choice


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", PUBLISHED)
def test_wide_heads_and_long_rows_agree_too(shape: str, dtype: str) -> None:
    wide = {
        key: value
        for key, value in WIDE.items()
        if key != "head_dim" or shape in ("qwen3", "gemma", "mistral")
    }
    policy = a_policy(shape, DTYPES[dtype], device="cuda", **wide)
    choice = selection.strategy_select(policy, some_items(200, 384, 33), gradients=True)
    assert choice.strategy == SHAPES[shape][2], choice


def measured(policy: Any, strategy: Strategy) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    items = some_items(40, 20, 57)
    with selftest.measurement_mode(policy, True):
        if strategy is Strategy.STOCK:
            return selftest.measure_reference(policy, items, True)
        selftest.install(policy, strategy)
        return selftest.measure_packed(policy, items, strategy, True)


@pytest.mark.parametrize("shape", EXACT)
def test_in_float32_it_is_the_stock_forward_of_a_cpu(shape: str) -> None:
    expected, wanted = measured(a_policy(shape), Strategy.STOCK)
    found, gradients = measured(a_policy(shape, device="cuda"), SHAPES[shape][2])
    assert float((expected - found.cpu()).abs().max()) < 1e-4
    differences = selftest.gradient_differences(
        (expected, wanted), (found.cpu(), {name: value.cpu() for name, value in gradients.items()})
    )
    assert max(differences.values()) < 1e-3


def trained(kind: type[trl.DPOTrainer], folder: Path, dtype: str) -> list[float]:
    """Losses of four steps on pairs that share prompts; policy and reference differ from the first."""
    model = a_policy("llama", DTYPES[dtype], device="cuda", **WIDE).model.unload()
    rows = [
        {"prompt_ids": a.prompt_ids, "chosen_ids": a.response_ids, "rejected_ids": b.response_ids}
        for n in range(4)
        for a, b in [some_items(30 + n, seed=n)]
    ]
    arguments = trl.DPOConfig(
        str(folder),
        per_device_train_batch_size=4,
        max_steps=4,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        seed=0,
        disable_tqdm=True,
        bf16=dtype == "bfloat16",
        gradient_checkpointing=False,
        lr_scheduler_type="constant",
    )
    torch.manual_seed(0)
    trainer = kind(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(words(rows)),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            if "lora_B" in name:
                weight.add_((torch.randn(weight.shape, generator=generator) * 0.05).to(weight))
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def words(rows: list[dict[str, list[int]]]) -> list[dict[str, str]]:
    return [{key[:-4]: "".join(f"w{i} " for i in ids) for key, ids in row.items()} for row in rows]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"<pad>": 0, "<unk>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 200)}
    of_words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    of_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=of_words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def test_the_trainer_has_the_losses_of_trls(tmp_path: Path) -> None:
    """In bfloat16 it is as near to TRL's in float32 as TRL's own."""
    exact = trained(trl.DPOTrainer, tmp_path / "theirs", "float32")
    assert trained(PackedDPOTrainer, tmp_path / "ours", "float32") == pytest.approx(exact, abs=1e-4)

    def off(kind: type[trl.DPOTrainer]) -> float:
        losses = trained(kind, tmp_path / kind.__name__, "bfloat16")
        return statistics.fmean(abs(a - b) for a, b in zip(losses, exact, strict=True))

    assert off(PackedDPOTrainer) < 2 * off(trl.DPOTrainer) + 0.01
