"""Detection of divergence in runs that sample or learn from rewards, with the last step before it.

Watched are the KL to the reference, the share of answers that end, the share the agent can act on, their length, and
how much answers repeat themselves. One bad row may be luck; PATIENCE in a row are not. No torch here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PATIENCE = 3
"""Bad rows in a row that stop a run."""

FAR = 4.0
"""Times the allowed KL from which one row is enough."""

NATS_PER_TOKEN = 0.5
"""KL per token that is allowed to answers so long that `max_kl` nats would be too few for them."""

FELL = 0.2
"""The share of answers that end is bad below this part of what it was."""

VALID = 0.75
"""The share of answers the agent can act on is bad below this part of what it was: 16 answers of which 85 % are valid
look so three times in a row once in 2,000 steps."""

LONGER, SHORTER = 3.0, 0.2
"""Mean tokens of an answer are bad beyond, or below, these times what they began with."""

LONGER_TOKENS = 16
"""Tokens beyond where they began up to which answers are never called longer."""

REPEATS = 0.8
"""Share of repeated 4-grams from which answers are called repetitive, where they began below half of that."""


@dataclass
class Watch:
    """Reads the rows of a run's metrics in order. Names: `kl` (nats per response), `tokens`, `ended`, `valid`,
    `repetition` (shares); those that are missing are not watched."""

    max_kl: float
    """Nats per response beyond where the run began; 0 watches nothing."""
    from_base: bool = True
    """True if the run began as the base; else its first row says how far away it began."""
    bad: int = 0
    """Bad rows in a row so far."""
    last_good: int = 0
    """Step of the last row that was not bad."""
    first: dict[str, float] = field(default_factory=dict)
    """The first value of each."""
    high_marks: dict[str, float] = field(default_factory=dict)
    """Of the shares `ended` and `valid`: the highest that PATIENCE rows in a row reached, at least the first. A run
    that learnt the form and loses it again has lost something, wherever it began."""
    _newest: list[Mapping[str, float]] = field(default_factory=list)
    reason: str = ""
    """Reason why the run has to stop; empty while it may go on."""

    def see(self, step: int, row: Mapping[str, float]) -> str:
        """Read the row of a step; returns `reason`."""
        if not self.max_kl:
            return ""
        fault, at_once = self._fault(row)
        watched = ("ended", "valid", "repetition", "tokens")
        for name in watched if self.from_base else ("kl", *watched):
            if math.isfinite(value := row.get(name, math.nan)):
                self.first.setdefault(name, value)
        self._newest = [*self._newest, row][-PATIENCE:]
        for name in ("ended", "valid"):
            values = [one.get(name, math.nan) for one in self._newest]
            sustained = min(values) if len(values) == PATIENCE and all(map(math.isfinite, values)) else -1.0
            self.high_marks[name] = max(
                self.high_marks.get(name, -1.0), self.first.get(name, -1.0), sustained
            )
        if not fault:
            self.bad, self.last_good = 0, step
        else:
            self.bad += 1
            if at_once or self.bad >= PATIENCE:
                self.reason = f"diverged at step {step}: {fault}"
        return self.reason

    def _fault(self, row: Mapping[str, float]) -> tuple[str, bool]:
        tokens = row.get("tokens", math.nan)
        allowed = max(self.max_kl, NATS_PER_TOKEN * tokens) if math.isfinite(tokens) else self.max_kl
        kl = row.get("kl", 0.0)
        began = 0.0 if self.from_base else self.first.get("kl", kl)
        moved = kl - began
        if not moved <= allowed:
            beyond = f", {began:.0f} at first" if began else ""
            fault = f"KL to the reference {kl:.0f} nats per response{beyond}, {allowed:.0f} allowed (max_kl)"
            return fault, not moved <= FAR * allowed
        words = {
            "ended": (FELL, "{0:.0f} % of answers end, {1:.0f} % did before"),
            "valid": (VALID, "{0:.0f} % of answers are valid, {1:.0f} % were before"),
        }
        for name, (share, fault) in words.items():
            now, before = row.get(name, math.nan), self.high_marks.get(name, math.nan)
            if before >= 0.25 and now < share * before:
                return fault.format(100 * now, 100 * before), False
        first = self.first.get("tokens", math.nan)
        if tokens > max(LONGER * first, first + LONGER_TOKENS):
            return f"answers have {tokens:.0f} tokens, {first:.0f} at first", False
        if tokens < SHORTER * first and self.first.get("ended", 0.0) >= 0.5:
            return f"answers have {tokens:.1f} tokens, {first:.0f} at first", False
        now, began = row.get("repetition", math.nan), self.first.get("repetition", math.nan)
        if began <= REPEATS / 2 and now >= REPEATS:
            return f"{100 * now:.0f} % of what answers say they said before", False
        return "", False


def repetition_of(responses: Sequence[Sequence[int]]) -> float:
    """Mean share of 4-grams of tokens that stand in a response before; 0 where no response is that long."""
    shares = []
    for tokens in responses:
        grams = Counter(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
        if grams:
            shares.append(1 - len(grams) / grams.total())
    return math.fsum(shares) / len(shares) if shares else 0.0
