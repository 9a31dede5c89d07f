"""PPO and GRPO on an agent whose answers the bundled base never writes by itself: sampled within its form, and freely.

    python benchmarks/constrained_rollouts.py [--methods ppo,grpo] [--kinds enum,list,order,object] [--free]
                                              [--prompts 160] [--unseen 100] [--seed 0] [--json]

The agent is nobody's: reports of machines in a workshop, answered under keys that no prompt names with a part, the
parts to check, the order to check them in, or a part with its urgency and whether the line must stop. The taste depends
on the symptom. Recipes are those of a laptop (preset `cpu`); the reward is the taste itself, in [-2, 2]. Judged is the
taste, in [0, 1], of answers at temperature 1 to unseen reports, written within the schema as they are served, and
freely. --free trains a second time with `constrained_decoding=false`. Prints a markdown table, or JSON lines.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rl.agents import AGENTS  # noqa: E402
from rl.agents.base import InvalidResponse  # noqa: E402
from rl.agents.template import TemplateAgent  # noqa: E402
from rl.rewards.base import RewardSample, RewardValue  # noqa: E402

PARTS = ("pump", "valve", "Zahnrad", "dial 4", "blue hose")
SYMPTOMS = ("rust", "leak", "noise", "heat", "smell", "shake", "dust", "stall")
HOURS = 40
ORDERS = {word: Random(f"workshop/{word}").sample(PARTS, len(PARTS)) for word in SYMPTOMS}
"""Parts of each symptom, the likeliest culprit first."""
PART: dict[str, Any] = {"enum": list(PARTS)}
PROPERTIES: dict[str, dict[str, Any]] = {
    "enum": {"Bauteil": PART},
    "list": {"check_these": {"type": "array", "items": PART, "uniqueItems": True, "minItems": 1}},
    "order": {
        "reihenfolge": {"type": "array", "items": PART, "uniqueItems": True, "minItems": 5, "maxItems": 5}
    },
    "object": {
        "part": PART,
        "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
        "stop_line": {"type": "boolean"},
    },
}
SAMPLING_SEED = 3


class Workshop:
    """An agent of one kind, and what people think of its answers."""

    name = "taste"

    def __init__(self, kind: str) -> None:
        self.kind = kind
        schema = {
            "type": "object",
            "properties": PROPERTIES[kind],
            "required": list(PROPERTIES[kind]),
            "additionalProperties": False,
        }
        self.agent = TemplateAgent(
            slug="workshop",
            title="Workshop",
            description="",
            system_prompt="You are the workshop helper of the plant. Reply in JSON as the shop schema says.",
            template="Machine report: {symptom} since {hours} h.\nParts: " + " / ".join(PARTS),
            schema=schema,
            max_new_tokens=64,
        )

    def taste(self, state: Mapping[str, Any], response: str) -> float:
        """Liking of an answer, in [0, 1]; 0 for one that the agent cannot act on."""
        try:
            answer = self.agent.parse(response, state)
        except InvalidResponse:
            return 0.0
        order, symptom = ORDERS[state["symptom"]], SYMPTOMS.index(state["symptom"])
        if self.kind == "list":  # F1 with the two likeliest
            names, right = set(answer["check_these"]), set(order[:2])
            return 2 * len(names & right) / (len(names) + len(right))
        if self.kind == "order":  # share of pairs in the right order
            places = [order.index(name) for name in answer["reihenfolge"]]
            rights = [a < b for i, a in enumerate(places) for b in places[i + 1 :]]
            return sum(rights) / len(rights)
        if self.kind == "enum":
            return 1 - order.index(answer["Bauteil"]) / 4
        part, urgency = 1 - order.index(answer["part"]) / 4, 1 - abs(answer["urgency"] - 1 - symptom // 2) / 4
        return (part + urgency + (answer["stop_line"] == (symptom % 2 == 0))) / 3

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        """The taste as a reward."""
        return [RewardValue(4 * self.taste(sample.facts["state"], sample.response) - 2) for sample in samples]

    def rows(self, seed: int) -> list[dict[str, Any]]:
        states = [{"symptom": word, "hours": hours} for word in SYMPTOMS for hours in range(1, HOURS + 1)]
        Random(seed).shuffle(states)
        return [{"prompt": self.agent.render(state), "state": state} for state in states]

    def measure(self, adapter: str | None, unseen: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Mean taste of answers within the schema, and valid share of those written freely, in %."""
        from rl.training.hardware import detect
        from rl.training.policy import generate, load_policy

        policy = load_policy("bundled", adapter, hardware=detect())
        prompts, length = [row["prompt"] for row in unseen], self.agent.max_new_tokens
        forms = [self.agent.form_served(row["state"]) for row in unseen]
        within, free = (
            generate(policy, prompts, max_new_tokens=length, temperature=1.0, seed=SAMPLING_SEED, forms=given)
            for given in (forms, None)
        )
        tastes = [self.taste(row["state"], answer.text) for row, answer in zip(unseen, within, strict=True)]
        valid = [
            self.agent.is_valid(answer.text, row["state"]) for row, answer in zip(unseen, free, strict=True)
        ]
        return {
            "taste": 100 * math.fsum(tastes) / len(tastes),
            "valid_as_free_text": 100 * sum(valid) / len(valid),
        }


