"""How many rows a second a training takes: this project, TRL as it comes, and TRL tuned as well as we know how.

    python benchmarks/dpo_throughput.py [--method dpo|kto|sft|reward]
                                        [--model tiny|100m|smollm2|1b|8b] [--prompt 384] [--system 0]
                                        [--completion 24] [--vary]
                                        [--rounds 3] [--steps 8] [--only ours,trl_tuned] [--profile DIR]
    python benchmarks/dpo_throughput.py --matrix gpu|check [--model 1b|8b] [--rounds 1] [--ahead 4]

Each side runs in a process of its own, on the same random weights, the same tokens and the same LoRA start; the
sides take turns, round after round, and the median step counts (the first of a process is left out; on a GPU it is
the mean of all after the third, as nothing waits for a step there). Reference
log-probabilities are timed apart: TRL's defaults compute them in the step. `losses_differ` is the largest difference
of a step's loss of DPO and SFT to TRL's own in float32, given where that side ran; lengths are fixed unless `--vary`
spreads them by half. The 1b and 8b shapes are those of Llama 3.2 1B and Llama 3.1 8B and want a GPU. Prints one JSON
object.

`--matrix gpu` runs both of those at 384/24 and 1024/64 tokens, with and without CUDA graphs, and says
what share of the card's dense bfloat16 peak is reached, counted on the operations a pair needs (`pair_flops`).
`--matrix check` is the same over tiny shapes, to see it run anywhere. A side that fails is reported, the others go on.
On a GPU our sides also say what the estimate before a training foresees. `--ahead` starts so many sides while another
one runs: they import what they need, then wait for the device. `--profile` writes where the time of one step goes.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "packed" / "src")]

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 4096,
    },
    "100m": {
        "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_key_value_heads": 4, "vocab_size": 32000,
    },
    "smollm2": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "3b": {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
}  # fmt: skip
BATCH = {"tiny": 8, "100m": 4, "smollm2": 4, "1b": 8, "3b": 4, "8b": 4}
LARGE = ("1b", "3b", "8b")
"""Shapes that are written in bfloat16, on the GPU where there is one."""
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}
SIDES = {
    "trl_default": "TRL's DPOConfig as it comes",
    "trl_default_fp32": "the same in float32: its bfloat16 takes minutes a pair on a CPU without such products",
    "trl_tuned": "TRL: reference computed once, no checkpointing, bfloat16 where it pays, allocator settings",
    "packed_trl": "trl_fp32 with PackedDPOTrainer in the place of TRL's trainer",
    "trl_liger": "TRL tuned, with Liger's kernels in the layers",
    "trl_4bit": "TRL tuned, over a base in NF4",
    "trl_fp32": "TRL tuned, in float32: the losses the others are compared with",
    "ours": "rl.training.dpo.DPOTrainer with its defaults on this machine",
    "ours_fp32": "the same in float32",
    "ours_bf16": "the same in bfloat16",
    "ours_launched": "ours without CUDA graphs",
    "ours_4bit": "ours over a base in NF4",
    "ours_small_gpu": "ours with the preset small_gpu: NF4, checkpointing, one row at a time",
}
METHODS = ("dpo", "kto", "sft", "reward")
PLAIN = ("trl_default", "trl_tuned", "trl_fp32", "ours", "ours_fp32", "ours_bf16")
"""Sides that run unless others are named."""

MATRIX: dict[str, dict[str, tuple[tuple[int, int, int], ...]]] = {
    "gpu": {"1b": ((384, 24, 8), (1024, 64, 8)), "8b": ((384, 24, 4), (1024, 64, 2))},
    "check": {"tiny": ((24, 4, 8), (40, 6, 8))},
}
"""Model -> tokens of a prompt, tokens of a completion, pairs a step."""
MATRIX_SIDES = ("trl_default", "trl_tuned", "trl_liger", "ours", "ours_launched")

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
"""Dense bfloat16 peak by a part of the card's name, from NVIDIA's data sheets (SXM cards)."""
RANK = 16
LEARNING_RATE = 1e-3


def pair_flops(shape: dict[str, Any], prompt: int, completion: int) -> float:
    """Floating-point operations that one pair needs, forward and backward with a frozen base and LoRA on all linear
    layers, its prompt computed once and the last layer's queries, output and MLP only where they are read:

    4N(P + 2(C-1)) - 4 N_last (P-1) + 6 N_lora (P + 2C) + 12 L d (P^2/2 + 2CP + C^2) + 8 V d C

    with N the layers' weights and N_last those of the last layer without keys and values. Checkpointing, a prompt
    computed twice and a reference in the step are not work that is needed, and count for nobody.
    """
    width, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    shared = width * shape["num_key_value_heads"] // shape["num_attention_heads"]
    last = 2 * width * width + 3 * width * inner
    weights = layers * (last + 2 * width * shared)
    lora = layers * RANK * (4 * width + 2 * (width + shared) + 3 * (width + inner))
    p, c = prompt, completion
    return float(
        4 * weights * (p + 2 * (c - 1))
        - 4 * last * (p - 1)
        + 6 * lora * (p + 2 * c)
        + 12 * layers * width * (p * p / 2 + 2 * c * p + c * c)
        + 8 * shape["vocab_size"] * width * c
    )


def rows(
    count: int, vocabulary: int, prompt: int, completion: int, vary: bool, system: int = 0
) -> list[dict[str, str]]:
    """Pairs of random words, each word one token; with `vary`, lengths spread evenly by half around the mean. The first
    `system` tokens of all prompts are the same. `method_rows` makes rows of other methods of them."""
    rng = random.Random(1)

    def words(mean: int) -> str:
        length = int(mean * rng.uniform(0.5, 1.5)) if vary else mean
        return " ".join(f"w{rng.randrange(8, vocabulary)}" for _ in range(max(length, 2)))

    lead = "".join(f"w{rng.randrange(8, vocabulary)} " for _ in range(system))
    return [
        {
            "prompt": lead + words(prompt - system),
            "chosen": words(completion - 1),
            "rejected": words(completion - 1),
        }
        for _ in range(count)
    ]


def method_rows(method: str, pairs: list[dict[str, str]]) -> list[dict[str, Any]]:
    """The rows of a method: pairs as they are, or their chosen responses, every other of which KTO calls bad."""
    if method in ("dpo", "reward"):
        return [dict(pair) for pair in pairs]
    rows: list[dict[str, Any]] = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    if method == "kto":
        for number, row in enumerate(rows):
            row["label"] = number % 2 == 0
    return rows


def model_write(path: Path, name: str) -> None:
    """A random Llama of the shape and a tokenizer of whole words, whose template adds nothing but the turn's end."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    shape = SHAPES[name]
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, shape["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    turn = "{% if m.role == 'assistant' %}{{ '</s> ' }}{% endif %}"
    fast.chat_template = "{% for m in messages %}{{ m.content + ' ' }}" + turn + "{% endfor %}"
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"tie_word_embeddings": True, **shape},
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    big = name in LARGE
    with torch.device("cuda" if big and torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16 if big else torch.float32)
        model = LlamaForCausalLM(config)
    model.save_pretrained(path)


