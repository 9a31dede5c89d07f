"""Group relative policy optimisation (Shao et al. 2024): answers to one prompt compete."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from trl.import_utils import is_vllm_available

from rl.agents.base import Row
from rl.recipes import GRPORecipe
from rl.training.adapter_trainer import TrainRows, common_arguments
from rl.training.chat_template import prompt_messages, response_text
from rl.training.grpo_trainer import GroupTrainer, LoggedTrainer, OnlineTrainer
from rl.training.loading import ADAPTER_FILES
from rl.training.policy import LoadedPolicy
from rl.training.result import TrainingFailed, TrainingRefused, checkpoint_last
from rl.training.rewarding import Judge, Prompts, RewardedTrainer, rewards_of
from rl.training.shared_base import reference_add


class GRPOTrainer(RewardedTrainer[GRPORecipe, Any]):
    """Train an adapter on groups of answers to one prompt, each rewarded against the mean of its group.

    `mode="online"` rows are prompts: the policy answers each one `num_generations` times, and rewards judge.
    `mode="logged"` rows are {"prompt", "completions": [text or [message], ...], "rewards": [number, ...]}, at least two
    of each: answers that were given and rated before.
    """

    method = "grpo"

    @property
    def logged(self) -> bool:
        return self.recipe.mode == "logged"

    @property
    def evaluated(self) -> str:  # type: ignore[override]
        return "eval_loss" if self.logged else "eval_reward"

    def check(self, rows: Sequence[Row]) -> None:
        super().check(rows)
        if self.recipe.vllm != "off" and not is_vllm_available():
            raise TrainingRefused(
                f"vllm={self.recipe.vllm} needs vLLM, which is not installed here: `pip install trl[vllm]`, or vllm=off"
            )

    def encode(
        self, policy: LoadedPolicy, train_rows: Sequence[Row], eval_rows: Sequence[Row]
    ) -> TrainRows[Any]:
        if self.logged:
            return self._encode_groups(policy, train_rows, eval_rows)
        self.rewards = self.rewards or rewards_of(self.recipe.reward)
        return self.encode_prompts(policy, train_rows, eval_rows)

    def build(self, policy: LoadedPolicy, arguments: trl.GRPOConfig, rows: TrainRows[Any]) -> GroupTrainer:
        given = self.trl_arguments(policy, arguments)
        trainer: GroupTrainer
        if self.logged:
            trainer = LoggedTrainer(
                reward_funcs=[_no_reward],
                train_dataset=Dataset.from_list(rows.train),
                eval_dataset=Dataset.from_list(rows.held_out) if rows.held_out else None,
                **given,
            )
        else:
            trainer = OnlineTrainer(
                train_dataset=self._numbers(rows.train, arguments),
                prompts=rows.train,
                eval_prompts=rows.held_out,
                judge=Judge(self.rewards, agent=self.context.agent),
                **given,
            )
        trainer.settle(self.context, policy)
        return trainer

    def begin(self, trainer: GroupTrainer, *, resumed: bool) -> None:
        super().begin(trainer, resumed=resumed)
        if self.recipe.has_adapter_reference:
            reference_add(trainer.model)
        self.context.detail(f"forward {trainer.choice.strategy}: {trainer.choice.reason}")
        if not resumed and isinstance(trainer, OnlineTrainer):
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

    def _encode_groups(
        self, policy: LoadedPolicy, rows: Sequence[Row], eval_rows: Sequence[Row]
    ) -> TrainRows[Any]:
        train, cut, left_out = self._groups(policy, rows)
        held_out, _, _ = self._groups(policy, eval_rows)
        if not train:
            raise TrainingRefused(
                f"expected prompts with two answers of different reward, found none among {len(rows)} rows: rate "
                "several answers to one prompt, or let the policy sample its own (mode=online)"
            )
        samples = {"train": len(train), "eval": len(held_out)}
        return TrainRows(train, held_out, facts=train, samples=samples, truncated=cut, left_out=left_out)

    def _groups(
        self, policy: LoadedPolicy, rows: Sequence[Row]
    ) -> tuple[list[dict[str, Any]], dict[str, int], dict[str, int]]:
        """Token rows {"prompt_ids", "answers", "rewards"} of groups that can teach, what was cut, what left out."""
        items, rewards = [], []
        try:
            rows, not_written = policy.encoder.written(rows)
            for number, row in enumerate(rows):
                answers = [response_text({"a": said}, "a", number) for said in row["completions"]]
                if len(answers) != len(row["rewards"]):
                    raise ValueError(
                        f"row {number}: {len(answers)} completions, {len(row['rewards'])} rewards"
                    )
                items.append([(prompt_messages(row, number), answer) for answer in answers])
                rewards.append([float(reward) for reward in row["rewards"]])
        except (KeyError, TypeError, ValueError) as error:
            raise TrainingRefused(
                f'expected rows {{"prompt", "completions", "rewards"}}, found another: {error}'
            ) from error
        encoded = iter(
            policy.encoder.responses(
                [item for group in items for item in group],
                self.recipe.max_length,
                self.recipe.max_completion_length,
            )
        )
        groups: list[dict[str, Any]] = []
        cut, left = {"prompts": 0, "completions": 0}, not_written.counts
        for group, group_rewards in zip(items, rewards, strict=True):
            responses = [next(encoded) for _ in group]
            # answers of one group share a row: the prompt as the longest of them leaves it room
            prompt = min((answer.prompt_ids for answer in responses), key=len)
            cut["prompts"] += any(answer.prompt_cut for answer in responses)
            cut["completions"] += sum(answer.response_cut for answer in responses)
            why = "" if len(set(group_rewards)) > 1 else "same reward"
            if not prompt or not all(answer.response_ids for answer in responses):
                why = "empty response"
            if why:
                left[why] = left.get(why, 0) + 1
                continue
            groups.append(
                {
                    "prompt_ids": prompt,
                    "answers": [answer.response_ids for answer in responses],
                    "rewards": group_rewards,
                }
            )
        return groups, cut, left

    def arguments(self, rows: TrainRows[Any]) -> trl.GRPOConfig:
        recipe = self.recipe
        is_logged = recipe.mode == "logged"
        vllm = {} if recipe.vllm == "off" else {"use_vllm": True, "vllm_mode": recipe.vllm}
        return trl.GRPOConfig(
            **common_arguments(self.context),
            num_generations=recipe.num_generations,
            max_completion_length=recipe.max_new_tokens,
            temperature=recipe.temperature,
            top_k=recipe.top_k,
            top_p=recipe.top_p,
            beta=recipe.beta,
            loss_type="cispo" if is_logged else recipe.loss,
            epsilon=recipe.epsilon,
            epsilon_high=recipe.max_ratio if is_logged else None,
            num_iterations=recipe.num_iterations,
            scale_rewards=recipe.scale_rewards,
            shuffle_dataset=recipe.curriculum == "none",
            **vllm,
        )


def _no_reward(**_: object) -> list[float]:
    """TRL wants a reward function; logged groups come with their rewards."""
    raise AssertionError("logged groups are not rewarded again")


def last_good_restore(trainer: OnlineTrainer, output_dir: Path, reason: str) -> int:
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
