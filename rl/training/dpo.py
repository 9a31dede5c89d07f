"""Direct preference optimisation (Rafailov et al. 2023): pairs in, an adapter out. Our batches, TRL's loss."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import trl
from datasets import Dataset
from scipy.optimize import minimize_scalar

from packed_forward.dpo_trainer import PreferenceCollator
from packed_forward.forward import graphs_release
from packed_forward.lazy_metrics import LazyMetrics
from packed_forward.logps import causal_model
from packed_forward.packing import MicroBatcher, StrategyChoice, UncollatedRows
from rl.agents.base import Row
from rl.recipes import DPORecipe
from rl.training.adapter_trainer import TrainRows, common_arguments
from rl.training.encoding import EncodedPairs, EncodedResponse, PairTokens
from rl.training.policy import LoadedPolicy
from rl.training.preference import PreferenceTrainer
from rl.training.rows import LengthGroupedSampler, pairs_encoded
from rl.training.run import Processes, RunContext
from rl.training.trl_trainer import (
    RANKING_LOSS,
    TokenizedTrainerMixin,
    forward_settle,
    moved,
    strategy_apply,
    trainer_settle,
)

if TYPE_CHECKING:
    from transformers.modeling_outputs import CausalLMOutput
    from transformers.trainer_utils import EvalLoopOutput


class DPOTrainer(PreferenceTrainer[DPORecipe, EncodedPairs]):
    """Train a LoRA adapter on preference pairs.

    Rows are {"prompt": messages, "chosen": text or messages, "rejected": likewise, "weight": above 0, optional,
    "tools": that the prompt offers, optional}, in a list or a Hugging Face Dataset. A weight multiplies that pair's
    gradient (weights are scaled to mean 1); the loss shown stays unweighted.
    """

    method = "dpo"
    needs = "preference pair"

    def encode(
        self, policy: LoadedPolicy, train_rows: Sequence[Row], eval_rows: Sequence[Row]
    ) -> TrainRows[EncodedPairs]:
        train = pairs_encoded(policy.encoder, train_rows, self.recipe)
        held_out = pairs_encoded(policy.encoder, eval_rows, self.recipe, needed=False)
        self.judged = [
            {"prompt": row["prompt"], "completion": row[side], "tools": row.get("tools")}
            for row in train_rows
            for side in ("chosen", "rejected")
        ]
        notes = train.left_out.notes("pairs")
        if any(train.truncated.values()):
            notes.insert(
                0,
                f"truncated to max_length {self.recipe.max_length} and max_completion_length "
                f"{self.recipe.max_completion_length}: {train.truncated['prompts']} prompts (oldest tokens), "
                f"{train.truncated['completions']} responses (end)",
            )
        return TrainRows(
            train,
            held_out,
            facts=train.rows,
            samples={"train": len(train.rows), "eval": len(held_out.rows)},
            truncated=train.truncated,
            left_out=train.left_out.counts,
            notes=notes,
        )

    def arguments(self, rows: TrainRows[EncodedPairs]) -> trl.DPOConfig:
        losses, weights = trl_losses(self.recipe)
        return trl.DPOConfig(
            **common_arguments(self.context, rows=len(rows.train.rows), eval_rows=len(rows.held_out.rows)),
            beta=self.recipe.beta,
            loss_type=losses,
            loss_weights=weights,
            label_smoothing=self.recipe.label_smoothing,
            max_length=None,  # cut by us, before TRL would drop pairs
        )

    def build(
        self, policy: LoadedPolicy, arguments: trl.DPOConfig, rows: TrainRows[EncodedPairs]
    ) -> PairTrainer:
        train, held_out = (
            self._dataset(policy, arguments, pairs) if pairs.rows else None
            for pairs in (rows.train, rows.held_out)
        )
        weights = [row["weight"] for row in rows.train.rows]
        collator = PairCollator(policy.tokenizer.pad_token_id, weight_scale=len(weights) / math.fsum(weights))
        trainer = PairTrainer(
            train_dataset=train,
            eval_dataset=held_out,
            data_collator=collator,
            **self.trl_arguments(policy, arguments),
        )
        trainer.settle(self.context, policy)
        return trainer

    def begin(self, trainer: PairTrainer, *, resumed: bool) -> None:
        super().begin(trainer, resumed=resumed)
        self.context.detail(trainer.choice.summary)

    def _dataset(self, policy: LoadedPolicy, arguments: trl.DPOConfig, pairs: EncodedPairs) -> Dataset:
        columns: dict[str, list[list[int]] | list[float]] = {
            name: [row[name] for row in pairs.rows] for name in ("prompt_ids", "chosen_ids", "rejected_ids")
        }
        if any(row["weight"] != 1.0 for row in pairs.rows):
            columns["weight"] = [row["weight"] for row in pairs.rows]
        if self.recipe.precompute_reference:
            items = [
                EncodedResponse(row["prompt_ids"], row[side])
                for row in pairs.rows
                for side in ("chosen_ids", "rejected_ids")
            ]
            logps = self.reference(policy, arguments, items)
            columns["ref_chosen_logps"], columns["ref_rejected_logps"] = logps[::2], logps[1::2]
        return Dataset.from_dict(columns)


Forward = Callable[..., "CausalLMOutput"]


def trl_losses(recipe: DPORecipe) -> tuple[list[str], list[float]]:
    """TRL's loss_type and loss_weights for a recipe.

    TRL 1.16 ignores label smoothing in `sigmoid`. Conservative DPO, -(1-e) log s(x) - e log s(-x), is the sum
    (2-2e) sigmoid - (1-2e) robust, because robust is (-(1-e) log s(x) + e log s(-x)) / (1-2e).
    """
    losses, weights = [recipe.loss], [1.0]
    if recipe.loss == "sigmoid" and recipe.label_smoothing > 0:
        e = recipe.label_smoothing
        losses, weights = ["sigmoid", "robust"], [2 - 2 * e, -(1 - 2 * e)]
    if recipe.sft_weight > 0:
        losses, weights = [*losses, "sft"], [*weights, recipe.sft_weight]
    return losses, weights


@dataclass
class PairCollator(PreferenceCollator):
    """A batch of B pairs with their weights; or, where the trainer cuts micro-batches first, its rows as they are."""

    weight_scale: float = 1.0
    uncollated: bool = False
    """Leave the rows as they are: the trainer cuts them into micro-batches first (`packed.micro_batches`)."""

    def torch_call(self, examples: list[PairTokens]) -> dict[str, torch.Tensor | UncollatedRows]:
        return {"rows": UncollatedRows(examples)} if self.uncollated else self.batch(examples)

    def batch(self, examples: list[PairTokens]) -> dict[str, torch.Tensor]:
        """The tensors of these rows."""
        batch = super().torch_call(examples)
        if "weight" in examples[0]:
            weights = [example["weight"] * self.weight_scale for example in examples]
            batch["pair_weights"] = torch.tensor(weights)
        return batch


class PairTrainer(TokenizedTrainerMixin, trl.DPOTrainer):
    """TRL's trainer on pairs that are already tokens. Loss, metrics, optimiser and checkpoints stay TRL's."""

    context: RunContext[DPORecipe]
    policy: LoadedPolicy
    data_collator: PairCollator
    choice: StrategyChoice
    """Forward strategy of rows that share a prompt, and its reason."""
    _differences: list[float] | None = None
    """log p(chosen) - log p(rejected) of the eval pairs so far, nats; None while it is not evaluated."""
    defer_metrics: bool | None = None
    """True if metrics stay on the device until they are logged; None: where the device is not the CPU."""

    def settle(self, context: RunContext[DPORecipe], policy: LoadedPolicy) -> None:
        """Apply the settings that TRL's constructor has no arguments for."""
        self.context = context
        self.precompute_ref_logps = context.recipe.precompute_reference
        trainer_settle(self, policy, context)
        forward_settle(self)
        items = self.token_rows("chosen_ids", "rejected_ids")
        self.choice = strategy_apply(self, items)
        self.data_collator.strategy = self.choice.strategy
        self._busy_s, self._busy_tokens = 0.0, 0
        later = policy.device.type != "cpu" if self.defer_metrics is None else self.defer_metrics
        self.lazy_metrics = LazyMetrics(self.args.world_size) if later else None
        self._share = 1.0
        self._micro = MicroBatcher(
            self.trained,
            context.recipe.micro_tokens,
            self._checkpoint,
            context.note,
            Processes(cpu=policy.device.type == "cpu").maximum if self.args.world_size > 1 else None,
        )

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> torch.utils.data.Sampler:
        data = train_dataset if train_dataset is not None else self.train_dataset
        lengths = [
            len(p) + max(len(c), len(r))
            for p, c, r in zip(data["prompt_ids"], data["chosen_ids"], data["rejected_ids"], strict=True)
        ]
        groups = (
            [hash(tuple(prompt)) for prompt in data["prompt_ids"]]
            if self.context.recipe.group_prompts
            else None
        )
        # trainer.state survives a resume, so the sampler reads it at each epoch
        # accelerate deals whole batches to the processes in turn: rows of one step lie together
        rows_at_once = self.args.train_batch_size * self.args.world_size
        return LengthGroupedSampler(
            lengths,
            rows_at_once,
            self.args.data_seed,
            lambda: self.state.epoch or 0,
            groups,
        )

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        own = self.data_collator
        self.data_collator = dataclasses.replace(own, uncollated=True)
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = own

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        began = time.perf_counter()

        def compute(rows: list[PairTokens], share: float) -> torch.Tensor:
            lengths = {name: len(values) for name, values in self._metrics["train"].items()}
            batch = self.data_collator.batch(rows)
            self._busy_tokens += int(batch["attention_mask"].sum()) * self.args.world_size
            batch = moved(batch, self.args.device)
            self._share = share
            try:
                loss: torch.Tensor = super(PairTrainer, self).training_step(model, batch, num_items_in_batch)
            except torch.OutOfMemoryError:
                graphs_release(causal_model(self.model))
                for name, values in self._metrics["train"].items():
                    del values[lengths.get(name, 0) :]
                raise
            return loss

        loss = self._micro.run(inputs["rows"].rows, compute)
        self._busy_s += time.perf_counter() - began
        return loss

    def _checkpoint(self) -> bool:
        if self.model.is_activation_checkpointing:
            return False
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        return True

    def _compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], return_outputs: bool
    ) -> torch.Tensor:
        with self.metrics_deferred():
            recorded = self._read_later(model) if self.model.training else self._read_differences(model)
            loss = super()._compute_loss(recorded, inputs, return_outputs)
            tokens = self.accelerator.gather(inputs["completion_mask"].sum()).sum().item()
        mode = "train" if self.model.training else "eval"
        self.loss_check(loss[0] if return_outputs else loss, f" or raise beta (now {self.beta:g})")
        metrics = self._metrics[mode]
        pairs = inputs["input_ids"].size(0) / 2 * self.args.world_size
        logratio = (metrics["rewards/chosen"][-1] + metrics["rewards/rejected"][-1]) / self.beta * pairs
        metrics["log_ratio"].append(logratio / tokens)
        if mode == "eval":
            return loss
        # a micro-batch is a share of its step
        return (loss[0] * self._share, *loss[1:]) if return_outputs else loss * self._share

    def evaluation_loop(self, *args: object, **kwargs: object) -> EvalLoopOutput:
        """TRL's, with the ranking loss of the pairs beside its metrics."""
        self._differences = []
        output = super().evaluation_loop(*args, **kwargs)
        differences, self._differences = self._differences, None
        output.metrics[RANKING_LOSS] = ranking_loss(differences)
        return output

    def _read_differences(self, model: torch.nn.Module) -> Forward:
        """The model, whose log-probabilities of the pairs are noted."""

        def forward(**inputs: torch.Tensor) -> CausalLMOutput:
            output = model(**inputs)
            if self._differences is not None:
                chosen, rejected = output.log_probs.detach().float().sum(-1).chunk(2)
                self._differences += self.accelerator.gather_for_metrics(chosen - rejected).tolist()
            return output

        return forward

    def _read_later(self, model: torch.nn.Module) -> Forward:
        """The model, whose mean logits TRL selects by a mask to average them."""
        if self.lazy_metrics is None:
            return model

        def forward(**inputs: torch.Tensor) -> CausalLMOutput:
            assert self.lazy_metrics is not None
            output = model(**inputs)
            if isinstance(output.get("mean_logits"), torch.Tensor):
                output.mean_logits = self.lazy_metrics.wrap(output.mean_logits)
            return output

        return forward

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        began = time.perf_counter()
        self.metrics_read()
        self._busy_s += time.perf_counter() - began  # reading waits for the steps to end
        if "loss" in logs and self._busy_s > 0:
            self._metrics["train"]["tokens_per_second"] = [self._busy_tokens / self._busy_s]
            self._busy_s, self._busy_tokens = 0.0, 0
        super().log(logs, start_time)


SCALES = (-9.0, 6.0)
"""Bounds of the natural logarithm of the scale that `ranking_loss` looks for."""


def ranking_loss(differences: Sequence[float]) -> float:
    """Log-loss of pairs, in nats, at the scale a >= 0 that makes it least: mean of log(1 + exp(-a d)).

    differences: log p(chosen) - log p(rejected) of each pair, nats. What is chosen among candidates does not depend on
    the scale, so a policy that is as right but surer of itself is as good; a coin has ln 2, and none is worse.
    """
    found = np.asarray(differences, dtype=float)

    def loss(log_scale: float) -> float:
        return float(np.logaddexp(0.0, -math.exp(log_scale) * found).mean())

    least = float(minimize_scalar(loss, bounds=SCALES, method="bounded").fun)
    return min(math.log(2), round(least, 4))  # what the search leaves open decides nothing
