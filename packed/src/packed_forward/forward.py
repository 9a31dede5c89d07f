"""Forward pass over packed rows under each strategy: hidden states, log-probabilities, and the patched last layer."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import torch

from packed_forward.graphs import Graphs
from packed_forward.logps import HeadLogps, head_logps, spread_at
from packed_forward.packing import (
    PREFIX_ATTENTION_STRATEGIES,
    PackedBatch,
    Strategy,
)
from packed_forward.prefix_attention import (
    ATTENTION,
    CPU_BLOCK_LIMIT,
    Prefix,
    SharedPrompt,
    masked_attention,
)

COMMON_LEAST = 16
"""Leading tokens, common to all rows of a batch, from which they are computed once; fewer save less than the
copies of their keys and values cost."""


def packed_hidden(model: torch.nn.Module, packed: PackedBatch, strategy: Strategy) -> torch.Tensor:
    """Last hidden states of the prompt's last token and of the suffix, [R, 1 + S, width]. Differentiable.

    `model` is the causal model itself, prepared by `install` for the strategy.
    """
    graphs = getattr(model, "ratchet_graphs", None)
    if graphs is not None and torch.is_grad_enabled():
        hidden: torch.Tensor = graphs.hidden(packed)
        return hidden
    return _launched_hidden(model, packed, strategy)


def graphs_use(model: torch.nn.Module, note: Callable[[str], None] = lambda _: None) -> None:
    """Let the training steps of a causal model run as CUDA graphs where they can; `install` ends it.

    `note` hears why nothing is captured, where a model on a CUDA device cannot be.
    """
    strategy = strategy_of(model)
    if next(model.parameters()).is_cuda and strategy in (Strategy.LAST_LAYER, Strategy.SPLIT):
        model.ratchet_graphs = Graphs(model, lambda packed: _launched_hidden(model, packed, strategy), note)


def graphs_release(model: torch.nn.Module) -> None:
    """Give the memory of a causal model's graphs back; they are captured again when they are needed."""
    if hasattr(model, "ratchet_graphs"):
        model.ratchet_graphs.release()


def _launched_hidden(model: torch.nn.Module, packed: PackedBatch, strategy: Strategy) -> torch.Tensor:
    """`packed_hidden` without a graph."""
    prompt = packed.prompt_ids.shape[1]
    ids = torch.cat([packed.prompt_ids, packed.suffix_ids], 1)
    last = packed.prompt_lengths[:, None] - 1
    suffix_mask = packed.suffix_mask()
    common = common_tokens(model, packed)
    if common:
        return _common_hidden(model, packed, strategy, common, suffix_mask)
    prefix = Prefix(prompt, suffix_mask)
    if strategy is Strategy.LAST_LAYER:
        suffix = torch.arange(prompt, ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
        column = torch.arange(ids.shape[1], device=ids.device)
        seen_by_last = (column[None] <= last)[:, None, None]
        output_mask = torch.cat([seen_by_last, suffix_mask], 2)
        prefix = Prefix(prompt, suffix_mask, torch.cat([last, suffix], 1), output_mask)
    # a 4-D mask is passed on by transformers as it is; ours says nothing, `prefix` says it all
    nothing = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    hidden = model.base_model(
        input_ids=ids,
        position_ids=packed.positions(),
        attention_mask=nothing,
        use_cache=False,
        prefix=prefix,
    ).last_hidden_state
    return hidden if strategy is Strategy.LAST_LAYER else _keep(hidden, packed, last)


def common_tokens(model: torch.nn.Module, packed: PackedBatch) -> int:
    """Leading tokens that all rows have and that are computed once: a system prompt, mostly; 0 where they are not.

    Each row keeps the last token of its prompt. Only for the attention that a CPU computes in blocks; compiled layers
    want few widths.
    """
    ids = packed.prompt_ids
    rows, prompt = ids.shape
    if ids.device.type != "cpu" or rows == 1 or prompt > CPU_BLOCK_LIMIT:
        return 0
    dropout = any(getattr(model.config, name, 0.0) for name in ("attention_dropout", "attn_pdrop"))
    if model.training and dropout:
        return 0
    tokens = ids.numpy()
    different = (tokens != tokens[:1]).any(0)
    equal = int(different.argmax()) if different.any() else prompt
    common = min(equal, int(packed.prompt_lengths.numpy().min()) - 1)
    return common if common >= COMMON_LEAST else 0


def _common_hidden(
    model: torch.nn.Module, packed: PackedBatch, strategy: Strategy, common: int, suffix_mask: torch.Tensor
) -> torch.Tensor:
    """`packed_hidden` of rows whose first `common` tokens are the same: one row, [common | rest of each row]."""
    rows, prompt = packed.prompt_ids.shape
    ids = torch.cat([packed.prompt_ids, packed.suffix_ids], 1)
    width = ids.shape[1] - common

    def lay_out(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values[:1, :common], values[:, common:].reshape(1, -1)], 1)

    last = packed.prompt_lengths[:, None] - 1
    kept = torch.cat([last, torch.arange(prompt, ids.shape[1]).expand(rows, -1)], 1)
    index = (kept + torch.arange(rows)[:, None] * width).view(1, -1)
    seen_by_last = (torch.arange(ids.shape[1])[None] <= last)[:, None, None]
    in_last = strategy is Strategy.LAST_LAYER
    prefix = Prefix(
        prompt - common,
        suffix_mask,
        index if in_last else None,
        torch.cat([seen_by_last, suffix_mask], 2) if in_last else None,
        common=common,
        rows=rows,
    )
    hidden = model.base_model(
        input_ids=lay_out(ids),
        position_ids=lay_out(packed.positions()),
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
        use_cache=False,
        prefix=prefix,
    ).last_hidden_state
    if not in_last:
        hidden = hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[-1]))
    return hidden.view(rows, -1, hidden.shape[-1])


