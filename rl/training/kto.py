"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024): good and bad responses in, an adapter out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import trl
from datasets import Dataset
from torch.nn import functional
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from packed_forward.packing import Strategy, completion_batch, pack
from rl.agents.base import Row
from rl.recipes import KTORecipe
from rl.training.adapter_trainer import TrainRows, common_arguments
from rl.training.encoding import EncodedResponse
from rl.training.policy import LoadedPolicy
from rl.training.preference import PreferenceTrainer
from rl.training.rows import kto_weights, labels_encoded
from rl.training.run import RunContext
from rl.training.trl_trainer import TokenizedTrainerMixin, forward_settle, strategy_apply, trainer_settle

if TYPE_CHECKING:
    from transformers.modeling_outputs import CausalLMOutput

Labelled = list[tuple[EncodedResponse, bool]]
"""Responses as tokens, and whether each was good."""


class KTOTrainer(PreferenceTrainer[KTORecipe, Labelled]):
    """Train a LoRA adapter on single responses that were liked or not.

    Rows are {"prompt": messages, "completion": text or [message], "label": whether it was good}.
    """

    method = "kto"
    weights = (1.0, 1.0)
    """Weights of good and of bad responses, from how many of each are trained on."""

    def check(self, rows: Sequence[Row]) -> None:
        good = sum(bool(row.get("label")) for row in rows)
        kto_weights(good, len(rows) - good)

    def encode(
        self, policy: LoadedPolicy, train_rows: Sequence[Row], eval_rows: Sequence[Row]
    ) -> TrainRows[Labelled]:
        self.judged = train_rows
        items, left_out = labels_encoded(policy.encoder, train_rows, self.recipe)
        held_out, _ = labels_encoded(policy.encoder, eval_rows, self.recipe, needed=False)
        if len(held_out) < 2:  # the reference point needs a second prompt
            held_out = []
        good = sum(label for _, label in items)
        found = kto_weights(good, len(items) - good)
        self.weights = (
            self.recipe.desirable_weight or found[0],
            self.recipe.undesirable_weight or found[1],
        )
        said = (
            f"{good:,} good and {len(items) - good:,} bad responses: weights {self.weights[0]:.3g} and "
            f"{self.weights[1]:.3g}"
        )
        return TrainRows(
            items,
            held_out,
            facts=[[item.prompt_ids, item.response_ids, label] for item, label in items],
            samples={"train": len(items), "eval": len(held_out)},
            truncated={
                "prompts": sum(item.prompt_cut for item, _ in items),
                "completions": sum(item.response_cut for item, _ in items),
            },
            left_out=left_out.counts,
            notes=[said, *left_out.notes("responses")],
        )

    def arguments(self, rows: TrainRows[Labelled]) -> trl.KTOConfig:
        return trl.KTOConfig(
            # our order is shuffled already, see _dataset
            **common_arguments(self.context, rows=len(rows.train), eval_rows=len(rows.held_out))
            | {"train_sampling_strategy": "sequential"},
            beta=self.recipe.beta,
            loss_type="apo_zero_unpaired" if self.recipe.loss == "logistic" else self.recipe.loss,
            desirable_weight=self.weights[0],
            undesirable_weight=self.weights[1],
            max_length=None,
        )

    def build(self, policy: LoadedPolicy, arguments: trl.KTOConfig, rows: TrainRows[Labelled]) -> _KTOTrainer:
        train, held_out = (
            self._dataset(policy, arguments, some) if some else None for some in (rows.train, rows.held_out)
        )
        trainer = _KTOTrainer(
            train_dataset=train,
            eval_dataset=held_out,
            data_collator=KTOCollator(policy.tokenizer.pad_token_id),
            **self.trl_arguments(policy, arguments),
        )
        trainer.settle(self.context, policy)
        return trainer

    def _dataset(self, policy: LoadedPolicy, arguments: trl.KTOConfig, examples: Labelled) -> Dataset:
        """Token columns with the reference's log-probabilities, of each response and of one that answers another
        prompt.

        The paper's reference point is the KL of mismatched pairs: prompt i goes with the next response in a fixed
        shuffle.
        """
        generator = torch.Generator().manual_seed(self.recipe.seed)
        examples = [examples[i] for i in torch.randperm(len(examples), generator=generator).tolist()]
        items = [item for item, _ in examples]
        mismatches = [
            EncodedResponse(item.prompt_ids, other.response_ids)
            for item, other in zip(items, [*items[1:], items[0]], strict=True)
        ]
        has_reference_point = arguments.loss_type == "kto"  # the other losses have no reference point
        logps = self.reference(policy, arguments, [*items, *mismatches] if has_reference_point else items)
        return Dataset.from_dict(
            {
                "prompt_ids": [item.prompt_ids for item in items],
                "completion_ids": [item.response_ids for item in items],
                "KL_completion_ids": [item.response_ids for item in mismatches],
                "label": [label for _, label in examples],
                "ref_logps": logps[: len(items)],
                "ref_KL_logps": logps[len(items) :] if has_reference_point else [0.0] * len(items),
            }
        )


