"""What a machine is taken to be, and why."""

import dataclasses
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl.recipes import RECIPES, DPORecipe, GRPORecipe, PPORecipe, Recipe, SFTRecipe
from rl.recipes.fit import sizes_that_fit
from rl.recipes.methods import METHODS
from rl.training import estimates, hardware, profiler
from rl.training.encoding import EncodedResponse
from rl.training.estimates import dpo as dpo_estimate
from rl.training.estimates import evaluations, grpo
from rl.training.hardware import Hardware, HardwareRefused, detect, measure_products
from rl.training.loading import PolicyLoadError
from rl.training.profiler import MeasuredBase

FACTS = {"float32": 200.0, "float32_medium": 200.0, "bfloat16": 200.0, "medium_relative_error": 1e-6}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine without accelerator whose probe finds what it is told."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)

    def machine(**facts: float) -> Hardware:
        monkeypatch.setattr(hardware, "measure_products", lambda: {**FACTS, **facts})
        return detect()

    return machine


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    def machine(gigabytes: float, bf16: bool = True) -> Hardware:
        card = SimpleNamespace(name="A Card", total_memory=int(gigabytes * 1e9), major=8, minor=6)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16)
        return detect()

    return machine


@pytest.mark.slow
def test_this_machine_is_described_with_a_reason_for_each_derived_setting() -> None:
    found = detect()
    assert found.device in ("cuda", "mps", "cpu")
    assert found.dtype in ("float32", "bfloat16", "float16")
    assert found.cores >= 1
    assert found.ram_gb > 0.5
    assert found.cpu_model
    assert set(found.reasons) == set(
        "device dtype matmul_precision supports_4bit preset profile threads".split()
    )
    assert all(found.reasons.values())
    assert json.loads(json.dumps(found.as_dict()))["preset"] == found.preset


def test_which_product_is_taken(on_cpu: Any) -> None:
    # bfloat16 is taken where it is clearly faster
    assert on_cpu(bfloat16=200.0 * hardware.BF16_MIN_GAIN).dtype == "bfloat16"
    quick = on_cpu(bfloat16=200.0 * hardware.BF16_MIN_GAIN - 10)
    assert quick.dtype == "float32"
    assert "GFLOP/s" in quick.reasons["dtype"]
    # the faster float32 product is taken only while it is float32
    assert on_cpu(float32_medium=420.0).matmul_precision == "medium"
    assert on_cpu(float32_medium=420.0, medium_relative_error=2e-3).matmul_precision == "highest"
    assert on_cpu(float32_medium=210.0).matmul_precision == "highest"
    # bfloat16 is compared with the fastest exact float32
    fast = {"float32_medium": 600.0, "bfloat16": 600.0 * hardware.BF16_MIN_GAIN - 60}
    assert on_cpu(**fast).dtype == "float32"
    assert on_cpu(**fast, medium_relative_error=1e-2).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("gigabytes", "preset"),
    [(8.6, "small_gpu"), (12.9, "small_gpu"), (16.1, "default"), (25.7, "high_quality")],
)
def test_the_preset_follows_the_accelerators_memory(on_gpu: Any, gigabytes: float, preset: str) -> None:
    found = on_gpu(gigabytes)
    assert (found.device, found.preset, found.memory_gb) == ("cuda", preset, gigabytes)


def test_a_gpu_without_native_bfloat16_gets_float16(on_gpu: Any) -> None:
    assert on_gpu(16.1).dtype == "bfloat16"
    assert on_gpu(16.1, bf16=False).dtype == "float16"


