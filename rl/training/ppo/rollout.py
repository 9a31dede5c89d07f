"""Rollouts: the policy answers a batch of prompts. One prefill per prompt, its KV cache shared by all its samples."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from packed_forward.prefix_attention import ATTENTION
from packed_forward.shared_prompt import SharedPrompt, running_rows
from rl.training.constrained_generation import AnswerForms
from rl.training.encoding import EncodedResponse
from rl.training.ppo.formulas import truncate_at_stop
from rl.training.result import TrainingRefused


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a token. Temperature 0 takes the likeliest; top_k 0 and top_p 1 leave all tokens in."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


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
        model, prompts, samples, sampling, encoder.stop_ids, encoder.tokenizer.pad_token_id, generator, forms
    )
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


@torch.no_grad()
def generate_tokens(
    model: Any,
    prompts: Sequence[Sequence[int]],
    samples: int,
    sampling: Sampling,
    stop_ids: Sequence[int],
    pad_token_id: int,
    generator: torch.Generator,
    forms: AnswerForms | None = None,
) -> Tensor:
    """Tokens [prompts * samples, at most max_new_tokens], int64; what follows a row's first stop token is padding.
    Answers to a prompt with a form stay within it.

    The prompts are computed once. A model with our attention (`packed.prefix_attention`, by its self-test) reads their
    keys and values where they are, all samples together; for others they are repeated for the samples. Rows that have
    ended leave the batch when they are half of it, so that one long answer does not make all others wait.
    """
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise TrainingRefused(
            f"{model.config.model_type} cannot be asked with left-padded prompts and a key-value cache, which sampling "
            f"needs; choose a base of another architecture"
        )
    device = model.device
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad_token_id, device=device)
    mask = torch.zeros((len(prompts), width), dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt), device=device)
        mask[row, width - len(prompt) :] = 1
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=True,
        logits_to_keep=1,
    )
    cache, logits = output.past_key_values, output.logits[:, -1].repeat_interleave(samples, 0)
    shared = None
    if samples > 1 and model.config._attn_implementation == ATTENTION:
        shared, cache = SharedPrompt.of(cache, mask, samples), DynamicCache()
    elif samples > 1:
        cache.batch_repeat_interleave(samples)
    mask = mask.repeat_interleave(samples, 0)
    position = mask.sum(1, keepdim=True)
    tokens = torch.full((len(logits), sampling.max_new_tokens), pad_token_id, device=device)
    stops = torch.tensor(sorted(stop_ids), device=device)
    # the rows still in the batch, by their place in `tokens`, and which of them have not ended
    alive = torch.arange(len(logits), device=device)
    running = torch.ones(len(logits), dtype=torch.bool, device=device)
    own_mask = torch.ones(
        1, 1, 1, 1, dtype=torch.bool, device=device
    )  # 4-D: transformers makes no mask of its own
    constraints = forms.start([prompt for prompt in prompts for _ in range(samples)]) if forms else None
    for column in range(sampling.max_new_tokens):
        if constraints:
            logits = constraints.mask_logits(logits, alive.tolist())
        samples_drawn = draw(logits, sampling, generator)
        tokens[alive[running], column] = samples_drawn[running]
        if constraints:
            for row, token in zip(alive[running].tolist(), samples_drawn[running].tolist(), strict=True):
                constraints.accept(row, token)
        running = running & ~torch.isin(samples_drawn, stops)
        left = int(running.sum())
        if left == 0 or column + 1 == sampling.max_new_tokens:
            return tokens[:, : column + 1]
        if 2 * left <= len(running):
            kept, prompts, most = running_rows(running, shared.samples if shared else 1)
            if len(kept) < len(running):
                cache.batch_select_indices(kept)
                shared = shared.select(prompts, most) if shared else None
                alive, mask, position = alive[kept], mask[kept], position[kept]
                samples_drawn, running = samples_drawn[kept], running[kept]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        output = model(
            input_ids=samples_drawn[:, None],
            attention_mask=mask if shared is None else own_mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            **({} if shared is None else {"prefix": shared}),
        )
        position = position + 1
        cache, logits = output.past_key_values, output.logits[:, -1]
    return tokens


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One token per row of logits [rows, vocabulary]: temperature, then top_k, then top_p (Holtzman et al. 2020).

    top_p keeps the likeliest tokens up to and including the one with which their sum reaches p: never none.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= sampling.top_p  # the sum of those before it suffices already
        logits = torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(beyond, -torch.inf))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
