"""Experiments in simulation: false alarms under peeking, power against a fixed horizon, with and without adjustment.

Prints JSON; `--experiments` and `--decisions` say how much of each. `--traffic` simulates units that come back, with a
past or none, instead of independent thumbs.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.statistics import wilson_interval
from tests.support.experiment_worlds import LOOK_EVERY, peeking
from tests.support.traffic_worlds import EQUAL_WORLDS, WORLDS, Shares, shares_of


def fixed_horizon(share: float, gain: float, power: float, alpha: float = 0.05) -> int:
    """Decisions of both arms that a two-sided z test of proportions needs (Fleiss, without correction)."""
    quantiles = float(stats.norm.ppf(1 - alpha / 2) + stats.norm.ppf(power))
    other = share + gain
    return round(2 * quantiles**2 * (share * (1 - share) + other * (1 - other)) / gain**2)


def traffic(experiments: int, only: str) -> None:
    """JSON lines: shares of experiments that were settled, of equal arms and of arms ten points apart."""
    worlds = {f"equal arms: {name}": world for name, world in EQUAL_WORLDS.items()}
    for name, world in WORLDS.items():
        for times in (1, 2):
            worlds[f"10 points better, {times} x: {name}"] = replace(world.times(times), gain=0.1)
    for name, world in worlds.items():
        if only in name:
            _line(name, shares_of(world, range(experiments)), experiments)


def _line(name: str, found: Shares, experiments: int) -> None:
    shares = {
        part: wilson_interval(round(getattr(found, part) * experiments), experiments).as_dict()
        for part in ("before", "plain", "adjusted", "fixed")
    }
    figures = {**shares, "variance_removed": found.removed, "units": found.units}
    print(json.dumps({"world": name, **figures}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=2000, help="Of each kind (default 2000)")
    parser.add_argument("--decisions", type=int, default=5000, help="Of each (default 5000)")
    parser.add_argument("--traffic", action="store_true", help="Units that come back, with a past or none")
    parser.add_argument("--only", default="", metavar="TEXT", help="Of --traffic, only worlds named so")
    options = parser.parse_args()
    if options.traffic:
        traffic(options.experiments, options.only)
        return
    equal = {
        str(share): asdict(peeking(options.experiments, options.decisions, share, 0.0, seed=7))
        for share in (0.02, 0.1, 0.3, 0.5, 0.9)
    }
    power = {}
    for gain in (0.05, 0.1, 0.2):
        planned = fixed_horizon(0.3, gain, 0.8)
        power[str(gain)] = {
            "fixed_horizon": planned,
            "at_that_horizon": asdict(peeking(options.experiments, planned, 0.3, gain, seed=8)),
            "at_twice_that": asdict(peeking(options.experiments, 2 * planned, 0.3, gain, seed=9)),
        }
    result = {
        "look_every": LOOK_EVERY,
        "experiments": options.experiments,
        "decisions": options.decisions,
        "equal_arms": equal,
        "power": power,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
