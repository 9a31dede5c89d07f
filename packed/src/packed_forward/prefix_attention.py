"""Attention of packed rows: causal over the prompt, then each completion over the prompt and itself.

Registered with transformers under `ATTENTION`; without a `prefix` keyword it is the stock SDPA attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from transformers import DynamicCache

ATTENTION = "ratchet_prefix"
"""Name under which transformers finds `prefix_attention`."""

CPU_BLOCK_LIMIT = 1024
"""Longest prompt, in tokens, for which a CPU computes blocks of plain products. They beat its fused attention well
beyond (twice as quick in bfloat16), but keep heads * P^2 / 2 weights a row and layer for the backward pass."""


@dataclass(frozen=True)
class Prefix:
    """Layout of a packed row for its attention; handed through the model's layers as a keyword."""

    prompt: int
    """P, the width of the prompt's part; without the tokens in `common`."""
    suffix_mask: torch.Tensor | None
    """[R, 1, S, P + S] bool."""
    output_positions: torch.Tensor | None = None
    """[R, 1 + S] int64, positions the last layer keeps; None where it keeps all."""
    output_mask: torch.Tensor | None = None
    """[R, 1, 1 + S, P + S] bool."""
    common: int = 0
    """K, leading tokens that all R rows have. Where there are any, queries, keys and values are one row
    [K | rest of row 1 | ... | rest of row R] and the masks have K more columns in front."""
    rows: int = 1
    """R, where `common` is not 0."""

    def by_row(self, states: torch.Tensor) -> torch.Tensor:
        """[1, heads, R * n, head] -> [R, heads, n, head]."""
        return states.view(states.shape[1], self.rows, -1, states.shape[3]).transpose(0, 1)

    def with_common(self, states: torch.Tensor) -> torch.Tensor:
        """Keys or values [1, heads, K + R * n, head] -> [R, heads, K + n, head]."""
        shared, own = states.split([self.common, states.shape[2] - self.common], 2)
        return torch.cat([shared.expand(self.rows, -1, -1, -1), self.by_row(own.contiguous())], 2)


def prefix_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    prefix: Prefix | SharedPrompt | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention call: query [R, heads, T, head], key and value [R, kv heads, T, head] -> [R, T, heads,
    head].

    Without a `prefix` it is the stock SDPA. With one, the prompt's queries see the prompt causally (no mask: a fused
    kernel can run) and the suffix's queries what `suffix_mask` says. With a `SharedPrompt` the queries are the newest
    tokens of answers, which see their prompt and themselves.
    """
    if prefix is None:
        out = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out[0], None
    query, key = query.to(value.dtype), key.to(value.dtype)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if isinstance(prefix, SharedPrompt):
        return prefix.attend(module.layer_idx, query, key, value, scale), None
    split = prefix.prompt
    if prefix.common:
        if dropout:
            raise NotImplementedError("rows with common leading tokens have no attention dropout")
        return _common_attention(query, key, value, prefix, scale), None
    in_blocks = query.device.type == "cpu" and split <= CPU_BLOCK_LIMIT and dropout == 0
    if in_blocks:
        return BlockAttention.apply(query, key, value, split, prefix.suffix_mask, scale, 0), None
    prompt = functional.scaled_dot_product_attention(
        query[:, :, :split],
        key[:, :, :split],
        value[:, :, :split],
        dropout_p=dropout,
        is_causal=True,
        scale=scale,
        enable_gqa=query.shape[1] > key.shape[1],
    )
    suffix = masked_attention(query[:, :, split:], key, value, prefix.suffix_mask, scale, dropout)
    return torch.cat([prompt, suffix], 2).transpose(1, 2).contiguous(), None


def _common_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prefix: Prefix, scale: float
) -> torch.Tensor:
    """Attention of rows with common leading tokens, which are queries once: [1, heads, T, head] -> [1, T, heads,
    head]."""
    common = prefix.common
    shared = BlockAttention.apply(
        query[:, :, :common], key[:, :, :common], value[:, :, :common], common, None, scale, 0
    )
    own = BlockAttention.apply(
        prefix.by_row(query[:, :, common:].contiguous()),
        prefix.with_common(key),
        prefix.with_common(value),
        prefix.prompt,
        prefix.suffix_mask,
        scale,
        common,
    )
    return torch.cat([shared, own.view(1, -1, *own.shape[2:])], 1)


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention of few queries [R, heads, S, head] over keys and values [R, kv heads, T, head] -> as the queries.

    mask: [R, 1, S, T] bool. Queries that share a key are laid side by side, so that no key is repeated. On a CPU plain
    products are quicker for few queries, see `BlockAttention`.
    """
    rows, heads, count, width = query.shape
    groups = heads // key.shape[1]
    together = query.reshape(rows, key.shape[1], groups * count, width)
    seen = None if mask is None else mask.repeat(1, 1, groups, 1)
    if query.device.type == "cpu" and dropout == 0 and seen is not None:
        scores = torch.matmul(together * scale, key.transpose(-1, -2)).add_(additive(seen, query.dtype))
        found = torch.matmul(torch.softmax(scores, -1), value)
    else:
        found = functional.scaled_dot_product_attention(
            together, key, value, attn_mask=seen, dropout_p=dropout, scale=scale
        )
    return found.reshape(rows, heads, count, width)


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask that is true where a query may look -> 0 there and -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


