"""What a retrain costs when a tenth of the feedback is new: with the caches of earlier runs, and without.

    python benchmarks/retrain_growth.py [--model tiny|100m] [--pairs 64] [--rounds 3]

Trains on `pairs`, then on a tenth more, twice in turn: once with the folder that keeps tokens and reference
log-probabilities between runs, once with none. One pass over the data each; the second run is timed, load of the model
left out. Prints one JSON object with the medians and the number of reference log-probabilities computed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from dpo_throughput import BATCH, SHAPES, model_write, rows  # noqa: E402


def train(
    folder: Path, out: Path, pairs: list[dict[str, str]], batch: int, cache: Path | None
) -> dict[str, Any]:
    """One run; seconds from loaded model to adapter, and what it said of its reference."""
    from rl.recipes import DPORecipe
    from rl.training.dpo import DPOTrainer

    recipe = DPORecipe(epochs=1, batch_size=batch, max_length=4096, save_steps=10_000)
    trainer = DPOTrainer(recipe, str(folder), output_dir=out, cache_dir=cache)
    trainer.load_base_model()
    began = time.perf_counter()
    trainer.train([{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in pairs])
    said = [note for note in trainer.context.notes if note.startswith("reference log-probabilities")]
    return {"seconds": time.perf_counter() - began, "reference": said[0] if said else "all computed"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=["tiny", "100m"], default="100m")
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from rl.training.hardware import allocator_settle

    allocator_settle()
    batch = BATCH[options.model]
    grown = rows(options.pairs + options.pairs // 10, SHAPES[options.model]["vocab_size"], 384, 24, False)
    first = grown[: options.pairs]
    found: dict[str, list[dict[str, Any]]] = {"cached": [], "not cached": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / options.model
        model_write(folder, options.model)
        for number in range(options.rounds):
            for way, runs in found.items():
                base = Path(scratch) / f"{number}-{way.replace(' ', '-')}"
                cache = base / "cache" if way == "cached" else None
                train(folder, base / "first", first, batch, cache)
                runs.append(train(folder, base / "second", grown, batch, cache))
                print(f"round {number + 1}, {way}: {runs[-1]}", file=sys.stderr)
    seconds = {way: statistics.median(run["seconds"] for run in runs) for way, runs in found.items()}
    print(
        json.dumps(
            {
                "benchmark": "retrain_grown",
                "model": options.model,
                "pairs": [len(first), len(grown)],
                "machine": {"processor": platform.processor() or platform.machine()},
                "seconds": {way: round(value, 2) for way, value in seconds.items()},
                "saved": round(1 - seconds["cached"] / seconds["not cached"], 3),
                "reference": {way: runs[-1]["reference"] for way, runs in found.items()},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
