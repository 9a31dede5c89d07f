"""Packed rows one behind the other in a single row without padding, under FlexAttention's block mask.

For long prompts on CUDA: empty tiles of the mask are not computed, and a batch of uneven lengths has no padding. After
Dong et al. 2024 (arXiv 2412.05496). PyTorch has no backward of it on a CPU, where it scores but does not train.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from rl.training.packed.packing import Packed

BLOCK = 128
"""Tokens on a side of one tile of the mask; rows are filled up to a multiple of it."""


@dataclass(frozen=True)
class Flat:
    """All tokens of a `Packed`, padding aside, in one row of T: each prompt, its completions, then the next prompt."""

    ids: torch.Tensor
    """[1, T] int64."""
    positions: torch.Tensor
    """[1, T] int64."""
    documents: torch.Tensor
    """[T] int64: which prompt a token belongs to; -1 fills up."""
    segments: torch.Tensor
    """[T] int64: which completion of its prompt; -1 is the prompt itself."""
    kept: torch.Tensor
    """[1, R * (1 + S)] int64: where the states lie that `Packed.sources` counts; a padded one lies at its prompt's
    end."""

    def to(self, device: Any, **kwargs: Any) -> Self:
        return type(self)(**{f.name: getattr(self, f.name).to(device, **kwargs) for f in fields(self)})

    def pin_memory(self) -> Self:
        return type(self)(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})


def flatten(packed: Packed) -> Flat:
    """Lay packed rows out one behind the other. Counts the tokens, so better done before they are on a device."""
    rows, prompt = packed.prompt_ids.shape
    device = packed.prompt_ids.device
    in_prompt = torch.arange(prompt, device=device) < packed.prompt_lengths[:, None]
    real = torch.cat([in_prompt, packed.suffix_segments >= 0], 1)
    segments = torch.cat([torch.full_like(packed.prompt_ids, -1), packed.suffix_segments], 1)
    documents = torch.arange(rows, device=device)[:, None].expand_as(real)
    at = (real.flatten().cumsum(0) - 1).view_as(real)
    last = at.gather(1, packed.prompt_lengths[:, None] - 1)
    kept = torch.cat([last, torch.where(packed.suffix_segments >= 0, at[:, prompt:], last)], 1)
    places = real.flatten().nonzero()[:, 0]
    missing = -len(places) % BLOCK

    def laid(values: torch.Tensor, fill: int) -> torch.Tensor:
        return functional.pad(values.flatten()[places], (0, missing), value=fill)

    ids = torch.cat([packed.prompt_ids, packed.suffix_ids], 1)
    return Flat(
        ids=laid(ids, 0)[None],
        positions=laid(packed.positions(), 0)[None],
        documents=laid(documents, -1),
        segments=laid(segments, -1),
        kept=kept.reshape(1, -1),
    )


def sees(flat: Flat, at: torch.Tensor | None = None) -> Callable[..., torch.Tensor]:
    """FlexAttention's `mask_mod`: a token sees its own prompt and its own completion, causally.

    `at` [Q] gives the places of the queries where they are not all tokens.
    """
    documents, segments = flat.documents, flat.segments

    def mask(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        place = query if at is None else at[query]
        shared = (segments[key] < 0) | (segments[key] == segments[place])
        seen: torch.Tensor = (place >= key) & (documents[place] == documents[key]) & shared
        return seen

    return mask


def block_mask(flat: Flat, at: torch.Tensor | None = None) -> BlockMask:
    """The mask over all T keys, for all T queries or those at `at` [Q]."""
    length = flat.documents.shape[0]
    device = flat.documents.device
    return create_block_mask(
        sees(flat, at), None, None, length if at is None else at.shape[0], length, device=str(device),
        BLOCK_SIZE=BLOCK, _compile=device.type == "cuda",
    )  # fmt: skip


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scale: float
) -> torch.Tensor:
    """Attention under a block mask: [1, heads, Q, head], keys of fewer heads as they are -> [1, heads, Q, head]."""
    run = _compiled() if query.device.type == "cuda" else flex_attention
    grouped = query.shape[1] != key.shape[1]
    out: torch.Tensor = run(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out


@functools.cache
def _compiled() -> Any:
    """Only compiled is it one kernel. Lengths differ from batch to batch, so it is compiled for any."""
    return torch.compile(flex_attention, dynamic=True)
