"""LoRA layers, gated MLPs, RMS norms and rotations in as few passes over memory as there can be, forward and backward.

peft's and transformers' own forwards cast, scale, add and square in passes of their own; on short rows these cost as
much as the products. Nothing here approximates: the self-test in `packed.selection` compares each model with its stock
forward.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch.nn import functional

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""transformers' `apply_rotary_pos_emb` of an architecture: (q, k, cos, sin) -> q and k, rotated."""


def lora_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x W^T + b + s (x A^T) B^T and x A^T, for x [n, in]; Hu et al. 2021 (arXiv 2106.09685), eq. 3."""
    low = x @ a.t()
    return functional.linear(x, weight, bias).addmm_(low, b.t(), alpha=scale), low


def lora_gradients(
    out: torch.Tensor, x: torch.Tensor, low: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of A [r, in], of B [out, r] and of s x A^T [n, r], given that of the layer's output [n, out]."""
    low_grad = (out @ b).mul_(scale)
    return low_grad.t() @ x, (low.t() @ out).mul_(scale).t(), low_grad


class LoraFunction(torch.autograd.Function):
    """One frozen linear layer with one LoRA adapter: x [..., in] -> [..., out].

    No gradient is computed for the frozen W and b, nor for x where nothing before it is trained.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        a_cast, b_cast = a.to(x.dtype), b.to(x.dtype)
        out, low = lora_product(flat, weight, bias, a_cast, b_cast, scale)
        ctx.save_for_backward(flat, weight, a_cast, b_cast, low)
        ctx.scale, ctx.shape, ctx.kept_dtype = scale, x.shape, a.dtype
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        flat, weight, a, b, low = ctx.saved_tensors
        out = grads[0].reshape(-1, grads[0].shape[-1])
        a_grad, b_grad, low_grad = lora_gradients(out, flat, low, a, b, ctx.scale)
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = (out @ weight).addmm_(low_grad, a).view(ctx.shape)
        return x_grad, None, None, a_grad.to(ctx.kept_dtype), b_grad.to(ctx.kept_dtype), None


@functools.cache
def gpu_kernels() -> Any:
    """The module `triton_kernels`; None where Triton is not installed, as with PyTorch for Windows."""
    try:
        return importlib.import_module("packed_forward.triton_kernels")
    except ImportError:
        return None


class GatedMlpFunction(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)) with a LoRA adapter on each of the three; x [..., width] -> the same shape.

    Takes (x, then weight, A and B of gate, up and down, then their scales). One function, so that the two gradients
    of x are summed inside the products, gate and up read x once for both adapters, and down's input is computed again
    (one product per element) rather than kept.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, *parts: torch.Tensor
    ) -> torch.Tensor:
        weights, scales = parts[:9], parts[9:]
        flat = x.reshape(-1, x.shape[-1])
        gate_w, gate_a, gate_b, up_w, up_a, up_b, down_w, down_a, down_b = (w.to(x.dtype) for w in weights)
        rank = gate_a.shape[0]
        near_a = torch.cat([gate_a, up_a])
        near_low = flat @ near_a.t()
        gate = functional.linear(flat, gate_w).addmm_(near_low[:, :rank], gate_b.t(), alpha=scales[0])
        up = functional.linear(flat, up_w).addmm_(near_low[:, rank:], up_b.t(), alpha=scales[1])
        if flat.is_cuda and (kernels := gpu_kernels()) is not None:
            active, product = None, kernels.gated(gate, up)
        else:
            active = functional.silu(gate)
            product = active * up
        out, down_low = lora_product(product, down_w, None, down_a, down_b, scales[2])
        ctx.save_for_backward(
            flat,
            gate,
            up,
            active,
            near_low,
            down_low,
            near_a,
            gate_w,
            gate_b,
            up_w,
            up_b,
            down_w,
            down_a,
            down_b,
        )
        ctx.scales, ctx.shape, ctx.kept_dtype = scales, x.shape, weights[1].dtype
        return out.view(x.shape)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        flat, gate, up, active, near_low, down_low, near_a, *frozen = ctx.saved_tensors
        gate_w, gate_b, up_w, up_b, down_w, down_a, down_b = frozen
        gate_s, up_s, down_s = ctx.scales
        rank = gate_b.shape[1]
        out = grads[0].reshape(-1, grads[0].shape[-1])
        low = (out @ down_b).mul_(down_s)
        hidden_grad = (out @ down_w).addmm_(low, down_a)
        if active is None:
            product, gate_grad, up_grad = gpu_kernels().gated_backward(hidden_grad, gate, up)
        else:
            product, up_grad = active * up, active * hidden_grad
            gate_grad = torch.ops.aten.silu_backward(hidden_grad.mul_(up), gate)
        down_a_grad, down_b_grad = low.t() @ product, (down_low.t() @ out).mul_(down_s).t()
        # not written into slices of one tensor: a compiler stops at a slice given as `out`
        near_grad = torch.cat([(gate_grad @ gate_b).mul_(gate_s), (up_grad @ up_b).mul_(up_s)], 1)
        near_a_grad = near_grad.t() @ flat
        gate_b_grad = (near_low[:, :rank].t() @ gate_grad).mul_(gate_s).t()
        up_b_grad = (near_low[:, rank:].t() @ up_grad).mul_(up_s).t()
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = gate_grad @ gate_w
            x_grad.addmm_(up_grad, up_w).addmm_(near_grad, near_a)
            x_grad = x_grad.view(ctx.shape)
        dtype = ctx.kept_dtype
        return (
            x_grad,
            None,
            near_a_grad[:rank].to(dtype),
            gate_b_grad.to(dtype),
            None,
            near_a_grad[rank:].to(dtype),
            up_b_grad.to(dtype),
            None,
            down_a_grad.to(dtype),
            down_b_grad.to(dtype),
            None,
            None,
            None,
        )


class RmsNormFunction(torch.autograd.Function):
    """w x / sqrt(mean(x^2) + eps) with a frozen w (Zhang & Sennrich 2019, arXiv 1910.07467, eq. 4), in x's dtype.

    All but the product with w is float32, as in transformers. One copy of x is widened and worked on in place:
    products of two dtypes would widen it each time.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if x.is_cuda:
            out, scale = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)
            ctx.save_for_backward(x, weight, scale)
            return out
        wide = x.to(torch.float32, copy=True)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return wide.mul_(scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        if x.is_cuda:
            found = torch.ops.aten._fused_rms_norm_backward(
                grads[0].contiguous(), x, [x.shape[-1]], scale, weight, [True, False]
            )
            return found[0], None, None
        wide = x.to(torch.float32)
        out = (grads[0] * weight).to(torch.float32)  # g = w * grad
        # d/dx = s (g - x s^2 mean(g x))
        inner = (out * wide).sum(-1, keepdim=True)
        out.mul_(scale).addcmul_(wide, (scale.pow(3) * inner).div_(-x.shape[-1]))
        return out.to(x.dtype), None, None


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, backward: bool = False) -> torch.Tensor:
    """x cos + rotate_half(x) sin of x [R, heads, T, head], or x times the transposed matrix of that.

    cos and sin are [R or 1, T, head]. One pass on a GPU, three elsewhere.
    """
    if x.is_cuda and (kernels := gpu_kernels()) is not None:
        found: torch.Tensor = kernels.rotated(x, cos, sin, backward=backward)
        return found
    out = x * cos[:, None]
    (first, second), (near, far) = x.chunk(2, -1), sin[:, None].chunk(2, -1)
    left, right = out.chunk(2, -1)
    if backward:
        left.addcmul_(second, far)
        right.addcmul_(first, near, value=-1)
    else:
        left.addcmul_(second, near, value=-1)
        right.addcmul_(first, far)
    return out