def _keep(hidden: torch.Tensor, packed: PackedBatch, last: torch.Tensor) -> torch.Tensor:
    end = hidden.gather(1, last[..., None].expand(-1, -1, hidden.shape[-1]))
    return torch.cat([end, hidden[:, packed.prompt_ids.shape[1] :]], 1)


def packed_logps(
    model: torch.nn.Module,
    packed: PackedBatch,
    strategy: Strategy,
    extras: tuple[str, ...] = (),
    temperature: float = 1.0,
) -> HeadLogps:
    """Log-probability of each completion token, float32 [N, C], 0 where there is none; then what `extras` name, as
    `head_logps` returns it, among the tokens that the batch allows. `model` is the causal model itself.
    Differentiable.
    """
    hidden = packed_hidden(model, packed, strategy)
    flat = hidden.reshape(-1, hidden.shape[-1])
    shape, places = packed.target_mask.shape, packed.places
    read = flat[packed.sources.flatten()[places]]
    targets = packed.targets.flatten()[places]
    logps, entropy, log_sum_sq, mean_logits, is_top1 = (
        None if values is None else spread_at(values, places, shape)
        for values in head_logps(model, read, targets, extras, temperature, packed.token_sets)
    )
    return logps, entropy, log_sum_sq, mean_logits, is_top1


# --- The last layer -----------------------------------------------------------------------------------------

LAST_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}


def last_layer_supported(model: torch.nn.Module) -> bool:
    """True if the last layer has the parts, and only those, that `_last_layer` computes itself."""
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
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    *args: object,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    prefix: Prefix | SharedPrompt | None = None,
    **kwargs: object,
) -> torch.Tensor:
    """The layer's forward; with a prefix that keeps positions, computed there only: [R, T, width] -> [R, 1 + S,
    width]."""
    if not isinstance(prefix, Prefix) or prefix.output_positions is None:
        if prefix is not None:
            kwargs["prefix"] = prefix
        return self.ratchet_stock_forward(
            hidden_states, *args, position_embeddings=position_embeddings, **kwargs
        )
    attention = self.self_attn
    rows, length, width = hidden_states.shape
    positions = prefix.output_positions[..., None]
    normed = self.input_layernorm(hidden_states)
    head = attention.head_dim
    query = attention.q_proj(normed.gather(1, positions.expand(-1, -1, width))).view(
        rows, positions.shape[1], -1, head
    )
    key = attention.k_proj(normed).view(rows, length, -1, head)
    value = attention.v_proj(normed).view(rows, length, -1, head).transpose(1, 2)
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    # the architecture's own rotation, once for the kept queries and once for all keys
    rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
    assert position_embeddings is not None  # transformers gives them to every layer
    cos, sin = (part.expand(rows, -1, -1) for part in position_embeddings)
    spread = positions.expand(-1, -1, cos.shape[-1])
    query, _ = rotate(query, query, cos.gather(1, spread), sin.gather(1, spread))
    key, _ = rotate(key, key, cos, sin)
    query, key = query.to(value.dtype), key.to(value.dtype)
    if prefix.common:
        query, key, value = (
            prefix.by_row(query.contiguous()),
            prefix.with_common(key),
            prefix.with_common(value),
        )
    seen = masked_attention(query, key, value, prefix.output_mask, attention.scaling)
    out = attention.o_proj(seen.transpose(1, 2).reshape(rows, positions.shape[1], -1))
    residual = hidden_states.gather(1, positions.expand(-1, -1, width)) + out
    return residual + self.mlp(self.post_attention_layernorm(residual))


def install(model: torch.nn.Module, strategy: Strategy) -> None:
    """Prepare a causal model for a strategy; the stock forward stays what it was. A second call changes it."""
    uninstall(model)
    model.ratchet_strategy = strategy
    if strategy in PREFIX_ATTENTION_STRATEGIES:
        model.config._attn_implementation = ATTENTION
    if strategy is Strategy.LAST_LAYER:
        layer = model.base_model.layers[-1]
        if "forward" in vars(layer):
            raise RuntimeError("the last layer's forward was replaced by something else")
        layer.ratchet_stock_forward = layer.forward
        layer.forward = types.MethodType(_last_layer, layer)


def strategy_of(model: torch.nn.Module) -> Strategy:
    """The strategy a causal model is prepared for."""
    return getattr(model, "ratchet_strategy", Strategy.STOCK)


def uninstall(model: torch.nn.Module) -> None:
    """Undo `install`."""
    if hasattr(model, "ratchet_graphs"):
        del model.ratchet_graphs
    if model.config._attn_implementation == ATTENTION:
        model.config._attn_implementation = "sdpa"
    for layer in getattr(model.base_model, "layers", None) or ():
        if hasattr(layer, "ratchet_stock_forward"):
            del layer.forward, layer.ratchet_stock_forward  # what is left is the class's own
