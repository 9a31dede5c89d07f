"""How long a step of GRPO takes: this project, and TRL's GRPOTrainer as it comes and tuned.

    python benchmarks/grpo_throughput.py [--model tiny|100m|1b] [--prompt 384] [--completion 24] [--group 8]
                                         [--groups 1] [--steps 4] [--rounds 2] [--only ours,trl_default,trl_tuned]

A step samples `group` answers to each of `groups` prompts, judges them and takes one optimiser step. Each side runs in
a process of its own on the same random weights, prompts and LoRA rank; the sides take turns, and the median counts, the
first step of a process left out. Before that, both are given the same sampled answers in float32: `loss_differs` and
`gradient_differs` (largest norm of a difference, relative to the largest gradient) say whether they compute the same.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from dpo_throughput import ALLOCATOR, RANK, SHAPES, lora_start, model_write  # noqa: E402

SIDES = {
    "ours": "rl.training.grpo.GRPOTrainer with its defaults on this machine",
    "ours_fp32": "the same in float32",
    "trl_tuned": "TRL without gradient checkpointing, with allocator settings",
    "trl_default": "TRL's GRPOConfig as it comes",
}


def prompts(options: argparse.Namespace) -> list[str]:
    rng = random.Random(1)
    vocabulary = SHAPES[options.model]["vocab_size"]
    return [
        " ".join(f"w{rng.randrange(8, vocabulary)}" for _ in range(options.prompt))
        for _ in range(options.groups * (options.steps + 1))
    ]


def stock(options: argparse.Namespace, folder: Path, texts: list[str], **knobs: Any) -> Any:
    """TRL's trainer."""
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gpu = torch.cuda.is_available()

    def reward(completions: Sequence[str], **_: Any) -> list[float]:
        return [len(said) % 7 / 7 for said in completions]

    return trl.GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16 if gpu and knobs.get("bf16", True) else torch.float32
        ),
        [reward],
        trl.GRPOConfig(
            str(folder / "trl"),
            per_device_train_batch_size=options.group * options.groups,
            num_generations=options.group,
            max_completion_length=options.completion,
            num_train_epochs=1,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            seed=0,
            use_cpu=not gpu,
            disable_tqdm=True,
            lr_scheduler_type="constant",
            dataloader_pin_memory=False,
            learning_rate=1e-5,
            **knobs,
        ),
        Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"),
    )


def ours(options: argparse.Namespace, folder: Path, dtype: str | None, listener: Any = None) -> Any:
    """Our trainer, to be asked to train."""
    from rl.recipes import GRPORecipe
    from rl.rewards.base import RewardValue
    from rl.training.grpo import GRPOTrainer
    from rl.training.hardware import detect

    class Length:
        name = "length"

        def score(self, samples: Any) -> list[RewardValue]:
            return [RewardValue(len(sample.response) % 7 / 7) for sample in samples]

    hardware = detect()
    if dtype:
        hardware = dataclasses.replace(hardware, dtype=dtype, matmul_precision="highest")
    recipe = GRPORecipe(
        batch_size=options.group * options.groups,
        num_generations=options.group,
        beta=0.0,
        lora_r=RANK,
        lora_alpha=2 * RANK,
        max_new_tokens=options.completion,
        max_length=options.prompt + options.completion + 8,
        max_steps=options.steps + 1,
        learning_rate=1e-5,
        save_steps=10_000,
        missing_eos_penalty=0.0,
    )
    return GRPOTrainer(
        recipe,
        str(folder),
        output_dir=folder / f"ours-{os.getpid()}",
        hardware=hardware,
        listener=listener,
        rewards=[Length()],
    )