class RotationFunction(torch.autograd.Function):
    """x cos + rotate_half(x) sin of x [R, heads, T, head] (Su et al. 2021, arXiv 2104.09864)."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        return rotated(grads[0], *ctx.saved_tensors, backward=True), None, None


# --- Putting them in ----------------------------------------------------------------------------------------


def fuse_layers(model: torch.nn.Module) -> None:
    """Let a PeftModel's plain LoRA layers, gated MLPs and RMS norms compute with the functions above.

    Each goes back to its own forward by itself wherever the function is not the same thing: adapter off or merged,
    several adapters, dropout, DoRA, autocast, a quantised base.
    """
    for module in model.modules():
        forward = _forward_for(module)
        if forward is not None and "forward" not in vars(module):  # else it is there, or somebody's hook is
            module.ratchet_own_forward = module.forward
            module.forward = types.MethodType(forward, module)
    for code in _architectures(model):
        stock = code.apply_rotary_pos_emb
        if not hasattr(stock, "ratchet_stock") and rotates_by_halves(stock):
            code.apply_rotary_pos_emb = _rotation_of(stock)


def restore_layers(model: torch.nn.Module) -> None:
    """Undo `fuse_layers`."""
    for module in model.modules():
        if "ratchet_own_forward" in vars(module):  # a wrapper shows the attributes of what it wraps
            del module.forward, module.ratchet_own_forward  # what is left is the class's own
    for code in _architectures(model):
        code.apply_rotary_pos_emb = getattr(
            code.apply_rotary_pos_emb, "ratchet_stock", code.apply_rotary_pos_emb
        )


def _architectures(model: torch.nn.Module) -> list[Any]:
    """The modules of transformers that define a model's layers and rotate their queries and keys."""
    names = {type(module).__module__ for module in model.modules()}
    return [sys.modules[name] for name in sorted(names) if hasattr(sys.modules[name], "apply_rotary_pos_emb")]


