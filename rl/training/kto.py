"""Kahneman-Tversky optimisation: recipe -> TRL's KTOTrainer -> TrainResult. Good and bad responses in, an adapter
out."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
import trl
from datasets import Dataset
from torch.nn import functional
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from packed_forward.packing import completion_batch, pack
from packed_forward.strategies import Strategy
from rl.recipes import AdapterRecipe, KTORecipe
from rl.training.encoding import EMPTY, EncodedResponse, Encoder, LeftOut, reasoning_check
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
    strategy_apply,
    train_stoppable,
    trainer_settle,
    weights_begin,
)
from rl.training.warm_up import WarmUp, warm_up

BALANCE = (1.0, 4.0 / 3.0)
"""Bounds of (weight x number of good) / (weight x number of bad): Ethayarajh et al. 2024, eq. 9."""


def kto_weights(good: int, bad: int) -> tuple[float, float]:
    """Weights of good and of bad responses for so many of each, the rarer side's raised until the paper's bounds hold.

    Eq. 9 of arXiv 2402.01306: w_D n_D / (w_U n_U) in [1, 4/3]. Raises TrainingRefused where a side is empty: with good
    responses alone that is supervised fine-tuning.
    """
    if not good or not bad:
        raise TrainingRefused(
            f"expected good and bad responses, found {good} good and {bad} bad: rate more responses of "
            "the missing kind" + (", or use train_sft, which needs only good ones" if good else "")
        )
    ratio = good / bad
    low, high = BALANCE
    if ratio < low:
        return low / ratio, 1.0
    if ratio > high:
        return 1.0, ratio / high
    return 1.0, 1.0


def labels_encoded(
    encoder: Encoder, rows: Sequence[Any], recipe: KTORecipe, *, needed: bool = True
) -> tuple[list[tuple[EncodedResponse, bool]], LeftOut]:
    """Responses as tokens with whether each was good, and what was left out. Raises TrainingRefused where rows that are
    `needed` do not leave both kinds."""
    reasoning_check(encoder, recipe)
    try:
        column = encoder.column(rows, "completion", recipe.max_length, recipe.max_completion_length)
    except ValueError as error:
        raise TrainingRefused(str(error)) from error
    items = []
    for item, number in zip(column.items, column.index, strict=True):
        if item.prompt_ids and item.response_ids:
            items.append((item, bool(rows[number]["label"])))
        else:
            column.left_out.add(EMPTY, rows[number], number)
    good = sum(label for _, label in items)
    if needed:
        try:
            kto_weights(good, len(items) - good)
        except TrainingRefused as refusal:
            left_out = f" (left out: {column.left_out.words()})" if column.left_out.counts else ""
            raise TrainingRefused(f"{refusal}{left_out}") from refusal
    return items, column.left_out


class KTOTrainer:
    """Train a LoRA adapter on single responses that were liked or not.

    Rows are {"prompt": messages, "completion": text or [message], "label": whether it was good}. Everything else as
    `rl.training.dpo.DPOTrainer`.
    """

    def __init__(
        self,
        recipe: KTORecipe,
        base_model: str = "bundled",
        **options: Unpack[RunOptions],
    ) -> None:
        self.context = run_context(recipe, base_model, **options)
        self.recipe = recipe
        self.policy: LoadedPolicy | None = None
        self.warm_up: WarmUp | None = None

    def load_base_model(self) -> LoadedPolicy:
        """Load base model and tokenizer, once. Raises PolicyLoadError."""
        if self.policy is None:
            self.policy = base_load(self.context)
        return self.policy

    def train(self, train_dataset: Any, eval_dataset: Any = None) -> TrainResult:
        """Train and return the result; refusals and failures as DPOTrainer's."""
        start = time.monotonic()
        train_rows, eval_rows = rows_ordered(train_dataset or [], self.recipe), list(eval_dataset or [])
        good = sum(bool(row.get("label")) for row in train_rows)
        kto_weights(good, len(train_rows) - good)
        checkpoint, notes = folder_prepare(self.context)
        policy = self.load_base_model()
        head_check(policy)
        items, left_out = labels_encoded(policy.encoder, train_rows, self.recipe)
        good = sum(label for _, label in items)
        weights = kto_weights(good, len(items) - good)
        # the reference point needs a second prompt; one held-out row alone has none
        held_out, _ = labels_encoded(policy.encoder, eval_rows, self.recipe, needed=False)
        held_out = held_out if len(held_out) > 1 else []
        arguments = self._arguments(len(items), len(held_out), weights)
        self.context.main_process = arguments.process_index == 0
        truncation = {
            "prompts": sum(item.prompt_cut for item, _ in items),
            "completions": sum(item.response_cut for item, _ in items),
        }
        self.context.note_all([*notes, *policy.notes, *one_gpu(arguments)])
        self.context.note(
            f"{good:,} good and {len(items) - good:,} bad responses: weights {arguments.desirable_weight:.3g} and "
            f"{arguments.undesirable_weight:.3g}"
        )
        self.context.note_all(left_out.notes("responses"))
        rows = [[item.prompt_ids, item.response_ids, label] for item, label in items]
        now = run_facts(self.recipe, policy, rows, arguments.world_size)
        same_run_check(self.context, now, resumed=checkpoint is not None)
        with matmul(self.context.hardware):
            self.warm_up = warm_up(self.context, train_rows)
            recipe: AdapterRecipe = self.recipe
            if self.warm_up is not None:
                self.context.note(self.warm_up.note)
                recipe = self.warm_up.start_recipe(recipe)
            special_tokens_settle(policy)
            train, evaluated = (
                self._dataset(policy, arguments, rows) if rows else None for rows in (items, held_out)
            )
            if self.warm_up is not None:
                self.warm_up.release()
            trainer = _KTOTrainer(
                model=policy.model,
                args=arguments,
                train_dataset=train,
                eval_dataset=evaluated,
                processing_class=policy.tokenizer,
                data_collator=KTOCollator(policy.tokenizer.pad_token_id),
                peft_config=lora_config_of(recipe, policy),
            )
            trainer.settle(self.context, policy)
            self.context.note_all(weights_begin(recipe, trainer.model))
            train_stoppable(trainer, self.context, checkpoint)
            metrics = trainer.evaluate_at_end() if held_out else {}
        result = result_of(
            "kto",
            trainer,
            policy,
            context=self.context,
            seconds=time.monotonic() - start,
            samples={"train": len(items), "eval": len(held_out)},
            truncated=truncation,
            left_out=left_out.counts,
            metrics=metrics,
        )
        if self.warm_up is not None and self.context.main_process and result.status == "succeeded":
            self.warm_up.store(Path(result.checkpoint))
        return result

    def _arguments(self, rows: int, eval_rows: int, weights: tuple[float, float]) -> trl.KTOConfig:
        recipe = self.recipe
        return trl.KTOConfig(
            # our order is shuffled already, see _dataset
            **common_arguments(self.context, rows=rows, eval_rows=eval_rows)
            | {"train_sampling_strategy": "sequential"},
            beta=recipe.beta,
            loss_type="apo_zero_unpaired" if recipe.loss == "logistic" else recipe.loss,
            desirable_weight=recipe.desirable_weight or weights[0],
            undesirable_weight=recipe.undesirable_weight or weights[1],
            max_length=None,
        )

    def _dataset(
        self, policy: LoadedPolicy, arguments: trl.KTOConfig, examples: list[tuple[EncodedResponse, bool]]
    ) -> Dataset:
        """Token columns with the reference's log-probabilities, of each response and of one that answers another
        prompt.

        The paper's reference point is the KL of mismatched pairs: prompt i goes with the next response in a fixed
        shuffle.
        """
        generator = torch.Generator().manual_seed(self.recipe.seed)
        if self.recipe.curriculum == "none":
            examples = [examples[i] for i in torch.randperm(len(examples), generator=generator).tolist()]
        items = [item for item, _ in examples]
        mismatches = [
            EncodedResponse(item.prompt_ids, other.response_ids)
            for item, other in zip(items, [*items[1:], items[0]], strict=True)
        ]
        has_reference_point = arguments.loss_type == "kto"  # the other losses have no reference point
        score_items = [*items, *mismatches] if has_reference_point else items
        reference, cache = policy, reference_cache(self.context)
        if self.warm_up is not None:
            assert self.warm_up.reference is not None  # until the rows of all splits are made
            reference, cache = self.warm_up.reference, self.warm_up.cache
        self.context.phase("reference pass")
        logps, computed = reference_logps(
            reference, arguments, score_items, 2 * self.recipe.batch_size, cache, self.context.phase
        )
        if cache is not None:
            self.context.detail(
                f"reference log-probabilities: {computed:,} computed, {len(score_items) - computed:,} "
                "from the cache"
            )
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

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
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

    method = "kto"
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

    def _compute_kl_logps(self, model: Any, batch: dict[str, Any]) -> Any:
        return (
            super()._compute_kl_logps(model, batch) if self._mismatch_logps is None else self._mismatch_logps
        )

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
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

    def _record_logps(self, model: Any) -> Any:
        """The model, whose newest log-probabilities are kept for the losses that TRL does not have: those of the
        mismatched responses come first."""

        def forward(**inputs: Any) -> Any:
            output = model(**inputs)
            self._log_probs = output.log_probs
            return output

        return forward

    def _logistic_loss(self, inputs: dict[str, Any]) -> torch.Tensor:
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


def _model_with_outputs(output: Any, **_: Any) -> Any:
    """Model whose forward pass was computed already: gives its outputs again."""
    return output