class BlockAttention(torch.autograd.Function):
    """Attention of packed rows as plain products: queries [R, heads, T, head], keys and values [R, kv heads,
    offset + T, head] -> [R, T, heads, head]. All queries see the first `offset` keys.

    The prompt's queries go in slices of `WIDTH`, each over the keys up to its own end, which skips most of the products
    that a causal mask would throw away; the suffix's are one more slice over all keys. Grouped queries
    share their keys without repeating them. On a CPU this beats the fused kernel up to `CPU_BLOCK_LIMIT` tokens,
    whose backward is slow. A softmax of bfloat16 sums in float32 by itself.
    """

    WIDTH = 64
    """Queries of a slice. Wider ones waste products, narrower ones make them slow."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        split: int,
        suffix_mask: torch.Tensor | None,
        scale: float,
        offset: int,
    ) -> torch.Tensor:
        rows, heads, length, width = query.shape
        shared = key.shape[1]
        group = heads // shared
        grouped = query.reshape(rows, shared, group, length, width)
        keys, values = (part.reshape(rows * shared, offset + length, width) for part in (key, value))
        output = query.new_empty(rows, length, shared, group, width)
        saves = [keys, values]
        slices = list(_slices(split, length, BlockAttention.WIDTH, offset))
        for start, end, key_count in slices:
            part = query.new_empty(rows, shared, group, end - start, width)
            torch.mul(grouped[:, :, :, start:end], scale, out=part)
            part = part.view(rows * shared, -1, width)
            scores = torch.bmm(part, keys[:, :key_count].transpose(1, 2))
            if start < split:  # only the slice's own keys can lie ahead of a query
                ahead = torch.ones(end - start, end - start, dtype=torch.bool).tril()
                scores[:, :, offset + start :].add_(additive(ahead, query.dtype).repeat(group, 1))
            elif suffix_mask is not None:
                own = additive(suffix_mask, query.dtype)[:, :, None]
                scores.view(rows, shared, group, -1, key_count).add_(own)
            weights = torch.softmax(scores, -1)
            answer = torch.bmm(weights, values[:, :key_count])
            output[:, start:end] = answer.view(rows, shared, group, -1, width).permute(0, 3, 1, 2, 4)
            saves += [part, weights]
        ctx.save_for_backward(*saves)
        ctx.slices, ctx.scale, ctx.shape = slices, scale, (rows, shared, group, length, width)
        return output.view(rows, length, heads, width)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        keys, values, *kept = ctx.saved_tensors
        rows, shared, group, length, width = ctx.shape
        out = grads[0].view(rows, length, shared, group, width)
        query_grad = keys.new_empty(rows, shared, group, length, width)
        key_grad, value_grad = torch.zeros_like(keys), torch.zeros_like(values)
        for number, (start, end, seen) in enumerate(ctx.slices):
            part, weights = kept[2 * number], kept[2 * number + 1]
            own = out[:, start:end].permute(0, 2, 3, 1, 4).reshape(rows * shared, -1, width)
            value_grad[:, :seen].baddbmm_(weights.transpose(1, 2), own)
            weights_grad = torch.bmm(own, values[:, :seen].transpose(1, 2))
            scores_grad = torch._softmax_backward_data(weights_grad, weights, -1, weights.dtype)
            key_grad[:, :seen].baddbmm_(scores_grad.transpose(1, 2), part)  # part is scaled
            own_grad = torch.bmm(scores_grad, keys[:, :seen]).mul_(ctx.scale)
            query_grad[:, :, :, start:end] = own_grad.view(rows, shared, group, -1, width)
        return (
            query_grad.view(rows, shared * group, length, width),
            key_grad.view(rows, shared, -1, width),
            value_grad.view(rows, shared, -1, width),
            None,
            None,
            None,
            None,
        )


def _slices(split: int, length: int, width: int, offset: int) -> Iterator[tuple[int, int, int]]:
    """(first query, one past the last, keys seen) of each slice: the prompt's blocks, then the suffix."""
    for start in range(0, split, width):
        end = min(start + width, split)
        yield start, end, offset + end
    if length > split:
        yield split, length, offset + length


