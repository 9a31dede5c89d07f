"""`python -m tools.bundled_model`: train the bundled base model from random weights and evaluate it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tools.bundled_model.model import BATCH_SIZE, STEPS, build_base_model


def main(arguments: list[str] | None = None) -> None:
    """Build the model, evaluate it and print the figures of each agent."""
    options = parser().parse_args(arguments)
    if (options.output / "config.json").exists() and not options.force:
        sys.exit(f"{options.output} holds a model: add --force to replace it, or choose another --output")
    built = build_base_model(
        options.output,
        seed=options.seed,
        steps=options.steps,
        batch_size=options.batch_size,
        start_from=options.start_from,
        progress=progress_print,
    )
    print(
        f"{built['path']}: {built['parameters'] / 1e6:.2f} M parameters, {built['bytes'] / 1e6:.1f} MB, "
        f"{built['steps']} steps in {built['seconds']:.0f} s, loss {built['loss']:.3f} nats per token"
    )
    from tools.bundled_model.measure import base_model_measure

    for agent, figures in base_model_measure(options.output, seed=options.seed).items():
        print(f"{agent}: {figures_in_words(figures)}")
    print(f"Next: python manage.py train_dpo --model {options.output}")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m tools.bundled_model",
        description=__doc__,
        epilog="An interrupted build is resumed. Example: python -m tools.bundled_model --output var/my-base",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    found.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the model files")
    found.add_argument("--force", action="store_true", help="replace the model in the folder")
    found.add_argument("--steps", type=int, default=STEPS, help="optimiser steps")
    found.add_argument(
        "--batch-size", type=int, default=BATCH_SIZE, help="examples per step; hundreds fit a GPU"
    )
    found.add_argument("--seed", type=int, default=0, help="seed of the examples and the weights")
    found.add_argument(
        "--start-from",
        default="",
        metavar="MODEL",
        help="base model to train further, with another --seed than its own; empty: from random weights",
    )
    return found


def progress_print(step: int, steps: int, loss: float) -> None:
    """A line on stderr every hundred steps, and after the last."""
    if step % 100 == 0 or step == steps:
        print(f"step {step} of {steps}, loss {loss:.3f} nats", file=sys.stderr)


def figures_in_words(figures: dict[str, Any]) -> str:
    """One agent's figures, as a line of the summary."""
    words = f"{figures['valid_greedy']:.0%} valid greedy, {figures['valid_sampled']:.0%} at temperature 1"
    if "evenness" in figures:
        words += f"; answers spread over {figures['evenness']:.0%} of the options"
    if "preference_accuracy" in figures:
        words += f"; {figures['preference_accuracy']:.0%} preference accuracy (the taste is simulated)"
    return f"{words} ({figures['prompts']} prompts)"


if __name__ == "__main__":
    main()