@dataclass
class KTOCollator(DataCollatorForUnpairedPreference):
    """A batch as TRL's loss takes it; with a packed `strategy`, one row per prompt, its responses and the
    mismatched ones behind it, where TRL has two rows per response."""

    strategy: Strategy = Strategy.STOCK
    mismatched: bool = True
    """True if the loss has a reference point, which the mismatched responses are for."""

    def torch_call(self, examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        if self.strategy is Strategy.STOCK:
            return dict(super().torch_call(examples))
        columns = ("completion_ids", "KL_completion_ids")[: 1 + self.mismatched]
        packed = pack(
            [example["prompt_ids"] for example in examples] * len(columns),
            [example[name] for name in columns for example in examples],
            pad_token_id=self.pad_token_id,
        )
        batch = completion_batch(packed, self.pad_token_id, len(examples))
        for name in ("ref_logps", "ref_KL_logps", "label"):
            batch[name] = torch.tensor([example[name] for example in examples])
        return batch


def logistic_loss(rewards: torch.Tensor, labels: torch.Tensor, weights: tuple[float, float]) -> torch.Tensor:
    """Logistic regression of thumbs on rewards: the mean over [B] responses of -w log sigmoid(r) where one was good and
    -w log sigmoid(-r) where it was bad.

    rewards: beta times the log-ratio to the reference, nats. It is binary classifier optimisation (Jung et al. 2024,
    arXiv 2404.04656) with its shift fixed at 0: with the shift, all responses could become unlikely together.
    """
    signs = torch.where(labels, 1.0, -1.0)
    weight = torch.where(labels, weights[0], weights[1])
    return -(weight * functional.logsigmoid(signs * rewards)).mean()


class _KTOTrainer(TokenizedTrainerMixin, trl.KTOTrainer):
    """TRL's trainer on responses that are already tokens and whose reference is known."""

    sft_weight: float
    _mismatch_logps: torch.Tensor | None = None
    """[B] log-probabilities of the mismatched responses, where they came with the others."""
    logistic = False
    """True if the loss is `logistic_loss`, computed from what TRL's own has computed."""
    _log_probs: torch.Tensor | None = None
    """[B, T] log-probabilities of the tokens of this batch's responses, 0 elsewhere."""

    def settle(self, context: RunContext[KTORecipe], policy: LoadedPolicy) -> None:
        self.precompute_ref_logps = True
        self.logistic = context.recipe.loss == "logistic"
        self.sft_weight = context.recipe.sft_weight
        trainer_settle(self, policy, context)
        forward_settle(self)
        choice = strategy_apply(self, self.token_rows("completion_ids", "KL_completion_ids"))
        self.data_collator.strategy, self.data_collator.mismatched = choice.strategy, self.calculate_KL
        context.detail(choice.summary)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the figures; where a loss has no reference point TRL's 0 is no KL that anybody measured."""
        if not self.calculate_KL:
            for figures in self._metrics.values():
                figures.pop("kl", None)
        super().log(logs, start_time)

    def _compute_kl_logps(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (
            super()._compute_kl_logps(model, batch) if self._mismatch_logps is None else self._mismatch_logps
        )

    def _compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], return_outputs: bool
    ) -> torch.Tensor:
        if "packed" in inputs:
            # one forward for what TRL computes in two; its loss is given what it would have computed
            count = len(inputs["label"])
            found = model(packed=inputs["packed"], fused_lm_head=True)
            self._mismatch_logps = found.log_probs[count:].detach().sum(-1) if self.calculate_KL else None
            mask = inputs["packed"].target_mask[:count]
            answered = type(found)(**{name: values[:count] for name, values in found.items()})
            inputs = {name: values for name, values in inputs.items() if name != "packed"}
            model = functools.partial(_model_with_outputs, answered)
        else:
            mask = inputs["completion_mask"].bool()
        found_loss = super()._compute_loss(self._record_logps(model), inputs, return_outputs)
        loss, *rest = found_loss if return_outputs else (found_loss,)
        if self.logistic:
            loss = self._logistic_loss(inputs)
        if self.sft_weight > 0:
            assert self._log_probs is not None
            loss = loss + self.sft_weight * likelihood_loss(self._log_probs, mask, inputs["label"])
        self._log_probs = None
        self.loss_check(loss, f" or raise beta (now {self.beta:g})")
        return (loss, *rest) if return_outputs else loss

    def _record_logps(self, model: torch.nn.Module) -> object:
        """The model, whose newest log-probabilities are kept for the losses that TRL does not have: those of the
        mismatched responses come first."""

        def forward(**inputs: torch.Tensor) -> CausalLMOutput:
            output = model(**inputs)
            self._log_probs = output.log_probs
            return output

        return forward

    def _logistic_loss(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        assert self._log_probs is not None
        logps = self._log_probs.sum(-1)
        rewards = self.beta * (logps - inputs["ref_logps"].to(logps))
        labels = inputs["label"].to(device=logps.device, dtype=torch.bool)
        return logistic_loss(rewards, labels, (self.desirable_weight, self.undesirable_weight))


def likelihood_loss(log_probs: torch.Tensor, mask: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood per token of the good responses, nats; 0 where there is none.

    log_probs: [B, T], 0 where `mask` [B, T] is (the stock forward has one column less, for the first token of all).
    """
    good = label.bool().to(log_probs.device)
    tokens = mask.to(log_probs.device)[good].sum()
    return -log_probs[good].sum() / tokens.clamp(min=1)


def _model_with_outputs(output: CausalLMOutput, **_: object) -> CausalLMOutput:
    """Model whose forward pass was computed already: gives its outputs again."""
    return output
