"""Does each method learn what it should from simulated feedback, on prompts nobody rated, and nothing from coins?

    python benchmarks/methods.py [--methods reward_model,dpo,kto,sft,ppo,grpo] [--home DIR] [--scenarios 400]
                                 [--holdout 200] [--steps 16] [--seed 0]

Two worlds of widgets scenarios, each with a database of its own: in `noisy` one simulated rater thumbs every variation
by a hidden taste and one thumb in ten is flipped; in `coin` every thumb is a coin, which is what shuffled labels are.
Each method is run by its own command on the bundled model, in both worlds. Demonstrations for `sft` are corrections: to
the answer the rater likes best in one world, to any in the other. `ppo` and `grpo` are paid by the reward model trained
on the noisy thumbs, or by a coin. Judged is on scenarios that neither world holds, by the taste itself: pairs of
a liked and a disliked answer, or answers sampled with temperature 1. With --home, what was run before is kept and not
run again, so that the methods may be run one by one. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rl.agents import widgets  # noqa: E402
from rl.agents.base import Scenario  # noqa: E402
from rl.rewards.base import RewardSample  # noqa: E402

METHODS = ("reward_model", "dpo", "kto", "sft", "ppo", "grpo")
NOISE = {"noisy": 0.1, "coin": 0.5}
ANSWERS = 4
"""Answers sampled to each unseen prompt."""


def coin(sample: RewardSample) -> float:
    """A reward that says nothing: a number drawn by the words of prompt and answer."""
    said = json.dumps([list(sample.prompt), sample.response])
    return 4 * int.from_bytes(hashlib.sha256(said.encode()).digest()[:4]) / 2**32 - 2


def taste(state: Mapping[str, Any], response: str) -> float:
    return widgets.AGENT.hidden_preference(dict(state), response)


class World:
    """A data folder of its own, in which commands are run."""

    def __init__(self, home: Path, name: str, options: argparse.Namespace) -> None:
        self.home, self.name, self.options = home / name, name, options
        self.environment = {
            **{
                key: value
                for key, value in os.environ.items()
                if key not in ("DATABASE_URL", "RATCHET_CONFIG")
            },
            "RATCHET_HOME": str(self.home),
            "RATCHET_BASE_MODEL": "bundled",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def manage(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, str(ROOT / "manage.py"), *arguments],
            env=self.environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        said: dict[str, Any] = json.loads(done.stdout) if "--json" in arguments else {}
        return said

    def rated(self) -> World:
        """With thumbs on every variation of the scenarios."""
        if not self.home.exists():
            self.manage("migrate", "--verbosity", "0")
            self.manage(
                "simulate",
                "widgets",
                "--scenarios",
                str(self.options.scenarios),
                "--rate",
                "simulated",
                "--raters",
                "1",
                "--noise",
                str(NOISE[self.name]),
                "--seed",
                str(self.options.seed),
                "--json",
            )
        return self

    def corrected(self) -> World:
        """With a correction of one answer to each scenario."""
        if not self.home.exists():
            self.manage("migrate", "--verbosity", "0")
            command = [
                sys.executable,
                __file__,
                "--correct",
                self.name,
                "--scenarios",
                str(self.options.scenarios),
            ]
            subprocess.run(
                [*command, "--seed", str(self.options.seed)], env=self.environment, cwd=ROOT, check=True
            )
        return self

    def train(self, method: str, *more: str) -> dict[str, Any]:
        return self.manage(
            f"train_{method}",
            "--agent",
            "widgets",
            "--config",
            "cpu",
            "--seed",
            str(self.options.seed),
            "--json",
            *more,
        )


def correct(options: argparse.Namespace) -> None:
    """Record decisions and what a person would have answered instead; runs with a world's environment."""
    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "backend.settings")
    django.setup()
    from feedback.services import decision_record, rating_submit

    random = Random(options.seed)
    for scenario in scenarios(options)[0]:
        state = dict(scenario.state)
        candidates = widgets.AGENT.candidates(state)
        given = random.choice(candidates)
        wanted = best(state) if options.correct == "shown" else random.choice(candidates)
        if wanted == given:
            continue
        decision = decision_record(
            agent="widgets",
            messages=widgets.AGENT.render(state),
            response=given,
            state=state,
            candidates=candidates,
        ).row
        rating_submit(decision=decision, rater="simulated", rater_kind="simulated", correction=wanted)


