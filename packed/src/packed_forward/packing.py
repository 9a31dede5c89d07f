"""One row per prompt: `[prompt | completion 1 | completion 2 | ...]`, cut into micro-batches by a budget of tokens.

A completion's last token is never fed: nothing is predicted from it. Positions go on from the prompt's, and a
completion sees the prompt and itself. After Krell et al. 2021 (arXiv 2107.02027) for packing; shared prefixes in
DPO: arXiv 2410.20305.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import NotRequired, Protocol, Self, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional


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
    token_sets: AllowedTokens | None = None
    """Tokens among which the completions were sampled, of each of the n places; None: of all."""

    def to(self, device: torch.device | str, **kwargs: object) -> Self:
        """The same on another device; accelerate calls this with `non_blocking`."""
        return self._map(lambda part: part.to(device, **kwargs))

    def pin_memory(self) -> Self:
        return self._map(lambda part: part.pin_memory())

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**{name: None if part is None else change(part) for name, part in parts.items()})

    def widened(self, prompt: int, suffix: int) -> Self:
        """The same rows, padded to so many tokens: what depends on `sources` still counts the old width."""
        more = prompt - self.prompt_ids.shape[1], suffix - self.suffix_ids.shape[1]
        return dataclasses.replace(
            self,
            prompt_ids=functional.pad(self.prompt_ids, (0, more[0])),
            suffix_ids=functional.pad(self.suffix_ids, (0, more[1])),
            suffix_positions=functional.pad(self.suffix_positions, (0, more[1])),
            suffix_segments=functional.pad(self.suffix_segments, (0, more[1]), value=-1),
        )

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
    allowed: AllowedTokens | None = None,
) -> PackedBatch:
    """Pack N completions, each after its own prompt; equal prompts share a row, equal completions of one a segment.

    `prompts[n]` and `completions[n]` are token ids, neither of them empty. Row n of `sources` and `targets` belongs to
    completion n, in the order given. `allowed` are the tokens that
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


def completion_with_end(completion: Sequence[int], pad_token_id: int) -> list[int]:
    """A completion with one token behind it: its last own token is then fed, and a score can be read there."""
    return [*completion, pad_token_id]


def completion_batch(packed: PackedBatch, pad_token_id: int, count: int) -> dict[str, object]:
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


class Strategy(StrEnum):
    """A way to compute packed rows; each falls back on the next."""

    LAST_LAYER = "split+last_layer"
    """Strategy `split`, with the last layer's queries, output and MLP only where a completion token is
    predicted."""
    SPLIT = "split"
    """Causal attention over the prompt, one small masked attention for the completions."""
    STOCK = "stock"
    """Not packed: TRL's rows, prompt and completion repeated for each."""


PREFIX_ATTENTION_STRATEGIES = (Strategy.LAST_LAYER, Strategy.SPLIT)
"""Strategies whose attention is `prefix_attention`."""


@dataclass(frozen=True)
class StrategyChoice:
    """The forward strategy a model is computed with, and the reason."""

    strategy: Strategy
    reason: str
    agreement: dict[str, str]
    """Strategy -> the differences measured, or why it was not measured."""
    raised: bool = False
    """True if a candidate raised an error, which may have been a passing one."""

    @property
    def summary(self) -> str:
        """One line for a run's record."""
        if self.strategy is Strategy.STOCK:
            return f"rows are not packed: {self.reason}"
        return f"forward pass for rows that share a prompt: {self.strategy}, as it {self.reason}"


class PairTokens(TypedDict):
    """A preference pair as token ids."""

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    weight: NotRequired[float]
    """Of the pair, in the loss."""
    index: NotRequired[int]
    """Place among the rows given."""
    ref_chosen_logps: NotRequired[float]
    ref_rejected_logps: NotRequired[float]


@dataclass(frozen=True)
class UncollatedRows:
    """The rows of one batch, not yet tensors: how many go at once is known only when they are computed."""

    rows: list[PairTokens]


def row_tokens(row: PairTokens) -> int:
    """Tokens a pair feeds when its prompt is computed once."""
    return len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"])


def micro_batches(rows: Sequence[PairTokens], budget: int) -> Iterator[list[PairTokens]]:
    """Cut rows, in order, so that padded to its longest row none is wider than `budget` tokens; 0 does not cut.

    A row longer than the budget goes alone.
    """
    batch: list[PairTokens] = []
    longest = 0
    for row in rows:
        longest = max(longest, row_tokens(row))
        if batch and budget > 0 and longest * (len(batch) + 1) > budget:
            yield batch
            batch, longest = [], row_tokens(row)
        batch.append(row)
    if batch:
        yield batch


def split_evenly(rows: Sequence[PairTokens], parts: int) -> list[list[PairTokens]]:
    """Rows cut, in order, into `parts` of nearly the same number; none is empty where there are rows enough."""
    cuts = [len(rows) * part // parts for part in range(parts + 1)]
    return [list(rows[start:end]) for start, end in itertools.pairwise(cuts) if end > start]


@dataclass
class MicroBatcher:
    """Runs one step over its micro-batches and remembers what fits."""

    parameters: list[torch.nn.Parameter]
    """Parameters whose gradients a failed backward pass may have half written."""
    budget: int = 0
    """Tokens at once; 0 until something did not fit."""
    checkpoint: Callable[[], bool] = lambda: False
    """Turns gradient checkpointing on; false where it is on already."""
    say: Callable[[str], None] = lambda _: None
    max_over_ranks: Callable[[int], int] | None = None
    """The greatest of several processes' counts; None: this process trains alone. Each micro-batch is a collective
    operation of all processes, so they must make as many; a process that runs out of memory cannot halve its own."""

    def run(
        self, rows: list[PairTokens], compute: Callable[[list[PairTokens], float], torch.Tensor]
    ) -> torch.Tensor:
        """Sum of `compute(micro-batch, its share of the rows)`, each of which also runs the backward pass.

        Out of memory: the gradients of that micro-batch are taken back, the budget becomes half of what was tried,
        and what is left goes on. One row that does not fit is tried once more with gradient checkpointing; then the
        error is the caller's.
        """
        waiting = list(micro_batches(rows, self.budget))
        if self.max_over_ranks is not None and self.budget > 0:
            waiting = split_evenly(rows, self.max_over_ranks(len(waiting)))
        total: torch.Tensor | None = None
        while waiting:
            part = waiting.pop(0)
            before = [None if p.grad is None else p.grad.detach().clone() for p in self.parameters]
            try:
                loss = compute(part, len(part) / len(rows))
            except torch.OutOfMemoryError:
                for parameter, gradient in zip(self.parameters, before, strict=True):
                    parameter.grad = gradient
                if self.max_over_ranks is not None or (len(part) == 1 and not self.checkpoint()):
                    raise
                self._shrink(part)
                waiting = [*micro_batches([row for rest in (part, *waiting) for row in rest], self.budget)]
                continue
            total = loss if total is None else total + loss
        assert total is not None
        return total

    def _shrink(self, part: list[PairTokens]) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        tried = len(part) * max(map(row_tokens, part))
        if len(part) == 1:
            self.say(
                f"one pair of {tried:,} tokens did not fit into memory: gradient checkpointing is on from now"
            )
            return
        self.budget = tried // 2
        self.say(f"out of memory at {tried:,} tokens: continuing with {self.budget:,} at once")
