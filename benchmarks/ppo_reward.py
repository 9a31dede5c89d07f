"""Does PPO raise the reward on prompts it never saw, and does it leave it alone when there is nothing to learn?

    python benchmarks/ppo_reward.py [--steps 24] [--seeds 1] [--rewards agent,random,constant] [--holdout 128]

Trains the bundled model with the `cpu` preset on widgets scenarios, once for each reward and seed: `agent` pays what
the simulated rater likes, `random` pays a number drawn without looking, `constant` pays the same for everything. Before
and after, the held-out prompts are answered four times with temperature 1 and judged by the simulated rater, whatever
was paid. `reward` is its mean liking in [0, 1]; `rise` is relative to the base, with the 95 % interval of the paired
difference; `kl` is nats per response against the base. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rl.agents import widgets  # noqa: E402
from rl.recipes import PPO_CONFIG  # noqa: E402
from rl.rewards.base import RewardSample, RewardValue  # noqa: E402
from rl.training.hardware import detect  # noqa: E402
from rl.training.policy import LoadedPolicy, generate, load_policy  # noqa: E402
from rl.training.ppo import PPOTrainer  # noqa: E402

ANSWERS = 4
"""Answers to each held-out prompt."""


class Paid:
    """One of the rewards this benchmark compares."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.random = name, Random(seed)

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        return [RewardValue(self._raw(sample)) for sample in samples]

    def _raw(self, sample: RewardSample) -> float:
        if self.name == "random":
            return self.random.uniform(-2, 2)
        if self.name == "constant":
            return 1.0
        return 4 * widgets.AGENT.hidden_preference(sample.facts["state"], sample.response) - 2


def liking(policy: LoadedPolicy, rows: list[dict[str, Any]]) -> list[float]:
    """How much the simulated rater likes sampled answers to each prompt, mean of four, in [0, 1]."""
    prompts = [row["prompt"] for row in rows for _ in range(ANSWERS)]
    answers = generate(policy, prompts, max_new_tokens=48, temperature=1.0, seed=7)
    return [
        statistics.fmean(
            widgets.AGENT.hidden_preference(row["state"], answer.text)
            for answer in answers[ANSWERS * i : ANSWERS * (i + 1)]
        )
        for i, row in enumerate(rows)
    ]


def side(
    name: str, seed: int, steps: int, train: list[Any], held_out: list[Any], before: list[float]
) -> dict[str, Any]:
    """Train with one reward; what became of the liking of the held-out prompts."""
    recipe = PPO_CONFIG["cpu"].with_knobs(
        max_steps=steps, seed=seed, eval_prompts=len(held_out), allow_constant_reward=name == "constant"
    )
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        trainer = PPOTrainer(recipe, output_dir=folder, agent="widgets", rewards=[Paid(name, seed)])
        result = trainer.train(train, held_out)
        seconds = time.perf_counter() - began
        after = liking(load_policy("bundled", result.checkpoint), held_out)
    apart = [b - a for a, b in zip(before, after, strict=True)]
    base, mean = statistics.fmean(before), statistics.fmean(apart)
    half = 1.96 * statistics.stdev(apart) / math.sqrt(len(apart))
    return {
        "paid": name,
        "seed": seed,
        "reward": {"base": round(base, 4), "policy": round(statistics.fmean(after), 4)},
        "rise": {
            "value": round(mean / base, 4),
            "low": round((mean - half) / base, 4),
            "high": round((mean + half) / base, 4),
        },
        "kl": round(result.metrics["eval_kl"], 3),
        "ended": round(result.metrics["eval_ended"], 4),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=24, help="steps of 64 responses (default 24)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each reward (default 1)")
    parser.add_argument("--rewards", default="agent,random,constant", help="which to pay (default all three)")
    parser.add_argument("--holdout", type=int, default=128, help="prompts held out (default 128)")
    options = parser.parse_args()
    scenarios = widgets.AGENT.scenarios()
    Random(0).shuffle(scenarios)
    rows = [{"prompt": widgets.AGENT.render(s.state), "state": s.state} for s in scenarios]
    held_out, train = rows[: options.holdout], rows[options.holdout :]
    before = liking(load_policy("bundled"), held_out)
    found = []
    for name in options.rewards.split(","):
        for seed in range(options.seeds):
            found.append(side(name, seed, options.steps, train, held_out, before))
            print(json.dumps(found[-1]), file=sys.stderr)
    facts = {
        "benchmark": "ppo_reward",
        "machine": detect().as_dict(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        "steps": options.steps,
        "responses_a_step": PPO_CONFIG["cpu"].batch_size,
        "holdout": len(held_out),
        "runs": found,
    }
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
