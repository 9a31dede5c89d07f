"""Liked answers of classifiers that hear pairs, single thumbs, or both, of feedback that is half of each.

    python benchmarks/mixed_feedback.py [--sizes 300,1000] [--seeds 0,1,2] [--unseen 150]

In the worlds that recipes are tuned over (`benchmarks/world_tastes.py`; never those kept aside) half of the prompts,
drawn by lot, are judged by a pair and half by one thumb. The product's own classifier (`rl.linear.fit`) learns from the
training side's pairs, thumbs, and both. Prints a table, then one JSON object. Takes a minute on one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from world_tastes import TUNED, Prompt, World  # noqa: E402
from worlds import linear_fitted, linear_share, rows_split  # noqa: E402

SHOWN = {"pairs": ("chosen",), "thumbs": ("thumb",), "both": ("chosen", "thumb")}
"""What a classifier hears -> columns of the rows that say it."""


def mixed_feedback(world: World, prompts: Sequence[Prompt], seed: int) -> list[dict[str, Any]]:
    """A row for each prompt: a pair, or a thumb on one answer."""
    random = Random(f"{world.agent}/mixed/{seed}")
    rows = []
    for prompt in prompts:
        judge = world.pair if random.random() >= 0.5 else world.thumb
        rows.append({"prompt": prompt.text, **judge(prompt, random)})
    return rows


def measured(world: World, size: int, seed: int, unseen_count: int) -> dict[str, float]:
    """Share of liked answers to unseen prompts by what the classifier heard."""
    prompts = world.prompts(size, seed)
    unseen = world.prompts(unseen_count, seed + 1000, prompts)
    rows = rows_split(mixed_feedback(world, prompts, seed))["train"]
    return {
        shown: linear_share(
            world, unseen, linear_fitted(world, [row for row in rows if set(columns) & set(row)]).policy
        )
        for shown, columns in SHOWN.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="300,1000")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--unseen", type=int, default=150)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    print(f"{'world':<14}{'n':>6}" + "".join(f"{shown:>9}" for shown in SHOWN), file=sys.stderr)
    for size in map(int, options.sizes.split(",")):
        for world in TUNED:
            runs = [measured(world, size, int(seed), options.unseen) for seed in options.seeds.split(",")]
            shares = {shown: statistics.fmean(run[shown] for run in runs) for shown in SHOWN}
            results.append({"world": world.agent, "prompts": size, "seeds": runs, **shares})
            print(
                f"{world.agent:<14}{size:>6}" + "".join(f"{100 * share:>9.1f}" for share in shares.values()),
                file=sys.stderr,
            )
    print(json.dumps({"benchmark": "mixed_feedback", "unseen": options.unseen, "rows": results}))


if __name__ == "__main__":
    main()
