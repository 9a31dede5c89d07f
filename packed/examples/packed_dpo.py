"""DPO with TRL, and the same over packed rows: two trainers, one model, one order of batches.

    python packed/examples/packed_dpo.py                          # a tiny random model, no network
    python packed/examples/packed_dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --steps 20

Prints each step's loss under both trainers and the median seconds of a step. The losses agree to rounding.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from packed_forward.dpo_trainer import PackedDPOTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAIRS = [
    {
        "prompt": f"Question {number}: which folder is right for invoice {number} of the year 2025? "
        "Folders: invoices, contracts, letters, photos.\nAnswer:",
        "chosen": f" invoices, because document {number} is one",
        "rejected": " photos",
    }
    for number in range(16)
]
"""Preference pairs in TRL's explicit-prompt format; put your own here."""


@dataclass
class Run:
    """Figures of one training run."""

    losses: list[float]
    seconds: list[float]
    """Of each optimiser step."""
    strategy: str
    """The forward strategy, `trl` for TRL's own forward."""


class Recorder(TrainerCallback):
    """Collects the loss and the seconds of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.seconds.append(time.perf_counter() - self.began)

    def on_log(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def tiny_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A random two-layer Llama and a tokenizer of bytes: nothing is downloaded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "</s>": 1} | {letter: 2 + place for place, letter in enumerate(alphabet)}
    words = Tokenizer(models.BPE(vocabulary, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(vocabulary),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config), tokenizer


def load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if name == "tiny":
        return tiny_model()
    return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)


def train(kind: type[trl.DPOTrainer], model_name: str, steps: int, folder: Path, **config: object) -> Run:
    """Train one trainer class on `PAIRS` with LoRA; both classes draw the same weights and batches from the seed."""
    model, tokenizer = load(model_name)
    recorder = Recorder()
    arguments = trl.DPOConfig(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        **config,
    )
    trainer = kind(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
        callbacks=[recorder],
    )
    trainer.train()
    choice = getattr(trainer, "strategy_choice", None)
    return Run(recorder.losses, recorder.seconds, str(choice.strategy) if choice else "trl")


def compare(model_name: str, steps: int) -> tuple[Run, Run]:
    """The same training by TRL's trainer and by the packed one."""
    with tempfile.TemporaryDirectory() as scratch:
        return (
            train(trl.DPOTrainer, model_name, steps, Path(scratch) / "trl"),
            train(PackedDPOTrainer, model_name, steps, Path(scratch) / "packed"),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="DPO with TRL and over packed rows, side by side")
    parser.add_argument(
        "--model", default="tiny", help="a Hugging Face name or a folder; default a tiny random model"
    )
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    stock, packed = compare(options.model, options.steps)
    print(f"forward strategy: {packed.strategy}")
    for step, (one, other) in enumerate(zip(stock.losses, packed.losses, strict=True), 1):
        print(f"step {step}: loss {one:.6f} with TRL, {other:.6f} packed")
    for name, run in (("TRL", stock), ("packed", packed)):
        print(f"{name}: {statistics.median(run.seconds):.3f} s a step (median)")


if __name__ == "__main__":
    main()
