"""Group relative policy optimisation (Shao et al. 2024): answers to one prompt compete."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import trl
from datasets import Dataset
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from trl.import_utils import is_vllm_available

from rl.agents.base import Row
from rl.recipes import GRPORecipe
from rl.training.adapter_trainer import TrainRows, common_arguments
from rl.training.grpo_trainer import GroupTrainer
from rl.training.loading import ADAPTER_FILES
from rl.training.policy import LoadedPolicy
from rl.training.result import TrainingFailed, TrainingRefused, checkpoint_last
from rl.training.rewarding import Judge, Prompts, RewardedTrainer, rewards_of
from rl.training.shared_base import reference_add


class GRPOTrainer(RewardedTrainer[GRPORecipe, Prompts]):
    """Train an adapter on groups of answers to one prompt, each rewarded against the mean of its group.

    Rows are prompts: the policy answers each one `num_generations` times, and rewards judge.
    """

    method = "grpo"

    def check(self, rows: Sequence[Row]) -> None:
        super().check(rows)
        if self.recipe.vllm != "off" and not is_vllm_available():
            raise TrainingRefused(
                f"vllm={self.recipe.vllm} needs vLLM, which is not installed here: `pip install trl[vllm]`, or vllm=off"
            )

    def encode(
        self, policy: LoadedPolicy, train_rows: Sequence[Row], eval_rows: Sequence[Row]
    ) -> TrainRows[Prompts]:
        self.rewards = self.rewards or rewards_of(self.recipe.reward)
        return self.encode_prompts(policy, train_rows, eval_rows)

    def build(
        self, policy: LoadedPolicy, arguments: trl.GRPOConfig, rows: TrainRows[Prompts]
    ) -> GroupTrainer:
        trainer = GroupTrainer(
            train_dataset=self._numbers(rows.train, arguments),
            prompts=rows.train,
            eval_prompts=rows.held_out,
            judge=Judge(self.rewards, agent=self.context.agent),
            **self.trl_arguments(policy, arguments),
        )
        trainer.settle(self.context, policy)
        return trainer

    def begin(self, trainer: GroupTrainer, *, resumed: bool) -> None:
        super().begin(trainer, resumed=resumed)
        if self.recipe.has_adapter_reference:
            reference_add(trainer.model)
        self.context.detail(f"forward {trainer.choice.strategy}: {trainer.choice.reason}")
        if not resumed:
            trainer.probe_rewards()

    def end(self, trainer: GroupTrainer) -> str:
        if not (reason := trainer.watch.reason):
            return ""
        step = last_good_restore(trainer, self.context.output_dir, reason)
        stopped_early = f"{reason}; the policy is that of step {step}"
        self.context.note(f"stopped early: {stopped_early}")
        return stopped_early

    def _numbers(self, prompts: Prompts, arguments: trl.GRPOConfig) -> Dataset:
        """The prompts by number. TRL drops what does not fill a batch: the first ones are asked again to fill it."""
        share = arguments.generation_batch_size // arguments.num_generations
        size = -(-len(prompts.ids) // share) * share
        return Dataset.from_dict({"prompt": [str(i % len(prompts.ids)) for i in range(size)]})

    def arguments(self, rows: TrainRows[Prompts]) -> trl.GRPOConfig:
        recipe = self.recipe
        vllm = {} if recipe.vllm == "off" else {"use_vllm": True, "vllm_mode": recipe.vllm}
        return trl.GRPOConfig(
            **common_arguments(self.context),
            num_generations=recipe.num_generations,
            max_completion_length=recipe.max_new_tokens,
            temperature=recipe.temperature,
            top_k=recipe.top_k,
            top_p=recipe.top_p,
            beta=recipe.beta,
            loss_type=recipe.loss,
            epsilon=recipe.epsilon,
            num_iterations=recipe.num_iterations,
            scale_rewards=recipe.scale_rewards,
            **vllm,
        )


def last_good_restore(trainer: GroupTrainer, output_dir: Path, reason: str) -> int:
    """Put the newest checkpoint's adapter, from before a run diverged, back into its model; returns its step.

    Raises TrainingFailed where there is none.
    """
    path, _ = checkpoint_last(output_dir / "checkpoints")
    if path is None:
        raise TrainingFailed(
            f"{reason}, before a checkpoint was written. Lower learning_rate (now {trainer.args.learning_rate:g}), "
            "raise beta, or lower save_steps to have something to go back to"
        )
    set_peft_model_state_dict(
        trainer.accelerator.unwrap_model(trainer.model), load_file(path / ADAPTER_FILES[1])
    )
    step = int(path.name.removeprefix("checkpoint-"))
    trainer.state.global_step = step
    return step