AttentionInterface.register(ATTENTION, prefix_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


# --- Attention while sampling many answers to one prompt ---


@dataclass(frozen=True)
class SharedPrompt:
    """The prompts of a batch whose rows are answers, `samples` to each, those of one prompt side by side."""

    keys: list[torch.Tensor]
    """Key tensors of each layer, [P, kv heads, T, head]."""
    values: list[torch.Tensor]
    """Value tensors of each layer, [P, kv heads, T, head]."""
    attention_bias: torch.Tensor
    """[P, 1, 1, T]: 0 where a prompt has a token, -inf where it is padded."""
    samples: int
    own_bias: torch.Tensor | None = None
    """[1, 1, 1, t]: -inf where the answers' own keys are not written yet; None where all are."""

    @classmethod
    def of(cls, cache: DynamicCache, mask: torch.Tensor, samples: int) -> Self:
        """From the prefill's cache and its mask [P, T]."""
        keys = [layer.keys for layer in cache.layers]
        closed = torch.zeros_like(mask, dtype=keys[0].dtype).masked_fill(mask == 0, -torch.inf)
        return cls(keys, [layer.values for layer in cache.layers], closed[:, None, None], samples)

    def select(self, prompts: torch.Tensor, samples: int) -> Self:
        """Of some prompts, by their places, and so many answers to each."""
        return type(self)(
            [keys[prompts] for keys in self.keys],
            [values[prompts] for values in self.values],
            self.attention_bias[prompts],
            samples,
        )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of each row's newest token: query [rows, heads, 1, head], key and value of the answers so far
        [rows, kv heads, t, head] -> [rows, 1, heads, head]."""
        prompt_keys, prompt_values = self.keys[layer], self.values[layer]
        prompts, shared, length, width = prompt_keys.shape
        rows, heads = query.shape[:2]
        samples, group = self.samples, heads // shared
        own = (query * scale).view(rows, shared, group, width)
        together = own.view(prompts, samples, shared, group, width).transpose(1, 2).flatten(2, 3)
        far = torch.matmul(together, prompt_keys.transpose(2, 3)) + self.attention_bias
        near = torch.matmul(own, key.transpose(2, 3))
        near = (near if self.own_bias is None else near + self.own_bias).view(
            prompts, samples, shared, group, -1
        )
        scores = torch.cat([far, near.transpose(1, 2).flatten(2, 3)], -1)
        weights = torch.softmax(scores, -1)
        far_out = torch.matmul(weights[..., :length], prompt_values)
        own_weights = weights[..., length:].view(prompts, shared, samples, group, -1).transpose(1, 2)
        near_out = torch.matmul(own_weights.reshape(rows, shared, group, -1), value)
        far_out = (
            far_out.view(prompts, shared, samples, group, width).transpose(1, 2).reshape(rows, heads, width)
        )
        return (far_out + near_out.view(rows, heads, width))[:, None]


def running_rows(running: torch.Tensor, samples: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Rows to go on with when some have ended: rows [kept], their prompts' places, and rows to a prompt.

    `running` [prompts * samples] bool. A prompt without a running row leaves; the others keep as many rows as the one
    with most, those that run first.
    """
    by_prompt = running.view(-1, samples)
    left = by_prompt.sum(1)
    prompts, most = left.nonzero()[:, 0], int(left.max())
    order = by_prompt.long().argsort(dim=1, descending=True, stable=True)[prompts, :most]
    return (prompts[:, None] * samples + order).flatten(), prompts, most
