"""LoRA layers without elementwise passes: y = x W^T + b + s (x A^T) B^T as products alone, forward and backward.

peft's own forward casts, scales and adds in passes of their own; on short rows these cost as much as the products.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch.nn import functional


class LoraFunction(torch.autograd.Function):
    """One frozen linear layer with one LoRA adapter. x [..., in], W [out, in], A [r, in], B [out, r] -> [..., out].

    Hu et al. 2021 (arXiv 2106.09685), eq. 3. The scale is applied in the products themselves; no gradient is
    computed for the frozen W and b, nor for x where nothing before it is trained.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        a_cast, b_cast = a.to(x.dtype), b.to(x.dtype)
        low = flat @ a_cast.t()
        out = functional.linear(flat, weight, bias)
        out.addmm_(low, b_cast.t(), alpha=scale)
        ctx.save_for_backward(flat, weight, a_cast, b_cast, low)
        ctx.scale, ctx.shape, ctx.kept_dtype = scale, x.shape, a.dtype
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat, weight, a, b, low = ctx.saved_tensors
        out = grads[0].reshape(-1, grads[0].shape[-1])
        low_grad = (out @ b).mul_(ctx.scale)
        a_grad = (low_grad.t() @ flat).to(ctx.kept_dtype)
        b_grad = (out.t() @ low).mul_(ctx.scale).to(ctx.kept_dtype)
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = (out @ weight).addmm_(low_grad, a).view(ctx.shape)
        return x_grad, None, None, a_grad, b_grad, None


def fuse(model: Any) -> int:
    """Let every plain LoRA layer of a PeftModel compute with `LoraFunction`; return how many there are.

    A layer goes back to peft's forward by itself wherever the function is not the same thing: adapter off or merged,
    several adapters, dropout, DoRA, autocast, a quantised base.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, LoraLinear) and type(module.base_layer) is torch.nn.Linear:
            if "forward" not in vars(module):  # else ours is there already, or somebody's hook that must stay
                module.ratchet_peft_forward = module.forward
                module.forward = types.MethodType(_forward, module)
            count += 1
    return count


def unfuse(model: Any) -> None:
    """Undo `fuse`."""
    for module in model.modules():
        if hasattr(module, "ratchet_peft_forward"):
            del module.forward, module.ratchet_peft_forward  # what is left is the class's own


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    adapter = plain_adapter(self, x)
    if adapter is None or args or kwargs:
        return self.ratchet_peft_forward(x, *args, **kwargs)
    base = self.base_layer
    return LoraFunction.apply(
        x, base.weight, base.bias, self.lora_A[adapter].weight, self.lora_B[adapter].weight, self.scaling[adapter]
    )  # fmt: skip


def plain_adapter(layer: Any, x: torch.Tensor) -> str | None:
    """The name of the one adapter a LoRA layer applies to x, or None where `LoraFunction` would not be the same."""
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return None
    (adapter,) = layer.active_adapters
    if adapter not in layer.lora_A or not isinstance(layer.lora_dropout[adapter], torch.nn.Identity):
        return None
    if adapter in layer.lora_variant or layer.fan_in_fan_out or layer.lora_bias[adapter]:
        return None
    if x.dtype != layer.base_layer.weight.dtype or torch.is_autocast_enabled(x.device.type):
        return None
    return str(adapter)