def best(state: Mapping[str, Any]) -> str:
    return max(widgets.AGENT.candidates(dict(state)), key=lambda answer: taste(state, answer))


def scenarios(options: argparse.Namespace) -> tuple[list[Scenario], list[Scenario]]:
    """Those that `simulate` draws with the seed, and unseen ones."""
    every = widgets.AGENT.scenarios()
    seen = Random(options.seed).sample(every, options.scenarios)
    keys = {scenario.key for scenario in seen}
    unseen = [scenario for scenario in every if scenario.key not in keys]
    Random(options.seed + 1).shuffle(unseen)
    return seen, unseen[: options.holdout]


class Judge:
    """The taste itself, on scenarios nobody rated."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.unseen = scenarios(options)[1]
        random = Random(options.seed + 2)
        self.pairs = []
        for scenario in self.unseen:
            answers = widgets.AGENT.candidates(scenario.state)
            liked = [answer for answer in answers if taste(scenario.state, answer) >= 0.5]
            rest = [answer for answer in answers if answer not in liked]
            self.pairs.append((random.choice(liked), random.choice(rest)))
        self.file = folder / "clean.jsonl"
        rows = [
            {
                "prompt": widgets.AGENT.render(scenario.state),
                "chosen": [{"role": "assistant", "content": chosen}],
                "rejected": [{"role": "assistant", "content": rejected}],
            }
            for scenario, (chosen, rejected) in zip(self.unseen, self.pairs, strict=True)
        ]
        self.file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")

    def preference(self, world: World, policy: str) -> dict[str, Any]:
        """By `evaluate_model`: share of the clean pairs that policy and base order as the taste does."""
        found = world.manage(
            "evaluate_model", "--policy", policy, "--compare-base", "--test-data", str(self.file), "--json"
        )
        against = found["comparison"]
        return {
            "base": against["preference_accuracy"]["value"],
            "policy": found["preference_accuracy"]["value"],
            "difference": against["difference"],
            "valid_rate": found["valid_rate"]["value"],
        }

    def ranking(self, checkpoint: str) -> dict[str, float]:
        """Share of the clean pairs a reward model orders right, with its 95 % interval."""
        from rl.statistics import wilson_interval
        from rl.training.reward_model import RewardModel

        items = [
            (widgets.AGENT.render(scenario.state), answer)
            for scenario, pair in zip(self.unseen, self.pairs, strict=True)
            for answer in pair
        ]
        scores = RewardModel.load(checkpoint).scores(items)
        right = sum(a > b for a, b in zip(scores[::2], scores[1::2], strict=True))
        return wilson_interval(right, len(self.pairs)).as_dict()

    def liking(self, adapter: str | None) -> list[float]:
        """Mean taste of sampled answers to each unseen prompt, in [0, 1]."""
        answers = self._answers(adapter, ANSWERS, 1.0)
        return [
            statistics.fmean(
                taste(scenario.state, answer) for answer in answers[ANSWERS * i : ANSWERS * (i + 1)]
            )
            for i, scenario in enumerate(self.unseen)
        ]

    def reproduced(self, adapter: str | None) -> float:
        """Share of unseen prompts whose greedy answer is the one a person would have corrected to."""
        answers = self._answers(adapter, 1, 0.0)
        hits = [answer == best(s.state) for s, answer in zip(self.unseen, answers, strict=True)]
        return sum(hits) / len(hits)

    def _answers(self, adapter: str | None, samples: int, temperature: float) -> list[str]:
        from rl.training.policy import generate, load_policy

        prompts = [widgets.AGENT.render(s.state) for s in self.unseen for _ in range(samples)]
        policy = load_policy("bundled", adapter)
        return [a.text for a in generate(policy, prompts, max_new_tokens=48, temperature=temperature, seed=7)]

    def rise(self, before: Sequence[float], result: Mapping[str, Any]) -> dict[str, Any]:
        """What became of the liking, relative to the base, with the 95 % interval of the paired difference."""
        after = self.liking(result["checkpoint"])
        apart = [b - a for a, b in zip(before, after, strict=True)]
        base, mean = statistics.fmean(before), statistics.fmean(apart)
        half = 1.96 * statistics.stdev(apart) / math.sqrt(len(apart))
        return {
            "base": base,
            "policy": statistics.fmean(after),
            "rise": {"value": mean / base, "low": (mean - half) / base, "high": (mean + half) / base},
            "paid": {
                "base": result["metrics"]["eval_reward_before"],
                "policy": result["metrics"]["eval_reward"],
            },
            "kl": result["metrics"]["eval_kl"],
            "steps": result["steps"],
            "seconds": result["seconds"],
        }


def measured(
    method: str, home: Path, options: argparse.Namespace, earlier: Mapping[str, Any]
) -> dict[str, Any]:
    """One method in the world and in its control: figures, and whether they are as they should be."""
    judge = Judge(options, home)
    noisy, blind = World(home, "noisy", options), World(home, "coin", options)
    if method == "reward_model":
        runs = {world.name: world.rated().train(method) for world in (noisy, blind)}
        found = {name: {**judge.ranking(run["checkpoint"]), "run": run["run"]} for name, run in runs.items()}
        passed = found["noisy"]["value"] > 0.85 and found["coin"]["low"] <= 0.5 <= found["coin"]["high"]
        return {"accuracy": found["noisy"], "control": found["coin"], "passed": passed}
    if method in ("dpo", "kto"):
        runs = {world.name: world.rated().train(method) for world in (noisy, blind)}
        figures = {
            world.name: judge.preference(world, runs[world.name]["policy"]) for world in (noisy, blind)
        }
        learnt, control = figures["noisy"], figures["coin"]
        passed = learnt["difference"]["low"] > 0 and control["difference"]["low"] <= 0
        if method == "kto" and "dpo" in earlier:
            learnt["behind_dpo"] = earlier["dpo"]["accuracy"]["policy"] - learnt["policy"]
            passed = passed and learnt["behind_dpo"] <= 0.05
        return {"accuracy": learnt, "control": control, "passed": passed}
    if method == "sft":
        shown = {
            name: World(home, name, options).corrected().train(method) for name in ("shown", "shown_coin")
        }
        base = judge.reproduced(None)
        share = {name: judge.reproduced(run["checkpoint"]) for name, run in shown.items()}
        passed = share["shown"] >= base + 0.2 and share["shown_coin"] <= base + 0.1
        return {
            "reproduced": {"base": base, "policy": share["shown"]},
            "control": share["shown_coin"],
            "passed": passed,
        }
    if "reward_model" not in earlier:
        raise SystemExit(f"{method} is paid by the reward model: run reward_model first")
    before = judge.liking(None)
    steps = ("--max-steps", str(options.steps))
    paid = noisy.train(method, *steps, "--reward", f"model:{earlier['reward_model']['accuracy']['run']}")
    tossed = noisy.train(method, *steps, "--reward", "benchmarks.methods.coin")
    learnt, control = judge.rise(before, paid), judge.rise(before, tossed)
    passed = learnt["rise"]["value"] >= 0.15 and control["rise"]["value"] < 0.05
    return {"liking": learnt, "control": control, "passed": passed}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default=",".join(METHODS), help=f"of {', '.join(METHODS)} (default all)")
    parser.add_argument("--home", type=Path, help="folder to keep, and to go on in (default: temporary)")
    parser.add_argument("--scenarios", type=int, default=400, help="scenarios with feedback (default 400)")
    parser.add_argument("--holdout", type=int, default=200, help="unseen scenarios judged on (default 200)")
    parser.add_argument("--steps", type=int, default=16, help="steps of ppo and grpo (default 16)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--correct", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.correct:
        correct(options)
        return
    with tempfile.TemporaryDirectory() as temporary:
        home = (options.home or Path(temporary)).absolute()
        home.mkdir(parents=True, exist_ok=True)
        kept = home / "results.json"
        results: dict[str, Any] = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
        for method in options.methods.split(","):
            if method not in results:
                results[method] = measured(method, home, options, results)
                kept.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
                print(json.dumps({method: results[method]}), file=sys.stderr, flush=True)
        from rl.training.hardware import detect

        facts = {
            "benchmark": "methods",
            "machine": detect().as_dict(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("torch", "transformers", "peft", "trl")},
            **{name: getattr(options, name) for name in ("scenarios", "holdout", "steps", "seed")},
            "methods": results,
            "passed": all(result["passed"] for result in results.values()),
        }
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
