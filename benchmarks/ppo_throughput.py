"""How many sampled responses a second PPO learns from: this project, and the experimental PPO of trl 1.10, the last one
TRL had.

    python benchmarks/ppo_throughput.py [--model tiny|100m|1b] [--prompt 384] [--response 24] [--batch 8] [--steps 4]
                                        [--rounds 2] [--only ours,trl] [--environment DIR]

trl 1.10 gets an environment of its own: a virtual environment in DIR (default: a temporary one) that sees this one's
packages and has trl 1.10.0 in front of them, installed by pip without its dependencies. Each side runs in a process
of its own on the same random weights, prompts, batch sizes, epochs and LoRA rank; the sides take turns and the median
step counts, the first of a process left out. trl's value model is a second copy of the base with LoRA of the same
rank; its reward model, which it must have, has one layer, ours is a function. Three sides are ours: with a value of its
own as trl's is, with a value on the policy's trunk (another algorithm), and with that and four samples of each prompt,
which trl samples as four prompts. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import site
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TRL = "1.10.0"
MINI_BATCHES, EPOCHS, RANK = 2, 4, 16
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours_shared": {"value_backbone": "shared"},
    "ours_shared_four": {"value_backbone": "shared", "samples_per_prompt": 4},
}
SIDES = (*OURS, "trl")


def environment(folder: Path) -> Path:
    """The Python of an environment with trl 1.10 over this one's packages; made where it is not there."""
    python = folder / "bin" / "python"
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    if not python.exists():
        venv.create(folder, with_pip=False, symlinks=True)
    if not (packages / "trl").is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*install, f"trl=={TRL}"], check=True)
        here = [path for path in site.getsitepackages() if Path(path).is_dir()]
        (packages / "beneath.pth").write_text("\n".join(here) + "\n", "utf-8")
    return python


def prompts(options: argparse.Namespace, vocabulary: int) -> list[str]:
    rng = random.Random(1)
    return [
        " ".join(f"w{rng.randrange(8, vocabulary)}" for _ in range(options.prompt))
        for _ in range(options.batch * (options.steps + 1))
    ]


def run_trl(options: argparse.Namespace, folder: Path, texts: list[str]) -> list[float]:
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    assert trl.__version__ == TRL, trl.__version__
    gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if gpu else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    dataset = Dataset.from_list([{"input_ids": tokenizer(text)["input_ids"]} for text in texts])
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    judge = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", modules_to_save=["score"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    value = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=dtype)
    reward = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, num_hidden_layers=1, dtype=dtype
    )
    value = get_peft_model(value, judge).base_model.model  # the wrapper looks for the backbone by name
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            settle()
            times.append(time.perf_counter() - self.began)
            self.began = time.perf_counter()

    arguments = PPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=options.batch // MINI_BATCHES,
        gradient_accumulation_steps=MINI_BATCHES,
        num_mini_batches=MINI_BATCHES,
        num_ppo_epochs=EPOCHS,
        total_episodes=options.batch * (options.steps + 1),
        response_length=options.response,
        temperature=1.0,
        learning_rate=1e-5,
        report_to=[],
        save_strategy="no",
        num_sample_generations=0,
        use_cpu=not gpu,
        gradient_checkpointing=False,
        bf16=gpu,
        disable_tqdm=True,
        missing_eos_penalty=1.0,
        stop_token="eos",
        logging_steps=1,
        seed=0,
    )
    trainer = PPOTrainer(
        args=arguments,
        processing_class=tokenizer,
        model=model,
        ref_model=None,
        reward_model=reward,
        train_dataset=dataset,
        value_model=value,
        eval_dataset=dataset.select(range(options.batch)),
        peft_config=lora,
        callbacks=[Clock()],
    )
    trainer.train()
    return times


