"""Supervised fine-tuning: recipe -> TRL's SFTTrainer -> TrainResult. Demonstrations in, an adapter out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Unpack

import torch
import trl
from datasets import Dataset

from rl.recipes import SFTRecipe
from rl.training.encoding import EMPTY, EncodedColumn, EncodedResponse, Encoder, reasoning_check
from rl.training.folder import folder_prepare, same_run_check
from rl.training.pair_trainer import forward_settle, reference_logps
from rl.training.policy import LoadedPolicy, matmul
from rl.training.result import TrainingRefused, TrainResult
from rl.training.run_context import RunContext, RunOptions, base_load, reference_cache, run_context
from rl.training.scoring import head_check
from rl.training.trl_runs import (
    TokenizedTrainerMixin,
    common_arguments,
    lora_config_of,
    one_gpu,
    result_of,
    rows_ordered,
    run_facts,
    special_tokens_settle,
    train_stoppable,
    trainer_settle,
    weights_begin,
)

Reference = dict[tuple[int, ...], float]
"""Tokens of a prompt and its demonstration -> the base's log-probability of the demonstration, nats."""


def demonstrations_encoded(
    encoder: Encoder, rows: Sequence[Any], recipe: SFTRecipe, *, needed: bool = True
) -> EncodedColumn:
    """Demonstrations as tokens; those without a word are left out. Raises TrainingRefused where none is left of rows
    that are `needed`."""
    reasoning_check(encoder, recipe)
    try:
        encoded = encoder.column(
            rows, "completion", recipe.max_length, recipe.max_completion_length, turns=True
        )
    except ValueError as error:
        raise TrainingRefused(str(error)) from error
    said = [item.response_ids != [encoder.turn_end_id] and item.response_ids != [] for item in encoded.items]
    for number, kept in zip(encoded.index, said, strict=True):
        if not kept:
            encoded.left_out.add(EMPTY, rows[number], number)
    encoded.items = [item for item, kept in zip(encoded.items, said, strict=True) if kept]
    encoded.index = [number for number, kept in zip(encoded.index, said, strict=True) if kept]
    if needed and not encoded.items:
        raise TrainingRefused(
            f"expected a demonstration that the base model can be shown, found none among {len(rows)}: "
            f"{encoded.left_out.words()}"
        )
    return encoded


