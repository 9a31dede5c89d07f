"""Is a policy better? Preference accuracy, valid answers and reward on held-out pairs, alone or against another."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.agents.base import Agent, InvalidResponse, Message
from rl.statistics import mcnemar_exact, mean_interval, paired_difference, wilson_interval
from rl.training.encoding import prompt_messages, response_text
from rl.training.policy import Generation, LoadedPolicy, generate
from rl.training.result import TrainingRefused
from rl.training.scoring import ResponseScore, head_check, score_pairs, score_responses

Reward = Callable[[Mapping[str, Any], str], float]
"""(held-out row, generated answer) -> reward in [0, 1]."""

MAX_ERRORS = 20
"""Sample errors kept."""

CHUNK = 64
"""Pairs or prompts worked on between two calls of `progress`."""


@dataclass
class _Prompt:
    """One distinct held-out prompt and what people thought of the responses to it."""

    messages: list[Message]
    row: Mapping[str, Any]
    liked: list[str] = field(default_factory=list)
    disliked: list[str] = field(default_factory=list)


@dataclass
class _Side:
    """What one policy did with the held-out pairs."""

    scores: list[tuple[ResponseScore, ResponseScore]]
    answers: list[Generation]
    problems: list[str | None]
    """Per answer, why it is not valid."""
    rewards: list[float]

    @property
    def prefers(self) -> list[bool]:
        return [chosen.logp > rejected.logp for chosen, rejected in self.scores]


def evaluate_policy(
    policy: LoadedPolicy,
    pairs: Sequence[Mapping[str, Any]],
    *,
    agent: Agent,
    against: LoadedPolicy | str | None = None,
    max_samples: int | None = None,
    generate_samples: int = 64,
    reward: Reward | None = None,
    batch_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Evaluate on held-out rows {"prompt", "chosen", "rejected", "state"?}; JSON-serialisable.

    - preference_accuracy: share of pairs where log p(chosen | prompt) > log p(rejected | prompt), summed over the
      tokens, not length-normalised; a tie counts as not preferred. Beside it the same per token.
    - valid_rate: share of greedy answers, one to each of the first `generate_samples` distinct prompts, that the
      agent can act on; with a row's `state`, the choice must also be one it lists.
    - average_reward: mean of `reward(row, answer)` over those answers. Without a reward function: 1 for an answer
      people preferred for that prompt, 0 for one they only rejected or that is not valid, 0.5 for any other.
    - ground_truth: share of answers that are right, over the prompts whose right answer the agent knows, or None.

    Shares are {"value", "low", "high", "n"} with 95 % intervals: Wilson for shares, Student's t for the reward.
    `against` is "base" (the same model without its adapter) or another policy; both then get the same prompts, and
    `comparison` holds the other's figures, the paired difference (Newcombe) and the exact McNemar p. `progress` is
    called with (done, total) work items. With a comparison, `evidence` holds what a gate asks: `cases`, one per pair,
    and `answers`, one per prompt asked. Raises TrainingRefused without a pair.
    """
    rows = list(pairs)[:max_samples]
    if not rows:
        raise TrainingRefused("expected at least one held-out pair to evaluate on, found none")
    if isinstance(against, str) and against != "base":
        raise ValueError(f"expected against='base' or a loaded policy, found {against!r}")
    try:
        prompts = _prompts(rows)
    except ValueError as error:
        raise TrainingRefused(str(error)) from error
    asked = prompts[: max(generate_samples, 0)]
    sides = 2 if against is not None else 1
    tick = _Ticker(progress, sides * (len(rows) + len(asked)))
    head_check(policy)
    judge = _Judge(agent, reward)
    own = _side(policy, rows, asked, judge, batch_size, tick)
    outcome: dict[str, Any] = {
        "base_model": policy.base_model,
        "samples": len(rows),
        "prompts_answered": len(asked),
        **_figures(own),
        "length_normalised": False,
        "ground_truth": judge.ground_truth(asked, own.answers),
        "truncated": sum(score.truncated for pair in own.scores for score in pair),
        "errors": _errors(rows, asked, own, judge),
    }
    if against is not None:
        if isinstance(against, LoadedPolicy):
            head_check(against)
            other, name = (
                _side(against, rows, asked, judge, batch_size, tick),
                against.adapter or against.base_model,
            )
        else:
            with policy.without_adapter():
                other, name = _side(policy, rows, asked, judge, batch_size, tick), "base"
        outcome["comparison"] = _comparison(name, own, other)
        outcome["comparison"]["ground_truth"] = judge.ground_truth(asked, other.answers)
        outcome["evidence"] = _evidence(rows, asked, own, other)
    return outcome


def _prompts(rows: Sequence[Mapping[str, Any]]) -> list[_Prompt]:
    """Distinct prompts in the order of their first pair."""
    found: dict[str, _Prompt] = {}
    for number, row in enumerate(rows):
        messages = prompt_messages(row, number)
        key = json.dumps(messages, sort_keys=True)
        prompt = found.setdefault(key, _Prompt(messages, row))
        prompt.liked.append(response_text(row, "chosen", number))
        prompt.disliked.append(response_text(row, "rejected", number))
    return list(found.values())


