"""Made-up traffic of experiments whose truth is known: units that come back, with a past or none, in changing times."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rl.statistics.contrasts import FOLDS, Contrast, Moments, adjusted_moments, difference
from rl.statistics.sequential import critical_value, mixing_rho

MIN_UNITS = 50
"""Units per arm before anything is said: the default of an experiment."""


@dataclass(frozen=True)
class TrafficWorld:
    """Decisions of units that differ in taste and in how often they come; the challenger gains so many points / 100."""

    decisions: int = 4000
    gain: float = 0.0
    base: float = 0.4
    units: int = 0
    """Units that decisions are drawn from; 0: every decision is a unit of its own."""
    tail: float = 0.0
    """Index of the Pareto law of how often units come; 0: all alike."""
    taste: float = 0.25
    """Standard deviation of units' tastes around `base`."""
    known: float = 0.7
    """Share of the units that have a past."""
    past: float = 5.0
    """Rated decisions of such a unit before the experiment, on average."""
    rated: float = 1.0
    """Share of decisions that are rated; units of better taste rate up to twice as often."""
    drift: float = 0.0
    """By how much taste rises from the first to the last decision, in points / 100; the past knew none of it."""
    hard: float = 0.0
    """What a hard prompt, one in three, costs, in points / 100; which are hard can be seen."""

    def times(self, factor: int) -> TrafficWorld:
        """The same traffic for so many times as long, with as many times the units."""
        return replace(self, decisions=self.decisions * factor, units=self.units * factor)


UGLY = TrafficWorld(8000, units=2000, tail=1.5, drift=0.2, rated=0.4, hard=0.2)
"""Unit sizes without a variance, times that change, ratings on a third, three units in ten without a past."""

WORLDS = {
    "one decision a unit, prompts that differ": TrafficWorld(750, known=0.0, hard=0.4),
    "units come back, seven in ten with a past of five ratings": TrafficWorld(1200, units=400),
    "regulars: all with a past of twenty ratings": TrafficWorld(1200, units=400, known=1.0, past=20.0),
    "ugly: heavy-tailed sizes, drift, a third rated": UGLY,
}
"""Worlds whose size gives a fixed horizon a power of about 80 % for ten points."""

EQUAL_WORLDS = {
    **{name: world.times(2) for name, world in WORLDS.items()},
    "few units, again and again": TrafficWorld(6000, units=200),
    "heavier tails (index 1.1), half without a past": TrafficWorld(6000, units=1500, tail=1.1, known=0.5),
    "no unit has a past; drift": TrafficWorld(4000, units=1000, known=0.0, drift=0.3),
}
"""Worlds that false alarms are counted in."""


@dataclass(frozen=True)
class Look:
    """One look at an experiment of two equal arms."""

    delta: Contrast
    """With the delta method's variance, as it was before the jackknife's."""
    plain: Contrast
    adjusted: Contrast


def looks_of(world: TrafficWorld, random: np.random.Generator, at: NDArray[np.int64]) -> list[Look]:
    """An experiment looked at after so many decisions each, but for looks at which an arm has too few units."""
    n, count = world.decisions, world.units or world.decisions
    taste = np.clip(world.base + world.taste * random.standard_normal(count), 0.02, 0.98)
    weight = random.pareto(world.tail, count) + 1 if world.tail else np.ones(count)
    unit = random.choice(count, n, p=weight / weight.sum()) if world.units else np.arange(n)
    arm = (random.random(count) < 0.5).astype(np.int64)
    hard = random.random(n) < 1 / 3
    clock = np.arange(n) / n
    chance = taste[unit] + world.gain * arm[unit] - world.hard * hard + world.drift * (clock - 0.5)
    up = (random.random(n) < np.clip(chance, 0, 1)).astype(float)
    keen = np.minimum(0.5 + taste[unit], 1.0) if world.rated < 1 else 1.0
    rated = random.random(n) < world.rated * keen
    # the past: ratings by the same taste, as many as the unit comes often
    seen = random.poisson(world.past * weight / weight.mean()) * (random.random(count) < world.known)
    liked = random.binomial(seen, taste)
    away = liked - seen * (liked.sum() / max(seen.sum(), 1))
    first = np.full(count, n)
    np.minimum.at(first, unit, np.arange(n))
    place = np.minimum(first, n - 1)
    features = np.column_stack(
        [away, away / (seen + 1), away / (seen + 5), seen > 0, np.log1p(seen), hard[place], clock[place]]
    ).astype(float)
    folds = random.integers(FOLDS, size=count)
    found = []
    for end in at.tolist():
        there = np.flatnonzero(first < end)
        own = unit[:end][rated[:end]]
        sums = np.bincount(own, up[:end][rated[:end]], count)[there]
        counts = np.bincount(own, minlength=count)[there].astype(float)
        arms = arm[there]
        parts = [(sums[valued], counts[valued]) for k in (0, 1) for valued in [(arms == k) & (counts > 0)]]
        if min(len(s) for s, _ in parts) < MIN_UNITS:
            continue
        plain = [Moments.of_ratio(s, c) for s, c in parts]
        better = adjusted_moments(
            sums, counts, arms, features[there], folds[there], seen[there].astype(float)
        )
        assert better is not None  # fifty units in each arm are enough
        found.append(
            Look(*(_difference(arms) for arms in ([_delta(*part) for part in parts], plain, better)))
        )
    return found


def _difference(arms: list[Moments]) -> Contrast:
    return difference(arms[1].with_pseudo_unit(), arms[0].with_pseudo_unit())


def _delta(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> Moments:
    n, mean = len(sums), float(sums.sum() / counts.sum())
    return Moments(n, mean, float((((sums - mean * counts) / counts.mean()) ** 2).sum() / (n - 1)))


def normal_critical(n: float, alpha: float = 0.05, tuning: float = 1000) -> float:
    """Standard errors of a normal mixture alone, as it was before the mixture of several places."""
    spent = n * mixing_rho(alpha, tuning) ** 2
    return math.sqrt(2 * (spent + 1) / spent * math.log(math.sqrt(spent + 1) / alpha))


@dataclass(frozen=True)
class Shares:
    """Shares of the experiments that some look called settled, by what they were judged by."""

    before: float
    """A normal mixture on the delta method's variance."""
    plain: float
    """The mixture and the jackknife's variance, not adjusted."""
    adjusted: float
    fixed: float
    """A z test at the last look alone, not adjusted."""
    removed: float
    """Share of the variance that the adjustment took away at the last look, the median."""
    units: float
    """With a value at the last look, on average."""


def shares_of(world: TrafficWorld, seeds: range, looks: int = 40) -> Shares:
    """Experiments of a world, each looked at so many times, the first after 100 decisions, evenly on a log scale."""
    at = np.unique(np.geomspace(100, world.decisions, looks).astype(int))
    settled, removed, units = [], [], []
    for seed in seeds:
        found = looks_of(world, np.random.default_rng(seed), at)
        settled.append(
            (
                any(_z(one.delta) > normal_critical(one.delta.n) for one in found),
                any(_z(one.plain) > critical_value(float(one.plain.n), 0.05, 1000.0) for one in found),
                any(_z(one.adjusted) > critical_value(float(one.plain.n), 0.05, 1000.0) for one in found),
                _z(found[-1].plain) > 1.959964,
            )
        )
        removed.append(1 - found[-1].adjusted.error / found[-1].plain.error)
        units.append(found[-1].plain.n)
    return Shares(*np.mean(settled, axis=0).tolist(), float(np.median(removed)), float(np.mean(units)))


def _z(found: Contrast) -> float:
    return abs(found.value) / math.sqrt(found.error)
