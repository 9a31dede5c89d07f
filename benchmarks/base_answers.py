"""Share of valid answers of the bundled base: written freely, and under the agent's schema as the gateway asks.

    python benchmarks/base_answers.py [--prompts 40] [--model bundled]

Built-in agents, and made-up ones that the base was never taught (`tools.bundled_model.unseen`; somebody who knew
nothing of its curriculum wrote the last twelve). Freely: without a grammar, greedily and at temperature 1. Under the
schema: llama.cpp in this process, as the gateway and `/api/decide/` have it.
Prints a markdown table.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "backend.settings")

import django

django.setup()

from rl.agents import AGENTS  # noqa: E402
from rl.agents.base import Agent  # noqa: E402
from rl.agents.worlds import TEAM, scenarios_of  # noqa: E402
from rl.bundled_models import resolve_base_model  # noqa: E402
from rl.export.gguf import writer_for  # noqa: E402
from rl.export.source import source_open  # noqa: E402
from rl.serving.base import Ask  # noqa: E402
from rl.serving.llama import LlamaPolicy  # noqa: E402
from rl.training.policy import generate, load_policy  # noqa: E402
from tools.bundled_model.unseen import BLIND, UNSEEN  # noqa: E402

Cases = Sequence[tuple[Agent, dict[str, Any]]]


def agents_asked(prompts: int) -> dict[str, Cases]:
    """Agent -> prompts: of a built-in one its scenarios, and those of the simulated tastes, which tell of a situation;
    of a made-up one prompts drawn anew."""
    found: dict[str, Cases] = {}
    for slug, agent in sorted(AGENTS.items()):
        scenarios = agent.scenarios()
        drawn = Random(f"answers/{slug}").sample(scenarios, min(prompts, len(scenarios)))
        found[slug] = [(agent, dict(scenario.state)) for scenario in drawn]
        if agent.world is not None:
            told = scenarios_of(agent, TEAM, prompts, seed=1)
            found[f"{slug} (in a situation)"] = [(agent, dict(scenario.state)) for scenario in told]
    for unseen in (*UNSEEN, *BLIND):
        random = Random(f"answers/{unseen.slug}")
        found[f"{unseen.slug} ({unseen.kind})"] = [unseen.prompt(random)[:2] for _ in range(prompts)]
    return found


def share_valid(texts: Sequence[str], cases: Cases) -> float:
    valid = [agent.is_valid(text, state) for text, (agent, state) in zip(texts, cases, strict=True)]
    return sum(valid) / len(valid)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--model", default="bundled")
    options = parser.parse_args()
    base = load_policy(options.model)
    print(
        "| agent | freely, greedy | freely, at temperature 1 | under its schema, greedy | at temperature 1 |"
    )
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(prefix="ratchet-base-answers-") as folder:
        file = Path(folder) / "base.gguf"
        writer_for(source_open(resolve_base_model(options.model), None)).write(
            file, "f16", "base", lambda *_: None
        )
        with LlamaPolicy(file, threads=1) as served:
            for name, cases in agents_asked(options.prompts).items():
                shares = []
                for temperature in (0.0, 1.0):
                    written = generate(
                        base,
                        [agent.render(state) for agent, state in cases],
                        max_new_tokens=cases[0][0].max_new_tokens,
                        temperature=temperature,
                    )
                    shares.append(share_valid([answer.text for answer in written], cases))
                for temperature in (0.0, 1.0):
                    answers = [
                        served.answer(
                            Ask(
                                agent.render(state),
                                max_tokens=agent.max_new_tokens,
                                temperature=temperature,
                                seed=number,
                                response_schema=agent.response_schema(state),
                            )
                        ).text
                        for number, (agent, state) in enumerate(cases)
                    ]
                    shares.append(share_valid(answers, cases))
                print(f"| {name} | " + " | ".join(f"{share:.0%}" for share in shares) + " |", flush=True)


if __name__ == "__main__":
    main()