class _Judge:
    """Decides whether an answer is valid, the same as another, right, and what it is worth."""

    def __init__(self, agent: Agent, reward: Reward | None) -> None:
        self.agent, self.custom = agent, reward

    def problem(self, prompt: _Prompt, answer: Generation) -> str | None:
        try:
            self.agent.parse(answer.text, prompt.row.get("state"))
        except InvalidResponse as error:
            ending = " (cut at the length limit)" if answer.finish_reason == "length" else ""
            return f"{error}{ending}"
        return None

    def action(self, response: str) -> Any:
        """What a response does: two texts that do the same are the same answer."""
        if self.agent.structured:
            try:
                return json.dumps(self.agent.parse(response), sort_keys=True)
            except InvalidResponse:
                pass  # compared as text: it can only equal itself
        return response.strip()

    def opinion(self, prompt: _Prompt, answer: str) -> float:
        done = self.action(answer)
        liked = done in {self.action(response) for response in prompt.liked}
        disliked = done in {self.action(response) for response in prompt.disliked}
        return 0.5 if liked == disliked else float(liked)

    def reward(self, prompt: _Prompt, answer: str, problem: str | None) -> float:
        if self.custom is not None:
            return float(self.custom(prompt.row, answer))
        return 0.0 if problem is not None else self.opinion(prompt, answer)

    def ground_truth(
        self, prompts: Sequence[_Prompt], answers: Sequence[Generation]
    ) -> dict[str, Any] | None:
        right = known = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            state = prompt.row.get("state")
            truth = self.agent.ground_truth(state) if state is not None else None
            if truth:
                known += 1
                right += self.action(answer.text) in {self.action(response) for response in truth}
        return wilson_interval(right, known).as_dict() if known else None


class _Ticker:
    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, items: int) -> None:
        self.done += items
        if self.progress is not None:
            self.progress(self.done, self.total)


def _side(
    policy: LoadedPolicy,
    rows: Sequence[Mapping[str, Any]],
    asked: Sequence[_Prompt],
    judge: _Judge,
    batch_size: int,
    tick: _Ticker,
) -> _Side:
    scores: list[tuple[ResponseScore, ResponseScore]] = []
    for start in range(0, len(rows), CHUNK):
        part = rows[start : start + CHUNK]
        scores += score_pairs(policy, part, batch_size=batch_size)
        tick(len(part))
    answers: list[Generation] = []
    for start in range(0, len(asked), CHUNK):
        chunk = asked[start : start + CHUNK]
        answers += generate(
            policy,
            [prompt.messages for prompt in chunk],
            max_new_tokens=judge.agent.max_new_tokens,
            batch_size=batch_size,
        )
        tick(len(chunk))
    problems = [judge.problem(prompt, answer) for prompt, answer in zip(asked, answers, strict=True)]
    rewards = [
        judge.reward(prompt, answer.text, problem)
        for prompt, answer, problem in zip(asked, answers, problems, strict=True)
    ]
    return _Side(scores, answers, problems, rewards)


def _figures(side: _Side) -> dict[str, Any]:
    per_token = sum(chosen.mean_logp > rejected.mean_logp for chosen, rejected in side.scores)
    valid = sum(problem is None for problem in side.problems)
    return {
        "preference_accuracy": wilson_interval(sum(side.prefers), len(side.scores)).as_dict(),
        "preference_accuracy_length_normalised": wilson_interval(per_token, len(side.scores)).as_dict(),
        "valid_rate": wilson_interval(valid, len(side.problems)).as_dict(),
        "average_reward": mean_interval(side.rewards, bounds=(0.0, 1.0)).as_dict(),
        "reward_std": statistics.stdev(side.rewards) if len(side.rewards) > 1 else None,
    }


def _comparison(name: str, own: _Side, other: _Side) -> dict[str, Any]:
    verdicts = list(zip(own.prefers, other.prefers, strict=True))
    both, neither = verdicts.count((True, True)), verdicts.count((False, False))
    b, c = verdicts.count((True, False)), verdicts.count((False, True))
    gains = [mine - theirs for mine, theirs in zip(own.rewards, other.rewards, strict=True)]
    return {
        "against": name,
        **_figures(other),
        "difference": paired_difference(both, b, c, neither).as_dict(),
        "p_value": mcnemar_exact(b, c),
        "b": b,
        "c": c,
        "average_reward_difference": mean_interval(gains, bounds=(-1.0, 1.0)).as_dict(),
    }


SHORT_CHARS, LONG_CHARS = 400, 2000
"""Prompts below and from which a slice of short and of long prompts begins."""

TOPICS = ("topic", "category", "intent")
"""Keys of a state that name what the prompt is about."""


