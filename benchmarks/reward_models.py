"""Comparison of reward models on the same feedback: a score head on the bundled base, and a linear one without a base.

    python benchmarks/reward_models.py [--agents filer,...] [--feedback pairs,thumbs] [--prompts 240] [--unseen 100]
                                       [--seed 0] [--json]

Feedback of a simulated rater, one verdict in ten flipped: a pair or two thumbs a prompt, on built-in agents among what
they list (`benchmarks/agents.py`) and on the workshop's forms (`benchmarks/constrained_rollouts.py`), whose answers are
drawn from the schema. Both learn with the settings of a laptop, where architecture `auto` keeps the one that ranks more
of the eval split as the rater did. The figure: of any two answers to an unseen prompt that differ in worth, the share
in which the better one scores higher, ties counted half, in %, mean over prompts with a 95 % interval. 50 is a coin.
Prints a markdown table, or JSON lines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from constrained_rollouts import PROPERTIES, Workshop  # noqa: E402

from rl.agents import AGENTS  # noqa: E402
from rl.agents.base import Agent  # noqa: E402
from rl.agents.worlds import TEAM, scenarios_of  # noqa: E402
from rl.datasets.demonstrations import draw_value  # noqa: E402

NOISE, DRAWN, EVAL_SHARE = 0.1, 6, 0.15
"""Share of flipped verdicts, answers drawn for a prompt of the workshop, and share of the prompts that is watched."""
FEEDBACK = {"pairs": "pairwise", "thumbs": "binary"}
ARCHITECTURES = ("causal", "linear")

State = Mapping[str, Any]


@dataclass(frozen=True)
class World:
    """An agent, prompts of it by their states, the answers that are judged there, and their worth in [0, 1]."""

    agent: Agent
    states: Sequence[State]
    answers: Callable[[State], list[str]]
    worth: Callable[[State, str], float]


def world_of(name: str, prompts: int, seed: int) -> World:
    if name in PROPERTIES:
        shop = Workshop(name)
        schema = shop.agent.response_schema()
        assert schema is not None

        def drawn(state: State) -> list[str]:
            random = Random(f"{name}/{state['symptom']}/{state['hours']}")
            return list(
                dict.fromkeys(
                    json.dumps(draw_value(schema, random), ensure_ascii=False) for _ in range(DRAWN)
                )
            )

        states = [row["state"] for row in shop.rows(seed)][:prompts]
        AGENTS[shop.agent.slug] = shop.agent
        return World(shop.agent, states, drawn, shop.taste)
    agent = AGENTS[name]
    states = [scenario.state for scenario in scenarios_of(agent, TEAM, prompts, seed)]
    return World(agent, states, lambda state: agent.candidates(dict(state)), agent.hidden_preference)


def rated(world: World, states: Sequence[State], feedback: str, random: Random) -> list[dict[str, Any]]:
    """Rows of a rater: a pair of answers that differ in worth, or thumbs on two, up from a worth of one half on."""
    rows = []
    for state in states:
        answers = world.answers(state)
        shown = {"prompt": world.agent.render(dict(state)), "prompt_hash": json.dumps(state, sort_keys=True)}
        one, other = random.sample(answers, 2) if len(answers) > 1 else (answers[0], answers[0])
        flipped = random.random() < NOISE
        if feedback == "pairs":
            if world.worth(state, one) == world.worth(state, other):
                continue
            if (world.worth(state, one) < world.worth(state, other)) != flipped:
                one, other = other, one
            rows.append({**shown, "chosen": one, "rejected": other})
            continue
        for answer in (one, other):
            liked = world.worth(state, answer) >= 0.5
            rows.append({**shown, "completion": answer, "label": liked != (random.random() < NOISE)})
    return rows


def ranked(model: Any, world: World, unseen: Sequence[State]) -> dict[str, Any]:
    """Share of pairs of answers in their order, by prompt."""
    from rl.statistics import mean_interval

    shares = []
    for state in unseen:
        answers, messages = world.answers(state), world.agent.render(dict(state))
        scores = model.scores([(messages, answer) for answer in answers])
        worths = [world.worth(state, answer) for answer in answers]
        pairs = [(a, b) for a, b in itertools.combinations(range(len(answers)), 2) if worths[a] != worths[b]]
        if pairs:
            right = [
                0.5 if scores[a] == scores[b] else (scores[a] > scores[b]) == (worths[a] > worths[b])
                for a, b in pairs
            ]
            shares.append(math.fsum(right) / len(right))
    return mean_interval(shares, bounds=(0.0, 1.0)).as_dict()


def cell(world: World, architecture: str, feedback: str, options: argparse.Namespace) -> dict[str, Any]:
    from rl.recipes import REWARD_MODEL_CONFIG
    from rl.training.hardware import detect
    from rl.training.reward_model import RewardModel, RewardModelTrainer
    from rl.training.reward_scores import ranked_share

    unseen, states = world.states[: options.unseen], world.states[options.unseen :]
    rows = rated(world, states, feedback, Random(f"{world.agent.slug}/{options.seed}/{feedback}"))
    held_out = round(EVAL_SHARE * len(rows))
    recipe = REWARD_MODEL_CONFIG["cpu"].with_knobs(
        seed=options.seed, objective=FEEDBACK[feedback], architecture=architecture
    )
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        trainer = RewardModelTrainer(
            recipe.fit_to_rows(len(rows) - held_out),
            "bundled",
            output_dir=Path(folder),
            agent=world.agent.slug,
            hardware=detect(),
        )
        result = trainer.train(rows[held_out:], rows[:held_out])
        model = RewardModel.load(result.checkpoint, detect())
        found = ranked(model, world, unseen)
        watched, scores = rows[:held_out], model.row_scores(rows[:held_out])
        targets, prompts = (
            [float(row.get("label", True)) for row in watched],
            [row["prompt_hash"] for row in watched],
        )
        found["eval"] = ranked_share(scores, targets, prompts)
    return {"rows": len(rows), "seconds": round(time.process_time() - began, 1), **found}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| agent | feedback | rows | score head on the base | linear | kept by the eval split |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        keeps_linear = (row["linear"]["eval"] or 0.0) >= (row["causal"]["eval"] or 0.0)
        shown = [
            f"{100 * one['value']:.0f} [{100 * one['low']:.0f}, {100 * one['high']:.0f}]"
            for one in (row[name] for name in ARCHITECTURES)
        ]
        kept = "linear" if keeps_linear else "score head"
        lines.append(
            f"| {row['agent']} | {row['feedback']} | {row['linear']['rows']} | {' | '.join(shown)} | {kept} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", default=",".join([*AGENTS, *PROPERTIES]))
    parser.add_argument("--feedback", default=",".join(FEEDBACK))
    parser.add_argument("--prompts", type=int, default=240, help="rated ones; of the workshop at most 220")
    parser.add_argument("--unseen", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for name in options.agents.split(","):
        world = world_of(name, options.prompts + options.unseen, options.seed)
        for feedback in options.feedback.split(","):
            cells = {
                architecture: cell(world, architecture, feedback, options) for architecture in ARCHITECTURES
            }
            rows.append({"agent": name, "feedback": feedback, **cells})
            if options.json:
                print(json.dumps(rows[-1]), flush=True)
    if not options.json:
        print(markdown(rows))


if __name__ == "__main__":
    main()
