"""Drop-in for `trl.DPOTrainer`: pairs share the computation of their prompt, loss and metrics stay TRL's.

    from packed_forward.dpo_trainer import PackedDPOTrainer

    trainer = PackedDPOTrainer(model=model, args=args, train_dataset=pairs, processing_class=tokenizer)

Differs from TRL in speed and memory alone. Where the model's forward over packed rows does not agree with its own
(`packed.selftest`), or the run has something packed rows cannot do, every batch is TRL's and `strategy_choice` has the
reason. `num_tokens` counts the tokens really computed, so it is lower than TRL's.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import trl
from accelerate.utils import DistributedType
from datasets import Dataset
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.utils import FusedCausalLMOutput

from packed_forward.forward import packed_logps, strategy_of
from packed_forward.logps import causal_model, head_logps, spread
from packed_forward.packing import (
    AllowedTokens,
    PackedBatch,
    PairTokens,
    Strategy,
    StrategyChoice,
    TokenizedCompletion,
    completion_batch,
    pack,
)
from packed_forward.row_cache import SelftestCache
from packed_forward.selection import strategy_select
from packed_forward.selftest import PackableModel, install

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer

EXTRAS = ("entropy", "mean_logits", "is_top1")
"""Per-token values TRL's metrics want beside the log-probabilities."""


