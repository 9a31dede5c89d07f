"""Assignment of units to arms: a pure function of SHA-256(salt, unit). No Django, no randomness, no state."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

RAMP = (1, 5, 10, 25, 50, 100)
"""Percent of an agent's units that an experiment may take, step by step."""

BASE = "base"
"""Name in place of a policy's where the base model answers without an adapter."""

_SEPARATOR = b"\x1f"


class AllocationError(ValueError):
    """Arms, weights or a ramp that cannot be; the message says what was expected."""


def positions(salt: str, unit: str) -> tuple[float, float]:
    """Two numbers in [0, 1), uniform and independent over units: whether a unit takes part, and in which arm.

    Both come from one digest, SHA-256(salt, unit): bytes 0-7 and bytes 8-15, 52 bits each, so that they are exact as
    floats. The same in every process, on every machine, for ever.
    """
    digest = hashlib.sha256(salt.encode() + _SEPARATOR + unit.encode("utf-8", "surrogatepass")).digest()
    taken, arm = (int.from_bytes(digest[start : start + 8], "big") >> 12 for start in (0, 8))
    return taken / 2**52, arm / 2**52


@dataclass(frozen=True)
class ArmPlan:
    """One arm: its name, the policy that answers for it, its share of the experiment's units (above 0)."""

    name: str
    policy: str
    weight: float


@dataclass(frozen=True)
class Assignment:
    """Arm that answers for a unit. `propensity` is the probability with which it was drawn, in (0, 1]."""

    policy: str
    arm: str = ""
    """`<experiment>/<arm>`, what a decision records as its arm; empty outside experiments."""
    experiment: str = ""
    propensity: float = 1.0


@dataclass(frozen=True)
class ExperimentPlan:
    """Plan that assigns units to a running experiment's arms."""

    name: str
    salt: str
    ramp: float
    """Percent of units that take part, in (0, 100]."""
    arms: tuple[ArmPlan, ...]
    epoch: int | None = None
    """Of a bandit: how often its weights were drawn up anew; a unit keeps its arm within one. None: weights are fixed
    and a unit keeps its arm for good."""
    group: str = ""
    """Experiments of one exclusion group share no unit."""
    group_start: float = 0.0
    """Start of its part of the group's units, in percent."""

    def __post_init__(self) -> None:
        if not self.arms or not all(arm.weight > 0 for arm in self.arms):
            raise AllocationError("expected arms with weights above 0")
        if not 0 < self.ramp <= 100:
            raise AllocationError(f"expected a ramp in (0, 100] percent, found {self.ramp!r}")

    def takes(self, unit: str) -> bool:
        """True if a unit takes part. A larger ramp takes all that a smaller one took."""
        if self.group:
            place, _ = positions(f"group:{self.group}", unit)
            return 0 <= place * 100 - self.group_start < self.ramp
        return positions(self.salt, unit)[0] * 100 < self.ramp

    def assignment(self, unit: str) -> Assignment | None:
        """The unit's arm, or None where it does not take part."""
        if not self.takes(unit):
            return None
        # a bandit draws afresh in each epoch: an arm kept by units that came back would depend on what they did before
        salt = self.salt if self.epoch is None else f"{self.salt}:{self.epoch}"
        _, place = positions(salt, unit)
        total = sum(arm.weight for arm in self.arms)
        chosen, passed = self.arms[-1], 0.0
        for arm in self.arms:
            passed += arm.weight / total
            if place < passed:
                chosen = arm
                break
        return Assignment(chosen.policy, f"{self.name}/{chosen.name}", self.name, chosen.weight / total)


@dataclass(frozen=True)
class AssignmentPlan:
    """Plan of an agent's units: its running experiments, and its champion for everybody else."""

    agent: str
    champion: str
    """A policy's name, or BASE."""
    experiments: tuple[ExperimentPlan, ...] = ()

    def assign(self, unit: str) -> Assignment:
        """The unit's assignment; experiments of one agent share no unit, so at most one takes it."""
        for experiment in self.experiments:
            if (found := experiment.assignment(unit)) is not None:
                return found
        return Assignment(self.champion)


def group_place(taken: Sequence[tuple[float, float]], reserve: float) -> float | None:
    """First place in an exclusion group where `reserve` percent are still free, or None.

    taken: (start, percent) of those that hold a part already.
    """
    place = 0.0
    for start, held in sorted(taken):
        if start - place >= reserve:
            return place
        place = max(place, start + held)
    return place if place + reserve <= 100 else None
