"""A file of prompts with tests -> GRPO: does the share of tests that pass rise on prompts it never saw?

    python benchmarks/grpo_code.py [--constants 99] [--held-out 100] [--shown 40] [--sft-steps 100] [--steps 90]
        [--learning-rate 8e-4] [--seed 0]

A tiny programming world: "f(x) is x plus 7" is answered by `def f(x): return x + 7`; two names, three operators,
constants from 2 to `--constants`, four tests each that are called from another process. The bundled model cannot write
code, so `train_sft` on `--shown` solutions comes first (GRPO on the bare base is refused by its probe, which is
printed). Then GRPO on prompts with tests alone. Greedy answers to `--held-out` prompts that neither saw are tested
after each stage. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rl.recipes import GRPO_CONFIG, SFT_CONFIG  # noqa: E402
from rl.rewards.answers import rows_rewarded  # noqa: E402
from rl.rewards.code_execution import CodeExecutionReward  # noqa: E402
from rl.statistics import mean_interval, paired_difference, wilson_interval  # noqa: E402
from rl.training.grpo import GRPOTrainer  # noqa: E402
from rl.training.policy import generate, load_policy  # noqa: E402
from rl.training.result import TrainingRefused  # noqa: E402
from rl.training.sft import SFTTrainer  # noqa: E402

WORDS = {"plus": "+", "minus": "-", "times": "*"}
TOKENS = 32


def world(seed: int, largest: int) -> list[dict[str, Any]]:
    """Every prompt with its solution and its tests, in an order drawn by the seed."""
    random = Random(seed)
    rows = []
    for word, sign in WORDS.items():
        for constant in range(2, largest + 1):
            for name in ("f", "g"):
                values = random.sample(range(-50, 51), 4)
                expected = [eval(f"{x} {sign} {constant}") for x in values]
                rows.append(
                    {
                        "prompt": [{"role": "user", "content": f"{name}(x) is x {word} {constant}"}],
                        "completion": f"def {name}(x): return x {sign} {constant}",
                        "facts": {
                            "tests": [
                                {"call": f"{name}({x})", "expected": value}
                                for x, value in zip(values, expected, strict=True)
                            ]
                        },
                    }
                )
    random.shuffle(rows)
    return rows


def passed(rows: Sequence[dict[str, Any]], adapter: str | None) -> tuple[list[bool], list[float]]:
    """Of greedy answers: whether all tests pass, and the share that does."""
    policy = load_policy("bundled", adapter)
    answers = [
        answer.text for answer in generate(policy, [row["prompt"] for row in rows], max_new_tokens=TOKENS)
    ]
    rewards = rows_rewarded([CodeExecutionReward(enabled=True)], rows, answers, agent="coder")
    return [bool(reward.passed) for reward in rewards], [reward.value or 0.0 for reward in rewards]


def told(found: tuple[list[bool], list[float]]) -> dict[str, Any]:
    solved, shares = found
    return {
        "solved": wilson_interval(sum(solved), len(solved)).as_dict(),
        "tests_passed": mean_interval(shares, bounds=(0.0, 1.0)).as_dict(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--constants", type=int, default=99, help="largest constant: six prompts each")
    parser.add_argument("--held-out", type=int, default=100, help="prompts that are only tested")
    parser.add_argument("--shown", type=int, default=40, help="solutions that train_sft sees")
    parser.add_argument("--sft-steps", type=int, default=100)
    parser.add_argument("--steps", type=int, default=90, help="steps of GRPO")
    parser.add_argument("--learning-rate", type=float, default=8e-4, help="of GRPO")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows, aside = world(arguments.seed, arguments.constants), arguments.held_out
    held_out, shown, prompts = (
        rows[:aside],
        rows[aside : aside + arguments.shown],
        [{"prompt": row["prompt"], "facts": row["facts"]} for row in rows[aside:]],
    )
    recipe = GRPO_CONFIG["cpu"].with_knobs(
        max_steps=arguments.steps, max_new_tokens=TOKENS, max_length=128, seed=arguments.seed, epochs=100.0
    )
    reward = CodeExecutionReward(enabled=True)
    result: dict[str, Any] = {"asked": vars(arguments), "prompts": len(prompts)}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        try:
            GRPOTrainer(recipe, output_dir=home / "bare", agent="coder", rewards=[reward]).train(prompts)
            result["bare_base"] = "trained"
        except TrainingRefused as refusal:
            result["bare_base"] = str(refusal)
        sft = SFTTrainer(
            SFT_CONFIG["cpu"].with_knobs(max_steps=arguments.sft_steps, seed=arguments.seed),
            output_dir=home / "sft",
            agent="coder",
        ).train(shown)
        began = time.perf_counter()
        grpo = GRPOTrainer(
            recipe.with_knobs(start_from=sft.checkpoint, beta=0.0, learning_rate=arguments.learning_rate),
            output_dir=home / "grpo",
            agent="coder",
            rewards=[reward],
        ).train(prompts)
        result["grpo_s"] = round(time.perf_counter() - began, 1)
        stages = {
            "base": passed(held_out, None),
            "sft": passed(held_out, sft.checkpoint),
            "grpo": passed(held_out, grpo.checkpoint),
        }
    result |= {name: told(found) for name, found in stages.items()}
    before, after = stages["sft"][0], stages["grpo"][0]
    cells = [
        sum(pair == cell for pair in zip(after, before, strict=True))
        for cell in ((True, True), (True, False), (False, True), (False, False))
    ]
    result["gain_of_grpo"] = paired_difference(*cells).as_dict()
    result |= {
        "reward_first_and_last": [grpo.history["reward"][0], grpo.history["reward"][-1]],
        "kl": grpo.metrics.get("kl"),
        "steps": grpo.steps,
        "stopped_early": grpo.stopped_early,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
