"""Tests of recorded propensities against what was drawn: wrong ones make every off-policy estimate wrong. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import scipy

Array = npt.NDArray[np.float64]

LEVEL = 0.001
"""Chance that a log with right propensities is found at fault by any of its tests (Bonferroni)."""
BINS = 10
"""Groups of equal variance that candidates are put into by their probability."""
LEAST_VARIANCE = 5.0
"""Variance of a count below which the normal approximation says too little of it; such groups are not tested."""
MOST_ARMS = 50
"""Responses looked at one by one, the most frequent first."""


@dataclass(frozen=True)
class Draw:
    """One choice among k listed candidates, as it was recorded."""

    arms: Sequence[str]
    """(k,) What each candidate is: its response."""
    chosen: int
    propensity: float
    """Recorded probability of the chosen one, in (0, 1]."""
    probabilities: Sequence[float] | None = None
    """(k,) Recorded probabilities of all, summing to 1, where they are known."""


@dataclass(frozen=True)
class _Group:
    """Candidates that should be chosen `expected` times in all."""

    name: str
    expected: float
    variance: float
    observed: float

    @property
    def errors(self) -> float:
        """Standard errors between observed and expected."""
        return (self.observed - self.expected) / math.sqrt(self.variance)


def propensity_fault(draws: Sequence[Draw]) -> str:
    """Fault of recorded propensities, in words; "" where nothing is shown to be.

    Where all candidates' probabilities are known: how often the candidates of a probability (calibration), of a place
    in the list and of a response were chosen, each against the sum of their probabilities. Else: the mean of 1 / (k p)
    of the chosen, which is 1 in expectation where all k candidates were possible. All tests of a log together find
    fault with right propensities in at most LEVEL of logs, as far as counts and means are normal: 1 % of 200 decisions.
    """
    draws = _uniform(draws)
    groups = [group for group in _groups(draws) if group.variance >= LEAST_VARIANCE]
    inverse = _inverse([draw for draw in draws if draw.probabilities is None])
    tests = len(groups) + (inverse is not None)
    if not tests:
        return ""
    limit = float(scipy.stats.norm.isf(LEVEL / tests / 2))
    worst = max(groups, key=lambda group: abs(group.errors), default=None)
    if worst is not None and abs(worst.errors) > limit:
        return (
            f"the recorded probabilities are not those used for sampling: {worst.name} should have been "
            f"chosen {worst.expected:.0f} times and were chosen {worst.observed:.0f} times"
        )
    if inverse is not None and abs(inverse[0] - 1) > limit * inverse[1]:
        size = "too large, or some candidates were never possible" if inverse[0] < 1 else "too small"
        return (
            f"the recorded propensities are {size}: 1 / (propensity x candidates) averages {inverse[0]:.2f} "
            "where 1 is expected"
        )
    return ""


def _uniform(draws: Sequence[Draw]) -> Sequence[Draw]:
    """The draws, with their whole distribution where all that is recorded says that each was drawn uniformly."""
    if any(d.probabilities is not None or abs(d.propensity * len(d.arms) - 1) > 1e-6 for d in draws):
        return draws
    return [replace(draw, probabilities=[1 / len(draw.arms)] * len(draw.arms)) for draw in draws]


def _groups(draws: Sequence[Draw]) -> Iterator[_Group]:
    """Candidates by their probability, their place and their response, of draws whose probabilities are known."""
    recorded_shares = [
        (draw, np.asarray(draw.probabilities, float)) for draw in draws if draw.probabilities is not None
    ]
    if not recorded_shares:
        return
    sizes = [len(shares) for _, shares in recorded_shares]
    row = np.repeat(np.arange(len(recorded_shares)), sizes)
    share = np.concatenate([shares for _, shares in recorded_shares])
    place = np.concatenate([np.arange(size) for size in sizes])
    chosen = np.zeros(len(share))
    chosen[np.cumsum([0, *sizes[:-1]]) + [draw.chosen for draw, _ in recorded_shares]] = 1.0
    names, arm, times = np.unique(
        [text for draw, _ in recorded_shares for text in draw.arms], return_inverse=True, return_counts=True
    )

    def group(name: str, index: npt.NDArray[np.bool_]) -> _Group:
        # candidates of one decision exclude each other: the variance is that of whether any of them is chosen
        sums = np.bincount(row[index], share[index], len(recorded_shares)).clip(0.0, 1.0)
        return _Group(name, float(sums.sum()), float((sums * (1 - sums)).sum()), float(chosen[index].sum()))

    order = np.argsort(share, kind="stable")
    spread = np.cumsum((share * (1 - share))[order])
    if spread[-1] > 0:
        edges = np.searchsorted(spread, np.linspace(0, spread[-1], BINS + 1)[1:-1])
        for part in np.split(order, edges):
            if len(part):
                index = np.zeros(len(share), bool)
                index[part] = True
                low, high = share[part].min(), share[part].max()
                yield group(f"candidates of probability {low:.3g} to {high:.3g}", index)
    for number in range(max(sizes)):
        yield group(f"candidates at place {number + 1}", place == number)
    for number in np.argsort(-times, kind="stable")[:MOST_ARMS]:
        yield group(f"candidates that say {str(names[number])[:60]!r}", arm == number)


def _inverse(draws: Sequence[Draw]) -> tuple[float, float] | None:
    """Mean of 1 / (k p) and its standard error; None of too few draws, or of draws that were all made alike."""
    values = np.array([1 / (len(draw.arms) * draw.propensity) for draw in draws], float)
    if len(values) < 2:
        return None
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    # equal propensities say 1 / k or are wrong: then there is nothing that chance could do
    return float(values.mean()), max(error, 0.01 / math.sqrt(len(values)))