def test_many_cores_have_a_profile_of_their_own(on_cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cores_physical", lambda: 16)
    assert on_cpu().profile == "desktop_cpu"
    monkeypatch.setattr(hardware, "cores_physical", lambda: 4)
    found = on_cpu()
    assert (found.profile, found.threads <= 4) == ("cpu_only", True)
    assert "below 8" in found.reasons["profile"]


def test_an_accelerator_can_be_left_alone(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_gpu(25.7).profile == "gpu"
    monkeypatch.setattr(hardware, "measure_products", lambda: FACTS)
    found = detect(profile="cpu_only")
    assert (found.device, found.preset) == ("cpu", "cpu")
    assert "A Card is not used" in found.reasons["device"]
    assert found.gpus[0] | {"name": "A Card"} == found.gpus[0]


def test_rocm_cards_are_called_so(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    found = on_gpu(25.7)
    assert (found.device, found.gpus[0]["kind"]) == ("cuda", "rocm")
    assert "sees ROCm" in found.reasons["device"]


def test_a_profile_this_machine_cannot_have_is_refused(on_cpu: Any) -> None:
    on_cpu()
    with pytest.raises(HardwareRefused, match="profile gpu needs an accelerator"):
        detect(profile="gpu")
    with pytest.raises(HardwareRefused, match="one of auto, cpu_only, desktop_cpu, gpu; found 'laptop'"):
        detect(profile="laptop")


@pytest.mark.parametrize(
    ("asked", "physical", "quota", "threads", "why"),
    [
        (32, 16, None, 16, "physical cores"),
        (4, 16, None, 4, "PyTorch's own number"),
        (32, 16, 2.5, 3, "the 2.5 cores' worth of time"),
        (8, 8, 0.5, 1, "the 0.5 cores' worth"),
    ],
)
def test_threads_are_cut_to_what_can_run_at_once(
    monkeypatch: pytest.MonkeyPatch, asked: int, physical: int, quota: float | None, threads: int, why: str
) -> None:
    monkeypatch.setattr(hardware, "cores_physical", lambda: physical)
    monkeypatch.setattr(hardware, "cores_quota", lambda: quota)
    found, reason = hardware.threads_fit(asked)
    assert (found, reason.startswith(why)) == (threads, True), reason


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000", None), ("250000 100000", 2.5), ("", None), ("50000 0", None)]
)
def test_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, quota: float | None) -> None:
    monkeypatch.setattr(hardware, "CPU_MAX", tmp_path / "cpu.max")
    monkeypatch.setattr(hardware, "CFS", tmp_path / "none")
    (tmp_path / "cpu.max").write_text(text)
    assert hardware.cores_quota() == quota


def test_the_probe_measures_and_leaves_the_precision_as_it_was() -> None:
    before = torch.get_float32_matmul_precision()
    measured = measure_products(rows=64, width=64, budget_s=0.01)
    assert torch.get_float32_matmul_precision() == before
    assert set(measured) == set(hardware.PROBE_KEYS)
    assert all(value > 0 for value in measured.values())
    assert measured["medium_relative_error"] < 0.05


@pytest.mark.parametrize("content", ["", "{", "[]", '{"float32": 1.0}', '{"float32": "fast"}'])
def test_a_broken_probe_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "measure_products", lambda: FACTS)
    detect(tmp_path)
    (file,) = tmp_path.glob("hardware-*.json")
    file.write_text(content)
    assert detect(tmp_path).measured == FACTS
    assert json.loads(file.read_text()) == FACTS


CPU = Hardware("cpu", "a test", 1.0, 1.0, 1, "a test", "float32", "highest", True, "cpu")

ROWS = [
    {"prompt": [{"role": "user", "content": f"why {i}"}], "chosen": "a b c", "rejected": "d"}
    for i in range(50)
]


@pytest.mark.slow
def test_the_estimate_counts_steps_as_training_does(base: str) -> None:
    # 50 pairs in batches of 4: 13 micro-batches; 2 to a step: 7 steps; 3 epochs: 21
    recipe = DPORecipe(batch_size=4, gradient_accumulation=2, epochs=3)
    found = dpo_estimate(base, recipe, ROWS, hardware=CPU)
    assert found.steps == 21
    assert found.minutes > 0
    assert found.memory_gb > 0.5
    assert set(found.reasons) == {"steps", "minutes", "memory_gb"}
    assert dpo_estimate(base, dataclasses.replace(recipe, max_steps=5), ROWS, hardware=CPU).steps == 5
    same = [{**row, "rejected": row["chosen"]} for row in ROWS]
    assert dpo_estimate(base, recipe, same, hardware=CPU).steps == 0


def test_a_warm_up_counts_every_micro_batch(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "_estimate", lambda planned, work, hardware: work)

    def passes(**knobs: Any) -> float:
        recipe = DPORecipe(batch_size=4, warm_up_steps=2, max_length=96, max_completion_length=32)
        work: Any = dpo_estimate(base, recipe.with_knobs(**knobs), ROWS[:40], hardware=CPU)
        return float(work.warm_up)

    assert passes() == 3 * 2
    assert passes(gradient_accumulation=2) == 2 * passes()
    assert passes(general_weight=1.0) > passes()
    # each pair by itself: four times as many micro-batches
    assert passes(micro_tokens=1) == pytest.approx(4 * passes())


def test_a_base_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyLoadError, match="found none"):
        dpo_estimate(str(tmp_path / "nothing"), DPORecipe(), ROWS, hardware=CPU)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "rows"),
    [
        ("kto", [{**row, "completion": "a b c", "label": n % 2 == 0} for n, row in enumerate(ROWS)]),
        ("sft", [{**row, "completion": "a b c"} for row in ROWS]),
        ("reward_model", ROWS),
        ("ppo", ROWS),
        ("grpo", ROWS),
    ],
)
def test_every_method_can_be_estimated(base: str, method: str, rows: list[dict[str, Any]]) -> None:
    sampled = {"max_new_tokens": 6} if method in ("ppo", "grpo") else {}
    recipe = RECIPES[method]["default"].with_knobs(max_length=128, batch_size=8, **sampled)
    module, _, name = METHODS[method].estimate.partition(":")
    found = getattr(importlib.import_module(module), name)(base, recipe, rows, hardware=CPU)
    assert found.steps == recipe.steps(len(rows))
    assert found.minutes > 0
    assert found.memory_gb > 0.5


