"""Experiments whose truth is known: arms of thumbs under peeking, and logs of choices among listed candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from rl.statistics.contrasts import half_width
from rl.statistics.offpolicy import Choice, report

LOOK_EVERY = 10
MIN_UNITS = 50
"""Units per arm before anything is said: the default of an experiment."""


@dataclass(frozen=True)
class Peeking:
    """Shares of the simulated experiments."""

    alarms: float
    """Some look had the always-valid interval leave 0 out."""
    alarms_fixed_peeking: float
    """Some look had a fixed-horizon test say p < 0.05: what peeking does to it."""
    alarms_fixed: float
    """The fixed-horizon test at the last decision alone, as it is meant."""
    decisions_mean: float
    """Decisions until the always-valid interval left 0 out, or all of them."""


def peeking(
    experiments: int,
    decisions: int,
    share: float,
    gain: float,
    seed: int,
    alpha: float = 0.05,
    tuning: float = 1000,
) -> Peeking:
    """Two arms of thumbs, `share` and `share + gain` of them up, looked at every 10 decisions."""
    random = np.random.default_rng(seed)
    looks = np.arange(LOOK_EVERY, decisions + 1, LOOK_EVERY)
    widths = np.array([half_width(1.0, n, alpha, tuning) for n in looks.tolist()])
    critical = float(stats.norm.ppf(1 - alpha / 2))
    alarm, alarm_fixed, last, stopped = [], [], [], []
    for start in range(0, experiments, 250):
        rows = min(250, experiments - start)
        new = random.random((rows, decisions)) < 0.5
        up = random.random((rows, decisions)) < np.where(new, share + gain, share)
        n_new = new.cumsum(axis=1)[:, looks - 1]
        up_new = (new & up).cumsum(axis=1)[:, looks - 1]
        up_old = (~new & up).cumsum(axis=1)[:, looks - 1]
        n_old = looks - n_new
        enough = np.minimum(n_new, n_old) >= MIN_UNITS
        p_new, p_old = up_new / np.maximum(n_new, 1), up_old / np.maximum(n_old, 1)
        error = p_new * (1 - p_new) / np.maximum(n_new, 1) + p_old * (1 - p_old) / np.maximum(n_old, 1)
        z = np.abs(p_new - p_old) / np.sqrt(np.maximum(error, 1e-300))
        hit = enough & (z > widths)
        alarm.append(hit.any(axis=1))
        alarm_fixed.append((enough & (z > critical)).any(axis=1))
        last.append(z[:, -1] > critical)
        stopped.append(np.where(hit.any(axis=1), looks[hit.argmax(axis=1)], decisions))
    return Peeking(
        float(np.concatenate(alarm).mean()),
        float(np.concatenate(alarm_fixed).mean()),
        float(np.concatenate(last).mean()),
        float(np.concatenate(stopped).mean()),
    )


def choose_mode(
    seed: int, decisions: int = 400, candidates: int = 4
) -> dict[str, tuple[float, float, float]]:
    """One log of a softmax policy over listed candidates, and what another policy would have earned.

    Each candidate has a hidden quality; a thumb is up with that probability. Both policies score candidates by noisy
    views of it. Returns {method: (low, high, truth)}; the truth is the other policy's exact mean over these prompts.
    """
    random = np.random.default_rng(seed)
    quality = random.uniform(0.1, 0.9, (decisions, candidates))

    def policy(noise: float, temperature: float) -> Any:
        scores = (quality + random.normal(0, noise, quality.shape)) / temperature
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)

    logged, judged = policy(0.4, 0.5), policy(0.15, 0.3)
    chosen = (logged.cumsum(axis=1) > random.random((decisions, 1))).argmax(axis=1)
    up = random.random(decisions) < quality[np.arange(decisions), chosen]
    features = np.stack([quality + random.normal(0, 0.2, quality.shape), np.ones_like(quality)], axis=2)
    choices = [
        Choice(features[i], int(chosen[i]), float(up[i]), float(logged[i, chosen[i]]), judged[i], logged[i])
        for i in range(decisions)
    ]
    truth = float((judged * quality).sum(axis=1).mean())
    found = report(choices)
    return {name: (one.low, one.high, truth) for name, one in found.estimates.items()}


def coverage(simulations: int, decisions: int = 400) -> dict[str, float]:
    """Share of 95 % intervals that hold the truth, by method."""
    held: dict[str, int] = {}
    for seed in range(simulations):
        for name, (low, high, truth) in choose_mode(seed, decisions).items():
            held[name] = held.get(name, 0) + (low <= truth <= high)
    return {name: count / simulations for name, count in held.items()}
