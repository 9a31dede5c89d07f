"""Tokens that completions may go on with, place by place, and log-probabilities among these alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

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

    def to(self, device: Any, **kwargs: Any) -> Self:
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
