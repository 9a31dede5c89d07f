"""Everything that trains or asks a model, on a real CUDA device: the figures of the CPU, and half precision beside."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from packed_forward.prefix_attention import ATTENTION
from rl.training.constrained_generation import CapturedSteps
from rl.training.dpo import DPOTrainer
from rl.training.hardware import detect
from rl.training.policy import generate, load_policy
from tests.support import dpo_runs, fake_device_run
from tests.support.tiny_models import tiny_model
from tests.test_fake_device import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SINGLE = dataclasses.replace(dpo_runs.HARDWARE, device="cuda", device_name="a card")
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3")


SLIDING = ("mistral", "gemma3_text")
"""Families with a sliding window, whose answers are launched kernel by kernel."""

SAMPLED = ("ppo", "grpo")
"""Runs on answers that are drawn: another device draws others."""


@pytest.mark.parametrize("name", [name for name in fake_device_run.RUNS if name not in SAMPLED])
def test_in_float32_a_run_is_the_run_on_the_cpu(name: str, base: str, tmp_path: Path) -> None:
    run = fake_device_run.RUNS[name]
    there = run(base, tmp_path / "there", SINGLE)
    here = run(base, tmp_path / "here", dpo_runs.HARDWARE)
    assert there.keys() == here.keys()
    for what, values in here.items():
        assert_same(there[what], values, f"{name}, {what}")


@pytest.mark.parametrize("name", fake_device_run.RUNS)
def test_as_the_machine_is_detected_a_run_ends_in_figures(name: str, base: str, tmp_path: Path) -> None:
    found = fake_device_run.RUNS[name](base, tmp_path, detect())
    losses = [value for key, values in found.items() if "loss" in key for value in values]
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_as_on_the_cpu(family: str, dtype: str, tmp_path: Path) -> None:
    """bfloat16 may round, and may not learn otherwise."""
    base = str(tiny_model(tmp_path / "base", family))
    recipe = dataclasses.replace(dpo_runs.QUICK, max_steps=4)

    def losses(hardware: Any) -> list[float]:
        trainer = DPOTrainer(recipe, base, output_dir=tmp_path / hardware.device_name, hardware=hardware)
        return list(trainer.train(dpo_runs.some_pairs(16)).history["loss"])

    there = losses(dataclasses.replace(SINGLE, dtype=dtype))
    assert there == pytest.approx(losses(dpo_runs.HARDWARE), abs=2e-4 if dtype == "float32" else 0.05)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_cpu_and_their_steps_are_a_graph(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(tiny_model(tmp_path / "base", family))
    prompts = [row["prompt"] for row in dpo_runs.some_pairs(6)]
    replays: list[int] = []
    step = CapturedSteps.step

    def stepped(self: CapturedSteps, tokens: torch.Tensor) -> torch.Tensor:
        logits = step(self, tokens)
        replays.append(self.graph is not None)
        return logits

    monkeypatch.setattr(CapturedSteps, "step", stepped)

    def answers(hardware: Any) -> list[str]:
        policy = load_policy(base, hardware=hardware)
        policy.model.set_attn_implementation(ATTENTION)
        found = generate(policy, prompts, max_new_tokens=12)
        return [answer.text for answer in found]

    assert answers(SINGLE) == answers(dpo_runs.HARDWARE)
    assert any(replays) == (family not in SLIDING)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_over_a_base_in_four_bits_it_trains(checkpointing: bool, base: str, tmp_path: Path) -> None:
    recipe = dataclasses.replace(
        dpo_runs.QUICK, max_steps=6, quantization="4bit", gradient_checkpointing=checkpointing
    )
    trainer = DPOTrainer(recipe, base, output_dir=tmp_path, hardware=detect())
    result = trainer.train(dpo_runs.some_pairs(16))
    assert "the frozen base is loaded in 4 bits (NF4)" in result.notes
    assert result.history["loss"][-1] < result.history["loss"][0]