class SFTTrainer:
    """Train a LoRA adapter on demonstrations.

    Rows are {"prompt": messages, "completion": text or messages, "tools"?}; the loss is on the completion's tokens
    alone, the one that ends the turn included. A completion of several turns (a call, its result, a text) is a
    demonstration for each turn of the assistant. Everything else as `rl.training.dpo.DPOTrainer`.
    """

    def __init__(
        self,
        recipe: SFTRecipe,
        base_model: str = "bundled",
        **options: Unpack[RunOptions],
    ) -> None:
        self.context = run_context(recipe, base_model, **options)
        self.recipe = recipe
        self.policy: LoadedPolicy | None = None
        self.measures_distance = True
        """Log the distance to the base, for which its log-probabilities are computed first."""

    def load_base_model(self) -> LoadedPolicy:
        """Load base model and tokenizer, once. Raises PolicyLoadError."""
        if self.policy is None:
            self.policy = base_load(self.context)
        return self.policy

    def train(self, train_dataset: Any, eval_dataset: Any = None) -> TrainResult:
        """Train and return the result; refusals and failures as DPOTrainer's."""
        start = time.monotonic()
        train_rows, eval_rows = rows_ordered(train_dataset or [], self.recipe), list(eval_dataset or [])
        if not train_rows:
            raise TrainingRefused("expected at least one demonstration to train on, found none")
        checkpoint, notes = folder_prepare(self.context)
        policy = self.load_base_model()
        head_check(policy)
        encoded = demonstrations_encoded(policy.encoder, train_rows, self.recipe)
        train = encoded.items
        held_out = demonstrations_encoded(policy.encoder, eval_rows, self.recipe, needed=False).items
        self.context.note_all(encoded.left_out.notes("demonstrations"))
        arguments = trl.SFTConfig(
            **common_arguments(
                self.context,
                rows=len(train),
                eval_rows=len(held_out),
            ),
            max_length=None,
        )
        self.context.main_process = arguments.process_index == 0
        self.context.note_all([*notes, *policy.notes, *one_gpu(arguments)])
        rows = [[item.prompt_ids, item.response_ids] for item in train]
        now = run_facts(self.recipe, policy, rows, arguments.world_size)
        same_run_check(self.context, now, resumed=checkpoint is not None)
        with matmul(self.context.hardware):
            known = None
            if self.measures_distance:
                known = self._reference(policy, arguments, [*train, *held_out])
            special_tokens_settle(policy)
            trainer = _SFTTrainer(
                model=policy.model,
                args=arguments,
                train_dataset=self._dataset(train),
                eval_dataset=self._dataset(held_out) if held_out else None,
                processing_class=policy.tokenizer,
                peft_config=lora_config_of(self.recipe, policy),
            )
            trainer.settle(self.context, policy, known)
            self.context.note_all(weights_begin(self.recipe, trainer.model))
            train_stoppable(trainer, self.context, checkpoint)
            metrics = trainer.evaluate_at_end() if held_out else {}
        return result_of(
            "sft",
            trainer,
            policy,
            context=self.context,
            seconds=time.monotonic() - start,
            samples={"train": len(train), "eval": len(held_out)},
            truncated=encoded.truncated,
            left_out=encoded.left_out.counts,
            metrics=metrics,
        )

    def _reference(
        self, policy: LoadedPolicy, arguments: trl.SFTConfig, items: Sequence[EncodedResponse]
    ) -> Reference:
        """Log-probabilities of the demonstrations under the base, which the distance of training is measured from."""
        cache = reference_cache(self.context)
        self.context.phase("reference pass")
        logps, _ = reference_logps(
            policy, arguments, items, 2 * self.recipe.batch_size, cache, self.context.phase
        )
        return {(*item.prompt_ids, *item.response_ids): logp for item, logp in zip(items, logps, strict=True)}

    def _dataset(self, items: Sequence[EncodedResponse]) -> Dataset:
        return Dataset.from_dict(
            {
                "input_ids": [item.prompt_ids + item.response_ids for item in items],
                "labels": [[-100] * len(item.prompt_ids) + item.response_ids for item in items],
            }
        )


class _SFTTrainer(TokenizedTrainerMixin, trl.SFTTrainer):
    """TRL's trainer on demonstrations that are already tokens."""

    method = "sft"

    def settle(
        self, context: RunContext[SFTRecipe], policy: LoadedPolicy, reference: Reference | None
    ) -> None:
        trainer_settle(self, policy, context)
        forward_settle(self)
        self.reference = reference

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        rows = inputs["input_ids"], inputs["attention_mask"].bool(), inputs["labels"] != -100
        loss = super().compute_loss(model, inputs, return_outputs, **kwargs)
        value = loss[0] if return_outputs else loss
        self.loss_check(value, "")
        if self.reference is not None:
            self._log_distance(value.detach(), self.reference, *rows, kwargs.get("num_items_in_batch"))
        return loss

    def _log_distance(
        self,
        loss: torch.Tensor,
        reference: Reference,
        ids: torch.Tensor,
        fed: torch.Tensor,
        completion_mask: torch.Tensor,
        items: Any,
    ) -> None:
        """Log the demonstrations' log-ratio to the base: all of it per demonstration, and per token."""
        tokens = int(completion_mask.sum())
        # the loss is a sum over this batch divided by the tokens of the whole step, of all processes
        step = tokens if items is None else float(items) / (self.args.world_size if self._shares() else 1)
        base = sum(reference[tuple(row[mask].tolist())] for row, mask in zip(ids, fed, strict=True))
        ratio = -float(loss) * step - base
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["rewards/demonstrations"].append(ratio / len(ids))
        metrics["log_ratio"].append(ratio / tokens)

    def _shares(self) -> bool:
        return bool(self.args.average_tokens_across_devices) and self.args.world_size > 1
