"""Recipes fitted to rows, base model and minutes; training that ends at its limit."""

import dataclasses
import time
from pathlib import Path

import pytest

from rl.jobs.run_recipe import within_minutes
from rl.jobs.stages import SFT_SHARE, stage_limits
from rl.jobs.trainer import rows_read
from rl.recipes import DPO_CONFIG, RECIPES, Recipe, SFTRecipe
from rl.recipes.fit import SIZES, Speed, Workload, memory_of, minutes_fitted, rate_scale, recipe_fitted
from rl.training.sft import SFTTrainer
from tests.support.dpo_runs import HARDWARE, some_pairs

SMALL = Workload(rows=191, tokens=110, longest=200, parameters=135_000_000)


def fitted(method: str, work: Workload = SMALL, *named: str) -> Recipe:
    recipe: Recipe = RECIPES[method]["cpu"]
    return recipe_fitted(recipe, work, named)


@pytest.mark.parametrize(("method", "steps"), [("sft", 96), ("dpo", 36), ("kto", 36), ("reward_model", 36)])
def test_a_pretrained_model_gets_tens_of_steps(method: str, steps: int) -> None:
    recipe, preset = fitted(method), RECIPES[method]["cpu"]
    assert recipe.steps(191) == steps
    assert preset.steps(191) >= 2.5 * steps or method == "reward_model"
    assert recipe.learning_rate == pytest.approx(preset.learning_rate * rate_scale(135_000_000), rel=0.05)


@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "reward_model", "grpo", "ppo"])
@pytest.mark.parametrize("tokens", [60, 900])
@pytest.mark.parametrize("parameters", [30_000_000, 1_000_000_000, 8_000_000_000])
def test_rows_of_a_step_do_not_depend_on_how_it_is_cut(method: str, tokens: int, parameters: int) -> None:
    work = Workload(rows=300, tokens=tokens, longest=2 * tokens, parameters=parameters)
    recipe, preset = fitted(method, work), RECIPES[method]["cpu"]
    if method != "ppo":
        assert (
            recipe.batch_size * recipe.gradient_accumulation
            == preset.batch_size * preset.gradient_accumulation
        )
    assert 256 <= recipe.max_length <= 2048 + 48


def test_long_rows_and_large_models_get_small_micro_batches() -> None:
    short = fitted("sft")
    long = fitted("sft", dataclasses.replace(SMALL, tokens=800))
    large = fitted("sft", dataclasses.replace(SMALL, parameters=8_000_000_000))
    assert short.batch_size > long.batch_size > 0
    assert short.batch_size > large.batch_size > 0
    # a micro-batch padded to one long row stays within twice the memory that its rows were fitted to
    assert long.micro_tokens == short.micro_tokens > large.micro_tokens >= 2 * 200
    assert (short.lora_r, large.lora_r) == (16, 8)
    assert short.learning_rate > large.learning_rate


@pytest.mark.parametrize(("method", "alike"), [("sft", True), ("dpo", True), ("reward_model", False)])
def test_a_long_padded_row_makes_micro_batches_smaller(method: str, alike: bool) -> None:
    few_long = dataclasses.replace(SMALL, longest=1800)
    assert (fitted(method, few_long).batch_size == fitted(method).batch_size) is alike


def test_named_knobs_win_and_a_large_base_on_an_accelerator_keeps_its_preset() -> None:
    assert fitted("sft", SMALL, "learning_rate").learning_rate == RECIPES["sft"]["cpu"].learning_rate
    named = fitted("dpo", dataclasses.replace(SMALL, tokens=2000), "batch_size")
    assert (named.batch_size, named.gradient_accumulation) == (16, 1)
    assert fitted("sft", dataclasses.replace(SMALL, device="cuda")) == fitted("sft")
    large = dataclasses.replace(SMALL, device="cuda", parameters=1_240_000_000)
    assert fitted("sft", large) is RECIPES["sft"]["cpu"]


def test_passes_are_cut_to_the_minutes() -> None:
    recipe = fitted("sft")
    enough = minutes_fitted(recipe, 191, 20, Speed(step_s=2.0, once_s=10.0))
    assert (enough.recipe, enough.note) == (recipe, "")
    fewer = minutes_fitted(recipe, 191, 1, Speed(step_s=2.0, once_s=10.0))
    # 52.8 seconds are left of a minute, less ten: 21 steps, of 12 to a pass
    assert (fewer.steps, fewer.rows, fewer.recipe.steps(191)) == (21, 191, 21)
    assert "21 of 96 steps" in fewer.note


def test_rows_are_left_out_where_not_even_one_pass_fits() -> None:
    found = minutes_fitted(fitted("sft"), 400, 1, Speed(step_s=4.0, once_s=32.0))
    assert found.rows < 200
    assert f"{found.rows} of 400 rows" in found.note
    assert found.recipe.steps(400) == found.steps
    rows = list(range(400))
    assert abs(len(rows_read(found.recipe, rows)) - found.rows) <= 16
    assert rows_read(found.recipe, rows) == rows_read(found.recipe, rows)
    assert rows_read(fitted("sft"), rows) == rows


def test_minutes_bound_warm_ups_and_stages() -> None:
    # a warm up takes a part of the minutes at most
    recipe = fitted("dpo")
    found = minutes_fitted(recipe, 94, 2, Speed(step_s=3.0, once_s=110.0, warm_up_s=100.0)).recipe
    assert 0 < found.warm_up_steps < recipe.warm_up_steps  # type: ignore[attr-defined]
    # stages are held to the limits of their run
    assert stage_limits({"max_steps": 2, "minutes": 20.0}) == {"max_steps": 2, "minutes": 5.0}
    assert stage_limits({"max_steps": -1, "minutes": 0.0}) == {}
    assert stage_limits({"minutes": 20.0}, SFT_SHARE) == {"minutes": 10.0}
    own = within_minutes(DPO_CONFIG["cpu"].with_knobs(minutes=20.0, start_from="sft"), 300, Speed(10.0, 0.0))
    alone = within_minutes(DPO_CONFIG["cpu"].with_knobs(minutes=10.0), 300, Speed(10.0, 0.0))
    assert own.steps == alone.steps


def test_training_ends_at_its_deadline_with_the_weights_it_has(base: str, tmp_path: Path) -> None:
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in some_pairs(8)]
    recipe = SFTRecipe(max_steps=50, batch_size=4, lora_r=2, lora_alpha=4, minutes=1)
    result = SFTTrainer(
        recipe, base, output_dir=tmp_path, hardware=HARDWARE, deadline=time.monotonic() - 1
    ).train(rows)
    assert (result.status, result.steps, result.total_steps) == ("succeeded", 1, 50)
    assert "1 minutes were over" in result.stopped_early
    assert (Path(result.checkpoint) / "adapter_model.safetensors").is_file()


def test_memory_of_a_warm_up_counts_the_base_that_it_trains() -> None:
    weights = [
        memory_of(
            SIZES["0.5B"],
            RECIPES["kto"]["cpu"].with_knobs(warm_up_steps=steps),
            number=4,
            four_bit=False,
            kept=0,
        ).weights
        for steps in (0, 24)
    ]
    assert weights[1] == 2 * weights[0] == 2 * 4 * 494_000_000
