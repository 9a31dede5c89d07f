"""Full fine-tuning (`lora_r` 0): the weights themselves are trained, and go wherever an adapter goes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from django.utils import timezone
from peft import PeftModel
from safetensors.torch import load_file

from rl.export.artifact import ExportRefused
from rl.export.gguf import export_gguf
from rl.export.gguf_lora import export_gguf_lora
from rl.export.weights import BaseWeights, MergedWeights, adapter_open
from rl.jobs import warm_start
from rl.jobs.lifecycle import TrainOrder
from rl.jobs.run_recipe import recipe_for
from rl.jobs.teachability import teachability_warning
from rl.models import TrainingRun
from rl.models.runs import RunRefused
from rl.recipes import (
    DPO_CONFIG,
    GRPO_CONFIG,
    KTO_CONFIG,
    PPO_CONFIG,
    SFT_CONFIG,
    AdapterRecipe,
    RecipeError,
    RewardModelRecipe,
)
from rl.recipes.fit import SIZES, memory_of, trained_bytes
from rl.registry import service as registry
from rl.registry.model_card import policy_card
from rl.rewards.catalogue import reward_models_named
from rl.training.dpo import DPOTrainer
from rl.training.grpo import GRPOTrainer
from rl.training.hardware import Hardware
from rl.training.policy import generate, load_policy
from rl.training.ppo import PPOTrainer
from rl.training.preflight import start_policy
from rl.training.result import Silent
from rl.training.reward_model import train_reward_model
from rl.training.rewarding import fits, rewards_of
from rl.training.sft import SFTTrainer
from rl.training.shared_base import SharedBase
from tests.support.tiny_models import tiny_model
from tests.test_ppo import Length

WHOLE: dict[str, Any] = {
    "batch_size": 4, "learning_rate": 1e-3, "lora_r": 0, "max_length": 96, "max_steps": 2, "warmup_ratio": 0.0,
    "save_steps": 1, "patience": 0,
}  # fmt: skip

FULL = Hardware("cpu", "a test", 1.0, 1.0, 1, "a test", "float32", "highest", True, "cpu")
HALF = replace(FULL, dtype="bfloat16")


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
    assert written.equality["agreement"]["policy"]["texts"]["kl"] < 1e-5


@pytest.mark.training
def test_the_trained_policy_answers_on_a_machine_that_is_quick_with_bfloat16(
    base: str, tmp_path: Path
) -> None:
    trainer = SFTTrainer(
        SFT_CONFIG["cpu"].with_knobs(**WHOLE), base, output_dir=tmp_path / "out", hardware=HALF
    )
    trainer.train(rows(completion="table"))
    (answer,) = generate(trainer.load_base_model(), [rows()[0]["prompt"]], max_new_tokens=4)
    assert answer.tokens > 0


@pytest.mark.training
def test_a_look_at_the_policy_that_a_run_starts_from_leaves_the_base_as_it_was(
    base: str, tmp_path: Path
) -> None:
    recipe = SFT_CONFIG["cpu"].with_knobs(**WHOLE)
    start = SFTTrainer(recipe, base, output_dir=tmp_path, hardware=FULL).train(rows(completion="table"))
    policy = load_policy(base, hardware=FULL)
    before = {name: weight.clone() for name, weight in policy.model.state_dict().items()}
    with start_policy(policy, recipe.with_knobs(start_from=start.checkpoint)):
        pass
    after = policy.model.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(weight, before[name]) for name, weight in after.items())


@pytest.mark.training
@pytest.mark.parametrize("method", [PPOTrainer, GRPOTrainer], ids=["ppo", "grpo"])
def test_a_policy_that_samples_its_answers_trains_its_weights_and_goes_on_where_it_was_stopped(
    base: str, tmp_path: Path, method: Any
) -> None:
    presets = {PPOTrainer: PPO_CONFIG, GRPOTrainer: GRPO_CONFIG}
    knobs = {"mini_batch_size": 4} if method is PPOTrainer else {"num_generations": 4}
    recipe = presets[method]["cpu"].with_knobs(
        **WHOLE | {"batch_size": 8, "max_new_tokens": 6, "max_kl": 0.0} | knobs
    )

    def trained(folder: str, **options: Any) -> Any:
        return method(
            recipe,
            base,
            output_dir=tmp_path / folder,
            agent="assistant",
            rewards=[Length()],
            hardware=HALF,
            **options,
        ).train(rows())

    through = trained("through")
    assert trained("out", listener=Stopping()).status == "cancelled"
    resumed = trained("out", resume=True)
    one, other = (
        load_file(Path(made.checkpoint) / "adapter_model.safetensors") for made in (through, resumed)
    )
    weights = BaseWeights(Path(base))
    kept = {name for name in weights.names if "embed_tokens" not in name and "lm_head" not in name}
    assert {name.removeprefix("base_model.model.") for name in one} == kept
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name])
        assert weight.dtype == torch.float32  # half of it would lose small steps
    assert any(
        not torch.equal(weight, weights.tensor(name.removeprefix("base_model.model.")).float())
        for name, weight in one.items()
    )
    assert any("the base is loaded in float32" in detail for detail in through.details)
    # from there on: the reference is the policy it started from, not the base
    further = recipe.with_knobs(start_from=through.checkpoint, max_steps=1)
    first = method(
        further, base, output_dir=tmp_path / "further", agent="assistant", rewards=[Length()], hardware=HALF
    ).train(rows())
    assert first.history["kl"][0] == pytest.approx(0, abs=1e-4)


@pytest.mark.training
def test_a_reward_model_of_whole_weights_scores_as_it_did_when_it_was_trained_and_stays_beside_a_policy(
    base: str, tmp_path: Path
) -> None:
    shown = rows(chosen="line_chart", rejected="table")
    recipe = RewardModelRecipe(**WHOLE | {"max_steps": 6})
    model, result = train_reward_model(
        shown, recipe, output_dir=tmp_path / "judge", base_model=base, hardware=FULL
    )
    assert result.metrics["rewards/accuracies"] == 1
    assert not isinstance(model.model, PeftModel)  # the weights stand in the base's place
    asked = [([{"role": "user", "content": "revenue of week 3"}], text) for text in ("line_chart", "table")]
    liked, disliked = model.scores(asked)
    assert liked > disliked
    tensors = load_file(Path(result.checkpoint) / "adapter_model.safetensors")
    assert "base_model.model.score.weight" in tensors
    for rank in (0, 4):
        policy = SharedBase(load_policy(base, hardware=FULL), PPO_CONFIG["cpu"].with_knobs(lora_r=rank))
        assert not fits(result.checkpoint, policy)
        (judge,) = rewards_of(f"model:{result.checkpoint}", policy)
        assert judge.scores(asked) == pytest.approx([liked, disliked], abs=1e-2)  # in its own precision


@dataclass(frozen=True)
class AdapterOnlyRecipe(AdapterRecipe):
    """Recipe of a method from outside, whose trainer knows LoRA alone."""


def test_what_cannot_train_whole_weights_refuses_rank_0_and_says_what_to_do() -> None:
    with pytest.raises(RecipeError, match="trains LoRA adapters only; expected a rank above 0"):
        AdapterOnlyRecipe(lora_r=0)
    with pytest.raises(RecipeError, match=r"leave out vllm_server, or train a LoRA adapter \(--lora-r 16\)"):
        PPO_CONFIG["cpu"].with_knobs(lora_r=0, vllm_server="http://localhost:8001")


def test_quantised_weights_cannot_be_trained() -> None:
    with pytest.raises(RecipeError, match="found 4bit and 0"):
        SFT_CONFIG["small_gpu"].with_knobs(lora_r=0)
    recipe = SFT_CONFIG["cpu"].with_knobs(lora_r=0, max_steps=1, learning_rate=1e-6)
    assert "too little training to change what the policy answers" in teachability_warning(recipe, 100)


@pytest.mark.django_db
def test_memory_counts_a_trained_copy_and_what_does_not_fit_is_refused_with_figures(
    base: str,
) -> None:
    whole, lora = (SFT_CONFIG["cpu"].with_knobs(lora_r=rank) for rank in (0, 16))
    # 7.9 GB: weight, gradient and two moments in float32
    assert trained_bytes(SIZES["0.5B"], whole) == 494_000_000 * 16
    assert (
        memory_of(SIZES["0.5B"], whole, size=4, kept=0).weights
        == memory_of(SIZES["0.5B"], lora, size=4, kept=0).weights
    )
    small = Hardware("cpu", "a test", 1.0, 1.0, 1, "a test", "float32", "highest", True, "cpu")
    order = TrainOrder("x", "sft", "cpu", base, {"lora_r": 0})
    with pytest.raises(RunRefused, match=r"takes 1\.\d+ GB \(at most: .* this machine has 1 GB.*--lora-r 16"):
        recipe_for(order, small)
    roomy = replace(small, memory_gb=16.0)
    assert recipe_for(order, roomy)[1].learning_rate == pytest.approx(SFT_CONFIG["cpu"].learning_rate / 10)
    named = replace(order, knobs={"lora_r": 0, "learning_rate": 1e-3})
    assert recipe_for(named, roomy)[1].learning_rate == 1e-3
    ppo = replace(order, method="ppo", knobs={"lora_r": 0})
    rates, preset = recipe_for(ppo, roomy)[1], PPO_CONFIG["cpu"]
    assert rates.learning_rate == pytest.approx(preset.learning_rate / 10)
    assert rates.value_learning_rate == pytest.approx(preset.value_learning_rate / 10)
    with pytest.raises(RunRefused, match="value_backbone=shared saves the second trained copy"):
        recipe_for(ppo, small)


def test_memory_of_a_warm_up_counts_the_base_that_it_trains() -> None:
    recipe = KTO_CONFIG["cpu"]
    weights = [
        memory_of(SIZES["0.5B"], recipe.with_knobs(warm_up_steps=steps), size=4, kept=0).weights
        for steps in (0, 24)
    ]
    assert weights[1] == 2 * weights[0] == 2 * 4 * 494_000_000


def test_memory_of_ppo_counts_the_value_s_copy_and_what_stands_beside() -> None:
    def adapter_and_weights(**knobs: Any) -> tuple[float, float]:
        shape, recipe = SIZES["0.5B"], PPO_CONFIG["cpu"].with_knobs(lora_r=0, **knobs)
        judges = reward_models_named(recipe.reward)
        weights = memory_of(shape, recipe, size=4, kept=0, judges=judges).weights
        return trained_bytes(shape, recipe) / 494e6, weights / 494e6

    assert adapter_and_weights() == (32, 4)  # bytes a weight: two trained copies; the base
    assert adapter_and_weights(value_backbone="shared") == (16, 4)
    assert adapter_and_weights(start_from="x-v1") == (36, 4)  # the reference's copy
    assert adapter_and_weights(start_from="x-v1", reference="base") == (32, 4)
    assert adapter_and_weights(reward="agent,model:1") == (32, 8)  # a reward model beside the base


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
    assert settled("ppo", PPO_CONFIG["cpu"], whole).lora_r == 0
    assert settled("grpo", GRPO_CONFIG["cpu"], whole).lora_r == 0
    with pytest.raises(RunRefused, match="it was fully fine-tuned"):
        settled("sft", AdapterOnlyRecipe(), whole)
    with pytest.raises(RunRefused, match="it is a LoRA adapter"):
        settled("sft", SFT_CONFIG["cpu"].with_knobs(lora_r=0), lora)
    assert "fully fine-tuned" in policy_card(registry.policy_get(whole))
