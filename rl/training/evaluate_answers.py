"""Generated answers on held-out prompts: the prompts, and whether an answer is valid, right, or preferred by people."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.agents.base import Agent, InvalidResponse, Message
from rl.agents.fields import answer_action, fields_right, json_read
from rl.datasets.feedback_types import NEUTRAL
from rl.gates.evidence_kinds import CORRECTIONS, LABELS, OUTCOMES, PAIRS
from rl.statistics import wilson_interval
from rl.training.encoding import prompt_messages, response_text
from rl.training.linear_side import LinearSide
from rl.training.policy import Generation, LoadedPolicy, generate
from rl.training.scoring import ResponseScore, score_responses

Reward = Callable[[Mapping[str, Any], str], float]
"""(held-out row, generated answer) -> reward in [0, 1]."""

MAX_ERRORS = 20
"""Sample errors kept."""

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
"""Kind of evidence (rl.gates.evidence_kinds.KINDS) -> its held-out rows."""


@dataclass
class HeldOutPrompt:
    """One distinct held-out prompt and what people thought of the responses to it."""

    messages: list[Message]
    row: Mapping[str, Any]
    liked: list[str] = field(default_factory=list)
    disliked: list[str] = field(default_factory=list)
    demonstrations: list[str] = field(default_factory=list)
    """Responses that people wrote themselves."""

    @property
    def key(self) -> str:
        return prompt_key(self.messages)


def prompt_key(messages: Sequence[Message]) -> str:
    """Key that is equal for equal prompts."""
    return json.dumps(messages, sort_keys=True)


def held_out_prompts(rows: Rows) -> list[HeldOutPrompt]:
    """Distinct prompts in the order of their first row, pairs before the other kinds. Raises ValueError."""
    prompts: dict[str, HeldOutPrompt] = {}

    def prompt_of(row: Mapping[str, Any], number: int) -> HeldOutPrompt:
        messages = prompt_messages(row, number)
        return prompts.setdefault(prompt_key(messages), HeldOutPrompt(messages, row))

    for kind, kind_rows in rows.items():
        for number, row in enumerate(kind_rows):
            prompt = prompt_of(row, number)
            if kind == PAIRS:
                prompt.liked.append(response_text(row, "chosen", number))
                prompt.disliked.append(response_text(row, "rejected", number))
            elif kind == CORRECTIONS:
                prompt.demonstrations.append(response_text(row, "completion", number))
            elif kind in (LABELS, OUTCOMES):
                side = prompt.liked if row["score"] > NEUTRAL else prompt.disliked
                if row["score"] != NEUTRAL:
                    side.append(response_text(row, "completion", number))
    return list(prompts.values())


def generate_answers(
    policy: LoadedPolicy | LinearSide,
    prompts: Sequence[Sequence[Message]],
    agent: Agent,
    *,
    states: Sequence[Mapping[str, Any] | None] | None = None,
) -> list[Generation]:
    """The likeliest answer to each prompt as the agent is served: chosen out of its closed set, or of what its state
    lists, else written greedily within its schema; of a linear policy the best of what may be answered. states: of the
    prompts."""
    prompt_states = states or [None] * len(prompts)
    if isinstance(policy, LinearSide):
        return policy.answers(list(zip(prompts, prompt_states, strict=True)))
    choices = [agent.choices(state) for state in prompt_states]
    chosen = iter(_likeliest_choices(policy, prompts, choices))
    free = [i for i, listed in enumerate(choices) if not listed]
    written = iter(
        generate(
            policy,
            [prompts[i] for i in free],
            max_new_tokens=agent.max_new_tokens,
            forms=[agent.schema_served(prompt_states[i]) for i in free],
        )
    )
    return [next(chosen) if listed else next(written) for listed in choices]


def answers_written(
    policy: LoadedPolicy,
    prompts: Sequence[Sequence[Message]],
    agent: Agent,
    *,
    room: int,
) -> list[Generation]:
    """Greedy free-text answers of at most `room` tokens, without a list to choose from and without a grammar."""
    tokens = min(room, agent.max_new_tokens)
    return generate(policy, prompts, max_new_tokens=tokens)


def _likeliest_choices(
    policy: LoadedPolicy,
    prompts: Sequence[Sequence[Message]],
    choices: Sequence[Sequence[str]],
) -> list[Generation]:
    """The likeliest of the listed answers to each prompt that has some."""
    items = [(prompt, answer) for prompt, listed in zip(prompts, choices, strict=True) for answer in listed]
    scores = iter(score_responses(policy, items) if items else ())
    found = []
    for listed in filter(None, choices):
        scored = [next(scores) for _ in listed]
        best = max(range(len(listed)), key=lambda place: scored[place].logp)
        found.append(Generation(listed[best], scored[best].tokens, "stop"))
    return found


LOOP_CHARS, LOOP_SHARE, LOOP_GRAM = 64, 0.7, 8
"""A text of at least so many characters loops where such a share of its substrings of LOOP_GRAM characters stand in it
before."""


def loops(text: str) -> bool:
    """True of a degenerate text that repeats itself."""
    grams = [text[start : start + LOOP_GRAM] for start in range(len(text) - LOOP_GRAM + 1)]
    return len(text) >= LOOP_CHARS and 1 - len(set(grams)) / len(grams) >= LOOP_SHARE


class AnswerJudge:
    """Checks of an answer: validity, equality with another, correctness, reward."""

    def __init__(self, agent: Agent, reward: Reward | None) -> None:
        self.agent, self.custom = agent, reward

    def problem(self, prompt: HeldOutPrompt, answer: Generation) -> str | None:
        try:
            self.agent.parse(answer.text, prompt.row.get("state"))
        except InvalidResponse as error:
            ending = " (cut at the length limit)" if answer.finish_reason == "length" else ""
            return f"{error}{ending}"
        return None

    def action(self, response: str) -> Any:
        """Action that a response stands for: two texts that do the same are the same answer."""
        return answer_action(self.agent, response)

    def fields_right(self, answer: str, rights: Sequence[str]) -> float | None:
        """Share of the fields of a right answer that an answer has as well, of the nearest of several; None where they
        have fewer than two fields."""
        deed, wanted = self._deed(answer), [self._deed(right) for right in rights]
        found = [fields_right(deed, right) for right in wanted if isinstance(right, dict)]
        shares = [points / count for points, count in found if count > 1]
        return max(shares) if shares else None

    def _deed(self, response: str) -> Any:
        try:
            return self.agent.deed(response)
        except InvalidResponse:
            return json_read(response)

    def opinion(self, prompt: HeldOutPrompt, answer: str) -> float:
        done = self.action(answer)
        liked = done in {self.action(response) for response in [*prompt.liked, *prompt.demonstrations]}
        disliked = done in {self.action(response) for response in prompt.disliked}
        return 0.5 if liked == disliked else float(liked)

    def reward(self, prompt: HeldOutPrompt, answer: str, problem: str | None) -> float:
        if self.custom is not None:
            return float(self.custom(prompt.row, answer))
        return 0.0 if problem is not None else self.opinion(prompt, answer)

    def ground_truth(
        self, prompts: Sequence[HeldOutPrompt], answers: Sequence[Generation]
    ) -> dict[str, Any] | None:
        found = [self.right(prompt.row, answer.text) for prompt, answer in zip(prompts, answers, strict=True)]
        known = [right for right in found if right is not None]
        return wilson_interval(sum(known), len(known)).as_dict() if known else None

    def right(self, row: Mapping[str, Any], answer: str) -> bool | None:
        """True for a right answer; None where the agent does not know of that prompt."""
        truth = self.agent.truths(row.get("state"))
        return self.does_one_of(answer, truth) if truth else None

    def does_one_of(self, answer: str, responses: Sequence[str]) -> bool:
        """True if an answer does what one of these does."""
        return self.action(answer) in {self.action(response) for response in responses}


SHORT_CHARS, LONG_CHARS = 400, 2000
"""Prompts below and from which a slice of short and of long prompts begins."""

TOPICS = ("topic", "category", "intent")
"""Keys of a state that name what the prompt is about."""


def slices_of(row: Mapping[str, Any]) -> list[str]:
    """Slices a held-out row belongs to: its tags, topic, prompt length, and of a pair which response is longer."""
    found = [f"tag:{tag}" for tag in dict.fromkeys(row.get("tags") or ())]
    state = row.get("state")
    if isinstance(state, Mapping):
        found += [f"topic:{state[key]}" for key in TOPICS if isinstance(state.get(key), str)]
    length = sum(len(message["content"]) for message in prompt_messages(row, 0))
    found.append(f"prompt:{'short' if length < SHORT_CHARS else 'medium' if length < LONG_CHARS else 'long'}")
    if "chosen" in row:
        chosen, rejected = (len(response_text(row, side, 0)) for side in ("chosen", "rejected"))
        if max(chosen, rejected) > 1.2 * min(chosen, rejected):
            found.append("preferred:longer" if chosen > rejected else "preferred:shorter")
    return found


def golden_check(
    policy: LoadedPolicy | LinearSide, agent: Agent, cases: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Answer each {"name", "messages", "state"?, "accepted", "forbidden"} greedily and say whether it is right.

    Right is an answer the agent can act on that does what one of `accepted` does (any, where there are none) and
    nothing that `forbidden` lists.
    """
    states = [case.get("state") for case in cases]
    answers = generate_answers(policy, [case["messages"] for case in cases], agent, states=states)
    judge, found = AnswerJudge(agent, None), []
    for case, answer in zip(cases, answers, strict=True):
        prompt = HeldOutPrompt(list(case["messages"]), case)
        done, why = judge.action(answer.text), judge.problem(prompt, answer) or ""
        if not why and case["accepted"] and done not in {judge.action(text) for text in case["accepted"]}:
            why = "not one of the accepted answers"
        if not why and done in {judge.action(text) for text in case["forbidden"]}:
            why = "a forbidden answer"
        found.append({"name": case["name"], "passed": not why, "answer": answer.text, "why": why})
    return found


