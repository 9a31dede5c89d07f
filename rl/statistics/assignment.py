"""Assigns units to arms by SHA-256(salt, unit): a pure function, the same in every process and on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

RAMP = (1, 5, 10, 25, 50, 100)
"""Steps of an experiment's share of an agent's units, in percent."""

BASE = "base"
"""Policy name of the base model without an adapter."""

_SEPARATOR = b"\x1f"


class AllocationError(ValueError):
    """Impossible arms, weights or ramp; the message says what was expected."""


def positions(salt: str, unit: str) -> tuple[float, float]:
    """Two uniform independent numbers in [0, 1): the first decides whether a unit takes part, the second its arm.

    Bytes 0-7 and 8-15 of SHA-256(salt, unit), cut to 52 bits each so that they are exact as floats.
    """
    digest = hashlib.sha256(salt.encode() + _SEPARATOR + unit.encode("utf-8", "surrogatepass")).digest()
    taken, arm = (int.from_bytes(digest[start : start + 8], "big") >> 12 for start in (0, 8))
    return taken / 2**52, arm / 2**52


@dataclass(frozen=True)
class ArmPlan:
    """One arm. `weight`, above 0, is its share of the units relative to the other arms."""

    name: str
    policy: str
    weight: float


@dataclass(frozen=True)
class Assignment:
    """The arm of a unit. `propensity` is the probability of drawing it, in (0, 1]."""

    policy: str
    arm: str = ""
    """`<experiment>/<arm>` as decisions record it; empty outside experiments."""
    experiment: str = ""
    propensity: float = 1.0


@dataclass(frozen=True)
class ExperimentPlan:
    """Assigns units to a running experiment's arms."""

    name: str
    salt: str
    ramp: float
    """Percent of units that take part, in (0, 100]."""
    arms: tuple[ArmPlan, ...]
    epoch: int | None = None
    """Of a bandit, the number of its weight update; units keep their arm within one. None: fixed weights, and a unit
    keeps its arm for good."""
    group: str = ""
    """Experiments of one exclusion group share no unit."""
    group_start: float = 0.0
    """Start of its part of the exclusion group, in percent."""

    def __post_init__(self) -> None:
        if not self.arms or not all(arm.weight > 0 for arm in self.arms):
            raise AllocationError("expected arms with weights above 0")
        if not 0 < self.ramp <= 100:
            raise AllocationError(f"expected a ramp in (0, 100] percent, found {self.ramp!r}")

    def takes(self, unit: str) -> bool:
        """True if a unit takes part. Units of a smaller ramp stay in a larger one."""
        if self.group:
            place, _ = positions(f"group:{self.group}", unit)
            return 0 <= place * 100 - self.group_start < self.ramp
        return positions(self.salt, unit)[0] * 100 < self.ramp

    def assignment(self, unit: str) -> Assignment | None:
        """The unit's arm, or None if it does not take part."""
        if not self.takes(unit):
            return None
        # a bandit draws again in each epoch; otherwise the arm of returning units would depend on their past
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
    """Assigns an agent's units: to its running experiments, and all others to its champion."""

    agent: str
    champion: str
    """A policy's name, or BASE."""
    experiments: tuple[ExperimentPlan, ...] = ()

    def assign(self, unit: str) -> Assignment:
        """The unit's assignment. At most one experiment takes it: an agent's experiments share no unit."""
        for experiment in self.experiments:
            if (found := experiment.assignment(unit)) is not None:
                return found
        return Assignment(self.champion)


def group_place(taken: Sequence[tuple[float, float]], reserve: float) -> float | None:
    """First start of `reserve` free percent in an exclusion group, or None. taken: (start, percent) of held parts."""
    place = 0.0
    for start, held in sorted(taken):
        if start - place >= reserve:
            return place
        place = max(place, start + held)
    return place if place + reserve <= 100 else None