def rotates_by_halves(rotate: Rotate) -> bool:
    """True if a function rotates as `RotationFunction` does, seen on numbers."""
    generator = torch.Generator().manual_seed(0)
    x, cos, sin = (torch.randn(1, 2, 8, generator=generator) for _ in range(3))
    expected = x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin
    try:
        found, _ = rotate(x[:, None], x[:, None], cos, sin)
    except (TypeError, ValueError, RuntimeError):
        return False
    return found.shape == (1, 1, 2, 8) and torch.allclose(found[:, 0], expected, atol=1e-5)


def _rotation_of(stock: Rotate) -> Rotate:
    """An architecture's function for rotations, which takes `RotationFunction` where that is the same."""

    @functools.wraps(stock)
    def rotate(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if args or kwargs or q.dtype != cos.dtype or q.shape[-1] != cos.shape[-1]:
            return stock(q, k, cos, sin, *args, **kwargs)
        return RotationFunction.apply(q, cos, sin), RotationFunction.apply(k, cos, sin)

    rotate.ratchet_stock = stock  # type: ignore[attr-defined]
    return rotate


def _forward_for(module: torch.nn.Module) -> Callable[..., object] | None:
    if isinstance(module, LoraLinear) and type(module.base_layer) is torch.nn.Linear:
        return _linear_forward
    if {name for name, _ in module.named_children()} == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return _mlp_forward
    if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return _norm_forward
    return None


def _linear_forward(self: torch.nn.Module, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    adapter = plain_adapter(self, x)
    if adapter is None or args or kwargs:
        return self.ratchet_own_forward(x, *args, **kwargs)
    base = self.base_layer
    return LoraFunction.apply(
        x,
        base.weight,
        base.bias,
        self.lora_A[adapter].weight,
        self.lora_B[adapter].weight,
        self.scaling[adapter],
    )


def _mlp_forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    layers = (self.gate_proj, self.up_proj, self.down_proj)
    adapters = [
        plain_adapter(layer, x)
        if isinstance(layer, LoraLinear) and type(layer.base_layer) is torch.nn.Linear
        else None
        for layer in layers
    ]
    silu = isinstance(self.act_fn, torch.nn.SiLU) or type(self.act_fn).__name__ == "SiLUActivation"
    if not silu or not all(adapters) or any(layer.base_layer.bias is not None for layer in layers):
        return self.ratchet_own_forward(x)
    parts = [
        weight
        for layer, adapter in zip(layers, adapters, strict=True)
        for weight in (layer.base_layer.weight, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight)
    ]
    scales = [layer.scaling[adapter] for layer, adapter in zip(layers, adapters, strict=True)]
    return GatedMlpFunction.apply(x, *parts, *scales)


def _norm_forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    if self.weight.requires_grad or self.weight.dtype != x.dtype or autocast_changes(x):
        return self.ratchet_own_forward(x)
    return RmsNormFunction.apply(x, self.weight, self.variance_epsilon)


def autocast_changes(x: torch.Tensor) -> bool:
    """True if autocast would make x another type; on a GPU it is on, and where the base is its type it
    changes nothing of what the functions above do."""
    kind = x.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != x.dtype


def plain_adapter(layer: torch.nn.Module, x: torch.Tensor) -> str | None:
    """The name of the one adapter a LoRA layer applies to x, or None where `LoraFunction` would not be the same."""
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return None
    (adapter,) = layer.active_adapters
    if adapter not in layer.lora_A or not isinstance(layer.lora_dropout[adapter], torch.nn.Identity):
        return None
    if adapter in layer.lora_variant or layer.fan_in_fan_out or layer.lora_bias[adapter]:
        return None
    if x.dtype != layer.base_layer.weight.dtype or autocast_changes(x):
        return None
    return str(adapter)
