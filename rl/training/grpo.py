"""Group relative policy optimisation: recipe -> TRL's GRPOTrainer -> TrainResult. Answers to one prompt compete."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Unpack

import trl
from datasets import Dataset
from trl.import_utils import is_vllm_available

from rl.recipes import GRPORecipe
from rl.rewards.base import RewardFunction
from rl.training.encoding import prompt_messages, response_text
from rl.training.folder import folder_prepare, same_run_check
from rl.training.grpo_trainer import GroupTrainer, LoggedTrainer, OnlineTrainer
from rl.training.policy import LoadedPolicy, matmul
from rl.training.ppo.judge import Judge
from rl.training.ppo.probing import rewardable_prompts
from rl.training.ppo.prompts import Prompts, prompts_encoded
from rl.training.ppo.reward_specs import rewards_of
from rl.training.result import TrainingRefused, TrainResult
from rl.training.run_context import RunOptions, base_load, run_context
from rl.training.scoring import head_check
from rl.training.trl_runs import (
    common_arguments,
    last_good_restore,
    lora_config_of,
    one_gpu,
    reference_add,
    result_of,
    rows_ordered,
    run_facts,
    special_tokens_settle,
    train_stoppable,
    weights_begin,
)


class GRPOTrainer:
    """Train an adapter on groups of answers to one prompt, each rewarded against the mean of its group.

    `mode="online"` rows are {"prompt": messages, "state": what rewards may need, optional}: the policy answers each
    prompt `num_generations` times, and rewards (given, or named in the recipe) judge. `mode="logged"` rows are
    {"prompt", "completions": [text or [message], ...], "rewards": [number, ...]}, at least two of each: answers that
    were given and rated before. Everything else as `rl.training.dpo.DPOTrainer`.
    """

    def __init__(
        self,
        recipe: GRPORecipe,
        base_model: str = "bundled",
        *,
        rewards: Sequence[RewardFunction] = (),
        **options: Unpack[RunOptions],
    ) -> None:
        self.context = run_context(recipe, base_model, **options)
        self.recipe = recipe
        self.rewards = list(rewards)
        self.policy: LoadedPolicy | None = None

    def load_base_model(self) -> LoadedPolicy:
        """Load base model and tokenizer, once. Raises PolicyLoadError."""
        if self.policy is None:
            self.policy = base_load(self.context)
        return self.policy

    def train(self, train_dataset: Any, eval_dataset: Any = None) -> TrainResult:
        """Train and return what came of it; refusals and failures as DPOTrainer's and PPOTrainer's."""
        start = time.monotonic()
        train_rows, eval_rows = rows_ordered(train_dataset or [], self.recipe), list(eval_dataset or [])
        if not train_rows:
            raise TrainingRefused("expected at least one prompt to train on, found none")
        if self.recipe.vllm != "off" and not is_vllm_available():
            raise TrainingRefused(
                f"vllm={self.recipe.vllm} needs vLLM, which is not installed here: `pip install trl[vllm]`, or vllm=off"
            )
        checkpoint, notes = folder_prepare(self.context)
        policy = self.load_base_model()
        head_check(policy)
        arguments = self._arguments()
        self.context.main_process = arguments.process_index == 0
        self.context.note_all([*notes, *policy.notes, *one_gpu(arguments)])
        with matmul(self.context.hardware):
            special_tokens_settle(policy)
            build = self._online if self.recipe.mode == "online" else self._log_trainer
            trainer, facts, counts = build(policy, arguments, train_rows, eval_rows)
            now = run_facts(self.recipe, policy, facts, arguments.world_size)
            same_run_check(self.context, now, resumed=checkpoint is not None)
            trainer.settle(self.context, policy)
            self.context.note_all(weights_begin(self.recipe, trainer.model))
            if self.recipe.has_adapter_reference:
                reference_add(trainer.model)
            self.context.detail(f"forward {trainer.choice.strategy}: {trainer.choice.reason}")
            if checkpoint is None and isinstance(trainer, OnlineTrainer):
                trainer.probe_rewards()
            train_stoppable(trainer, self.context, checkpoint)
            stopped_early = ""
            if reason := trainer.watch.reason:
                step = last_good_restore(trainer, self.context.output_dir, reason)
                stopped_early = f"{reason}; the policy is that of step {step}"
                self.context.note(f"stopped early: {stopped_early}")
            logged = self.recipe.mode == "logged" and trainer.eval_dataset is not None
            metrics = trainer.evaluate_at_end() if logged else {}
        result = result_of(
            "grpo",
            trainer,
            policy,
            context=self.context,
            seconds=time.monotonic() - start,
            metrics=metrics,
            evaluated="eval_loss" if self.recipe.mode == "logged" else "eval_reward",
            stopped_early=stopped_early,
            **counts,
        )
        if before := result.history.get("eval_reward"):
            result.metrics["eval_reward_before"] = before[0]
        return result

    # --- Groups the policy samples ----------------------------------------------------------------------------

    def _online(
        self, policy: LoadedPolicy, arguments: trl.GRPOConfig, rows: Sequence[Any], eval_rows: Sequence[Any]
    ) -> tuple[GroupTrainer, list[Any], dict[str, Any]]:
        recipe = self.recipe
        if not self.rewards:
            self.rewards = rewards_of(recipe.reward)
        prompts, held_out = (
            rewardable_prompts(
                prompts_encoded(policy.encoder, some, recipe, self.context.note, most),
                self.rewards, self.context.agent, self.context.note, held_out=most is not None,
            )
            for some, most in ((rows, None), (eval_rows, recipe.eval_prompts))
        )  # fmt: skip
        trainer = OnlineTrainer(
            model=policy.model,
            args=arguments,
            train_dataset=self._numbers(prompts, arguments),
            processing_class=policy.tokenizer,
            peft_config=lora_config_of(recipe, policy),
            prompts=prompts,
            eval_prompts=held_out,
            judge=Judge(self.rewards, agent=self.context.agent),
        )
        counts = {
            "samples": {"train": len(prompts.ids), "eval": len(held_out.ids)},
            "truncated": {"prompts": prompts.truncated, "completions": 0},
            "left_out": prompts.left_out,
        }
        return trainer, [prompts.ids, held_out.ids], counts

    def _numbers(self, prompts: Prompts, arguments: trl.GRPOConfig) -> Dataset:
        """The prompts by number. TRL drops what does not fill a batch: the first ones are asked again to fill it."""
        share = arguments.generation_batch_size // arguments.num_generations
        size = -(-len(prompts.ids) // share) * share
        return Dataset.from_dict({"prompt": [str(i % len(prompts.ids)) for i in range(size)]})

    # --- Groups that were rated before ------------------------------------------------------------------------

    def _log_trainer(
        self, policy: LoadedPolicy, arguments: trl.GRPOConfig, rows: Sequence[Any], eval_rows: Sequence[Any]
    ) -> tuple[GroupTrainer, list[Any], dict[str, Any]]:
        train, cut, left_out = self._groups(policy, rows)
        held_out, _, _ = self._groups(policy, eval_rows)
        if not train:
            raise TrainingRefused(
                f"expected prompts with two answers of different reward, found none among {len(rows)} rows: rate "
                "several answers to one prompt, or let the policy sample its own (mode=online)"
            )
        trainer = LoggedTrainer(
            model=policy.model,
            reward_funcs=[_no_reward],
            args=arguments,
            train_dataset=Dataset.from_list(train),
            eval_dataset=Dataset.from_list(held_out) if held_out else None,
            processing_class=policy.tokenizer,
            peft_config=lora_config_of(self.recipe, policy),
        )
        counts = {
            "samples": {"train": len(train), "eval": len(held_out)},
            "truncated": cut,
            "left_out": left_out,
        }
        return trainer, train, counts

    def _groups(
        self, policy: LoadedPolicy, rows: Sequence[Any]
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

    def _arguments(self) -> trl.GRPOConfig:
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


def _no_reward(**_: Any) -> list[float]:
    """TRL wants a reward function; logged groups come with their rewards."""
    raise AssertionError("logged groups are not rewarded again")