def errors_of(
    rows: Sequence[Mapping[str, Any]],
    scores: Sequence[tuple[ResponseScore, ResponseScore]],
    asked: Sequence[HeldOutPrompt],
    answers: Sequence[Generation],
    judge: AnswerJudge,
    written: Mapping[int, Generation],
) -> list[dict[str, Any]]:
    """Sample errors, the gravest kind first: answers that are not valid, answers people rejected, wrong preferences,
    and what is not valid only where it is written without the list it is chosen from.

    written: number of a prompt -> what is written to it.
    """
    invalid, rejected, misses, strays = [], [], [], []
    for prompt, answer in zip(asked, answers, strict=True):
        problem = judge.problem(prompt, answer)
        error = {
            "prompt": prompt.messages[-1]["content"],
            "answer": answer.text,
            "expected": next(iter([*prompt.demonstrations, *prompt.liked]), ""),
        }
        if problem is not None:
            invalid.append({**error, "reason": f"not a valid answer: {problem}"})
        elif judge.opinion(prompt, answer.text) == 0.0:
            rejected.append({**error, "reason": "people rejected this answer"})
    for number, (row, (good, bad)) in enumerate(zip(rows, scores, strict=True)):
        if not good.logp > bad.logp:
            misses.append(
                {
                    "prompt": prompt_messages(row, number)[-1]["content"],
                    "answer": response_text(row, "rejected", number),
                    "expected": response_text(row, "chosen", number),
                    "reason": f"finds the rejected response {bad.logp - good.logp:.2f} nats more likely",
                }
            )
    for number, answer in written.items():
        if (problem := judge.problem(asked[number], answer)) is not None:
            strays.append(
                {
                    "prompt": asked[number].messages[-1]["content"],
                    "answer": answer.text,
                    "expected": answers[number].text,
                    "reason": f"not valid as free text (served answers are chosen or within a schema): {problem}",
                }
            )
    return [*invalid, *rejected, *misses, *strays][:MAX_ERRORS]