def test_general_prompts_are_part_of_the_memory(base: str) -> None:
    rows = [{**row, "completion": "a b c"} for row in ROWS]
    module, _, name = METHODS["sft"].estimate.partition(":")
    alone, rehearsed = (
        getattr(importlib.import_module(module), name)(
            base, SFTRecipe(max_length=128, batch_size=8, general_weight=weight), rows, hardware=CPU
        ).memory_gb
        for weight in (0.0, 1.0)
    )
    assert rehearsed > alone


@pytest.mark.parametrize(
    ("recipe", "rows", "steps"),
    [
        (DPORecipe(batch_size=4, gradient_accumulation=2, epochs=3), 50, 21),
        (DPORecipe(max_steps=5), 50, 5),
        (DPORecipe(), 0, 0),
        (PPORecipe(batch_size=8, mini_batch_size=8, samples_per_prompt=2, epochs=2), 50, 25),
        (GRPORecipe(batch_size=16, num_generations=8, gradient_accumulation=2, epochs=2), 50, 26),
        (GRPORecipe(batch_size=16, num_generations=8, num_iterations=3, epochs=1), 50, 75),
    ],
)
def test_a_recipe_knows_its_steps(recipe: Recipe, rows: int, steps: int) -> None:
    assert recipe.steps(rows) == steps


def test_a_model_too_large_to_be_loaded_is_counted(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = dpo_estimate(base, DPORecipe(), ROWS, hardware=CPU)
    monkeypatch.setattr(estimates, "ASKABLE", 0)
    monkeypatch.setattr(profiler, "ASKABLE", 0)
    monkeypatch.setattr(MeasuredBase, "policy", property(lambda self: pytest.fail("the base was loaded")))
    monkeypatch.setattr(profiler, "product_rate", lambda hardware: 1e9)
    slow = dpo_estimate(base, DPORecipe(), ROWS, hardware=CPU)
    monkeypatch.setattr(profiler, "product_rate", lambda hardware: 2e9)
    fast = dpo_estimate(base, DPORecipe(), ROWS, hardware=CPU)
    assert slow.minutes == pytest.approx(2 * fast.minutes)
    assert slow.steps == measured.steps
    assert slow.memory_gb > 0.5
    recipe = GRPORecipe(batch_size=8, num_generations=4, max_new_tokens=6, max_length=128)
    assert grpo(base, recipe, ROWS, hardware=CPU).minutes > 0


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 9.0), ("mps", 1.0)])
def test_kernels_that_a_gpu_compiles_for_a_shape_are_not_the_time_of_a_step(
    device: str, seconds: float, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the first step of a shape counts: a second one would take as long as a run may wait."""
    clock, seen = [0.0], set()
    runner = profiler._runner

    def compiling(*given: Any) -> Any:
        run = runner(*given)

        def timed(micro: Any) -> torch.Tensor:
            clock[0] += 1.0 if len(micro) in seen else 9.0
            seen.add(len(micro))
            loss: torch.Tensor = run(micro)
            return loss

        return timed

    monkeypatch.setattr(profiler, "_runner", compiling)
    monkeypatch.setattr(profiler, "_clock", lambda _: clock[0])
    measured = MeasuredBase(base, dataclasses.replace(CPU, device="cpu"))
    measured.policy.hardware = dataclasses.replace(CPU, device=device)
    item = EncodedResponse([5, 6, 7], [8, 9])
    micros = [[item] * count for count in (1, 2, 3)]
    assert profiler._measure(measured.policy, DPORecipe(), micros, False)[0].train_s == seconds


@pytest.mark.parametrize(("eval_steps", "steps", "times"), [(0, 30, 1), (10, 30, 3), (10, 31, 4)])
def test_held_out_rows_are_looked_at_as_training_does(eval_steps: int, steps: int, times: int) -> None:
    assert evaluations(SFTRecipe(eval_steps=eval_steps), steps, 100) == times


def test_sizes_that_fit_are_told_by_their_bytes() -> None:
    recipe = DPORecipe(lora_r=8, max_length=1000, max_completion_length=100, batch_size=4)
    fits = sizes_that_fit(24.0, recipe, on_accelerator=True, supports_4bit=True)
    found = {(fit.size, fit.quantization): fit for fit in fits}
    # 7B: 15.232 GB of weights; 28 layers x rank 8 x (8 x 3,584 + 3 x 22,528) x 16 = 0.345 GB of adapter and optimiser;
    # 2 x 1,000 tokens x (10 x 3,584 + 3 x 18,944) x 2 = 0.371 GB and 2 x 100 x 152,064 x 2 = 0.061 GB kept; 1.5 GB
    assert found["7B", "none"].gb == 17.5
    assert found["7B", "none"].fits
    # in 4 bits 3.367 GB of weights, beside them embedding and head: 2 x 152,064 x 3,584 x 2 = 2.180 GB
    assert found["7B", "4bit"].gb == 7.8
    assert not any(fit.fits for fit in sizes_that_fit(2.0, recipe, on_accelerator=True, supports_4bit=False))
    assert {
        fit.quantization for fit in sizes_that_fit(2.0, recipe, on_accelerator=False, supports_4bit=False)
    } == {"none"}
