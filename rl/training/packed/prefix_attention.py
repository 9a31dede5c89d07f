"""The forward over packed rows, as a ladder of ways from the quickest to the plainest; which one is right for a
model is found by `rl.training.packed.selection`, never assumed.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rl.training.packed import flex
from rl.training.packed.packing import Packed
from rl.training.packed.shared_prompt import SharedPrompt

ATTENTION = "ratchet_prefix"
"""Name under which transformers finds `prefix_attention`."""

CPU_BLOCK_LIMIT = 1024
"""Longest prompt, in tokens, for which a CPU computes blocks of plain products. They beat its fused attention well
beyond (twice as quick in bfloat16), but keep heads * P^2 / 2 weights a row and layer for the backward pass."""


class Rung(StrEnum):
    """A way to compute packed rows; each falls back on the next."""

    FLEX_LAST_LAYER = "flex+last_layer"
    """As `flex`; the last layer's queries, output and MLP only where a completion token is predicted."""
    FLEX = "flex"
    """All rows one behind the other under FlexAttention's block mask, without padding: for long prompts on CUDA."""
    LAST_LAYER = "split+last_layer"
    """As `split`; the last layer's queries, output and MLP only where a completion token is predicted."""
    SPLIT = "split"
    """Causal attention over the prompt, one small masked attention for the completions."""
    DENSE = "dense"
    """The model's own attention under a 4-D mask."""
    CACHE = "cache"
    """Two passes: the prompt, then the completions on its key-value cache. Needs no mask over the prompt."""
    STOCK = "stock"
    """Not packed: TRL's rows, prompt and completion repeated for each."""


FLEX_RUNGS = (Rung.FLEX_LAST_LAYER, Rung.FLEX)
LAST_LAYER_RUNGS = (Rung.FLEX_LAST_LAYER, Rung.LAST_LAYER)
OWN_ATTENTION = (*FLEX_RUNGS, Rung.LAST_LAYER, Rung.SPLIT)
"""Rungs whose attention is `prefix_attention`."""


@dataclass(frozen=True)
class Prefix:
    """What the attention of a packed row must know; handed through the model's layers as a keyword."""

    prompt: int
    """P, the width of the prompt's part."""
    suffix_mask: torch.Tensor | None
    """[R, 1, S, P + S] bool."""
    kept: torch.Tensor | None = None
    """[R, 1 + S] int64, positions the last layer keeps; None where it keeps all."""
    kept_mask: torch.Tensor | None = None
    """[R, 1, 1 + S, P + S] bool."""
    blocks: BlockMask | None = None
    """What FlexAttention sees, in place of `suffix_mask`."""
    kept_blocks: BlockMask | None = None
    """Likewise in place of `kept_mask`."""


def packed_hidden(model: Any, packed: Packed, rung: Rung) -> torch.Tensor:
    """Last hidden states of the prompt's last token and of the suffix, [R, 1 + S, width]. Differentiable.

    `model` is the causal model itself, prepared by `install` for the rung.
    """
    prompt = packed.prompt_ids.shape[1]
    ids = torch.cat([packed.prompt_ids, packed.suffix_ids], 1)
    last = packed.prompt_lengths[:, None] - 1
    if rung is Rung.CACHE:
        return _two_passes(model, packed, last)
    if rung in FLEX_RUNGS:
        return _flat_hidden(model, packed, rung)
    suffix_mask = packed.suffix_mask()
    if rung is Rung.DENSE:
        mask = torch.cat([packed.prompt_mask(), suffix_mask], 2)
        if model.config._attn_implementation != "sdpa":  # eager adds its mask to the scores
            mask = torch.zeros_like(mask, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)
        hidden = model.base_model(
            input_ids=ids, position_ids=packed.positions(), attention_mask=mask, use_cache=False
        ).last_hidden_state
        return _keep(hidden, packed, last)
    prefix = Prefix(prompt, suffix_mask)
    if rung is Rung.LAST_LAYER:
        suffix = torch.arange(prompt, ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
        column = torch.arange(ids.shape[1], device=ids.device)
        seen_by_last = (column[None] <= last)[:, None, None]
        prefix = Prefix(
            prompt, suffix_mask, torch.cat([last, suffix], 1), torch.cat([seen_by_last, suffix_mask], 2)
        )
    # a 4-D mask is passed on by transformers as it is; ours says nothing, `prefix` says it all
    nothing = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    hidden = model.base_model(
        input_ids=ids,
        position_ids=packed.positions(),
        attention_mask=nothing,
        use_cache=False,
        prefix=prefix,
    ).last_hidden_state
    return hidden if rung is Rung.LAST_LAYER else _keep(hidden, packed, last)


def _flat_hidden(model: Any, packed: Packed, rung: Rung) -> torch.Tensor:
    row = packed.flat or flex.flatten(packed)
    at = row.kept if rung is Rung.FLEX_LAST_LAYER else None
    prefix = Prefix(
        0, None, kept=at, blocks=flex.block_mask(row), kept_blocks=None if at is None else flex.block_mask(row, at[0])
    )  # fmt: skip
    hidden = model.base_model(
        input_ids=row.ids,
        position_ids=row.positions,
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=row.ids.device),
        use_cache=False,
        prefix=prefix,
    ).last_hidden_state
    if at is None:
        hidden = hidden.gather(1, row.kept[..., None].expand(-1, -1, hidden.shape[-1]))
    return hidden.view(packed.prompt_ids.shape[0], -1, hidden.shape[-1])