def run_ours(options: argparse.Namespace, folder: Path, texts: list[str]) -> list[float]:
    from rl.recipes import PPORecipe
    from rl.rewards.base import RewardValue
    from rl.training.hardware import detect
    from rl.training.ppo import PPOTrainer
    from rl.training.result import Silent

    class Length:
        name = "length"

        def score(self, samples: Any) -> list[RewardValue]:
            return [RewardValue(len(sample.response) % 7 / 7) for sample in samples]

    times: list[float] = []

    class Clock(Silent):
        def on_start(self, total_steps: int) -> None:
            self.began = time.perf_counter()

        def on_step(self, step: int, total: int) -> None:
            settle()
            times.append(time.perf_counter() - self.began)
            self.began = time.perf_counter()

    recipe = PPORecipe(
        batch_size=options.batch,
        mini_batch_size=options.batch // MINI_BATCHES,
        ppo_epochs=EPOCHS,
        lora_r=RANK,
        lora_alpha=2 * RANK,
        max_new_tokens=options.response,
        max_length=options.prompt + options.response + 8,
        max_steps=options.steps + 1,
        top_k=0,
        top_p=1.0,
        learning_rate=1e-5,
        early_stop_kl=1e9,
        **OURS[options.side],
    )
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
    with tempfile.TemporaryDirectory() as out:
        PPOTrainer(
            recipe, str(folder), output_dir=out, hardware=detect(folder), listener=Clock(), rewards=[Length()]
        ).train(rows)
    return times


def settle() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def child(options: argparse.Namespace) -> None:
    folder = Path(options.folder)
    texts = json.loads((folder / "prompts.json").read_text("utf-8"))
    times = (run_trl if options.side == "trl" else run_ours)(options, folder, texts)
    import torch

    on_gpu = torch.cuda.is_available()
    peak = (
        torch.cuda.max_memory_allocated() / 1e9
        if on_gpu
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    )
    print(json.dumps({"times": times[1:], "peak_gb": round(peak, 2)}), file=sys.__stdout__, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", choices=["tiny", "100m", "smollm2", "1b"])
    parser.add_argument("--prompt", type=int, default=384, help="tokens of a prompt (default 384)")
    parser.add_argument("--response", type=int, default=24, help="tokens of a response (default 24)")
    parser.add_argument("--batch", type=int, default=8, help="responses a step (default 8)")
    parser.add_argument("--steps", type=int, default=4, help="steps timed in a process (default 4)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side (default 2)")
    parser.add_argument("--only", default=",".join(SIDES), help="sides to run (default all)")
    parser.add_argument(
        "--environment", type=Path, help="folder of trl 1.10's environment (default: temporary)"
    )
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return child(options)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from dpo_throughput import SHAPES, model_write

    found: dict[str, dict[str, list[float]]] = {
        side: {"times": [], "peak_gb": []} for side in options.only.split(",")
    }
    with tempfile.TemporaryDirectory() as temporary:
        python = sys.executable
        if "trl" in found:
            theirs = environment((options.environment or Path(temporary) / "trl").absolute())
        folder = Path(temporary) / "model"
        model_write(folder, options.model)
        texts = prompts(options, SHAPES[options.model]["vocab_size"])
        (folder / "prompts.json").write_text(json.dumps(texts), "utf-8")
        for _ in range(options.rounds):
            for side in found:
                interpreter = str(theirs) if side == "trl" else python
                command = [interpreter, __file__, *sys.argv[1:], "--side", side, "--folder", str(folder)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ, check=True)
                told = json.loads(done.stdout.splitlines()[-1])
                found[side]["times"] += told["times"]
                found[side]["peak_gb"].append(told["peak_gb"])
    median = {side: statistics.median(figures["times"]) for side, figures in found.items()}
    from rl.training.hardware import detect

    facts = {
        "benchmark": "ppo_throughput",
        "machine": detect().as_dict(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")} | {"trl": TRL},
        **{name: getattr(options, name) for name in ("model", "prompt", "response", "batch")},
        "ppo_epochs": EPOCHS,
        "seconds_per_step": {side: round(seconds, 3) for side, seconds in median.items()},
        "ms_per_response": {side: round(1000 * s / options.batch, 1) for side, s in median.items()},
        "peak_gb": {side: max(figures["peak_gb"]) for side, figures in found.items()},
        "times_faster_than_trl": {
            side: round(median["trl"] / seconds, 2) for side, seconds in median.items() if "trl" in median
        },
    }
    print(json.dumps(facts, indent=2))
    return None


if __name__ == "__main__":
    main()
