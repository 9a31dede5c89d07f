"""One row per prompt: `[prompt | completion 1 | completion 2 | ...]`, so that a prompt is computed once.

A completion's last token is never fed: nothing is predicted from it. Positions go on from the prompt's, and a
completion sees the prompt and itself. After Krell et al. 2021 (arXiv 2107.02027) for packing; shared prefixes in
DPO: arXiv 2410.20305.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

FLEX_BLOCK = 128
"""Tokens on a side of one tile of the mask; rows are filled up to a multiple of it."""


class CompletionTokens(Protocol):
    """One completion of one prompt, in tokens."""

    @property
    def prompt_ids(self) -> list[int]: ...

    @property
    def response_ids(self) -> list[int]: ...


@dataclass(frozen=True)
class TokenizedCompletion:
    """The smallest `CompletionTokens`: token ids and nothing else."""

    prompt_ids: list[int]
    response_ids: list[int]


@dataclass(frozen=True)
class Flat:
    """All tokens of a `PackedBatch`, without padding, in one row of T: prompt, its completions, the next prompt."""

    ids: torch.Tensor
    """[1, T] int64."""
    positions: torch.Tensor
    """[1, T] int64."""
    documents: torch.Tensor
    """[T] int64: which prompt a token belongs to; -1 is padding."""
    segments: torch.Tensor
    """[T] int64: which completion of its prompt; -1 is the prompt itself."""
    state_index: torch.Tensor
    """[1, R * (1 + S)] int64: where the states lie that `PackedBatch.sources` counts; a padded one lies at its prompt's
    end."""

    def to(self, device: torch.device | str, **kwargs: object) -> Self:
        return type(self)(**{f.name: getattr(self, f.name).to(device, **kwargs) for f in fields(self)})

    def pin_memory(self) -> Self:
        return type(self)(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})


@dataclass(frozen=True)
class PackedBatch:
    """R prompts with all their completions; P and S are the longest prompt and the longest row of completions."""

    prompt_ids: torch.Tensor
    """[R, P] int64, padded on the right."""
    prompt_lengths: torch.Tensor
    """[R] int64."""
    suffix_ids: torch.Tensor
    """[R, S] int64: the completions without their last tokens, one after the other, padded on the right."""
    suffix_positions: torch.Tensor
    """[R, S] int64: each completion goes on where its prompt ended."""
    suffix_segments: torch.Tensor
    """[R, S] int64: which completion of its row, from 0; -1 is padding."""
    sources: torch.Tensor
    """[N, C] int64: where the hidden state that predicts token c of completion n lies among the R * (1 + S) kept
    ones, which are, for each row, the prompt's last token and then the suffix."""
    targets: torch.Tensor
    """[N, C] int64: completion tokens, padded on the right."""
    target_mask: torch.Tensor
    """[N, C] bool: real completion tokens."""
    places: torch.Tensor
    """[n] int64: where `target_mask` is true, counted row by row. Known here, it need not be counted on a device."""
    flat: Flat | None = None
    """The same tokens one behind the other, where FlexAttention is to compute them."""
    token_sets: AllowedTokens | None = None
    """Tokens among which the completions were sampled, of each of the n places; None: of all."""

    def to(self, device: torch.device | str, **kwargs: object) -> Self:
        """The same on another device; accelerate calls this with `non_blocking`."""
        return self._map(lambda part: part.to(device, **kwargs))

    def pin_memory(self) -> Self:
        return self._map(lambda part: part.pin_memory())

    def _map(self, change: Callable[[Any], Any]) -> Self:
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**{name: None if part is None else change(part) for name, part in parts.items()})

    @property
    def tokens(self) -> int:
        """Tokens that are really fed, padding aside."""
        return int(self.prompt_lengths.sum()) + int((self.suffix_segments >= 0).sum())

    def unpack(self) -> list[TokenizedCompletion]:
        """The N prompts and completions that were packed, in their order."""
        suffix = self.suffix_ids.shape[1]
        rows = (self.sources[:, 0] // (1 + suffix)).tolist()
        return [
            TokenizedCompletion(
                self.prompt_ids[row, : int(self.prompt_lengths[row])].tolist(), targets[mask].tolist()
            )
            for row, targets, mask in zip(rows, self.targets, self.target_mask, strict=True)
        ]

    def ends(self) -> torch.Tensor:
        """[N] int64: where the hidden state lies that a completion's last token is predicted from. Of completions made
        longer by `completion_with_end` it is the one at their own last token."""
        return self.sources.gather(1, self.target_mask.sum(1, keepdim=True) - 1)[:, 0]

    def suffix_mask(self) -> torch.Tensor:
        """[R, 1, S, P + S] bool: what each suffix position sees. A padded one sees itself, so that no row is empty."""
        rows, prompt = self.prompt_ids.shape
        suffix = self.suffix_ids.shape[1]
        device = self.prompt_ids.device
        column = torch.arange(prompt + suffix, device=device)
        prompt_part = column[None, :prompt] < self.prompt_lengths[:, None]
        segments = self.suffix_segments
        own = (segments[:, :, None] == segments[:, None, :]) & (segments >= 0)[:, :, None]
        own = own & (column[:suffix, None] >= column[None, :suffix])
        own = own | torch.eye(suffix, dtype=torch.bool, device=device)
        return torch.cat([prompt_part[:, None].expand(rows, suffix, prompt), own], 2)[:, None]

    def positions(self) -> torch.Tensor:
        """[R, P + S] int64."""
        rows, prompt = self.prompt_ids.shape
        own = torch.arange(prompt, device=self.prompt_ids.device)[None].expand(rows, -1)
        return torch.cat([own, self.suffix_positions], 1)


def pack(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    pad_token_id: int,
    fit: Callable[[int, int], tuple[int, int]] | None = None,
    allowed: AllowedTokens | None = None,
) -> PackedBatch:
    """Pack N completions, each after its own prompt; equal prompts share a row, equal completions of one a segment.

    `prompts[n]` and `completions[n]` are token ids, neither of them empty. Row n of `sources` and `targets` belongs to
    completion n, in the order given. `fit` may make P and S larger than the rows need. `allowed` are the tokens that
    each token of the completions, one behind the other, was sampled among.
    """
    if not all(prompts) or not all(completions):
        raise ValueError("expected prompts and completions of at least one token each, found an empty one")
    row_of: dict[tuple[int, ...], int] = {}
    segments: list[dict[tuple[int, ...], int]] = []  # per row: completion -> where its segment starts
    widths: list[int] = []
    places: list[tuple[int, int]] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        row = row_of.setdefault(tuple(prompt), len(segments))
        if row == len(segments):
            segments.append({})
            widths.append(0)
        key = tuple(completion)
        if key not in segments[row]:
            segments[row][key] = widths[row]
            widths[row] += len(key) - 1
        places.append((row, segments[row][key]))
    longest_prompt = max(map(len, row_of))
    suffix = max(*widths, 1)
    if fit is not None:
        longest_prompt, suffix = fit(longest_prompt, suffix)
    longest = max(map(len, completions))
    rows = len(segments)
    lengths = torch.tensor([len(completion) for completion in completions])
    target_mask = torch.arange(longest) < lengths[:, None]
    packed = PackedBatch(
        prompt_ids=torch.full((rows, longest_prompt), pad_token_id),
        prompt_lengths=torch.tensor([len(prompt) for prompt in row_of]),
        suffix_ids=torch.full((rows, suffix), pad_token_id),
        suffix_positions=torch.zeros((rows, suffix), dtype=torch.long),
        suffix_segments=torch.full((rows, suffix), -1),
        sources=torch.zeros((len(places), longest), dtype=torch.long),
        targets=torch.full((len(places), longest), pad_token_id),
        target_mask=target_mask,
        places=target_mask.flatten().nonzero()[:, 0],
        token_sets=allowed,
    )
    for prompt, row in row_of.items():
        packed.prompt_ids[row, : len(prompt)] = torch.tensor(prompt)
        for number, (completion, start) in enumerate(segments[row].items()):
            fed = len(completion) - 1
            packed.suffix_ids[row, start : start + fed] = torch.tensor(completion[:-1], dtype=torch.long)
            packed.suffix_positions[row, start : start + fed] = len(prompt) + torch.arange(fed)
            packed.suffix_segments[row, start : start + fed] = number
    for n, ((row, start), completion) in enumerate(zip(places, completions, strict=True)):
        length, first = len(completion), row * (1 + suffix)
        packed.targets[n, :length] = torch.tensor(completion)
        packed.sources[n, 0] = first
        packed.sources[n, 1:length] = first + 1 + start + torch.arange(length - 1)
    return packed


def flatten(packed: PackedBatch) -> Flat:
    """Lay packed rows out one behind the other. Counts the tokens, so better done before they are on a device."""
    rows, prompt = packed.prompt_ids.shape
    device = packed.prompt_ids.device
    in_prompt = torch.arange(prompt, device=device) < packed.prompt_lengths[:, None]
    real = torch.cat([in_prompt, packed.suffix_segments >= 0], 1)
    segments = torch.cat([torch.full_like(packed.prompt_ids, -1), packed.suffix_segments], 1)
    documents = torch.arange(rows, device=device)[:, None].expand_as(real)
    at = (real.flatten().cumsum(0) - 1).view_as(real)
    last = at.gather(1, packed.prompt_lengths[:, None] - 1)
    index = torch.cat([last, torch.where(packed.suffix_segments >= 0, at[:, prompt:], last)], 1)
    places = real.flatten().nonzero()[:, 0]
    missing = -len(places) % FLEX_BLOCK

    def pad(values: torch.Tensor, fill: int) -> torch.Tensor:
        return functional.pad(values.flatten()[places], (0, missing), value=fill)

    ids = torch.cat([packed.prompt_ids, packed.suffix_ids], 1)
    return Flat(
        ids=pad(ids, 0)[None],
        positions=pad(packed.positions(), 0)[None],
        documents=pad(documents, -1),
        segments=pad(segments, -1),
        state_index=index.reshape(1, -1),
    )


def completion_with_end(completion: Sequence[int], pad_token_id: int) -> list[int]:
    """A completion with one token behind it: its last own token is then fed, and a score can be read there."""
    return [*completion, pad_token_id]


def completion_batch(packed: PackedBatch, pad_token_id: int, count: int) -> dict[str, Any]:
    """A batch of the first `count` completions as TRL's losses take it: the completions alone, [count, 1 + C], whose
    log-probabilities the model finds by `packed`."""
    return {
        "input_ids": functional.pad(packed.targets[:count], (1, 0), value=pad_token_id),
        "completion_mask": functional.pad(packed.target_mask[:count].long(), (1, 0)),
        "attention_mask": torch.tensor([[packed.tokens]]),  # TRL counts the tokens by its sum
        "packed": packed,
    }


# --- Tokens that completions may go on with ---

NO_CHOICE = -1
"""Index of a place that one token alone may stand at: its log-probability is 0 whatever the model says."""

TokenSet = npt.NDArray[np.bool_]
"""Tokens of the vocabulary, [V]: True for those that may come next."""


@dataclass(frozen=True)
class AllowedTokens:
    """Allowed tokens of n places, the completions' tokens one behind the other; V is the model's vocabulary."""

    sets: torch.Tensor
    """[U, V] bool: the sets that differ, of more than one token each."""
    index: torch.Tensor
    """[n] int64: set of each place, NO_CHOICE where one token alone is allowed."""

    @classmethod
    def of(cls, places: Sequence[TokenSet | None], vocabulary: int) -> Self:
        """Allowed tokens of so many places; None: every token of the vocabulary, whose size is given."""
        numbers: dict[bytes, int] = {}
        sets: list[TokenSet] = []
        index = []
        every = np.ones(vocabulary, bool)
        for place in places:
            allowed = every if place is None else place
            if np.count_nonzero(allowed) == 1:
                index.append(NO_CHOICE)
                continue
            number = numbers.setdefault(np.packbits(allowed).tobytes(), len(sets))
            if number == len(sets):
                sets.append(allowed)
            index.append(number)
        stacked = np.stack(sets) if sets else np.ones((0, vocabulary), bool)
        return cls(torch.from_numpy(stacked), torch.tensor(index, dtype=torch.long))

    def to(self, device: torch.device | str, **kwargs: object) -> Self:
        return type(self)(self.sets.to(device, **kwargs), self.index.to(device, **kwargs))

    def at(self, places: torch.Tensor) -> Self:
        """The same of these places."""
        return type(self)(self.sets, self.index[places.to(self.index.device)])

    def pin_memory(self) -> Self:
        return type(self)(self.sets.pin_memory(), self.index.pin_memory())


def allowed_logps(logits: torch.Tensor, targets: torch.Tensor, sets: torch.Tensor) -> torch.Tensor:
    """Log-probability of each target and entropy, [2, n] float32, of logits [n, V] among the tokens of `sets` [n, V].
    Differentiable.

    log p(t) = z_t - log(sum over allowed tokens a of exp z_a): the distribution that constrained decoding samples from.
    """
    logps = torch.log_softmax(logits.float().masked_fill(~sets, -torch.inf), -1)
    among = logps.masked_fill(~sets, 0.0)  # 0 times minus infinity has no value, and neither has its gradient
    entropy = -(logps.exp() * among).sum(-1)
    return torch.stack([logps.gather(-1, targets[:, None])[:, 0], entropy])


def allowed_kl(logits: torch.Tensor, others: torch.Tensor, allowed: AllowedTokens) -> torch.Tensor:
    """KL(p || q) [n] in nats of the distributions of logits [n, V] among the tokens allowed at n places.

    0 where there is no choice, and for rounding below 0.
    """
    found = logits.new_zeros(len(allowed.index), dtype=torch.float32)
    at = (allowed.index != NO_CHOICE).nonzero()[:, 0]
    sets = allowed.sets[allowed.index[at]]
    log_p, log_q = (
        torch.log_softmax(some[at].float().masked_fill(~sets, -torch.inf), -1) for some in (logits, others)
    )
    apart = (log_p - log_q).masked_fill(~sets, 0.0)  # minus infinity less minus infinity has no value
    found[at] = (log_p.exp() * apart).sum(-1).clamp_min(0.0)
    return found
