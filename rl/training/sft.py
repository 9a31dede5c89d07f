"""Supervised fine-tuning: demonstrations in, an adapter out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import trl
from datasets import Dataset

from packed_forward.lazy_metrics import LazyMetrics
from packed_forward.logps import collate
from packed_forward.packing import PackedBatch, Strategy, pack
from rl.agents.base import Row
from rl.recipes import SFTRecipe
from rl.training.adapter_trainer import AdapterTrainer, TrainRows, common_arguments
from rl.training.encoding import (
    EncodedResponse,
    parts_alike,
)
from rl.training.policy import LoadedPolicy
from rl.training.rows import demonstrations_encoded
from rl.training.run import RunContext, reference_cache
from rl.training.trl_trainer import (
    TokenizedTrainerMixin,
    forward_settle,
    moved,
    strategy_apply,
    trainer_settle,
)

if TYPE_CHECKING:
    from transformers.modeling_outputs import CausalLMOutput

Reference = dict[tuple[int, ...], float]
"""Tokens of a prompt and its demonstration -> the base's log-probability of the demonstration, nats."""


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
            data_collator=demonstrations_collate,
            **self.trl_arguments(policy, arguments),
        )
        trainer.reference, trainer.micro_tokens = reference, self.recipe.micro_tokens
        trainer.settle(self.context, policy, [*rows.train, *rows.held_out])
        return trainer


def demonstrations_dataset(items: Sequence[EncodedResponse]) -> Dataset:
    """Token columns, a row for each demonstration."""
    return Dataset.from_dict(
        {
            "prompt_ids": [item.prompt_ids for item in items],
            "response_ids": [item.response_ids for item in items],
        }
    )


@dataclass(frozen=True)
class Demonstrations:
    """Demonstrations of a batch. They become tensors when the step has cut them into parts of like length."""

    items: list[EncodedResponse]


def demonstrations_collate(rows: Sequence[dict[str, list[int]]]) -> dict[str, Demonstrations | torch.Tensor]:
    """A batch of rows, and `labels` [rows, 1 + longest response], by which transformers counts a step's tokens."""
    items = [EncodedResponse(row["prompt_ids"], row["response_ids"]) for row in rows]
    labels = torch.full((len(items), 1 + max(len(item.response_ids) for item in items)), -100)
    for row, item in zip(labels, items, strict=True):
        row[1 : 1 + len(item.response_ids)] = 0
    return {"demonstrations": Demonstrations(items), "labels": labels}


class _SFTTrainer(TokenizedTrainerMixin, trl.SFTTrainer):
    """TRL's trainer on demonstrations that are already tokens."""

    reference: Reference | None = None
    """Log-probabilities that the distance is measured from; None: it is not logged."""
    micro_tokens: int = 0
    """Most tokens computed at once, padding included; 0 sets no limit."""
    strategy: Strategy = Strategy.STOCK
    """Forward strategy of the rows."""

    def settle(
        self, context: RunContext[SFTRecipe], policy: LoadedPolicy, items: Sequence[EncodedResponse]
    ) -> None:
        trainer_settle(self, policy, context)
        forward_settle(self)
        choice = strategy_apply(self, items)
        self.strategy = choice.strategy
        self.lazy_metrics = LazyMetrics(self.args.world_size) if policy.device.type != "cpu" else None
        context.detail(choice.summary)

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Demonstrations],
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """TRL's; a micro-batch above `micro_tokens` in parts of rows of like length, which add up to the same gradient.

        Processes of a launch exchange gradients after each part, so they do not cut: they may have other lengths.
        """
        items = inputs["demonstrations"].items
        lengths = [len(item.prompt_ids) + len(item.response_ids) for item in items]
        cut = 0 < self.micro_tokens < len(items) * max(lengths)
        if not cut or num_items_in_batch is None or self.args.world_size > 1:
            return super().training_step(model, inputs, num_items_in_batch)
        losses = []
        for places in parts_alike(lengths, self.micro_tokens):
            part = {"demonstrations": Demonstrations([items[place] for place in places])}
            losses.append(super().training_step(model, part, num_items_in_batch))
        return torch.stack(losses).sum()

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Demonstrations],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, CausalLMOutput]:
        items = inputs["demonstrations"].items
        with self.metrics_deferred():
            loss = super().compute_loss(
                model, self._tensors(items), return_outputs, num_items_in_batch=num_items_in_batch
            )
        value = loss[0] if return_outputs else loss
        self.loss_check(value, "")
        if self.reference is not None:
            self._log_distance(value.detach(), self.reference, items, num_items_in_batch)
        return loss

    def _tensors(self, items: Sequence[EncodedResponse]) -> dict[str, torch.Tensor | PackedBatch]:
        """The inputs of TRL's loss, on the model's device."""
        pad = self.policy.tokenizer.pad_token_id
        batch: dict[str, torch.Tensor | PackedBatch]
        if self.strategy is Strategy.STOCK:
            padded = collate(items, pad)
            completion = padded.pop("completion_mask").bool()
            batch = {**padded, "labels": padded["input_ids"].masked_fill(~completion, -100)}
        else:
            packed = pack(
                [item.prompt_ids for item in items], [item.response_ids for item in items], pad_token_id=pad
            )
            tokens = sum(len(item.prompt_ids) + len(item.response_ids) for item in items)
            batch = {"packed": packed, "attention_mask": torch.tensor([[tokens]])}  # TRL counts by its sum
        return moved(batch, self.args.device)

    def _log_distance(
        self,
        loss: torch.Tensor,
        reference: Reference,
        items: Sequence[EncodedResponse],
        step_tokens: torch.Tensor | None,
    ) -> None:
        """Log the demonstrations' log-ratio to the base: all of it per demonstration, and per token."""
        tokens = sum(len(item.response_ids) for item in items)
        # the loss is a sum over this batch divided by the tokens of the whole step, of all processes
        step = (
            tokens if step_tokens is None else step_tokens / (self.args.world_size if self._shares() else 1)
        )
        ratio = -loss * step - sum(reference[(*item.prompt_ids, *item.response_ids)] for item in items)
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["rewards/demonstrations"].append(self.metric(ratio / len(items)))
        metrics["log_ratio"].append(self.metric(ratio / tokens))

    def _shares(self) -> bool:
        return bool(self.args.average_tokens_across_devices) and self.args.world_size > 1
