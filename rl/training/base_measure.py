"""What a base model can do before it has learnt anybody's taste: valid answers, and no preference among the options."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

from rl.agents import AGENTS
from rl.training.base_corpus import LEARNT
from rl.training.policy import generate, load_policy
from rl.training.scoring import score_responses


def base_model_measure(path: Path, *, prompts: int = 100, seed: int = 0) -> dict[str, dict[str, float]]:
    """What the model at `path` does on scenarios of the agents it was taught to answer; it has learnt no answer.

    Per agent: prompts; valid_greedy and valid_sampled (temperature 1), shares of answers the agent can act on;
    preference_accuracy, how often the simulated rater's better option (worth at least 0.5) is more likely than a
    worse one (0.5: no preference); listed_mass, the mean probability of answering exactly one of the candidates.
    """

    policy = load_policy(str(path))
    figures: dict[str, dict[str, float]] = {}
    for slug in LEARNT:
        agent = AGENTS[slug]
        scenarios = agent.scenarios()
        if not scenarios:
            continue
        chosen = Random(f"measure/{seed}").sample(scenarios, min(prompts, len(scenarios)))
        asked = [agent.render(scenario.state) for scenario in chosen]
        valid = {}
        for name, temperature in (("valid_greedy", 0.0), ("valid_sampled", 1.0)):
            answers = generate(
                policy,
                asked,
                max_new_tokens=agent.max_new_tokens,
                temperature=temperature,
                seed=seed,
                batch_size=64,
            )
            usable = [agent.is_valid(a.text, s.state) for a, s in zip(answers, chosen, strict=True)]
            valid[name] = sum(usable) / len(usable)
        items = [(p, c) for p, s in zip(asked, chosen, strict=True) for c in agent.candidates(s.state)]
        scores = iter(score_responses(policy, items, batch_size=64))
        right: list[bool] = []
        mass = 0.0
        for scenario in chosen:
            worth = [agent.hidden_preference(scenario.state, c) for c in agent.candidates(scenario.state)]
            logps = [next(scores).logp for _ in worth]
            mass += sum(math.exp(logp) for logp in logps)
            right += [
                logps[good] > logps[bad]
                for good in range(len(worth))
                for bad in range(len(worth))
                if worth[good] >= 0.5 > worth[bad]
            ]
        figures[slug] = {
            "prompts": len(chosen),
            **valid,
            "preference_accuracy": sum(right) / len(right),
            "listed_mass": mass / len(chosen),
        }
    return figures
