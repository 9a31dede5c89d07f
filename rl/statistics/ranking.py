"""Concordance: the share of comparable responses that scores rank as people did, with an interval by prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from rl.statistics.intervals import Difference, Interval

MAX_ROWS = 2000
"""Rows ranked against each other at most; of more, the first so many count."""


@dataclass(frozen=True)
class Ranking:
    """Ranking quality of scores over responses that people valued."""

    share: Interval
    """Of `compared`, those ranked as people did, a tie counting half; n is the rows that could be compared."""
    pair_count: int
    """Pairs of rows with different values."""


def concordance(
    values: Sequence[float], scores: Sequence[float], prompts: Sequence[str], confidence: float = 0.95
) -> Ranking:
    """Harrell's C of scores against people's values; for thumbs it is the area under the ROC curve.

    Variance by the jackknife over prompts, since responses to one prompt go together; the interval is Wilson's at the
    sample size that variance stands for, held to at most what as many independent rows would give, so that a perfect
    ranking of few rows is not taken for certainty. Sources: Harrell et al., JAMA 247 (1982) 2543; Arvesen, Ann. Math.
    Stat. 40 (1969) 2076 (jackknife of U-statistics); Korn & Graubard, Survey Methodology 24 (1998) 193 (interval).
    """
    table = _Comparisons.of(values, scores, prompts)
    if table is None:
        return Ranking(Interval(None, None, None, 0), 0)
    share = table.share
    replicates = table.jackknife()
    groups = len(replicates)
    variance = (
        (groups - 1) / groups * float(((replicates - replicates.mean()) ** 2).sum()) if groups > 1 else 0.0
    )
    # what the variance of C under no association comes to for so many rows, and for prompts with several rows less
    most = min(3 * table.pair_count / (table.rows + 1), 1.5 * table.rows) * groups / table.rows
    equivalent = min(share * (1 - share) / variance, most) if variance > 0 else most
    equivalent = max(equivalent, 1.0)
    z = float(scipy.stats.t.ppf(0.5 + confidence / 2, max(groups - 1, 1)))
    low, high = _wilson(share, equivalent, z)
    return Ranking(Interval(share, low, high, table.rows), table.pair_count)


def concordance_difference(
    values: Sequence[float],
    scores: Sequence[float],
    others: Sequence[float],
    prompts: Sequence[str],
    confidence: float = 0.95,
) -> Difference | None:
    """Difference of the concordance of `scores` and that of `others` on the same rows; None where none
    compare.

    Jackknife over prompts of the paired difference, Student's t.
    """
    own, other = _Comparisons.of(values, scores, prompts), _Comparisons.of(values, others, prompts)
    if own is None or other is None:
        return None
    value = own.share - other.share
    replicates = own.jackknife() - other.jackknife()
    groups = len(replicates)
    if groups < 3:
        return Difference(value, -1.0, 1.0)
    deviation = math.sqrt((groups - 1) / groups * float(((replicates - replicates.mean()) ** 2).sum()))
    spread = float(scipy.stats.t.ppf(0.5 + confidence / 2, groups - 1)) * deviation
    return Difference(value, max(-1.0, value - spread), min(1.0, value + spread))


def _wilson(share: float, n: float, z: float) -> tuple[float, float]:
    centre, scale = share + z * z / (2 * n), 1 + z * z / n
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


@dataclass(frozen=True)
class _Comparisons:
    """Sums over pairs of rows with different values, in all and of those that touch each prompt."""

    concordant: float
    pair_count: int
    rows: int
    concordant_by_prompt: np.ndarray
    pair_count_by_prompt: np.ndarray

    @property
    def share(self) -> float:
        return self.concordant / self.pair_count

    @classmethod
    def of(
        cls, values: Sequence[float], scores: Sequence[float], prompts: Sequence[str]
    ) -> _Comparisons | None:
        y, s = np.asarray(values[:MAX_ROWS], dtype=float), np.asarray(scores[:MAX_ROWS], dtype=float)
        order = np.sign(y[:, None] - y[None, :])
        agree = (order * np.sign(s[:, None] - s[None, :]) + 1) / 2 * (order != 0)
        comparable = (order != 0).astype(float)
        if not comparable.any():
            return None
        names, codes = np.unique(np.asarray(prompts[:MAX_ROWS]), return_inverse=True)
        member = np.zeros((len(names), len(y)))
        member[codes, np.arange(len(y))] = 1.0

        def by_prompt(table: np.ndarray) -> np.ndarray:
            touching = member @ table.sum(axis=1)
            within = np.einsum("gi,ij,gj->g", member, table, member, optimize=True) / 2
            counted: np.ndarray = touching - within
            return counted

        return cls(
            float(agree.sum() / 2),
            int(comparable.sum() / 2),
            len(y),
            by_prompt(agree),
            by_prompt(comparable),
        )

    def jackknife(self) -> np.ndarray:
        """The share with each prompt left out in turn; the share itself where nothing would be left."""
        compared = self.pair_count - self.pair_count_by_prompt
        safe = np.where(compared > 0, compared, 1.0)
        found: np.ndarray = np.where(
            compared > 0, (self.concordant - self.concordant_by_prompt) / safe, self.share
        )
        return found
