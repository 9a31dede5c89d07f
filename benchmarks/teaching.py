"""From how much training on a policy answers otherwise: steps and learning rates, on the bundled model. Prints JSON.

The ratings are simulated. Measured on held-out prompts: the share of greedy answers that differ from the base model's,
and the gain in preference accuracy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def measured(method: str, steps: int, rate: float, held_out: list[dict[str, Any]]) -> dict[str, Any]:
    """One training of so many steps at this peak learning rate, judged against the base model."""
    from rl.agents import get_agent
    from rl.jobs import train
    from rl.jobs.lifecycle import TrainOrder
    from rl.jobs.teachability import rate_sum
    from rl.jobs.trainer import hardware_detect
    from rl.models import TrainingRun
    from rl.recipes import RECIPES
    from rl.registry.service import home_path, policy_get
    from rl.training.evaluate import evaluate_policy
    from rl.training.policy import load_policy

    knobs: dict[str, Any] = {"max_steps": steps, "learning_rate": rate}
    done = train.train(TrainOrder("widgets", method, config="cpu", knobs=knobs, actor="benchmark"))
    policy = policy_get(done["policy"])
    loaded = load_policy(policy.base_model, home_path(policy.adapter_path), hardware=hardware_detect())
    found = evaluate_policy(loaded, held_out, agent=get_agent("widgets"), against="base", generate_samples=40)
    answers = found["evidence"]["answers"]
    recipe = type(RECIPES[method]["cpu"]).from_dict(TrainingRun.objects.get(pk=done["run"]).recipe)
    return {
        "method": method,
        "steps": steps,
        "learning_rate": rate,
        "rows": done["samples"]["train"],
        "moved": float(f"{rate_sum(recipe, steps) * recipe.lora_alpha / recipe.lora_r:.3g}"),
        "answers_changed": sum(a["answer"] != a["other_answer"] for a in answers) / len(answers),
        "accuracy_gain": found["comparison"]["difference"]["value"],
        "n": len(held_out),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenarios", type=int, default=120, help="Simulated prompts (default 120)")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="Optimiser steps")
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-5, 4e-4], help="Peak learning rates")
    parser.add_argument("--methods", nargs="+", default=["dpo", "kto", "sft"], help="Methods")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="teaching-") as home:
        os.environ |= {"RATCHET_HOME": home, "DJANGO_SETTINGS_MODULE": "backend.settings", "DATABASE_URL": ""}
        import django

        django.setup()
        from django.core.management import call_command

        from rl.datasets import prepare_training_dataset
        from rl.management.simulation import simulate

        call_command("migrate", verbosity=0)
        simulate("widgets", scenarios=asked.scenarios, rated=True)
        held_out = list(prepare_training_dataset("widgets").rows("holdout"))
        for method in asked.methods:
            for rate in asked.rates:
                for steps in asked.steps:
                    print(json.dumps(measured(method, steps, rate, held_out)), flush=True)


if __name__ == "__main__":
    main()
