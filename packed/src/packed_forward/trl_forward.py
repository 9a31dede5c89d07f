"""Forward of a causal model as TRL's losses call it (`fused_lm_head=True`), over packed rows or completions alone."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from accelerate.utils import DistributedType
from trl.trainer.utils import FusedCausalLMOutput

from packed_forward.forward import packed_logps, strategy_of
from packed_forward.logps import head_logps, spread
from packed_forward.packing import AllowedTokens, PackedBatch

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
        pair_weights: Any = None,
        packed: PackedBatch | None = None,
        allowed: AllowedTokens | None = None,
        **kwargs: object,
    ) -> Any:
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


def is_sharded(trainer: Any) -> bool:
    """True if each process of the launch holds a part of the weights only (FSDP, DeepSpeed ZeRO-3)."""
    kind = trainer.accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        return bool(trainer.accelerator.state.deepspeed_plugin.zero_stage == 3)
    return bool(kind == DistributedType.FSDP)
