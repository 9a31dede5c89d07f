"""Supervised fine-tuning: demonstrations in, an adapter out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import trl
from datasets import Dataset

from rl.agents.base import Row
from rl.recipes import SFTRecipe
from rl.training.adapter_trainer import AdapterTrainer, TrainRows, common_arguments
from rl.training.encoding import (
    EMPTY,
    EncodedColumn,
    EncodedResponse,
    Encoder,
    parts_alike,
    reasoning_check,
)
from rl.training.policy import LoadedPolicy
from rl.training.result import TrainingRefused
from rl.training.run import reference_cache
from rl.training.trl_trainer import TokenizedTrainerMixin, forward_settle, trainer_settle

if TYPE_CHECKING:
    from transformers.modeling_outputs import CausalLMOutput

Reference = dict[tuple[int, ...], float]
"""Tokens of a prompt and its demonstration -> the base's log-probability of the demonstration, nats."""


def demonstrations_encoded(
    encoder: Encoder, rows: Sequence[Row], recipe: SFTRecipe, *, needed: bool = True
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


class SFTTrainer(AdapterTrainer[SFTRecipe, list[EncodedResponse]]):
    """Train a LoRA adapter on demonstrations.

    Rows are {"prompt": messages, "completion": text or messages, "tools"?}; the loss is on the completion's tokens
    alone, the one that ends the turn included. A completion of several turns (a call, its result, a text) is a
    demonstration for each turn of the assistant.
    """

    method = "sft"
    needs = "demonstration"
    measures_distance = True
    """Log the distance to the base, for which its log-probabilities are computed first."""

    def encode(
        self, policy: LoadedPolicy, train_rows: Sequence[Row], eval_rows: Sequence[Row]
    ) -> TrainRows[list[EncodedResponse]]:
        encoded = demonstrations_encoded(policy.encoder, train_rows, self.recipe)
        held_out = demonstrations_encoded(policy.encoder, eval_rows, self.recipe, needed=False).items
        return TrainRows(
            encoded.items,
            held_out,
            facts=[[item.prompt_ids, item.response_ids] for item in encoded.items],
            samples={"train": len(encoded.items), "eval": len(held_out)},
            truncated=encoded.truncated,
            left_out=encoded.left_out.counts,
            notes=encoded.left_out.notes("demonstrations"),
        )

    def arguments(self, rows: TrainRows[list[EncodedResponse]]) -> trl.SFTConfig:
        return trl.SFTConfig(
            **common_arguments(self.context, rows=len(rows.train), eval_rows=len(rows.held_out)),
            max_length=None,
        )

    def build(
        self, policy: LoadedPolicy, arguments: trl.SFTConfig, rows: TrainRows[list[EncodedResponse]]
    ) -> _SFTTrainer:
        reference: Reference | None = None
        if self.measures_distance:
            items = [*rows.train, *rows.held_out]
            logps = self.reference_logps(policy, arguments, items, reference_cache(self.context))
            tokens = [(*item.prompt_ids, *item.response_ids) for item in items]
            reference = dict(zip(tokens, logps, strict=True))
        trainer = _SFTTrainer(
            train_dataset=demonstrations_dataset(rows.train),
            eval_dataset=demonstrations_dataset(rows.held_out) if rows.held_out else None,
            **self.trl_arguments(policy, arguments),
        )
        trainer.reference, trainer.micro_tokens = reference, self.recipe.micro_tokens
        trainer_settle(trainer, policy, self.context)
        forward_settle(trainer)
        return trainer


def demonstrations_dataset(items: Sequence[EncodedResponse]) -> Dataset:
    """Token columns, the prompt's without a label."""
    return Dataset.from_dict(
        {
            "input_ids": [item.prompt_ids + item.response_ids for item in items],
            "labels": [[-100] * len(item.prompt_ids) + item.response_ids for item in items],
        }
    )


class _SFTTrainer(TokenizedTrainerMixin, trl.SFTTrainer):
    """TRL's trainer on demonstrations that are already tokens."""

    reference: Reference | None = None
    """Log-probabilities that the distance is measured from; None: it is not logged."""
    micro_tokens: int = 0
    """Most tokens computed at once, padding included; 0 sets no limit."""

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """TRL's; a micro-batch above `micro_tokens` in parts of rows of like length, which add up to the same gradient.

        Processes of a launch exchange gradients after each part, so they do not cut: they may have other lengths.
        """
        ids = inputs["input_ids"]
        if not 0 < self.micro_tokens < ids.numel() or num_items_in_batch is None or self.args.world_size > 1:
            return super().training_step(model, inputs, num_items_in_batch)
        lengths = inputs["attention_mask"].sum(1).tolist()
        losses = []
        for places in parts_alike(lengths, self.micro_tokens):
            longest = max(lengths[place] for place in places)
            part = {name: tensor[places, :longest] for name, tensor in inputs.items()}
            losses.append(super().training_step(model, part, num_items_in_batch))
        return torch.stack(losses).sum()

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        **kwargs: object,
    ) -> torch.Tensor | tuple[torch.Tensor, CausalLMOutput]:
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
        items: torch.Tensor | None,
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
