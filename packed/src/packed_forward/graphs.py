"""Forward and backward passes of packed rows as CUDA graphs.

On a GPU the thousands of launches of a step take the processor longer than the GPU takes for the work of a small batch.
A graph replays them all at once. Rows are padded to a grid of widths, so that few shapes come; a shape is captured when
it comes again, with the layers' own kernels, and computes what they compute.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from packed_forward.packing import PackedBatch

INPUTS = ("prompt_ids", "prompt_lengths", "suffix_ids", "suffix_positions", "suffix_segments")
"""Parts of a `PackedBatch` that hidden states depend on."""

CAPTURED_AT = 2
"""Times that a shape has come when it is captured: a capture costs about three steps."""

MOST = 48
"""Shapes captured, at most; further ones are computed without a graph."""

Run = Callable[[PackedBatch], torch.Tensor]
"""(rows) -> hidden states [R, 1 + S, width], launch by launch."""


def grid(tokens: int) -> int:
    """The least width on the grid that holds so many tokens: multiples of 16, from 64 on four to an octave."""
    step = max(16, 1 << max(tokens - 1, 8).bit_length() - 3)
    return -(-tokens // step) * step


@dataclass(frozen=True)
class Captured:
    """The two graphs of one shape, and the tensors that they read and write."""

    rows: PackedBatch
    output: torch.Tensor
    output_grad: torch.Tensor
    parameters: list[torch.nn.Parameter]
    gradients: list[torch.Tensor | None]
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph


class Graphs:
    """The graphs of one model in one run.

    All share their memory, so only one pass is under way at a time: from its forward to its backward. What comes
    between is computed without a graph, and so is all that a graph cannot hold.
    """

    def __init__(
        self, model: torch.nn.Module, run: Run, note: Callable[[str], None] = lambda _: None
    ) -> None:
        """`note` hears why nothing is captured, where a model cannot be."""
        self.model, self.run, self.note = model, run, note
        self.seen: Counter[tuple[object, ...]] = Counter()
        self.captured: dict[tuple[object, ...], Captured] = {}
        self.pool: object = None
        self.stream: torch.cuda.Stream | None = None
        self.off = False
        self._under_way: weakref.ref[Ticket] | None = None

    def hidden(self, packed: PackedBatch) -> torch.Tensor:
        """Hidden states of the rows, [R, 1 + S, width], differentiable in the trained weights."""
        if self.off or (self._under_way is not None and self._under_way() is not None):
            return self.run(packed)
        (rows, prompt), suffix = packed.prompt_ids.shape, packed.suffix_ids.shape[1]
        wide = packed.widened(grid(prompt), grid(suffix))
        key = (rows, wide.prompt_ids.shape[1], wide.suffix_ids.shape[1], *self._state())
        self.seen[key] += 1
        known = self.captured.get(key)
        if known is None:
            early = self.seen[key] < CAPTURED_AT or len(self.captured) >= MOST
            if early or self.model.is_activation_checkpointing:  # what is computed again cannot be captured
                return self.run(packed)
            known = self._capture(wide)
            if known is None:
                return self.run(packed)
            self.captured[key] = known
        ticket = Ticket()
        self._under_way = weakref.ref(ticket)
        hidden: torch.Tensor = _Replay.apply(known, ticket, wide, *known.parameters)
        return hidden[:, : 1 + suffix]

    def release(self) -> None:
        """Give the memory of all graphs back."""
        self.captured.clear()
        self.pool = None

    def _state(self) -> tuple[object, ...]:
        """What a graph depends on beside shapes: the adapter in use, and what is trained."""
        layer = next((module for module in self.model.modules() if hasattr(module, "lora_A")), None)
        adapters = () if layer is None else (*layer.active_adapters, layer.disable_adapters)
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        return (*adapters, autocast, self.model.training)

    def _capture(self, packed: PackedBatch) -> Captured | None:
        rows = dataclasses.replace(packed, **{name: getattr(packed, name).clone() for name in INPUTS})
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        # a cast that autocast remembers would be replayed from before the weights changed
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return self._captured(rows, parameters)
        except RuntimeError as error:
            self.off = True
            self.release()
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self.note(
                f"steps are launched kernel by kernel: they cannot be captured as a CUDA graph ({reason})"
            )
            return None
        finally:
            torch.set_autocast_cache_enabled(cached)

    def _captured(self, rows: PackedBatch, parameters: list[torch.nn.Parameter]) -> Captured:
        device = rows.prompt_ids.device
        # graphs that share memory are captured on one stream
        stream = self.stream = self.stream or torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))

        def differentiate(output: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor | None]:
            return list(torch.autograd.grad(output, parameters, grad, allow_unused=True))

        with torch.cuda.stream(stream):
            for strict in (False, True):  # what waits for the device cannot be captured: it raises here
                torch.cuda.set_sync_debug_mode("error" if strict else "default")
                try:
                    output = self.run(rows)
                    differentiate(output, torch.zeros_like(output))
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                del output
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=self.pool, stream=stream):
            output = self.run(rows)
        self.pool = self.pool or forward.pool()
        output_grad = torch.zeros_like(output)
        with torch.cuda.graph(backward, pool=self.pool, stream=stream):
            gradients = differentiate(output, output_grad)
        return Captured(rows, output.detach(), output_grad, parameters, gradients, forward, backward)


class Ticket:
    """Lives as long as the backward pass of a replayed forward may still come."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        known: Captured,
        ticket: Ticket,
        packed: PackedBatch,
        *parameters: torch.nn.Parameter,
    ) -> torch.Tensor:
        torch._foreach_copy_(
            [getattr(known.rows, name) for name in INPUTS], [getattr(packed, name) for name in INPUTS]
        )
        known.forward.replay()
        ctx.known, ctx.ticket = known, ticket
        return known.output.clone()

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        known: Captured = ctx.known
        known.output_grad.copy_(grads[0])
        known.backward.replay()
        # the next replay writes into the graph's own tensors, and autograd may keep what it is given
        found = [gradient for gradient in known.gradients if gradient is not None]
        copies = [torch.empty_like(gradient) for gradient in found]
        torch._foreach_copy_(copies, found)
        ctx.ticket = None
        left = iter(copies)
        return None, None, None, *(None if g is None else next(left) for g in known.gradients)
