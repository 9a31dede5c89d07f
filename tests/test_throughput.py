"""The benchmark's count of what a pair costs, which its share of a card's peak is made of."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parent.parent / "benchmarks" / "dpo_throughput.py"


# worked by hand from the formula, in units of 1e12: the shapes of Llama 3.2 1B and Llama 3.1 8B, LoRA of rank 16
@pytest.mark.parametrize(
    ("model", "prompt", "completion", "tflop"),
    [("1b", 384, 24, 1.70), ("1b", 1024, 64, 4.71), ("8b", 384, 24, 12.0), ("8b", 1024, 64, 32.8)],
)
def test_a_pair_costs_what_the_formula_says(model: str, prompt: int, completion: int, tflop: float) -> None:
    spec = importlib.util.spec_from_file_location("dpo_throughput", FILE)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    counted = benchmark.pair_flops(benchmark.SHAPES[model], prompt, completion) / 1e12
    assert counted == pytest.approx(tflop, rel=0.01)


@pytest.mark.campaign
@pytest.mark.parametrize("method", ["dpo", "kto", "sft", "reward"])
def test_every_method_is_measured_beside_trl(method: str) -> None:
    options = "--model tiny --prompt 24 --completion 6 --steps 3 --rounds 1 --threads 1 --batch 4"
    command = [
        sys.executable,
        str(FILE),
        "--method",
        method,
        *options.split(),
        "--only",
        "trl_fp32,ours_fp32",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sides = json.loads(done.stdout)["sides"]
    assert all(len(side["loss"]) == 3 for side in sides.values())
    if method in ("dpo", "sft"):  # the other two draw their rows or their head
        assert sides["ours_fp32"]["losses_differ"] < 1e-4