def _keep(hidden: torch.Tensor, packed: Packed, last: torch.Tensor) -> torch.Tensor:
    end = hidden.gather(1, last[..., None].expand(-1, -1, hidden.shape[-1]))
    return torch.cat([end, hidden[:, packed.prompt_ids.shape[1] :]], 1)


def _two_passes(model: Any, packed: Packed, last: torch.Tensor) -> torch.Tensor:
    positions = packed.positions()
    prompt = packed.prompt_ids.shape[1]
    first = model.base_model(input_ids=packed.prompt_ids, position_ids=positions[:, :prompt], use_cache=True)
    mask = packed.suffix_mask()
    if model.config._attn_implementation != "sdpa":
        mask = torch.zeros_like(mask, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)
    second = model.base_model(
        input_ids=packed.suffix_ids,
        position_ids=positions[:, prompt:],
        attention_mask=mask,
        past_key_values=first.past_key_values,
        use_cache=True,
    ).last_hidden_state
    end = first.last_hidden_state.gather(1, last[..., None].expand(-1, -1, second.shape[-1]))
    return torch.cat([end, second], 1)


# --- Attention ----------------------------------------------------------------------------------------------


def prefix_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    prefix: Prefix | SharedPrompt | None = None,
    **kwargs: Any,
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
    if prefix.blocks is not None:
        if dropout:
            raise NotImplementedError(
                "FlexAttention has no dropout: train without it, or with attention=split"
            )
        return flex.attend(query, key, value, prefix.blocks, scale).transpose(1, 2).contiguous(), None
    in_blocks = query.device.type == "cpu" and split <= CPU_BLOCK_LIMIT and dropout == 0
    if in_blocks and not torch.compiler.is_compiling():
        return BlockAttention.apply(query, key, value, split, prefix.suffix_mask, scale), None
    groups = query.shape[1] // key.shape[1]
    all_keys, all_values = repeat_heads(key, groups), repeat_heads(value, groups)
    grouped = groups > 1 and query.device.type == "cuda"
    near_keys, near_values = (key, value) if grouped else (all_keys, all_values)
    prompt = functional.scaled_dot_product_attention(
        query[:, :, :split], near_keys[:, :, :split], near_values[:, :, :split],
        dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=grouped,
    )  # fmt: skip
    suffix = functional.scaled_dot_product_attention(
        query[:, :, split:], all_keys, all_values,
        attn_mask=prefix.suffix_mask, dropout_p=dropout, scale=scale,
    )  # fmt: skip
    return torch.cat([prompt, suffix], 2).transpose(1, 2).contiguous(), None


def repeat_heads(states: torch.Tensor, groups: int) -> torch.Tensor:
    """[R, kv heads, T, head] -> [R, kv heads * groups, T, head]."""
    return states if groups == 1 else states.repeat_interleave(groups, 1)


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask that is true where a query may look -> 0 there and -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


class BlockAttention(torch.autograd.Function):
    """Attention of packed rows as plain products: [R, heads, T, head] -> [R, T, heads, head].

    The prompt's queries go in slices of `WIDTH`, each over the keys up to its own end, which skips most of the products
    that a causal mask would throw away; the suffix's are one more slice over all keys. Grouped queries
    share their keys without repeating them. On a CPU this beats the fused kernel up to `CPU_BLOCK_LIMIT` tokens,
    whose backward is slow. A softmax of bfloat16 sums in float32 by itself.
    """

    WIDTH = 64
    """Queries of a slice. Wider ones waste products, narrower ones make them slow."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        split: int,
        suffix_mask: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        rows, heads, length, width = query.shape
        shared = key.shape[1]
        group = heads // shared
        grouped = query.reshape(rows, shared, group, length, width)
        keys, values = key.reshape(-1, length, width), value.reshape(-1, length, width)
        out = query.new_empty(rows, length, shared, group, width)
        kept = [keys, values]
        slices = list(_slices(split, length, BlockAttention.WIDTH))
        for start, end, seen in slices:
            part = query.new_empty(rows, shared, group, end - start, width)
            torch.mul(grouped[:, :, :, start:end], scale, out=part)
            part = part.view(rows * shared, -1, width)
            scores = torch.bmm(part, keys[:, :seen].transpose(1, 2))
            if start < split:  # only the slice's own keys can lie ahead of a query
                ahead = torch.ones(end - start, end - start, dtype=torch.bool).tril()
                scores[:, :, start:].add_(additive(ahead, query.dtype).repeat(group, 1))
            else:
                own = additive(suffix_mask, query.dtype)[:, :, None]
                scores.view(rows, shared, group, -1, seen).add_(own)
            weights = torch.softmax(scores, -1)
            answer = torch.bmm(weights, values[:, :seen])
            out[:, start:end] = answer.view(rows, shared, group, -1, width).permute(0, 3, 1, 2, 4)
            kept += [part, weights]
        ctx.save_for_backward(*kept)
        ctx.slices, ctx.scale, ctx.shape = slices, scale, (rows, shared, group, length, width)
        return out.view(rows, length, heads, width)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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
            key_grad.view(rows, shared, length, width),
            value_grad.view(rows, shared, length, width),
            None, None, None,
        )  # fmt: skip


def _slices(split: int, length: int, width: int) -> Iterator[tuple[int, int, int]]:
    """(first query, one past the last, keys seen) of each slice: the prompt's blocks, then the suffix."""
    for start in range(0, split, width):
        end = min(start + width, split)
        yield start, end, end
    yield split, length, length


