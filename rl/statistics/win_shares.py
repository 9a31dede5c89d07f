"""Sequential test of a win share: which of two policies people prefer, looked at after every judgement. Pure.

A prompt is won, lost or tied. The win share p is the probability of a win among prompts that are not tied (sign test).
Against "p is at most b" the evidence is the likelihood ratio of the counts, averaged over shares above b:

    E(b) = integral over p > b of (p / b)^wins ((1 - p) / (1 - b))^losses dBeta(p; 2, 2), the prior scaled to p > b.

E(b) is a supermartingale from 1 where p is at most b, so it ever reaches 1 / alpha with probability alpha at most
(Ville 1939; Robbins, Ann. Math. Statist. 41 (1970) 1397-1409, for such mixtures). One may look after every judgement
and stop at any time. The shares b that are not ruled out make a confidence sequence (Howard, Ramdas, McAuliffe &
Sekhon, Annals of Statistics 49 (2021) 1055-1080, Prop. 7, has the two-sided mixture; here each side has its own alpha).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import scipy

BETTER, NOT_WORSE, WORSE, OPEN = "better", "not_worse", "worse", "open"
"""Verdicts: its share is above one half; above one half minus the margin; below one half; none of these is shown."""

PRIOR = 2.0
"""Both parameters of the prior. Median decided prompts to a verdict at true shares of 60, 70 and 80 %: 177, 41 and 18;
with 1 it takes 181, 41 and 18, with 10 it takes 168, 50 and 27 (alpha 1/30, 4,000 walks each)."""

MOST_DECISIONS = 5_000
"""More decisions than these are no plan for people."""

EXPECTED_SHARE = 0.7
"""Share that a forecast assumes before the first decision."""


@functools.lru_cache(maxsize=65_536)
def log_evidence(wins: float, losses: float, bound: float) -> float:
    """Logarithm of E(bound): evidence that the win share is above `bound`. Counts may be fractions in forecasts."""
    up, down = PRIOR + wins, PRIOR + losses
    above = float(scipy.special.betainc(down, up, 1 - bound))
    if above <= 0:
        return -math.inf
    return (
        float(scipy.special.betaln(up, down) - scipy.special.betaln(PRIOR, PRIOR))
        + math.log(above)
        - math.log(float(scipy.special.betainc(PRIOR, PRIOR, 1 - bound)))
        - wins * math.log(bound)
        - losses * math.log1p(-bound)
    )


def share_low(wins: int, losses: int, alpha: float) -> float:
    """Lower end of the confidence sequence: below the win share at all times with probability 1 - alpha."""
    if not wins:
        return 0.0
    threshold, tiny = -math.log(alpha), 1e-9
    inside = min(wins / (wins + losses), 1 - tiny)

    def excess(bound: float) -> float:
        return log_evidence(wins, losses, bound) - threshold

    return float(scipy.optimize.brentq(excess, tiny, inside)) if excess(tiny) > 0 > excess(inside) else 0.0


@dataclass(frozen=True)
class WinShare:
    """Prompts won, lost and tied, with the verdict that they allow.

    alpha: probability that a policy no better is ever called better, and one worse by the margin not worse. A policy no
    worse is called worse with half of it, so that equal policies get a wrong verdict with 1.5 alpha at most.
    """

    wins: int
    losses: int
    ties: int
    alpha: float
    margin: float

    @property
    def decided(self) -> int:
        return self.wins + self.losses

    @property
    def value(self) -> float | None:
        """Share of the decided prompts that were won; None where none is decided."""
        return self.wins / self.decided if self.decided else None

    @property
    def low(self) -> float:
        return share_low(self.wins, self.losses, self.alpha)

    @property
    def high(self) -> float:
        return 1 - share_low(self.losses, self.wins, self.alpha / 2)

    @property
    def confidence(self) -> float:
        """Of the interval from low to high, over all looks."""
        return 1 - 1.5 * self.alpha

    @property
    def verdict(self) -> str:
        threshold = -math.log(self.alpha)
        if log_evidence(self.wins, self.losses, 0.5) >= threshold:
            return BETTER
        if log_evidence(self.losses, self.wins, 0.5) >= threshold + math.log(2):
            return WORSE
        if log_evidence(self.wins, self.losses, 0.5 - self.margin) >= threshold:
            return NOT_WORSE
        return OPEN

    @property
    def further(self) -> int | None:
        """Further decided prompts until "better" or "worse", about, if the share stays as it is; None where that takes
        more than MOST_DECISIONS. Before the first one the share is taken to be EXPECTED_SHARE."""
        share = (self.wins + PRIOR) / (self.decided + 2 * PRIOR) if self.decided else EXPECTED_SHARE
        threshold = -math.log(self.alpha) + (math.log(2) if share < 0.5 else 0.0)
        ahead, behind = (self.wins, self.losses) if share >= 0.5 else (self.losses, self.wins)
        lead = max(share, 1 - share)

        def reached(count: int) -> bool:
            return log_evidence(ahead + lead * count, behind + (1 - lead) * count, 0.5) >= threshold

        if reached(0):
            return 0
        if not reached(MOST_DECISIONS):
            return None
        below, enough = 0, MOST_DECISIONS
        while enough - below > 1:
            middle = (below + enough) // 2
            below, enough = (below, middle) if reached(middle) else (middle, enough)
        return enough
