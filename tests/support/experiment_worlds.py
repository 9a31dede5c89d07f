"""Experiments and logs whose truth is known: arms of thumbs under peeking, choices among listed candidates."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from rl.statistics.contrasts import Contrast, Moments, half_width
from rl.statistics.offpolicy import Draw, LoggedChoice, OffPolicyRefused, report

LOOK_EVERY = 10
MIN_UNITS = 50
"""Units per arm before anything is said: the default of an experiment."""


def moments_of_counts(successes: int, n: int) -> Moments:
    """Moments of a proportion: variance p (1 - p)."""
    share = successes / n
    return Moments(n, share, share * (1 - share))


def uplift(new: Moments, old: Moments) -> Contrast:
    """(new - old) / |old| with its variance by the delta method, as GrowthBook's references are."""
    value = (new.mean - old.mean) / abs(old.mean)
    error = new.error / old.mean**2 + old.error * new.mean**2 / old.mean**4
    return Contrast(value, error, new.n + old.n)


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


@dataclass(frozen=True)
class LogWorld:
    """A log of choices among listed candidates whose truth is known, and a policy to judge by it.

    Each candidate has a hidden quality, the chance that its reward is 1. Both policies score candidates by noisy views
    of it; with `greedy`, the log takes a candidate that has nothing to do with it and explores by epsilon alone.
    """

    candidates: int = 4
    quality: tuple[float, float] = (0.1, 0.9)
    """Uniform between the two."""
    epsilon: float = 0.0
    """Share of choices that were drawn uniformly."""
    greedy: bool = False
    temperature: float = 0.3
    """Of the policy that is judged; the smaller, the sharper it is, and the heavier its weights."""

    def choices(self, seed: int, decisions: int) -> tuple[list[LoggedChoice], float]:
        """A log, and the judged policy's exact mean reward over its prompts."""
        random = np.random.default_rng(seed)
        low, high = self.quality
        quality = random.uniform(low, high, (decisions, self.candidates))
        scale = high - low

        def policy(noise: float, temperature: float) -> Any:
            scores = (quality / scale + random.normal(0, noise, quality.shape)) / temperature
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            return weights / weights.sum(axis=1, keepdims=True)

        if self.greedy:
            logged = np.eye(self.candidates)[random.integers(self.candidates, size=decisions)]
        else:
            logged = policy(0.5, 0.6)
        logged = (1 - self.epsilon) * logged + self.epsilon / self.candidates
        judged = policy(0.2, self.temperature)
        chosen = (logged.cumsum(axis=1) > random.random((decisions, 1))).argmax(axis=1)
        up = random.random(decisions) < quality[np.arange(decisions), chosen]
        features = np.stack(
            [quality + random.normal(0, 0.25 * scale, quality.shape), np.ones_like(quality)], axis=2
        )
        choices = [
            LoggedChoice(
                features[i], int(chosen[i]), float(up[i]), float(logged[i, chosen[i]]), judged[i], logged[i]
            )
            for i in range(decisions)
        ]
        return choices, float((judged * quality).sum(axis=1).mean())


LOG_WORLDS = {
    "4 candidates": LogWorld(),
    "10 candidates, a sharp policy": LogWorld(10, epsilon=0.1, temperature=0.1),
    "one in ten succeeds": LogWorld(quality=(0.0, 0.2)),
    "10 candidates, one in thirty succeeds": LogWorld(10, quality=(0.0, 0.06), epsilon=0.1, temperature=0.2),
    "log that explores one time in five, weights up to 50": LogWorld(
        10, epsilon=0.2, greedy=True, temperature=0.1
    ),
}
"""Name -> world."""


@dataclass(frozen=True)
class Coverage:
    """Coverage and width of the 95 % intervals of one method in one world."""

    held: int
    """Logs whose interval held the truth."""
    logs: int
    """Logs that were not refused."""
    width: float
    """Median width of the intervals."""


def coverage(world: LogWorld, simulations: int, decisions: int = 400) -> dict[str, Coverage]:
    """Coverage by method; logs that cannot answer count for none."""
    held: dict[str, list[bool]] = {}
    widths: dict[str, list[float]] = {}
    for seed in range(simulations):
        choices, truth = world.choices(seed, decisions)
        try:
            found = report(choices)
        except OffPolicyRefused:
            continue
        for name, one in found.estimates.items():
            held.setdefault(name, []).append(one.low <= truth <= one.high)
            widths.setdefault(name, []).append(one.high - one.low)
    return {
        name: Coverage(sum(hits), len(hits), float(np.median(widths[name]))) for name, hits in held.items()
    }


def draws(seed: int, decisions: int, fault: str = "", known: bool = True, candidates: int = 6) -> list[Draw]:
    """Choices of an epsilon-greedy softmax policy, whose propensities were recorded with a fault.

    fault: a number they were multiplied by, `shuffled` (those of another decision), `uniform`, `sharper` (of another
    temperature), or none. known: whether the whole distribution was recorded.
    """
    random = np.random.default_rng(seed)
    scores = random.normal(0, 1, (decisions, candidates)) + random.normal(0, 0.5, candidates)
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares = 0.8 * shares / shares.sum(axis=1, keepdims=True) + 0.2 / candidates
    chosen = (shares.cumsum(axis=1) > random.random((decisions, 1))).argmax(axis=1)
    said = shares.copy()
    if fault == "shuffled":
        said = said[random.permutation(decisions)]
    elif fault == "uniform":
        said[:] = 1 / candidates
    elif fault == "sharper":
        said = said**1.3 / (said**1.3).sum(axis=1, keepdims=True)
    elif fault:
        said = np.minimum(said * float(fault), 1.0)
    arms = [f"arm {number}" for number in range(candidates)]
    return [
        Draw(arms, int(c), float(row[c]), row.tolist() if known else None)
        for c, row in zip(chosen.tolist(), said, strict=True)
    ]
