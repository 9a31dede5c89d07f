"""Figures of a base model that has not learnt anybody's taste: valid answers, and no preference among the options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from rl.agents import AGENTS
from rl.agents.base import Agent, ChoiceAgent
from rl.training.policy import LoadedPolicy, generate, load_policy
from rl.training.scoring import score_responses
from tools.bundled_model.unseen import BLIND, ENUM, UNSEEN, Unseen


def base_model_measure(path: Path, *, prompts: int = 100, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Figures of the model at `path` on the built-in agents' scenarios and on agents it knows nothing of.

    Slug -> figures: prompts; valid_greedy and valid_sampled (temperature 1), shares of answers the agent can act on
    as they are written, without a grammar. Of agents that choose one option besides: listed_mass, the mean
    probability of writing exactly one of the options; evenness, how many options the answers are spread over as a
    share of those listed (exp of the entropy, 1: no taste). preference_accuracy, how often the simulated rater's
    better option (worth at least 0.5) is more likely than a worse one (0.5: no preference), where there is a rater.
    """
    policy = load_policy(str(path))
    figures = {slug: _agent_measure(policy, agent, prompts, seed) for slug, agent in sorted(AGENTS.items())}
    for unseen in (*UNSEEN, *BLIND):
        figures[unseen.slug] = _unseen_measure(policy, unseen, max(1, prompts // 2), seed)
    return figures


def _agent_measure(policy: LoadedPolicy, agent: Agent, prompts: int, seed: int) -> dict[str, Any]:
    scenarios = agent.scenarios()
    chosen = Random(f"measure/{seed}").sample(scenarios, min(prompts, len(scenarios)))
    cases = [(agent, dict(scenario.state)) for scenario in chosen]
    figures = _validity(policy, cases, seed)
    if isinstance(agent, ChoiceAgent):
        figures |= _taste(policy, [(agent, state, agent.candidates(state)) for agent, state in cases])
    return figures


def _unseen_measure(policy: LoadedPolicy, unseen: Unseen, prompts: int, seed: int) -> dict[str, Any]:
    random = Random(f"measure/{seed}/{unseen.slug}")
    drawn = [unseen.prompt(random) for _ in range(prompts)]
    figures = {"kind": unseen.kind} | _validity(policy, [(agent, state) for agent, state, _ in drawn], seed)
    if unseen.kind == ENUM:
        respond = ChoiceAgent(slug="", title="", description="", answer_key=unseen.key).respond
        figures |= _taste(policy, [(agent, s, [respond(option) for option in o]) for agent, s, o in drawn])
    return figures


def _validity(
    policy: LoadedPolicy, cases: Sequence[tuple[Agent, dict[str, Any]]], seed: int
) -> dict[str, Any]:
    asked = [agent.render(state) for agent, state in cases]
    figures: dict[str, Any] = {"prompts": len(cases)}
    for name, temperature in (("valid_greedy", 0.0), ("valid_sampled", 1.0)):
        answers = generate(
            policy,
            asked,
            max_new_tokens=cases[0][0].max_new_tokens,
            temperature=temperature,
            seed=seed,
            batch_size=64,
        )
        usable = [
            agent.is_valid(answer.text, state) for answer, (agent, state) in zip(answers, cases, strict=True)
        ]
        figures[name] = sum(usable) / len(usable)
    return figures


def _taste(
    policy: LoadedPolicy, cases: Sequence[tuple[Agent, dict[str, Any], list[str]]]
) -> dict[str, float]:
    items = [(agent.render(state), option) for agent, state, options in cases for option in options]
    scores = iter(score_responses(policy, items, batch_size=64))
    mass = evenness = 0.0
    right: list[bool] = []
    for agent, state, options in cases:
        logps = [next(scores).logp for _ in options]
        shares = [math.exp(logp) for logp in logps]
        mass += sum(shares)
        total = sum(shares) or 1.0
        entropy = -sum(share / total * math.log(share / total) for share in shares if share)
        evenness += math.exp(entropy) / len(options)
        try:
            preferences = [agent.hidden_preference(state, option) for option in options]
        except NotImplementedError:
            continue
        right += [
            logps[good] > logps[bad]
            for good in range(len(preferences))
            for bad in range(len(preferences))
            if preferences[good] >= 0.5 > preferences[bad]
        ]
    figures = {"listed_mass": mass / len(cases), "evenness": evenness / len(cases)}
    return figures | ({"preference_accuracy": sum(right) / len(right)} if right else {})
