"""Full fine-tuning (`lora_r` 0): the weights themselves are trained, and go wherever an adapter goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from django.utils import timezone
from safetensors.torch import load_file

from rl.export.artifact import ExportRefused
from rl.export.gguf import export_gguf
from rl.export.gguf_lora import export_gguf_lora
from rl.export.weights import BaseWeights, MergedWeights, adapter_open
from rl.jobs import memory_estimate, warm_start
from rl.jobs.lifecycle import TrainOrder
from rl.jobs.memory_estimate import SIZES
from rl.jobs.run_recipe import recipe_for
from rl.jobs.teachability import teachability_warning
from rl.models import TrainingRun
from rl.models.runs import RunRefused
from rl.recipes import DPO_CONFIG, GRPO_CONFIG, PPO_CONFIG, SFT_CONFIG, RecipeError, RewardModelRecipe
from rl.registry import service as registry
from rl.registry.model_card import policy_card
from rl.training.dpo import DPOTrainer
from rl.training.hardware import Hardware
from rl.training.policy import load_policy
from rl.training.progress import Silent
from tests.support.tiny_models import tiny_model

WHOLE: dict[str, Any] = {
    "batch_size": 4, "learning_rate": 1e-3, "lora_r": 0, "max_length": 96, "max_steps": 2, "warmup_ratio": 0.0,
    "save_steps": 1, "patience": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("base") / "llama"))


def rows(**answers: str) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"revenue of week {n}"}], **answers} for n in range(8)]


class Stopping(Silent):
    """Stop after the first step."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, step: int, total: int) -> None:
        self.steps = step

    def should_stop(self) -> bool:
        return self.steps >= 1


@pytest.mark.training
def test_a_stopped_training_goes_on_and_its_weights_are_kept_switched_off_merged_and_written_as_gguf(
    base: str, tmp_path: Path
) -> None:
    recipe = DPO_CONFIG["cpu"].with_knobs(**WHOLE, warm_up_steps=0)
    shown = rows(chosen="line_chart", rejected="table")
    through = DPOTrainer(recipe, base, output_dir=tmp_path / "through", agent="x").train(shown)
    stopped = DPOTrainer(recipe, base, output_dir=tmp_path / "out", agent="x", listener=Stopping()).train(
        shown
    )
    assert (stopped.status, stopped.steps) == ("cancelled", 1)
    resumed = DPOTrainer(recipe, base, output_dir=tmp_path / "out", agent="x", resume=True).train(shown)
    one, other = (
        load_file(Path(made.checkpoint) / "adapter_model.safetensors") for made in (through, resumed)
    )
    weights = BaseWeights(Path(base))
    kept = {name for name in weights.names if "embed_tokens" not in name and "lm_head" not in name}
    assert {name.removeprefix("base_model.model.") for name in one} == kept
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name])

    folder = Path(resumed.checkpoint)
    policy, plain = load_policy(base, folder), load_policy(base)
    ids = torch.tensor([policy.tokenizer("how did revenue")["input_ids"]])
    with torch.inference_mode():
        own, before = policy.model(input_ids=ids).logits, plain.model(input_ids=ids).logits
        with policy.model.disable_adapter():
            assert torch.equal(policy.model(input_ids=ids).logits, before)
        assert not torch.allclose(own, before, atol=1e-2)
        merged = MergedWeights(weights, adapter_open(folder))
        assert set(merged.replaced_names()) == kept
        plain.model.load_state_dict({name: merged.tensor(name) for name in merged.names}, strict=False)
        assert torch.allclose(plain.model(input_ids=ids).logits, own, atol=1e-5)
    with pytest.raises(ExportRefused, match="export the policy as gguf instead"):
        export_gguf_lora(base, folder, tmp_path / "lora.gguf")
    written = export_gguf(base, folder, tmp_path / "whole.gguf", quantization="f32")
    assert written.equality["logprob_mean_abs_diff"] < 1e-3


@pytest.mark.parametrize("recipe", [PPO_CONFIG["cpu"], GRPO_CONFIG["cpu"], RewardModelRecipe()])
def test_methods_that_train_beside_the_base_refuse_rank_0(recipe: Any) -> None:
    with pytest.raises(RecipeError, match="is for dpo, kto and sft"):
        recipe.with_knobs(lora_r=0)


def test_quantised_weights_cannot_be_trained() -> None:
    with pytest.raises(RecipeError, match="found 4bit and 0"):
        SFT_CONFIG["small_gpu"].with_knobs(lora_r=0)
    recipe = SFT_CONFIG["cpu"].with_knobs(lora_r=0, max_steps=1, learning_rate=1e-6)
    assert "too little training to change what the policy answers" in teachability_warning(recipe, 100)


@pytest.mark.django_db
def test_memory_counts_a_trained_copy_and_what_does_not_fit_is_refused_with_figures(
    base: str,
) -> None:
    whole, lora = (SFT_CONFIG["cpu"].with_knobs(lora_r=rank).as_dict() for rank in (0, 16))
    parts = [memory_estimate._parts(SIZES["0.5B"], recipe, 1, 4) for recipe in (whole, lora)]
    assert parts[0][1] == 494_000_000 * 16  # 7.9 GB: weight, gradient and two moments in float32
    assert parts[0][::2] == parts[1][::2]
    small = Hardware("cpu", "a test", 1.0, 1.0, 1, "a test", "float32", "highest", True, "cpu")
    order = TrainOrder("x", "sft", "cpu", base, {"lora_r": 0})
    with pytest.raises(RunRefused, match=r"takes 1\.\d+ GB \(at most: .* this machine has 1 GB.*--lora-r 16"):
        recipe_for(order, small)
    roomy = replace(small, memory_gb=16.0)
    assert recipe_for(order, roomy)[1].learning_rate == pytest.approx(2e-4)  # a tenth of the preset's 2e-3
    named = replace(order, knobs={"lora_r": 0, "learning_rate": 1e-3})
    assert recipe_for(named, roomy)[1].learning_rate == 1e-3


@pytest.mark.django_db
def test_a_run_goes_on_with_whole_tensors_or_with_a_lora_but_not_with_the_other(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(rank: int) -> str:
        run = TrainingRun.objects.create(
            agent="x", method="sft", base_model=base, recipe={"lora_r": rank}, status="succeeded",
            finished_at=timezone.now(),
        )  # fmt: skip
        return registry.policy_register(
            run,
            name=f"x-v{rank}",
            adapter=registry.home_path("a"),
            adapter_sha256="a" * 64,
            feedback_count=1,
            actor="t",
        ).name

    monkeypatch.setattr(warm_start, "start_located", lambda name: name)
    whole, lora = start(0), start(16)

    def settled(method: str, recipe: Any, name: str) -> Any:
        return warm_start.start_resolved(
            TrainOrder("x", method, "cpu", base), recipe.with_knobs(start_from=name)
        )

    assert settled("sft", SFT_CONFIG["cpu"], whole).lora_r == 0
    assert settled("sft", SFT_CONFIG["cpu"], lora).lora_r == 16
    with pytest.raises(RunRefused, match="it was fully fine-tuned"):
        settled("ppo", PPO_CONFIG["cpu"], whole)
    with pytest.raises(RunRefused, match="it is a LoRA adapter"):
        settled("sft", SFT_CONFIG["cpu"].with_knobs(lora_r=0), lora)
    assert "fully fine-tuned" in policy_card(registry.policy_get(whole))