def slices_of(row: Mapping[str, Any]) -> list[str]:
    """What kinds of case a held-out pair is: its tags, topic, prompt length, and which response is longer."""
    found = [f"tag:{tag}" for tag in dict.fromkeys(row.get("tags") or ())]
    state = row.get("state")
    if isinstance(state, Mapping):
        found += [f"topic:{state[key]}" for key in TOPICS if isinstance(state.get(key), str)]
    length = sum(len(message["content"]) for message in prompt_messages(row, 0))
    found.append(f"prompt:{'short' if length < SHORT_CHARS else 'medium' if length < LONG_CHARS else 'long'}")
    chosen, rejected = (len(response_text(row, side, 0)) for side in ("chosen", "rejected"))
    if max(chosen, rejected) > 1.2 * min(chosen, rejected):
        found.append("preferred:longer" if chosen > rejected else "preferred:shorter")
    return found


def _evidence(
    rows: Sequence[Mapping[str, Any]], asked: Sequence[_Prompt], own: _Side, other: _Side
) -> dict[str, Any]:
    """Per pair and per answer what both sides did: what the gate's rules are asked about."""
    return {
        "cases": [
            {
                "prompt_hash": row.get("prompt_hash", ""),
                "own": mine,
                "other": theirs,
                "slices": slices_of(row),
            }
            for row, mine, theirs in zip(rows, own.prefers, other.prefers, strict=True)
        ],
        "answers": [
            {
                "prompt_hash": prompt.row.get("prompt_hash", ""),
                "messages": prompt.messages,
                "answer": own.answers[i].text,
                "other_answer": other.answers[i].text,
                "valid": own.problems[i] is None,
                "other_valid": other.problems[i] is None,
                "reward": own.rewards[i],
                "other_reward": other.rewards[i],
            }
            for i, prompt in enumerate(asked)
        ],
    }


def kl_to_base(policy: LoadedPolicy, answers: Sequence[tuple[Sequence[Message], str]]) -> float | None:
    """Nats per token by which a policy's own answers are more likely to it than to its base: an estimate of its KL.

    The k1 estimator, mean of log p(y) - log base(y), over the policy's own answers; greedy ones here, so it leans high.
    Source: Schulman, Approximating KL Divergence (2020). None without an adapter or an answer.
    """
    items = [(list(messages), text) for messages, text in answers if text]
    if policy.adapter is None or not items:
        return None
    own, base = score_responses(policy, items), score_responses(policy, items, adapter=False)
    tokens = sum(score.tokens for score in own)
    return sum(mine.logp - theirs.logp for mine, theirs in zip(own, base, strict=True)) / max(tokens, 1)


def golden_check(
    policy: LoadedPolicy, agent: Agent, cases: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Answer each {"name", "messages", "state"?, "accepted", "forbidden"} greedily and say whether it is right.

    Right is an answer the agent can act on that does what one of `accepted` does (any, where there are none) and
    nothing that `forbidden` lists.
    """
    answers = generate(policy, [case["messages"] for case in cases], max_new_tokens=agent.max_new_tokens)
    judge, found = _Judge(agent, None), []
    for case, answer in zip(cases, answers, strict=True):
        prompt = _Prompt(list(case["messages"]), case)
        done, why = judge.action(answer.text), judge.problem(prompt, answer) or ""
        if not why and case["accepted"] and done not in {judge.action(text) for text in case["accepted"]}:
            why = "not one of the accepted answers"
        if not why and done in {judge.action(text) for text in case["forbidden"]}:
            why = "a forbidden answer"
        found.append({"name": case["name"], "passed": not why, "answer": answer.text, "why": why})
    return found


def _errors(
    rows: Sequence[Mapping[str, Any]], asked: Sequence[_Prompt], side: _Side, judge: _Judge
) -> list[dict[str, Any]]:
    """Sample errors, the gravest kind first: answers that are not valid, answers people rejected, wrong preferences."""
    invalid, rejected, misjudged = [], [], []
    for prompt, answer, problem in zip(asked, side.answers, side.problems, strict=True):
        error = {
            "prompt": prompt.messages[-1]["content"],
            "answer": answer.text,
            "expected": prompt.liked[0],
        }
        if problem is not None:
            invalid.append({**error, "reason": f"not a valid answer: {problem}"})
        elif judge.opinion(prompt, answer.text) == 0.0:
            rejected.append({**error, "reason": "people rejected this answer"})
    for number, (row, (good, bad)) in enumerate(zip(rows, side.scores, strict=True)):
        if not good.logp > bad.logp:
            misjudged.append(
                {
                    "prompt": prompt_messages(row, number)[-1]["content"],
                    "answer": response_text(row, "rejected", number),
                    "expected": response_text(row, "chosen", number),
                    "reason": f"holds the rejected response {bad.logp - good.logp:.2f} nats more likely",
                }
            )
    return [*invalid, *rejected, *misjudged][:MAX_ERRORS]