def lora_start(model: Any) -> None:
    """The same LoRA weights for every side; B is not zero, so that policy and reference differ from the first step."""
    import torch

    generator = torch.Generator().manual_seed(7)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            std = 0.02 if "lora_B" in name else parameter.shape[1] ** -0.5
            parameter.data.copy_((torch.randn(parameter.shape, generator=generator) * std).to(parameter))


WARM = 3
"""Steps of a GPU that are not timed: kernels are selected and graphs captured in them."""


class Steps:
    """Seconds of each step on a CPU. A GPU computes while the next step is prepared: there all steps after WARM are
    timed together, and their mean is given. The last step is profiled instead, where a file is named for that."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.times: list[float] = []
        self.last, self.file, self.side = spec["steps"] - 1, spec.get("profile"), spec["side"]
        self.count, self.profiler, self.on_gpu = 0, None, bool(_gpu())

    def begin(self) -> None:
        if self.file and self.count == self.last:
            import torch

            _settle()
            self.profiler: Any = torch.profiler.profile()
            self.profiler.__enter__()
        if not self.on_gpu or self.count <= WARM or self.profiler is not None:
            _settle()
            self.began = time.perf_counter()

    def end(self) -> None:
        timed = self.last - bool(self.file)
        if self.profiler is not None:
            self._profiled()
        elif not self.on_gpu:
            self.times.append(time.perf_counter() - self.began)
        elif self.count == timed:
            _settle()
            self.times += [(time.perf_counter() - self.began) / (timed - WARM + 1)] * 2
        self.count += 1

    def _profiled(self) -> None:
        _settle()
        seconds = time.perf_counter() - self.began
        self.profiler.__exit__(None, None, None)
        found = self.profiler.key_averages()
        key = "self_device_time_total" if self.on_gpu else "self_cpu_time_total"
        tables = [
            found.table(sort_by=by, row_limit=60, max_name_column_width=110)
            for by in (key, "self_cpu_time_total")
        ]
        Path(self.file).write_text(f"{self.side}: {1e3 * seconds:.1f} ms\n" + "\n".join(tables), "utf-8")


def run_trl(spec: dict[str, Any], data: list[dict[str, Any]]) -> dict[str, Any]:
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        BitsAndBytesConfig,
        TrainerCallback,
    )

    side, folder, method, vary = spec["side"], Path(spec["folder"]), spec["method"], spec["vary"]
    gpu = torch.cuda.is_available()
    plain = side.startswith("trl_default")
    knobs: dict[str, Any] = {"bf16": False} if side == "trl_default_fp32" else {}
    if plain and spec["prompt"] >= 1000:  # its 1,024 tokens at most leave nothing of an answer, and no row
        knobs["max_length"] = 2 * spec["prompt"]
    if not plain:
        knobs = {"gradient_checkpointing": False, "max_length": None}
        half = side in ("trl_tuned", "trl_liger", "trl_4bit")
        knobs["bf16"] = half and (gpu or _hardware().dtype == "bfloat16")
        if method in ("dpo", "kto"):
            knobs["precompute_ref_log_probs"] = True
        if side == "trl_liger":
            knobs["use_liger_kernel"] = True
        if vary:
            knobs |= {"train_sampling_strategy": "group_by_length", "remove_unused_columns": False}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row in data:
        for key in {"chosen", "rejected", "completion"} & row.keys():
            row[key] = f" {row[key]} </s>"
    dataset = Dataset.from_list(data)
    if vary and not plain:
        dataset = dataset.map(
            lambda row: {
                "length": len(row["prompt"].split())
                + max(len(row[k].split()) for k in ("chosen", "rejected", "completion") if k in row)
            }
        )
    kind = AutoModelForSequenceClassification if method == "reward" else AutoModelForCausalLM
    head: dict[str, Any] = {"num_labels": 1} if method == "reward" else {}
    if gpu:
        head["device_map"] = {"": 0}
    if side == "trl_4bit":
        head["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model = kind.from_pretrained(folder, dtype=torch.bfloat16 if gpu and not plain else torch.float32, **head)
    steps = Steps(spec)
    losses: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            steps.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.end()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))

    trainers: dict[str, tuple[Any, Any]] = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
    }
    trainer_kind, config = trainers[method]
    if side == "packed_trl":
        from packed_forward.dpo_trainer import PackedDPOTrainer

        trainer_kind = PackedDPOTrainer
    reference = timed_method(trainer_kind, "_precompute_ref_logps")
    arguments = config(
        str(folder / side),
        per_device_train_batch_size=spec["batch"],
        learning_rate=LEARNING_RATE,
        num_train_epochs=1,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        seed=0,
        use_cpu=not gpu,
        disable_tqdm=True,
        lr_scheduler_type="constant",
        dataloader_pin_memory=False,
        **{"train_sampling_strategy": "sequential", **knobs},
    )
    task = {"task_type": "SEQ_CLS"} if method == "reward" else {}
    trainer = trainer_kind(
        model=model,
        args=arguments,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[Clock()],
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", **task),
    )
    lora_start(trainer.model)
    trainer.train()
    return {"times": steps.times, "losses": losses, "reference_s": reference[0]}


def timed_method(owner: Any, name: str) -> list[float]:
    """Seconds spent in a method or function from now on, as the only item of a list."""
    spent = [0.0]
    stock = getattr(owner, name, None)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return stock(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - began

    if stock is not None:
        setattr(owner, name, timed)
    return spent


def run_ours(spec: dict[str, Any], data: list[dict[str, Any]]) -> dict[str, Any]:
    import dataclasses

    import torch

    from rl.recipes import DPORecipe, KTORecipe, RewardModelRecipe, SFTRecipe
    from rl.recipes.base import SMALL_GPU_ROWS
    from rl.training import adapter_trainer, dpo, estimates, kto, reward_model, sft, trl_trainer
    from rl.training.hardware import allocator_settle, detect
    from rl.training.profiler import product_rate
    from rl.training.result import Silent

    side, folder, method = spec["side"], Path(spec["folder"]), spec["method"]
    allocator_settle()
    hardware = detect()
    dtypes = {"ours_fp32": "float32", "ours_bf16": "bfloat16"}
    if side in dtypes:
        hardware = dataclasses.replace(hardware, dtype=dtypes[side])
    steps = Steps(spec)
    losses: list[float] = []

    class Clock(Silent):
        def on_metrics(self, step: int, values: dict[str, float]) -> None:
            if "loss" in values:
                losses.append(values["loss"])

    trainers: dict[str, tuple[Any, Any, Any]] = {
        "dpo": (DPORecipe, dpo.DPOTrainer, dpo.PairTrainer),
        "kto": (KTORecipe, kto.KTOTrainer, kto._KTOTrainer),
        "sft": (SFTRecipe, sft.SFTTrainer, sft._SFTTrainer),
        "reward": (RewardModelRecipe, reward_model.RewardModelTrainer, reward_model.ScoreTrainer),
    }
    recipe_kind, outer, inner = trainers[method]
    stock_step, stock_end, stock_build = (
        inner.training_step,
        trl_trainer.ListenerCallback.on_step_end,
        outer.build,
    )

    accumulated = [0]

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if accumulated[0] == 0:
            steps.begin()
        accumulated[0] += 1
        return stock_step(self, *args, **kwargs)

    def end(self: Any, *args: Any, **kwargs: Any) -> None:
        accumulated[0] = 0
        steps.end()
        stock_end(self, *args, **kwargs)

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = stock_build(self, *args, **kwargs)
        lora_start(trainer.model)
        return trainer

    def in_order(self: Any, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    inner.training_step, trl_trainer.ListenerCallback.on_step_end, outer.build = step, end, build  # type: ignore[method-assign]
    if not spec["vary"]:  # the same batches as the other sides
        inner._get_train_sampler = in_order
    if side == "ours_launched":
        trl_trainer.graphs_use = lambda model, note: None  # type: ignore[attr-defined]
    reference = timed_method(adapter_trainer, "reference_logps")
    knobs: dict[str, Any] = {
        "ours_4bit": {"quantization": "4bit"},
        "ours_small_gpu": SMALL_GPU_ROWS | {"gradient_accumulation": spec["batch"]},
    }.get(side, {})
    recipe = recipe_kind(
        **{
            "epochs": 1,
            "batch_size": spec["batch"],
            "learning_rate": LEARNING_RATE,
            "lr_scheduler": "constant",
            "warmup_ratio": 0.0,
            "lora_r": RANK,
            "lora_alpha": 2 * RANK,
            "logging_steps": 1,
            "save_steps": 10_000,
            "max_length": 4096,
            **knobs,
        }
    )
    asked = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in data]
    foreseen = None
    if hardware.device != "cpu":
        estimate = getattr(estimates, {"reward": "reward_model"}.get(method, method))
        told = estimate(str(folder), recipe, asked, hardware=hardware)
        foreseen = {"step_s": told.speed.step_s, "once_s": told.speed.once_s, "memory_gb": told.memory_gb}
        foreseen["product_tflops"] = product_rate(hardware) / 1e12
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = outer(recipe, str(folder), output_dir=folder / side, hardware=hardware, listener=Clock())
    trainer.load_base_model()
    trainer.train(asked)
    return {
        "times": steps.times,
        "losses": losses,
        "reference_s": reference[0],
        "notes": trainer.context.notes,
        "foreseen": foreseen,
    }


def _hardware() -> Any:
    """The machine as a training sees it."""
    from rl.training.hardware import detect

    return detect()


def _settle() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def child(spec: dict[str, Any]) -> dict[str, Any]:
    """One side, once."""
    import logging

    import torch

    logging.disable(logging.WARNING)
    torch.set_num_threads(spec["threads"])
    if spec["side"] == "trl_tuned":
        torch.set_float32_matmul_precision(_hardware().matmul_precision)
    pairs = rows(
        spec["batch"] * spec["steps"],
        SHAPES[spec["model"]]["vocab_size"],
        spec["prompt"],
        spec["completion"],
        spec["vary"],
        spec["system"],
    )
    side = run_ours if spec["side"].startswith("ours") else run_trl
    with device_turn(spec.get("turn")):
        out = side(spec, method_rows(spec["method"], pairs))
        out["peak_mb"] = (
            torch.cuda.max_memory_allocated() >> 20
            if torch.cuda.is_available()
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        )
    return out


@contextlib.contextmanager
def device_turn(lock: str | None) -> Iterator[None]:
    """Wait until no other side computes, all imports done; at once where no file is named."""
    if lock is None:
        yield
        return
    import peft
    import transformers
    import trl  # noqa: F401

    import rl.training.dpo
    import rl.training.estimates  # noqa: F401

    assert peft.LoraConfig
    assert transformers.LlamaForCausalLM  # named, so that their modules are loaded too
    with Path(lock).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--method", choices=METHODS, default="dpo", help="default dpo")
    parser.add_argument("--model", choices=list(SHAPES), help="default tiny; with a matrix, only this one")
    parser.add_argument("--prompt", type=int, default=384, help="tokens")
    parser.add_argument(
        "--system", type=int, default=0, help="tokens of the prompt that all prompts begin with"
    )
    parser.add_argument("--completion", type=int, default=24, help="tokens")
    parser.add_argument("--matrix", choices=list(MATRIX), help="all models, lengths and ways of it")
    parser.add_argument("--batch", type=int, help="pairs a step (default 8, for 100m and 8b 4)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vary", action="store_true", help="spread lengths by half around the mean")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", help=f"sides, of {', '.join(SIDES)}; default {', '.join(PLAIN)}")
    parser.add_argument("--ahead", type=int, default=0, help="sides that import while another one runs")
    parser.add_argument(
        "--profile", type=Path, help="folder for where the time of each side's last step goes"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(json.loads(options.child))))
        return
    matrix = MATRIX.get(options.matrix, {})
    models = (options.model,) if options.model else tuple(matrix) or ("tiny",)
    usual = MATRIX_SIDES if matrix else PLAIN
    sides = options.only.split(",") if options.only else list(usual)
    unknown = [side for side in sides if side not in SIDES]
    if unknown:
        raise SystemExit(f"no side {', '.join(unknown)}; there are {', '.join(SIDES)}")
    reports = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in models:
            options.model = model
            folder = Path(scratch) / model
            model_write(folder, model)
            one = (options.prompt, options.completion, options.batch or BATCH[model])
            for options.prompt, options.completion, options.batch in matrix.get(model, (one,)):
                reports.append(measure(sides, folder, options, stop=not matrix))
            shutil.rmtree(folder)
    print(json.dumps({"matrix": options.matrix, "cases": reports} if matrix else reports[0], indent=2))


def measure(sides: list[str], folder: Path, options: argparse.Namespace, *, stop: bool) -> dict[str, Any]:
    """All sides on one model and one pair of lengths, in turn; with `stop` a side that fails ends the benchmark."""
    batch = options.batch
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    failed: dict[str, str] = {}
    spec = {
        "model": options.model,
        "prompt": options.prompt,
        "completion": options.completion,
        "batch": batch,
        "steps": options.steps,
        "vary": options.vary,
        "threads": options.threads,
        "system": options.system,
        "method": options.method,
    }
    if options.ahead:
        spec["turn"] = str(folder.parent / "turn")

    def run(number: int, side: str) -> None:
        if side in failed:
            return
        own: dict[str, Any] = spec | {"side": side}
        if options.profile and number == 0:
            options.profile.mkdir(parents=True, exist_ok=True)
            name = f"{options.method}-{options.model}-{options.prompt}-{side}.txt"
            own["profile"] = str(options.profile.absolute() / name)
        said = side_run(folder, own)
        if isinstance(said, str):
            if stop:
                raise SystemExit(f"{side} failed:\n{said}")
            failed[side] = said.strip().splitlines()[-1]
            print(f"{options.model} {side} failed: {said[-1500:]}", file=sys.stderr, flush=True)
            return
        found[side].append(said)
        ms = 1e3 * statistics.median(said["times"][1:]) / batch
        print(
            f"{options.method} {options.model} {options.prompt}/{options.completion} round {number + 1}: {side} "
            f"{ms:.1f} ms a row, {said['peak_mb']} MB, foreseen {said.get('foreseen')}",
            file=sys.stderr,
            flush=True,
        )

    with ThreadPoolExecutor(1 + options.ahead) as pool:
        turns = [pool.submit(run, number, side) for number in range(options.rounds) for side in sides]
    for turn in turns:
        turn.result()
    made = report({side: runs for side, runs in found.items() if runs}, batch, options)
    return made | ({"failed": failed} if failed else {})


def side_run(folder: Path, spec: dict[str, Any]) -> dict[str, Any] | str:
    """One side once, in a process of its own; what it measured, or the end of what it complained."""
    # a folder of its own each time: a run does not go on in another's
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        own = Path(scratch)
        for file in folder.iterdir():
            (own / file.name).symlink_to(file)
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        environment.pop("OMP_NUM_THREADS", None)
        if spec["side"] in ("trl_tuned", "trl_fp32", "packed_trl"):
            environment |= ALLOCATOR
        done = subprocess.run(
            [sys.executable, __file__, "--child", json.dumps(spec | {"folder": str(own)})],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
    if done.returncode != 0:
        return done.stderr[-3000:] or f"exit code {done.returncode}"
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def report(found: dict[str, list[dict[str, Any]]], batch: int, options: argparse.Namespace) -> dict[str, Any]:
    sides: dict[str, Any] = {}
    for side, runs in found.items():
        ms = [1e3 * statistics.median(run["times"][1:]) / batch for run in runs]
        sides[side] = {
            "what": SIDES[side],
            "ms_per_row": round(statistics.median(ms), 2),
            "rounds_ms_per_row": [round(value, 2) for value in ms],
            "reference_ms_per_row": round(
                1e3 * statistics.median(run["reference_s"] for run in runs) / (batch * options.steps), 2
            ),
            "peak_mb": max(run["peak_mb"] for run in runs),
            "loss": [round(loss, 5) for loss in runs[0]["losses"]],
            **{key: runs[0][key] for key in ("notes", "foreseen") if runs[0].get(key)},
        }
    flops, peak = pair_flops(SHAPES[options.model], options.prompt, options.completion), _peak_tflops()
    for side in sides.values() if options.method == "dpo" else ():
        tflops = flops / side["ms_per_row"] / 1e9
        side["tflops"] = round(tflops, 2)
        if peak:
            side["share_of_peak"] = round(tflops / peak, 3)
    exact = sides.get("trl_fp32", {}).get("loss")
    if exact and not options.vary and options.method in ("dpo", "sft"):
        for side in sides.values():
            side["losses_differ"] = round(
                max(abs(a - b) for a, b in zip(side["loss"], exact, strict=True)), 6
            )
    return {
        "benchmark": "dpo_throughput",
        "method": options.method,
        "model": options.model,
        "prompt": options.prompt,
        "completion": options.completion,
        "system": options.system,
        "pair_tflop": round(flops / 1e12, 3),
        "peak_tflops": peak,
        "lengths": "spread by half" if options.vary else "fixed",
        "batch": batch,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "threads": options.threads,
            **_gpu(),
        },
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "peft")},
        "sides": sides,
        "ratios": {
            f"{theirs} / {ours}": {
                "time": round(sides[theirs]["ms_per_row"] / sides[ours]["ms_per_row"], 2),
                "memory": round(sides[theirs]["peak_mb"] / sides[ours]["peak_mb"], 2),
            }
            for ours in sides
            for theirs in sides
            if theirs.startswith("trl") and ours in ("ours", "ours_launched", "packed_trl")
        },
    }


def _peak_tflops() -> float | None:
    name = _gpu().get("gpu", "")
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def _gpu() -> dict[str, str]:
    import torch

    return {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


if __name__ == "__main__":
    main()
