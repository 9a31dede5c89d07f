"""Kernels for NVIDIA and AMD GPUs: what would be several passes over memory goes in one. Imported on a GPU alone."""

from __future__ import annotations

import torch
import triton
from triton import language as tl

BLOCK = 1024
"""Elements that one program computes."""


@triton.jit
def _gated(gate, up, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_backward(grad, gate, up, out, gate_grad, up_grad, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    d = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    active = g * s
    tl.store(out + place, (active * u).to(out.dtype.element_ty), mask=inside)
    slope = s * (1.0 + g * (1.0 - s))
    tl.store(gate_grad + place, (d * u * slope).to(gate_grad.dtype.element_ty), mask=inside)
    tl.store(up_grad + place, (d * active).to(up_grad.dtype.element_ty), mask=inside)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of contiguous tensors of one shape."""
    out = torch.empty_like(gate)
    _gated[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, out, gate.numel(), BLOCK=BLOCK)
    return out


def gated_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """silu(gate) * up again, and the gradients of gate and up, given that of their product."""
    out, gate_grad, up_grad = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(gate)
    _gated_backward[(triton.cdiv(gate.numel(), BLOCK),)](
        grad, gate, up, out, gate_grad, up_grad, gate.numel(), BLOCK=BLOCK
    )
    return out, gate_grad, up_grad
