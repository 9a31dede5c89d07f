"""Rollouts: the policy answers a batch of prompts. One prefill per prompt, its KV cache shared by all its samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl.training.constrained_generation import AnswerForms, Sampling, generate_tokens
from rl.training.encoding import EncodedResponse
from rl.training.ppo.formulas import truncate_at_stop


@dataclass(frozen=True)
class Rollout:
    """One sampled response."""

    prompt: int
    """Index of the prompt."""
    item: EncodedResponse
    """Prompt and response as tokens; the response has at least one."""
    ended: bool
    """True if it ended its turn; False if the length limit did."""
    text: str


@torch.no_grad()
def sample_responses(
    model: Any,
    encoder: Any,
    prompts: Sequence[Sequence[int]],
    samples: int,
    sampling: Sampling,
    generator: torch.Generator,
    forms: AnswerForms | None = None,
) -> list[Rollout]:
    """Answer each prompt `samples` times; those of one prompt stand side by side, in the prompts' order.

    `model` is the causal model, in the role that is to speak; `generator` lives on its device and alone decides what
    is drawn, `forms` among which tokens. Prompts are padded on the left, so that all responses begin in one column.
    """
    tokens = generate_tokens(
        model, prompts, samples, sampling, encoder.stop_ids, encoder.tokenizer.pad_token_id, generator,
        forms.start([prompt for prompt in prompts for _ in range(samples)]) if forms else None,
    )  # fmt: skip
    return [
        rollout_of(encoder, n // samples, prompts[n // samples], ids)
        for n, ids in enumerate(responses_cut(tokens, encoder))
    ]


def responses_cut(tokens: Tensor, encoder: Any) -> list[list[int]]:
    """Rows of sampled tokens, each up to and with its first stop token."""
    _, mask = truncate_at_stop(tokens, encoder.stop_ids, encoder.tokenizer.pad_token_id)
    return [row[:length] for row, length in zip(tokens.tolist(), mask.sum(1).tolist(), strict=True)]


def rollout_of(encoder: Any, prompt: int, prompt_ids: Sequence[int], ids: list[int]) -> Rollout:
    """A response's tokens as what is judged: its words, and whether it ended its turn."""
    ended = ids[-1] in encoder.stop_ids
    text = encoder.tokenizer.decode(
        ids[:-1] if ended else ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return Rollout(prompt, EncodedResponse(list(prompt_ids), ids), ended, text)


def draw_seed(seed: int, purpose: str, number: int) -> int:
    """A seed of its own for each purpose and step of a run: what a resumed run draws needs no random state."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}/{number}".encode()).digest()[:6])
