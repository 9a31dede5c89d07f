"""Choice among the policies of one training by their results on the eval split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev

from backend.bodies import Answer
from rl.agents.base import Agent
from rl.datasets.feedback_types import Row
from rl.datasets.held_out_evidence import eval_rows
from rl.evaluation.sides import side_load
from rl.gates.evidence_kinds import PAIRS
from rl.models import Policy
from rl.models.agent_definitions import agent_served
from rl.registry.integrity import adapter_folder


class CandidateScore(Answer):
    """A policy's result on the eval split."""

    policy: str
    share: float
    """Share of the prompts where its answer is one that people wrote, preferred or liked; of free text, which has no
    linear policy, of the pairs whose preferred answer it holds likelier. An answer that nobody knows counts half; where
    answers are a closed set or structured, and a right one is known, it is wrong."""
    compared: int
    """Prompts, or pairs."""
    kept: bool


def candidates_compared(
    policies: Sequence[Policy], progress: Callable[[int, int, str], None] | None = None
) -> list[CandidateScore]:
    """Compare policies of one agent on its eval split, as they are served; the last is kept unless another is ahead by
    more than the standard error of their difference. The holdout is not looked at."""
    agent = agent_served(policies[0].agent)
    rows = eval_rows(agent.slug)
    by_answers = agent.discrete or any(policy.kind == Policy.Kind.LINEAR for policy in policies)
    values: list[list[float]] = []
    for number, policy in enumerate(policies):
        if progress is not None:
            progress(0, 0, f"comparing candidates on the eval split, {number + 1} of {len(policies)}")
        values.append(_eval_values(policy, rows, agent, by_answers=by_answers))
    best = len(policies) - 1
    for place in range(len(policies) - 1):
        ahead = [one - other for one, other in zip(values[place], values[best], strict=True)]
        # one prompt is exactly one standard error, but for rounding
        if len(ahead) > 1 and mean(ahead) > 1.001 * stdev(ahead) / len(ahead) ** 0.5:
            best = place
    return [
        CandidateScore(
            policy=policy.name, share=mean(own) if own else 0.0, compared=len(own), kept=place == best
        )
        for place, (policy, own) in enumerate(zip(policies, values, strict=True))
    ]


def _eval_values(
    policy: Policy, rows: Mapping[str, Sequence[Row]], agent: Agent, *, by_answers: bool
) -> list[float]:
    """Value of the policy's answer to each eval prompt, else of its preference in each pair."""
    from rl.training.chat_template import prompt_messages, response_text
    from rl.training.held_out import AnswerJudge, held_out_prompts
    from rl.training.scoring import score_responses
    from rl.training.sides import LinearSide, generate_answers

    side = side_load(adapter_folder(policy), policy.base_model, agent)
    if by_answers or isinstance(side, LinearSide):
        prompts = held_out_prompts(rows)[:MOST_COMPARED]
        states = [prompt.row.get("state") for prompt in prompts]
        answers = generate_answers(side, [prompt.messages for prompt in prompts], agent, states=states)
        judge = AnswerJudge(agent)
        _, values = judge.judged(prompts, answers)
        return [
            0.0 if agent.discrete and prompt.expected and not judge.is_known(prompt, answer.text) else value
            for prompt, answer, value in zip(prompts, answers, values, strict=True)
        ]
    pairs = side.encoder.written(list(rows.get(PAIRS, ())))[0][:MOST_COMPARED]
    items = [
        (prompt_messages(row, number), response_text(row, name, number))
        for number, row in enumerate(pairs)
        for name in ("chosen", "rejected")
    ]
    scores = iter(score_responses(side, items) if items else ())
    return [float(next(scores).logp > next(scores).logp) for _ in pairs]


MOST_COMPARED = 100
"""Eval prompts, or pairs, that candidates are compared on."""
