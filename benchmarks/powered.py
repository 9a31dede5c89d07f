"""Prediction-powered intervals in made-up worlds: do they hold the truth, and how much narrower are they? Prints JSON.

Judges: good (correlation 0.8), useless (0), biased (0.8, but shifted and stretched), against (-0.6), constant. Labels:
comparisons (-1, 0, 1), thumbs (0, 1) or scores.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.statistics import wilson_interval
from rl.statistics.prediction_powered import powered_mean

JUDGES = {
    "good": (0.8, 0.0, 1.0),
    "fair": (0.5, 0.0, 1.0),
    "useless": (0.0, 0.0, 1.0),
    "biased": (0.8, 0.4, 1.7),
}
"""Name -> correlation with the labels, shift, stretch."""

KINDS = ("scores", "comparisons", "thumbs")
LABELS, JUDGED = (15, 30, 50, 100), 1000


def labels_of(kind: str, random: np.random.Generator, size: int) -> np.ndarray:
    if kind == "comparisons":
        return random.choice([-1.0, 0.0, 1.0], size, p=[0.3, 0.3, 0.4])
    return (random.random(size) < 0.8).astype(float) if kind == "thumbs" else random.normal(0.3, 1.0, size)


MEANS = {"comparisons": (0.1, 0.83066), "thumbs": (0.8, 0.4), "scores": (0.3, 1.0)}
"""Kind -> mean and standard deviation."""


def world(kind: str, judge: str, n: int, seeds: int) -> dict[str, Any]:
    correlation, shift, stretch = JUDGES[judge]
    mean, deviation = MEANS[kind]
    held, widths, biases = 0, [], []
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        y = labels_of(kind, random, n + JUDGED)
        noise = random.normal(0, 1, n + JUDGED)
        f = correlation * (y - mean) / deviation + (1 - correlation**2) ** 0.5 * noise
        f = shift + stretch * f
        found = powered_mean(y[:n], f[:n], f[n:])
        held += found.low <= mean <= found.high
        widths.append(found.narrower)
        biases.append(found.value - mean)
    return {
        "covers": wilson_interval(held, seeds).as_dict(),
        "narrower": float(np.mean(widths)),
        "bias": float(np.mean(biases)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4000, help="Worlds of each kind (default 4000)")
    options = parser.parse_args()
    for kind in KINDS:
        for judge in JUDGES:
            for n in LABELS:
                found = world(kind, judge, n, options.seeds)
                print(json.dumps({"labels": kind, "judge": judge, "n": n, **found}), flush=True)


if __name__ == "__main__":
    main()