def rows(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": text}]} for text in texts]


def timed(options: argparse.Namespace, folder: Path, texts: list[str]) -> list[float]:
    """Seconds of each step of one side."""
    from transformers import TrainerCallback

    from rl.training.hardware import allocator_settle
    from rl.training.result import Silent

    times: list[float] = []
    began = 0.0

    def start() -> None:
        nonlocal began
        began = time.perf_counter()

    def end() -> None:
        settle()
        times.append(time.perf_counter() - began)
        start()

    class Theirs(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            end()

    class Ours(Silent):
        def on_start(self, total_steps: int) -> None:
            start()

        def on_step(self, step: int, total: int) -> None:
            end()

    if options.side.startswith("ours"):
        allocator_settle()
        dtype = "float32" if options.side == "ours_fp32" else None
        ours(options, folder, dtype, Ours()).train(rows(texts))
        return times
    knobs = {"gradient_checkpointing": False} if options.side == "trl_tuned" else {}
    trainer = stock(options, folder, texts, **knobs)
    trainer.add_callback(Theirs())
    trainer.train()
    return times


def agreement(options: argparse.Namespace, folder: Path, texts: list[str]) -> dict[str, Any]:
    """Loss and LoRA gradients of both on the same answers, float32."""
    from rl.training.grpo import GroupTrainer

    caught: dict[str, Any] = {}

    def catch(self: Any, model: Any, inputs: Any) -> Any:
        lora_start(model)
        loss = super(GroupTrainer, self)._compute_loss(model, inputs)
        caught.update(
            inputs=inputs,
            loss=float(loss.detach()),
            gradients=_gradients(model, loss),
            strategy=self.choice.strategy,
        )
        raise KeyboardInterrupt

    whole = GroupTrainer._compute_loss
    GroupTrainer._compute_loss = catch  # type: ignore[method-assign]
    try:
        ours(options, folder, "float32").train(rows(texts))
    except KeyboardInterrupt:
        pass
    finally:
        GroupTrainer._compute_loss = whole  # type: ignore[method-assign]
    theirs = stock(options, folder, texts, gradient_checkpointing=False, bf16=False)
    theirs.current_gradient_accumulation_steps = 1
    lora_start(theirs.model)
    theirs.model.train()
    loss = theirs._compute_loss(theirs.model, caught["inputs"])
    gradients = _gradients(theirs.model, loss)
    largest = max(float(g.norm()) for g in gradients.values())
    apart = max(float((caught["gradients"][name] - g).norm()) for name, g in gradients.items())
    return {
        "loss": float(loss.detach()),
        "loss_differs": abs(float(loss.detach()) - caught["loss"]),
        "gradient_differs": apart / largest,
        "forward": str(caught["strategy"]),
    }


def _gradients(model: Any, loss: Any) -> dict[str, Any]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def settle() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def child(options: argparse.Namespace) -> None:
    import logging

    import torch

    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    folder = Path(options.folder)
    texts = prompts(options)
    if options.side == "agreement":
        told: dict[str, Any] = dict(agreement(options, folder, texts))
    else:
        told = {"times": timed(options, folder, texts)[1:]}
        told["peak_mb"] = (
            torch.cuda.max_memory_allocated() >> 20
            if torch.cuda.is_available()
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        )
    print(json.dumps(told), file=sys.__stdout__, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", choices=["tiny", "100m", "smollm2", "1b"])
    parser.add_argument("--prompt", type=int, default=384, help="tokens of a prompt (default 384)")
    parser.add_argument("--completion", type=int, default=24, help="tokens of an answer (default 24)")
    parser.add_argument("--group", type=int, default=8, help="answers to a prompt (default 8)")
    parser.add_argument("--groups", type=int, default=1, help="prompts a step (default 1)")
    parser.add_argument("--steps", type=int, default=4, help="steps timed in a process (default 4)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side (default 2)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default=",".join(SIDES), help=f"sides, of {', '.join(SIDES)}")
    parser.add_argument("--side", choices=[*SIDES, "agreement"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        child(options)
        return
    sides = options.only.split(",")
    found: dict[str, dict[str, list[float]]] = {side: {"times": [], "peak_mb": []} for side in sides}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        model_write(folder, options.model)

        def ask(side: str) -> dict[str, Any]:
            environment = os.environ | (ALLOCATOR if side == "trl_tuned" else {})
            command = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--folder", str(folder)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
            told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return told

        same = ask("agreement")
        for _ in range(options.rounds):
            for side in sides:
                told = ask(side)
                found[side]["times"] += told["times"]
                found[side]["peak_mb"].append(told["peak_mb"])
    median = {side: statistics.median(figures["times"]) for side, figures in found.items()}
    from rl.training.hardware import detect

    facts = {
        "benchmark": "grpo_throughput",
        "machine": detect().as_dict(),
        "threads": options.threads,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "trl")},
        **{name: getattr(options, name) for name in ("model", "prompt", "completion", "group", "groups")},
        "agreement": same,
        "seconds_per_step": {side: round(seconds, 3) for side, seconds in median.items()},
        "peak_mb": {side: max(figures["peak_mb"]) for side, figures in found.items()},
        "ours_times_faster": {
            side: round(seconds / median["ours"], 2)
            for side, seconds in median.items()
            if "ours" in median and side != "ours"
        },
    }
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
