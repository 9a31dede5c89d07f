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


@triton.jit
def _rotated(  # type: ignore[no-untyped-def]
    x, cos, sin, out, heads, half, x_row, x_head, x_token, at_row, at_token, out_row, out_token,
    HEADS: tl.constexpr, HALF: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    token, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head, place = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None]
    inside = (head < heads) & (place < half)
    read = x + row * x_row + head * x_head + token * x_token + place
    first = tl.load(read, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(read + half, mask=inside, other=0.0).to(tl.float32)
    at = row * at_row + token * at_token + place
    cos_1 = tl.load(cos + at, mask=place < half, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + at + half, mask=place < half, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + at, mask=place < half, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + at + half, mask=place < half, other=0.0).to(tl.float32)
    if BACKWARD:
        left, right = first * cos_1 + second * sin_2, second * cos_2 - first * sin_1
    else:
        left, right = first * cos_1 - second * sin_1, second * cos_2 + first * sin_2
    write = out + row * out_row + token * out_token + head * (2 * half) + place
    tl.store(write, left.to(out.dtype.element_ty), mask=inside)
    tl.store(write + half, right.to(out.dtype.element_ty), mask=inside)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, backward: bool = False) -> torch.Tensor:
    """x cos + rotate_half(x) sin of x [R, heads, T, head], or x times the transposed matrix of that.

    cos and sin are [R or 1, T, head]. The heads of a token lie side by side in the result's memory.
    """
    rows, heads, tokens, width = x.shape
    x, cos, sin = (part if part.stride(-1) == 1 else part.contiguous() for part in (x, cos, sin))
    if sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(rows, tokens, heads, width, dtype=x.dtype, device=x.device)
    _rotated[(tokens, rows)](
        x, cos, sin, out, heads, width // 2, *x.stride()[:3], cos.stride(0) if len(cos) > 1 else 0, cos.stride(1),
        *out.stride()[:2],
        HEADS=triton.next_power_of_2(heads), HALF=triton.next_power_of_2(width // 2), BACKWARD=backward,
    )  # fmt: skip
    return out.transpose(1, 2)


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
