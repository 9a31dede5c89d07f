"""Choose one of listed responses with exactly known probability. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class CandidateChoice:
    """Response drawn among the listed ones, and from what distribution."""

    index: int
    probabilities: tuple[float, ...]
    """Of every response, in their order; sums to 1."""

    @property
    def propensity(self) -> float:
        return self.probabilities[self.index]


def choice_probabilities(
    log_probabilities: Sequence[float], *, temperature: float = 0.0, epsilon: float = 0.0
) -> tuple[float, ...]:
    """The distribution a choice is drawn from: (1 - epsilon) softmax(log p / temperature) + epsilon / K.

    log_probabilities: of K responses, in nats. temperature 0: the best one (the first of equals); 1: as the policy
    itself would answer among these. epsilon in [0, 1]: the share drawn evenly (Sutton and Barto 2018, 2.2).
    Raises ValueError on an empty list, a temperature below 0 or an epsilon outside [0, 1].
    """
    if not log_probabilities:
        raise ValueError("expected at least one response to choose from, found none")
    if temperature < 0 or not 0 <= epsilon <= 1:
        raise ValueError(
            f"expected a temperature of at least 0 and an epsilon in [0, 1], found {temperature} and {epsilon}"
        )
    best = max(log_probabilities)
    if temperature == 0:
        first = log_probabilities.index(best)
        shares = [float(i == first) for i in range(len(log_probabilities))]
    else:
        weights = [math.exp((value - best) / temperature) for value in log_probabilities]
        total = math.fsum(weights)
        shares = [weight / total for weight in weights]
    even = epsilon / len(shares)
    return tuple((1 - epsilon) * share + even for share in shares)


def choose(
    log_probabilities: Sequence[float],
    *,
    temperature: float = 0.0,
    epsilon: float = 0.0,
    random: Random | None = None,
) -> CandidateChoice:
    """Draw one of the responses from `choice_probabilities`."""
    shares = choice_probabilities(log_probabilities, temperature=temperature, epsilon=epsilon)
    drawn = (random or Random()).random()
    passed = 0.0
    for index, share in enumerate(shares):
        passed += share
        if drawn < passed:
            return CandidateChoice(index, shares)
    # the shares' sum may end a rounding error below 1: the last one that can be drawn at all
    return CandidateChoice(max(i for i, share in enumerate(shares) if share > 0), shares)