def train(shop: Workshop, method: str, within: bool, options: argparse.Namespace) -> dict[str, Any]:
    """One training and its measures; `refused` where it says beforehand that nothing can be learnt."""
    from rl.recipes import RECIPES
    from rl.recipes.methods import method_named
    from rl.training.hardware import detect
    from rl.training.result import TrainingRefused

    rows = shop.rows(options.seed)
    unseen, rows = rows[: options.unseen], rows[options.unseen : options.unseen + options.prompts]
    held_out = len(rows) // 8
    recipe = RECIPES[method]["cpu"].with_knobs(seed=options.seed, constrained_decoding=within)
    module, _, name = method_named(method).trainer.partition(":")
    row = {"kind": shop.kind, "method": method, "within": within, "base": shop.measure(None, unseen)}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = getattr(importlib.import_module(module), name)(
            recipe.fit_to_rows(len(rows) - held_out),
            "bundled",
            output_dir=Path(folder),
            agent=shop.agent.slug,
            hardware=detect(),
            rewards=[shop],
        )
        try:
            result = trainer.train(rows[held_out:], rows[:held_out])
        except TrainingRefused as refusal:
            return {**row, "refused": str(refusal)}
        seconds = time.perf_counter() - began
        return {
            **row,
            "trained": shop.measure(result.checkpoint, unseen),
            "steps": result.steps,
            "seconds": seconds,
        }


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| answer | method | sampled | base | trained | valid as free text, before and after |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        before, after = row["base"], row.get("trained")
        figures = (
            f"{after['taste']:.0f} | {before['valid_as_free_text']:.0f}, {after['valid_as_free_text']:.0f}"
            if after
            else f"refused: {row['refused'].partition(',')[0]} | {before['valid_as_free_text']:.0f}"
        )
        sampled = "within the schema" if row["within"] else "freely"
        lines.append(f"| {row['kind']} | {row['method']} | {sampled} | {before['taste']:.0f} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="ppo,grpo")
    parser.add_argument("--kinds", default=",".join(PROPERTIES))
    parser.add_argument("--free", action="store_true", help="also sample freely")
    parser.add_argument("--prompts", type=int, default=160)
    parser.add_argument("--unseen", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for kind in options.kinds.split(","):
        shop = Workshop(kind)
        AGENTS[shop.agent.slug] = shop.agent
        for method in options.methods.split(","):
            for within in (True, False) if options.free else (True,):
                rows.append(train(shop, method, within, options))
                if options.json:
                    print(json.dumps(rows[-1]), flush=True)
    if not options.json:
        print(markdown(rows))


if __name__ == "__main__":
    main()
