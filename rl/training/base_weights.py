"""Starting weights with which a small Llama learns to copy from its prompt in minutes instead of hours.

Naming one of the listed options takes an induction circuit: a head that notes for each token which one stood before
it, and a later head that finds the place where the token just written stood before, and reads on from there (Olsson
et al. 2022, arXiv 2209.11895). From random weights it appears after thousands of steps; drawn into the weights
roughly, in the spirit of mimetic initialisation (Trockman and Kolter 2023, arXiv 2305.09828), training only has to
sharpen it. Everything stays trainable. Measured: DECISIONS.md.
"""

from __future__ import annotations

import math
from typing import Any

import torch

TOKEN_SHARE, BEFORE_SHARE = 0.625, 0.25
"""Shares of the residual stream that hold, at the start, the token itself and the token before it."""
TOKEN_STD, CONSTANT, NOISE = 0.063, 0.4, 0.005


@torch.no_grad()
def weights_start(model: Any) -> None:
    """Set the weights of a LlamaForCausalLM in place, drawn from torch's global generator.

    Needs at least two layers, two key-value heads, tied embeddings and a head at least 2 * 8 wide.
    """
    config = model.config
    hidden, layers = config.hidden_size, config.num_hidden_layers
    width = hidden // config.num_attention_heads
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "embed" not in name:
            last = "o_proj" in name or "down_proj" in name
            weight.normal_(0.0, 0.02 / math.sqrt(2 * layers) if last else 0.02)

    basis = torch.linalg.qr(torch.randn(hidden, hidden))[0].T  # orthonormal rows
    tokens, before = round(hidden * TOKEN_SHARE), round(hidden * BEFORE_SHARE)
    token_space, before_space = basis[:tokens], basis[tokens : tokens + before]
    constant = basis[tokens + before]

    embeddings = model.model.embed_tokens.weight
    embeddings.copy_(
        torch.randn(len(embeddings), tokens) * TOKEN_STD @ token_space
        + torch.randn_like(embeddings) * NOISE
        + CONSTANT * constant
    )
    _previous_token_head(model.model.layers[0].self_attn, width, token_space, before_space, constant)
    # one induction head per key-value head, each reading other dimensions of the token
    queries_per_key = config.num_attention_heads // config.num_key_value_heads
    for kv_head in range(2):
        read = token_space[:width] if kv_head == 0 else token_space[-width:]
        _induction_head(
            model.model.layers[1].self_attn,
            kv_head * queries_per_key,
            kv_head,
            width,
            token_space,
            before_space,
            read,
        )


def _previous_token_head(
    attention: Any,
    width: int,
    token_space: torch.Tensor,
    before_space: torch.Tensor,
    constant: torch.Tensor,
) -> None:
    """Head 0 looks one position back, whatever stands there, and copies it into `before_space`.

    Queries and keys hold only the constant direction, in the fast pairs of the rotary embedding and the keys turned
    by one position, so that their product is a sum of cos((distance - 1) * theta) and peaks at distance 1.
    """
    hidden = constant.shape[0]
    pairs, half = 5, width // 2
    theta = attention.config.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2).float() / width)
    tokens_norm = TOKEN_STD * math.sqrt(len(token_space))
    # size of the constant component once the layer's norm has made every vector sqrt(hidden) long
    seen = math.sqrt(hidden) * CONSTANT / math.hypot(tokens_norm, CONSTANT)
    # a score of 6 per pair at distance 1, after attention's own division by sqrt(width)
    strength = math.sqrt(6 * math.sqrt(width)) / seen
    query, key = torch.randn(width, hidden) * NOISE, torch.randn(width, hidden) * NOISE
    for pair in range(pairs):
        query[pair] += strength * constant
        key[pair] += strength * math.cos(theta[pair]) * constant
        key[pair + half] += strength * math.sin(theta[pair]) * constant
    attention.q_proj.weight[:width] = query
    attention.k_proj.weight[:width] = key
    attention.v_proj.weight[:width] = token_space[:width] + torch.randn(width, hidden) * NOISE
    attention.o_proj.weight[:, :width] = (
        0.11 * before_space[:width].T + torch.randn(hidden, width) * NOISE / 2
    )


def _induction_head(
    attention: Any,
    head: int,
    kv_head: int,
    width: int,
    token_space: torch.Tensor,
    before_space: torch.Tensor,
    read: torch.Tensor,
) -> None:
    """Looks where the present token is noted as the one before, and adds what stands there to the prediction.

    Only the slow pairs of the rotary embedding compare the two: the fast ones would blur the match over distance.
    """
    hidden = token_space.shape[1]
    quarter, half = width // 4, width // 2
    slow = torch.cat([torch.arange(quarter, half), torch.arange(half + quarter, width)])
    query, key = torch.randn(width, hidden) * NOISE, torch.randn(width, hidden) * NOISE
    query[slow] += 1.4 * token_space[slow]
    key[slow] += 1.4 * before_space[slow]
    queries = slice(head * width, (head + 1) * width)
    keys = slice(kv_head * width, (kv_head + 1) * width)
    attention.q_proj.weight[queries] = query
    attention.k_proj.weight[keys] = key
    attention.v_proj.weight[keys] = read + torch.randn(width, hidden) * NOISE
    attention.o_proj.weight[:, queries] = 0.15 * read.T + torch.randn(hidden, width) * NOISE / 2