class _ScaleGradient(torch.autograd.Function):
    """x -> x, with the gradient multiplied: each pair's loss depends on its own log-probabilities only, so scaling
    their gradient by w is training on w times that pair's loss, whatever the loss."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, factor: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (factor,) = ctx.saved_tensors
        return grads[0] * factor, None


def install_forward(model: torch.nn.Module, compact: bool, temperature: float = 1.0) -> None:
    """Give the causal model the forward TRL's loss calls with fused_lm_head=True.

    A `packed` batch is computed by the installed strategy. Else, `compact` projects completion positions only: TRL does
    so on CUDA itself; elsewhere it projects the prompt too. `allowed` tokens, among which probabilities are taken, are
    projected so in any case. Further keys of a batch arrive here as keyword arguments
    (TRL passes what it does not know to the model). Logits are divided by `temperature`.
    """
    stock = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        self: torch.nn.Module,
        *args: object,
        fused_lm_head: bool = False,
        pair_weights: torch.Tensor | None = None,
        packed: PackedBatch | None = None,
        allowed: AllowedTokens | None = None,
        **kwargs: object,
    ) -> object:
        if not fused_lm_head:
            return stock(*args, **kwargs)
        if packed is not None:
            output = _packed_output(self, packed, temperature)
        elif compact or allowed is not None:
            output = _compact_output(self, *args, temperature=temperature, allowed=allowed, **kwargs)
        else:
            output = stock(*args, fused_lm_head=True, **kwargs)
        if pair_weights is not None:
            factor = pair_weights.to(output.log_probs).repeat(2)[
                :, None
            ]  # the chosen half, then the rejected
            output.log_probs = _ScaleGradient.apply(output.log_probs, factor)
        return output

    model.forward = types.MethodType(forward, model)


def _packed_output(model: torch.nn.Module, packed: PackedBatch, temperature: float) -> FusedCausalLMOutput:
    logps, entropy, _, mean_logits, is_top1 = packed_logps(
        model, packed, strategy_of(model), EXTRAS, temperature
    )
    return FusedCausalLMOutput(
        log_probs=logps,
        entropy=entropy,
        mean_logits=mean_logits,
        is_top1=is_top1,
        label_mask=packed.target_mask,
    )


def _compact_output(
    model: torch.nn.Module,
    *args: object,
    labels: torch.Tensor,
    temperature: float,
    allowed: AllowedTokens | None = None,
    **kwargs: object,
) -> FusedCausalLMOutput:
    hidden = model.base_model(*args, **kwargs).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    mask = targets != -100
    logps, entropy, _, mean_logits, is_top1 = (
        None if values is None else spread(values, mask)
        for values in head_logps(model, hidden[mask], targets[mask], EXTRAS, temperature, allowed)
    )
    return FusedCausalLMOutput(
        log_probs=logps, entropy=entropy, mean_logits=mean_logits, is_top1=is_top1, label_mask=mask
    )


def is_sharded(trainer: Trainer) -> bool:
    """True if each process of the launch holds a part of the weights only (FSDP, DeepSpeed ZeRO-3)."""
    kind = trainer.accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        return bool(trainer.accelerator.state.deepspeed_plugin.zero_stage == 3)
    return bool(kind == DistributedType.FSDP)


logger = logging.getLogger("packed_forward.dpo_trainer")

Side = Literal["chosen_ids", "rejected_ids"]
SIDES: tuple[Side, Side] = ("chosen_ids", "rejected_ids")


class PackedDPOTrainer(trl.DPOTrainer):
    """`trl.DPOTrainer`, same arguments, over packed rows.

    The underscored methods and attributes are TRL 1.16's.
    """

    strategy_choice: StrategyChoice | None = None
    """The forward strategy and the reason for it; None before the constructor has tested it."""

    def __init__(self, *args: object, selftest_cache: SelftestCache | None = None, **kwargs: object) -> None:
        """`selftest_cache`: results of earlier self-tests of the same model; None tests anew (a few seconds)."""
        self._selftest_cache = selftest_cache
        super().__init__(*args, **kwargs)
        self._pack()

    def _precompute_ref_logps(self, dataset: Dataset, *args: object, **kwargs: object) -> object:
        self._pack()  # TRL's constructor comes here before it ends
        return super()._precompute_ref_logps(dataset, *args, **kwargs)

    def _pack(self) -> None:
        """Select the strategy, once, and where it is a packed one prepare models and batches for it."""
        if self.strategy_choice is not None:
            return
        obstacle = self._obstacle()
        probes = [] if obstacle else self._probes()
        if not probes:
            obstacle = obstacle or "no pair with a prompt and two completions"
            self.strategy_choice = StrategyChoice(Strategy.STOCK, obstacle, {})
        else:
            self.strategy_choice = self._select(probes)
        logger.info("packed forward: %s", self.strategy_choice.summary)
        if self.strategy_choice.strategy is Strategy.STOCK:
            return
        for model in self._models():
            install_forward(causal_model(model), compact=False)
        self.data_collator = dataclasses.replace(
            self._collator(),
            strategy=self.strategy_choice.strategy,
            tested_tokens=max(len(probe.prompt_ids) + len(probe.response_ids) for probe in probes),
        )

    def _collator(self) -> PreferenceCollator:
        """TRL's collator as ours, not packing yet."""
        stock = self.data_collator
        return PreferenceCollator(
            pad_token_id=stock.pad_token_id,
            max_length=stock.max_length,
            truncation_mode=stock.truncation_mode,
            pad_to_multiple_of=stock.pad_to_multiple_of,
        )

    def _models(self) -> list[torch.nn.Module]:
        """The policy, and the reference where it is a model of its own."""
        models = [self.model] if self.ref_model is None else [self.model, self.ref_model]
        return [self.accelerator.unwrap_model(model) for model in models]

    def _obstacle(self) -> str:
        """The reason why this run's rows cannot be packed; empty where there is none."""
        adapters = getattr(self.model, "peft_config", None) or {}
        obstacles = {
            "a vision-language model": self._is_vlm or self._is_vision_dataset,
            "a data collator of its own": type(self.data_collator) is not DataCollatorForPreference,
            "an iterable dataset, whose longest row is not known": not isinstance(
                self.train_dataset, Dataset
            ),
            "a router loss, which depends on every token fed": self.aux_loss_enabled,
            "sharded weights, which only the model's own forward gathers": is_sharded(self),
            "use_weighting, which needs a sum over the vocabulary": self.use_weighting,
            "kernels that replace the model's forward": self.args.use_liger_kernel or self.args.torch_compile,
            "virtual tokens before the prompt": any(
                getattr(config, "is_prompt_learning", False) for config in adapters.values()
            ),
        }
        return next((reason for reason, found in obstacles.items() if found), "")

    def _select(self, probes: list[TokenizedCompletion]) -> StrategyChoice:
        """Test the policy with gradients, then the reference model without; both must take a packed strategy."""
        subjects = [
            PackableModel(
                model, self.data_collator.pad_token_id, self._selftest_cache, self.accelerator.autocast
            )
            for model in self._models()
        ]
        choices = [
            strategy_select(subject, probes, gradients=number == 0) for number, subject in enumerate(subjects)
        ]
        stock = next((choice for choice in choices if choice.strategy is Strategy.STOCK), None)
        if stock is not None:
            for subject in subjects:
                install(subject, Strategy.STOCK)
        return stock or choices[0]

    def _probes(self) -> list[TokenizedCompletion]:
        """Both completions of the longest and of the shortest pair of all splits.

        Cut as TRL cuts them; pairs with an empty side are passed over, as they are not packed.
        """
        cut = self._collator().cut
        evaluated = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval": self.eval_dataset}
        longest: list[TokenizedCompletion] = []
        shortest: list[TokenizedCompletion] = []
        for dataset in (self.train_dataset, *evaluated.values()):
            for row in dataset if isinstance(dataset, Dataset) else ():
                pair = [TokenizedCompletion(*cut(row, side)) for side in ("chosen_ids", "rejected_ids")]
                if not all(one.prompt_ids and one.response_ids for one in pair):
                    continue
                longest = max(longest or pair, pair, key=_tokens)
                shortest = min(shortest or pair, pair, key=_tokens)
        return longest if longest is shortest else [*longest, *shortest]


