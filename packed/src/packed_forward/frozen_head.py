"""Log-probabilities over a frozen output layer on a CPU, in two products where the general function takes three.

The gradient of a log-probability does not depend on the loss but for one factor per token, so it is computed while
the logits are there instead of computing the logits again. TRL's function, right for any device and for a head that
is trained, multiplies in float32 on a CPU; that and the second logits were a tenth of a step at 100 M parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from trl.kernels import ChunkedLogProbFunction

CELLS = 1 << 23
"""Most logits held at once (32 MB in float32): tokens go in slices, each over the whole vocabulary."""


class FrozenHeadLogProb(torch.autograd.Function):
    """Log-probability function like TRL's `ChunkedLogProbFunction` (same arguments, but for its tile width;
    same five outputs, each [n] float32 or None), for a head without gradients.

    With z = T^-1 c(s h W^T + b) for temperature T, logit scale s and soft cap c, and f = dz / d(h W^T):
    d log p_t / dh = (f_t e_t - f p) W, of which the backward pass only multiplies rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        softcap: float | None,
        scale: float,
        extras: tuple[str, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        chunks: list[tuple[torch.Tensor | None, ...]] = []
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        at_once = max(1, CELLS // weight.shape[0])
        for start in range(0, max(len(hidden), 1), at_once):
            part = slice(start, start + at_once)
            logits = torch.nn.functional.linear(hidden[part], weight, bias)
            z, factor = _transform_logits(logits, temperature, softcap, scale)
            logps = torch.log_softmax(z, -1)
            chunk_targets = targets[part, None]
            chosen = logps.gather(-1, chunk_targets)
            p = torch.exp(logps)
            rows = p[:, None]
            chunks.append(
                (
                    chosen[:, 0],
                    -torch.bmm(rows, logps.nan_to_num(neginf=0.0)[..., None]).view(-1)
                    if "entropy" in extras
                    else None,
                    torch.bmm(rows, p[..., None]).view(-1).log() if "log_sum_sq_probs" in extras else None,
                    z.mean(-1) if "mean_logits" in extras else None,
                    logps.argmax(-1) == chunk_targets[:, 0] if "is_top1" in extras else None,
                )
            )
            if slopes is not None:
                # 1 - p of the target before it is rounded: a sure token keeps its small gradient
                p.scatter_(-1, chunk_targets, torch.expm1(chosen)).mul_(-factor)
                torch.mm(p.to(hidden.dtype), weight, out=slopes[part])
        outputs = tuple(
            None if values[0] is None else torch.cat(values) for values in zip(*chunks, strict=True)
        )
        ctx.save_for_backward(hidden, weight, bias, targets, slopes)
        ctx.settings = (temperature, min(weight.shape[0], CELLS), softcap, scale)
        ctx.mark_non_differentiable(*(values for values in outputs[2:] if values is not None))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, slopes = ctx.saved_tensors
        logps_grad, entropy_grad = grads[:2]
        no_gradients = (None,) * 7
        if slopes is None:
            return None, *no_gradients
        if entropy_grad is not None and bool(entropy_grad.any()):  # a bonus for entropy: the general function
            with torch.enable_grad():
                again = hidden.detach().requires_grad_()
                outputs = ChunkedLogProbFunction.apply(
                    again, weight, bias, targets, *ctx.settings, ("entropy",)
                )
                if logps_grad is None:
                    logps_grad = torch.zeros_like(outputs[0])
                (hidden_grad,) = torch.autograd.grad(outputs[:2], again, (logps_grad, entropy_grad))
            return hidden_grad, *no_gradients
        return None if logps_grad is None else slopes * logps_grad[:, None].to(slopes.dtype), *no_gradients


def _transform_logits(
    logits: torch.Tensor, temperature: float, softcap: float | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """z in float32 and its derivative by the logits, a number or as wide as z."""
    z = logits.float()
    if scale != 1:
        z = z * scale
    factor: torch.Tensor | float = scale / temperature
    if softcap is not None:
        bent = torch.tanh(z / softcap)
        z, factor = bent * softcap, (1 - bent.square()).mul_(factor)
    return (z if temperature == 1 else z / temperature), factor
