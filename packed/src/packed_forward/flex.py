"""Packed rows one behind the other in a single row without padding, under FlexAttention's block mask.

For long prompts on CUDA: empty tiles of the mask are not computed, and a batch of uneven lengths has no padding. After
Dong et al. 2024 (arXiv 2412.05496). PyTorch has no backward of it on a CPU, where it scores but does not train.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from packed_forward.packing import FLEX_BLOCK, Flat


def sees(flat: Flat, at: torch.Tensor | None = None) -> Callable[..., torch.Tensor]:
    """FlexAttention's `mask_mod`: a token sees its own prompt and its own completion, causally.

    `at` [Q] gives the places of the queries where they are not all tokens.
    """
    documents, segments = flat.documents, flat.segments

    def mask(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
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
        sees(flat, at),
        None,
        None,
        length if at is None else at.shape[0],
        length,
        device=str(device),
        BLOCK_SIZE=FLEX_BLOCK,
        _compile=device.type == "cuda",
    )


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scale: float
) -> torch.Tensor:
    """Attention under a block mask: [1, heads, Q, head], keys of fewer heads as they are -> [1, heads, Q, head]."""
    run = _compile_attention() if query.device.type == "cuda" else flex_attention
    grouped = query.shape[1] != key.shape[1]
    out: torch.Tensor = run(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out


@functools.cache
def _compile_attention() -> Any:
    """Only compiled is it one kernel. Lengths differ from batch to batch, so it is compiled for any."""
    return torch.compile(flex_attention, dynamic=True)
