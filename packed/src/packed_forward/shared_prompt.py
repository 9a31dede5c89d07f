"""Attention while sampling many answers to one prompt, whose keys and values are in memory once.

Each new token would else read a copy of the prompt for every answer. After Juravsky et al. 2024, "Hydragen"
(arXiv 2402.05099): attention over a shared prefix as one product of all its queries, joined with each answer's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch


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

    @classmethod
    def of(cls, cache: Any, mask: torch.Tensor, samples: int) -> Self:
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
        near = torch.matmul(own, key.transpose(2, 3)).view(prompts, samples, shared, group, -1)
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