def _tokens(pair: list[TokenizedCompletion]) -> int:
    return max(len(one.prompt_ids) + len(one.response_ids) for one in pair)


# --- Batches of preference pairs for TRL's DPO loss ---


@dataclass
class PreferenceCollator(DataCollatorForPreference):
    """A batch of B pairs as TRL's loss takes it, the chosen half first.

    With a packed `strategy` TRL sees the completions alone, [2B, 1 + C], and the model finds the rows in `packed`.
    Rows that cannot be packed go as TRL's own: an empty prompt or completion, or one longer than `tested_tokens`.
    """

    strategy: Strategy = Strategy.STOCK
    tested_tokens: int | None = None
    """Longest row, in tokens, that the strategy was tested on; None: there are no longer ones."""

    def torch_call(self, examples: list[PairTokens]) -> dict[str, torch.Tensor]:
        if self.strategy is Strategy.STOCK:
            return dict(super().torch_call(examples))
        sides = {side: [self.cut(example, side) for example in examples] for side in SIDES}
        rows = [row for rows in sides.values() for row in rows]
        if not all(prompt and completion for prompt, completion in rows) or self._lacks_test(rows):
            return dict(super().torch_call(examples))
        packed = pack(
            [prompt for prompt, _ in rows],
            [completion for _, completion in rows],
            pad_token_id=self.pad_token_id,
        )
        batch = completion_batch(packed, self.pad_token_id, len(rows))
        if "ref_chosen_logps" in examples[0]:
            batch["ref_chosen_logps"] = torch.tensor([one["ref_chosen_logps"] for one in examples])
            batch["ref_rejected_logps"] = torch.tensor([one["ref_rejected_logps"] for one in examples])
        return batch

    def cut(self, example: PairTokens, side: Side) -> tuple[list[int], list[int]]:
        """Prompt and completion of one side, cut to `max_length` tokens together as TRL cuts them."""
        prompt, completion = example["prompt_ids"], example[side]
        excess = 0 if self.max_length is None else len(prompt) + len(completion) - self.max_length
        if excess <= 0:
            return prompt, completion
        if self.truncation_mode == "keep_end":
            return prompt[excess:], completion[max(excess - len(prompt), 0) :]
        limit = self.max_length or 0
        return prompt[:limit], completion[: max(limit - len(prompt), 0)]

    def _lacks_test(self, rows: list[tuple[list[int], list[int]]]) -> bool:
        longest = max(len(prompt) + len(completion) for prompt, completion in rows)
        return self.tested_tokens is not None and longest > self.tested_tokens
