"""Starting weights with which a small Llama learns to copy from its prompt in minutes instead of hours.

Naming one of the listed options takes an induction circuit: a head that notes for each token which one stood before
it, and a later head that finds the place where the token just written stood before, and reads on from there (Olsson
et al. 2022, arXiv 2209.11895). From random weights it appears after thousands of steps; drawn into the weights
roughly, in the spirit of mimetic initialisation (Trockman and Kolter 2023, arXiv 2305.09828), training only has to
sharpen it. Everything stays trainable. Measured: docs/models.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

TOKEN_SHARE = 0.5
"""Share of the residual stream that holds, at the start, the token itself."""
TOKEN_NORM, CONSTANT, NOISE = 0.8, 0.4, 0.005
FAST_PAIRS = 5
"""Pairs of the rotary embedding by which a head finds the place a fixed number of tokens back."""
SLOW_FROM = 0.375
"""Share of the pairs, fast ones first, after which they are slow enough to compare tokens over a prompt's length."""


@torch.no_grad()
def weights_start(model: Any, *, asking: Sequence[int] = (), opening: Sequence[int] = ()) -> None:
    """Set the weights of a LlamaForCausalLM in place, drawn from torch's global generator.

    asking: tokens after which a listed name is to be written; opening: tokens after which listed names stand in a
    prompt. From the former, heads begin by looking at what follows the latter, all alike.
    Needs at least two layers, two key-value heads with two queries each, and tied embeddings.
    """
    config = model.config
    hidden, layers = config.hidden_size, config.num_hidden_layers
    width = hidden // config.num_attention_heads
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "embed" not in name:
            last = "o_proj" in name or "down_proj" in name
            weight.normal_(0.0, 0.02 / math.sqrt(2 * layers) if last else 0.02)

    first = int(SLOW_FROM * width / 2)
    slow = torch.cat([torch.arange(first, width // 2), torch.arange(width // 2 + first, width)])
    tokens, before = round(hidden * TOKEN_SHARE), len(slow)
    basis = torch.linalg.qr(torch.randn(hidden, hidden))[0].T  # orthonormal rows
    token_space = basis[:tokens]
    spaces = [
        token_space[slow],
        basis[tokens : tokens + before],
        basis[tokens + before : tokens + 2 * before],
    ]
    constant = basis[tokens + 2 * before]

    embeddings = model.model.embed_tokens.weight
    embeddings.copy_(
        torch.randn(len(embeddings), tokens) * TOKEN_NORM / math.sqrt(tokens) @ token_space
        + torch.randn_like(embeddings) * NOISE
        + CONSTANT * constant
    )
    back = model.model.layers[0].self_attn
    for head, distance in ((0, 1), (1, 2)):
        _head_looking_back(back, head, distance, width, spaces[0], spaces[distance], slow, constant)
    # one induction head per key-value head, each reading other dimensions of the token
    queries_per_key = config.num_attention_heads // config.num_key_value_heads
    for kv_head in range(2):
        read = token_space[:width] if kv_head == 0 else token_space[-width:]
        _induction_head(
            model.model.layers[1].self_attn, kv_head * queries_per_key, kv_head, width, spaces, slow, read
        )
        if asking and opening:
            _selection_head(
                model.model.layers[1].self_attn,
                kv_head * queries_per_key + 1,
                width,
                embeddings[list(asking)] @ token_space.T @ token_space,
                embeddings[list(opening)] @ spaces[0].T,
                slow,
                read,
            )


def _head_looking_back(
    attention: Any,
    head: int,
    distance: int,
    width: int,
    token_space: torch.Tensor,
    before_space: torch.Tensor,
    slow: torch.Tensor,
    constant: torch.Tensor,
) -> None:
    """A head of key-value head 0 looks `distance` back, whatever stands there, and copies it into `before_space`.

    Queries and keys hold only the constant direction, in the fast pairs of the rotary embedding and the queries
    turned back, so that their product is a sum of cos((found - distance) * theta) and peaks at `distance`.
    """
    hidden = constant.shape[0]
    half = width // 2
    theta = attention.config.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2).float() / width)
    # size of the constant component once the layer's norm has made every vector sqrt(hidden) long
    seen = math.sqrt(hidden) * CONSTANT / math.hypot(TOKEN_NORM, CONSTANT)
    # a score of 6 per pair at the distance, after attention's own division by sqrt(width)
    strength = math.sqrt(6 * math.sqrt(width)) / seen
    query, key = torch.randn(width, hidden) * NOISE, torch.randn(width, hidden) * NOISE
    for pair in range(FAST_PAIRS):
        query[pair] += strength * math.cos(distance * theta[pair]) * constant
        query[pair + half] -= strength * math.sin(distance * theta[pair]) * constant
        key[pair] += strength * constant
    queries = slice(head * width, (head + 1) * width)
    attention.q_proj.weight[queries] = query
    attention.k_proj.weight[:width] = key
    value = torch.randn(width, hidden) * NOISE
    value[slow] += token_space
    attention.v_proj.weight[:width] = value
    out = torch.randn(hidden, width) * NOISE / 2
    out[:, slow] += 0.11 * before_space.T
    attention.o_proj.weight[:, queries] = out


def _induction_head(
    attention: Any,
    head: int,
    kv_head: int,
    width: int,
    spaces: list[torch.Tensor],
    slow: torch.Tensor,
    read: torch.Tensor,
) -> None:
    """Looks where the last two tokens stood in front, and adds what stands there to the prediction.

    `spaces`: where a place notes its own token, the one before, and the one before that. Only the slow pairs of the
    rotary embedding compare: the fast ones would blur the match over distance.
    """
    hidden = read.shape[1]
    query, key = torch.randn(width, hidden) * NOISE, torch.randn(width, hidden) * NOISE
    turn = torch.randperm(len(slow))
    query[slow] += 1.4 * spaces[0] + 0.9 * spaces[1][turn]
    key[slow] += 1.4 * spaces[1] + 0.9 * spaces[2][turn]
    queries = slice(head * width, (head + 1) * width)
    keys = slice(kv_head * width, (kv_head + 1) * width)
    attention.q_proj.weight[queries] = query
    attention.k_proj.weight[keys] = key
    attention.v_proj.weight[keys] = read + torch.randn(width, hidden) * NOISE
    attention.o_proj.weight[:, queries] = 0.15 * read.T + torch.randn(hidden, width) * NOISE / 2


def _selection_head(
    attention: Any,
    head: int,
    width: int,
    asking: torch.Tensor,
    opening: torch.Tensor,
    slow: torch.Tensor,
    read: torch.Tensor,
) -> None:
    """From a token of `asking` looks at every place in front of which one of `opening` stands, and reads it.

    Keys and values are those of the induction head it shares them with, which note the token before a place. What is
    read from several places is shared among them, so it is written more strongly than what one place says.
    """
    hidden = read.shape[1]
    query = torch.randn(width, hidden) * NOISE
    wanted = sum(row / row.norm() for row in opening)
    for row in asking:
        query[slow] += 0.65 * torch.outer(wanted, row / row.norm())
    queries = slice(head * width, (head + 1) * width)
    attention.q_proj.weight[queries] = query
    attention.o_proj.weight[:, queries] = 0.5 * read.T + torch.randn(hidden, width) * NOISE / 2