AttentionInterface.register(ATTENTION, prefix_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


# --- The last layer -----------------------------------------------------------------------------------------

LAST_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}


def last_layer_known(model: Any) -> bool:
    """Whether the last layer has the parts, and only those, that `_last_layer` computes itself."""
    layers = getattr(model.base_model, "layers", None)
    if not layers:
        return False
    layer = layers[-1]
    module = sys.modules[type(layer).__module__]
    return (
        {name for name, _ in layer.named_children()} == LAST_LAYER_PARTS
        and {name for name, _ in layer.self_attn.named_children()} >= ATTENTION_PARTS
        and hasattr(module, "apply_rotary_pos_emb")
    )


def _last_layer(
    self: Any,
    hidden_states: torch.Tensor,
    *args: Any,
    position_embeddings: Any = None,
    prefix: Prefix | SharedPrompt | None = None,
    **kwargs: Any,
) -> Any:
    """The layer's forward; with a prefix that keeps positions, computed there only: [R, T, width] -> [R, 1 + S,
    width]."""
    if not isinstance(prefix, Prefix) or prefix.kept is None:
        if prefix is not None:
            kwargs["prefix"] = prefix
        return self.ratchet_stock_forward(
            hidden_states, *args, position_embeddings=position_embeddings, **kwargs
        )
    attention = self.self_attn
    rows, length, width = hidden_states.shape
    at = prefix.kept[..., None]
    normed = self.input_layernorm(hidden_states)
    head = attention.head_dim
    query = attention.q_proj(normed.gather(1, at.expand(-1, -1, width))).view(rows, at.shape[1], -1, head)
    key = attention.k_proj(normed).view(rows, length, -1, head)
    value = attention.v_proj(normed).view(rows, length, -1, head).transpose(1, 2)
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    # the architecture's own rotation, once for the kept queries and once for all keys
    rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
    cos, sin = (part.expand(rows, -1, -1) for part in position_embeddings)
    spread = at.expand(-1, -1, cos.shape[-1])
    query, _ = rotate(query, query, cos.gather(1, spread), sin.gather(1, spread))
    key, _ = rotate(key, key, cos, sin)
    query, key = query.to(value.dtype), key.to(value.dtype)
    groups = query.shape[1] // key.shape[1]
    keys, values = repeat_heads(key, groups), repeat_heads(value, groups)
    if prefix.kept_blocks is not None:
        seen = flex.attend(query, key, value, prefix.kept_blocks, attention.scaling)
    elif query.device.type == "cpu":  # few queries: plain products are quicker there, see BlockAttention
        scores = torch.matmul(query * attention.scaling, keys.transpose(-1, -2))
        scores = scores.add_(additive(prefix.kept_mask, query.dtype))
        seen = torch.matmul(torch.softmax(scores, -1), values)
    else:
        seen = functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=prefix.kept_mask, scale=attention.scaling
        )
    out = attention.o_proj(seen.transpose(1, 2).reshape(rows, at.shape[1], -1))
    residual = hidden_states.gather(1, at.expand(-1, -1, width)) + out
    return residual + self.mlp(self.post_attention_layernorm(residual))


def install(model: Any, rung: Rung) -> None:
    """Prepare a causal model for a rung; the stock forward stays what it was. Calling it again changes the rung."""
    uninstall(model)
    model.ratchet_rung = rung
    if rung in OWN_ATTENTION:
        model.config._attn_implementation = ATTENTION
    if rung in LAST_LAYER_RUNGS:
        layer = model.base_model.layers[-1]
        if "forward" in vars(layer):
            raise RuntimeError("the last layer's forward was replaced by something else")
        layer.ratchet_stock_forward = layer.forward
        layer.forward = types.MethodType(_last_layer, layer)


def installed(model: Any) -> Rung:
    """The rung a causal model is prepared for."""
    return getattr(model, "ratchet_rung", Rung.STOCK)


def uninstall(model: Any) -> None:
    """Undo `install`."""
    if model.config._attn_implementation == ATTENTION:
        model.config._attn_implementation = "sdpa"
    for layer in getattr(model.base_model, "layers", None) or ():
        if hasattr(layer, "ratchet_stock_forward"):
            del layer.forward, layer.ratchet_stock_forward  # what is left is the class's own
