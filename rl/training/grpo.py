"""Group relative policy optimisation (Shao et al. 2024): answers to one prompt compete."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import trl
from accelerate.utils import gather_object
from datasets import Dataset
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from torch.nn import functional
from transformers import TrainerCallback, TrainerControl, TrainerState
from trl.import_utils import is_vllm_available
from trl.models.utils import unwrap_model_for_generation
from trl.trainer.utils import split_tensor_dict

from packed_forward.dpo_trainer import is_sharded
from packed_forward.logps import causal_model
from packed_forward.packing import Strategy, StrategyChoice, pack
from rl.agents.base import Row
from rl.recipes import BASE, GRPORecipe
from rl.training.adapter_trainer import TrainRows, common_arguments
from rl.training.constrained_generation import AnswerForms, Sampling, generate_tokens
from rl.training.encoding import EncodedResponse
from rl.training.loading import ADAPTER_FILES
from rl.training.policy import LoadedPolicy
from rl.training.result import TrainingFailed, TrainingRefused, checkpoint_last
from rl.training.rewarding import (
    Judge,
    Prompts,
    RewardedTrainer,
    answer_forms,
    rewards_of,
    rewards_probe,
    valid_share,
)
from rl.training.rollout import (
    Rollout,
    Watch,
    draw_seed,
    repetition_of,
    responses_cut,
    rollout_of,
    sample_responses,
)
from rl.training.run import RunContext
from rl.training.scoring import kl_encoded
from rl.training.shared_base import reference_add
from rl.training.trl_trainer import TokenizedTrainerMixin, forward_settle, strategy_apply, trainer_settle

Tensors = dict[str, torch.Tensor]


class GroupTrainer(TokenizedTrainerMixin, trl.GRPOTrainer):
    """Groups that the policy samples itself, judged as they come; each is computed on one packed row with its prompt.

    The underscored methods are TRL 1.16's, which is pinned.
    """

    context: RunContext[GRPORecipe]
    policy: LoadedPolicy
    choice: StrategyChoice
    """Forward strategy of rows that share a prompt, and its reason."""
    _buffered_inputs: list[Tensors] | None

    watch: Watch
    forms: AnswerForms
    """Forms that answers are sampled within."""

    def __init__(
        self, *args: object, prompts: Prompts, eval_prompts: Prompts, judge: Judge, **kwargs: object
    ) -> None:
        self.prompts, self.eval_prompts, self.judge = prompts, eval_prompts, judge
        super().__init__(*args, reward_funcs=[self.reward], **kwargs)

    def settle(self, context: RunContext[GRPORecipe], policy: LoadedPolicy) -> None:
        """Apply the settings that TRL's constructor has no arguments for."""
        self.context, recipe = context, context.recipe
        self.sampling = Sampling(recipe.max_new_tokens, recipe.temperature, recipe.top_k, recipe.top_p)
        self.forms = self.answer_forms(policy)
        self.watch = Watch(recipe.max_kl, recipe.start_from == BASE or recipe.has_adapter_reference)
        self.add_callback(_Watcher(self.watch))
        trainer_settle(self, policy, context)
        forward_settle(self, self.temperature)
        self.choice = strategy_apply(self, self.probe())
        policy.strategy_max_tokens = recipe.max_length  # what is sampled later may be longer
        self.add_callback(_Evaluator(self, recipe.eval_steps))

    def answer_forms(self, policy: LoadedPolicy) -> AnswerForms:
        if not self.context.recipe.constrains or is_sharded(self):
            return policy.answer_forms()
        forms = answer_forms(policy, self.context.definition, self.prompts, self.eval_prompts)
        self.context.note_all(note for note in policy.notes if note not in self.context.notes)
        return forms

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **others: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """TRL's, each [N, logits_to_keep]: of N rows, prompt padded on the left and answer on the right, those of one
        prompt share its computation, and equal answers share all of it."""
        if self.choice.strategy is Strategy.STOCK:
            found: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
            if self.forms:
                return self._constrained_logps(model, input_ids, attention_mask, logits_to_keep)
            found = super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size,
                compute_entropy,
                compute_aux_loss,
                **others,
            )
            return found
        size = batch_size or len(input_ids)
        logps, entropies = [], []
        for start in range(0, len(input_ids), size):
            part = slice(start, start + size)
            items = _items(input_ids[part], attention_mask[part], logits_to_keep)
            packed = pack(
                [item.prompt_ids for item in items],
                [item.response_ids for item in items],
                pad_token_id=self.policy.tokenizer.pad_token_id,
                allowed=self.forms.allowed_tokens(items),
            ).to(input_ids.device)
            with self.accelerator.autocast():
                out = model(input_ids=packed.targets, packed=packed, fused_lm_head=True)
            missing = logits_to_keep - out.log_probs.shape[1]
            logps.append(functional.pad(out.log_probs, (0, missing)))
            entropies.append(functional.pad(out.entropy, (0, missing)))
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None

    def _constrained_logps(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """The same by the stock forward, among the tokens that each answer was sampled among."""
        labels = input_ids.masked_fill(~attention_mask.bool(), -100)
        labels[:, :-logits_to_keep] = -100
        allowed = self.forms.allowed_tokens(_items(input_ids, attention_mask, logits_to_keep))
        with self.accelerator.autocast():
            out = model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                labels=labels,
                allowed=allowed if allowed is None else allowed.to(input_ids.device),
                fused_lm_head=True,
            )
        return out.log_probs[:, -logits_to_keep:], out.entropy[:, -logits_to_keep:], None

    def _compute_loss(self, model: torch.nn.Module, inputs: Tensors) -> torch.Tensor:
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        self.loss_check(loss, f" or raise beta (now {self.beta:g})")
        kl = self._metrics["train" if self.model.training else "eval"].get("kl")
        if kl:  # TRL's is per token; here as everywhere it is nats per response
            kl[-1] *= float(self.accelerator.gather(inputs["completion_mask"].sum(1).float()).mean())
        return loss

    @property
    def was_stopped(self) -> bool:
        """As of the others; a run that has diverged was not stopped."""
        return super().was_stopped and not self.watch.reason

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        if not self.watch.bad:  # what is kept is what a diverged run goes back to
            super()._save_checkpoint(model, trial)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        for row in (logs, self.state.log_history[-1]):
            for name in [name for name, value in row.items() if value is None]:
                del row[name]  # nothing to say, which a curve cannot draw

    def probe(self) -> list[EncodedResponse]:
        """Responses of this run, the longest prompt's among them, to try ways of computing them on."""
        ids = sorted(self.prompts.ids, key=len)
        return [r.item for r in self._answers([ids[-1], ids[0]], 2, self._generator("probe", 0))]

    def reward(
        self,
        prompts: Sequence[str],
        completion_ids: Sequence[list[int]],
        log_metric: Callable[[str, float], None],
        **_: object,
    ) -> list[float]:
        """TRL's reward function: what the judge says, less the penalty for not ending; a prompt is its number."""
        rollouts = [
            rollout_of(self.policy.encoder, int(n), self.prompts.ids[int(n)], ids)
            for n, ids in zip(prompts, completion_ids, strict=True)
        ]
        judged = self.judge.judge(self.prompts.rows, rollouts)
        log_metric("valid", valid_share(rollouts, self.prompts.rows, self.judge.agent))
        log_metric("repetition", repetition_of(completion_ids))
        for name, mean in judged.parts.items():
            log_metric(f"reward/{name}", mean)
        return [
            score - (0.0 if rollout.ended else self.context.recipe.missing_eos_penalty)
            for score, rollout in zip(judged.scores, rollouts, strict=True)
        ]

    def probe_rewards(self) -> None:
        """Raises TrainingRefused for rewards that tell no sampled answer from another."""
        if self.context.recipe.allow_constant_reward:
            return
        generator = self._generator("probe", 1)
        fault = rewards_probe(
            self.prompts,
            self.judge,
            lambda ids, samples: self._answers(ids, samples, generator),
            self.args.per_device_train_batch_size,
        )
        if fault:
            raise TrainingRefused(fault)

    def _tokenize_prompts(self, prompts: Sequence[str]) -> tuple[list[list[int]], None, dict[str, object]]:
        return [self.prompts.ids[int(number)] for number in prompts], None, {}

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: None,
        multimodal_fields: dict[str, torch.Tensor],
        num_generations: int,
        *args: object,
    ) -> object:
        """Answers to prompts that stand repeated side by side: each is computed once for all its answers."""
        if self.use_vllm:
            return super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, *args
            )
        runs = [(ids, len(list(same))) for ids, same in itertools.groupby(prompt_ids)]
        # a process may hold a part of a group
        samples = math.gcd(*(count for _, count in runs))
        prompts = [ids for ids, count in runs for _ in range(count // samples)]
        encoder = self.policy.encoder
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            torch.no_grad(),
        ):
            was_training = model.training
            model.eval()  # gradient checkpointing would leave out the KV cache
            tokens = generate_tokens(
                causal_model(model),
                prompts,
                samples,
                self.sampling,
                encoder.stop_ids,
                encoder.tokenizer.pad_token_id,
                self._generator("sample", self.state.global_step),
                self.forms.start([ids for ids in prompts for _ in range(samples)]) if self.forms else None,
            )
            model.train(was_training)
        return responses_cut(tokens, encoder), None

    def _prepare_inputs(self, generation_batch: list[dict[str, object]]) -> Tensors:
        """TRL's, without its shuffle, which would tear groups apart: the prompts come shuffled already."""
        fresh = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        if fresh or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            self._buffered_inputs = split_tensor_dict(batch, self.args.steps_per_generation)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _generator(self, purpose: str, step: int) -> torch.Generator:
        number = step * self.accelerator.num_processes + self.accelerator.process_index
        return torch.Generator(self.policy.device).manual_seed(draw_seed(self.args.seed, purpose, number))

    def _answers(self, ids: list[list[int]], samples: int, generator: torch.Generator) -> list[Rollout]:
        was_training = self.model.training
        self.model.eval()
        try:
            return sample_responses(
                causal_model(self.model),
                self.policy.encoder,
                ids,
                samples,
                self.sampling,
                generator,
                self.forms,
            )
        finally:
            self.model.train(was_training)

    def evaluate_rewards(self) -> None:
        """Log reward and KL on held-out prompts, one answer each, always with the same draws."""
        prompts, processes = self.eval_prompts, self.accelerator.num_processes
        if not prompts.ids:
            return
        share = list(range(self.accelerator.process_index, len(prompts.ids), processes))
        generator = self._generator("evaluate", 0)
        rows: list[list[float]] = []
        for start in range(0, len(share), self.args.per_device_train_batch_size):
            chosen = share[start : start + self.args.per_device_train_batch_size]
            rollouts = self._answers([prompts.ids[i] for i in chosen], 1, generator)
            scores = self.judge.judge([prompts.rows[i] for i in chosen], rollouts).scores
            items = [rollout.item for rollout in rollouts]
            rows += [
                [score, kl, float(len(rollout.item.response_ids)), float(rollout.ended)]
                for score, kl, rollout in zip(
                    scores, kl_encoded(self.policy, items, forms=self.forms), rollouts, strict=True
                )
            ]
        if processes > 1:
            rows = gather_object(rows)
        means = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
        was_training = self.model.training
        self.model.eval()  # what TRL gathered for the next training row is not to be logged here
        names = ("eval_reward", "eval_kl", "eval_tokens", "eval_ended")
        self.log(dict(zip(names, means, strict=True)))
        self.model.train(was_training)


def _items(ids: torch.Tensor, mask: torch.Tensor, answer_width: int) -> list[EncodedResponse]:
    """Prompts and answers out of rows [N, T] of a prompt padded on the left and an answer padded on the right."""
    items = []
    for row, real in zip(ids.tolist(), mask.bool().tolist(), strict=True):
        prompt = itertools.compress(row[:-answer_width], real[:-answer_width])
        answer = itertools.compress(row[-answer_width:], real[-answer_width:])
        items.append(EncodedResponse(list(prompt), list(answer)))
    return items


class _Watcher(TrainerCallback):
    """Ends a run that has diverged."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_log(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        row = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, (int, float))}
        if "loss" not in row:
            return
        if "completions/clipped_ratio" in row:
            row["ended"] = 1 - row["completions/clipped_ratio"]
        row["tokens"] = row.get("completions/mean_length", math.nan)
        if self.watch.see(state.global_step, row):
            control.should_training_stop = True


class _Evaluator(TrainerCallback):
    """Evaluates before the first step, every so many steps, and after the last."""

    def __init__(self, trainer: GroupTrainer, every: int) -> None:
        self.trainer, self.every, self.last = trainer, every, -1

    def on_train_begin(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        due = not state.global_step or (self.every and state.global_step % self.every == 0)
        known = any(row["step"] == state.global_step for row in state.log_history if "eval_reward" in row)
        if due and not known:  # a resumed run may have been stopped in it
            self._evaluate(state)

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self.every and state.global_step % self.every == 0:
            due = control.should_log
            self._evaluate(state)
            control.should_log = due  # whoever logs takes it back, and the step's own row would be missing

    def on_train_end(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        if state.global_step != self.last and state.global_step >= state.max_steps:
            self._evaluate(state)

    def _evaluate(self, state: TrainerState) -> None:
        self.last = state.global_step
        with self.trainer.interruptible():
            self.trainer.evaluate_rewards()


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
            judge=Judge(self.rewards, self.context.definition),
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
