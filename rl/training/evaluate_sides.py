"""The sides of an evaluation: the evidence and prompts that all get, and the scores and answers of each policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.agents.base import Agent
from rl.gates.evidence_kinds import CORRECTIONS, KINDS, LABELS, OUTCOMES, TESTS
from rl.training.constrained_generation import AnswerForm
from rl.training.evaluate_answers import (
    AnswerJudge,
    HeldOutPrompt,
    Rows,
    answers_written,
    generate_answers,
    held_out_prompts,
)
from rl.training.evaluate_approval import Verdicts, verdicts_on
from rl.training.evaluate_evidence import (
    GENERATED_KINDS,
    MAX_CHECKS,
    Check,
    OtherEvidence,
    ScoredRow,
    agreement_check,
    answered_evidence,
    field_figures,
    rated_evidence,
    response_of,
    written_evidence,
)
from rl.training.linear_side import LinearSide, Options, choice_scores
from rl.training.policy import Generation, LoadedPolicy
from rl.training.scoring import ResponseScore, head_check, score_pairs, score_responses

WRITTEN_ROOM = 2
"""Tokens of an answer that is written without its list or schema, as a multiple of the longest served answer."""

CHUNK = 64
"""Pairs or prompts worked on between two calls of `progress`."""


@dataclass
class Side:
    """Scores and answers of one policy on the held-out evidence."""

    scores: list[tuple[ResponseScore, ResponseScore]]
    """Of the pairs."""
    responses: list[ResponseScore]
    """Of the rated and written answers, in the order of `rows_scored`."""
    answers: list[Generation]
    problems: list[str | None]
    """Per answer, why it is not valid."""
    rewards: list[float]
    free_generations: dict[int, Generation]
    """Of the prompts whose answer was chosen out of a list or written within a schema, by number, what it writes
    without either."""
    answers_only: bool = False
    """True of a side without log-probabilities: `scores` and `responses` are empty."""

    @property
    def prefers(self) -> list[bool]:
        return [chosen.logp > rejected.logp for chosen, rejected in self.scores]


@dataclass
class EvaluationInput:
    """Evidence and prompts that every side is evaluated on."""

    rows: Sequence[Mapping[str, Any]]
    score_rows: Sequence[ScoredRow]
    prompts: Sequence[HeldOutPrompt]
    judge: AnswerJudge
    batch_size: int
    options: Options | None = None
    """Options that rated answers are measured among, on both sides, where one of them is linear."""

    @property
    def constrained_numbers(self) -> list[int]:
        """Numbers of the prompts whose answer is chosen among what they list or written within a schema. Not those of
        an agent whose answers are one closed set, which is never written."""
        agent, states = self.judge.agent, [prompt.row.get("state") for prompt in self.prompts]
        return [
            i
            for i, state in enumerate(states)
            if not agent.answers and (agent.choices(state) or agent.schema_served(state) is not None)
        ]

    @property
    def rewardable(self) -> list[bool]:
        """Per prompt asked, whether its reward can tell a good answer from a bad one."""
        return [
            bool(self.judge.custom or prompt.liked or prompt.disliked or prompt.demonstrations)
            for prompt in self.prompts
        ]

    def forms(self, rows: Sequence[Mapping[str, Any]]) -> list[AnswerForm]:
        """Schema that the answers to each row's prompt are written within when they are served; None of free text, and
        where they are chosen: by the likelihood of free text."""
        agent = self.judge.agent
        return [
            None if agent.choices(row.get("state")) else agent.schema_served(row.get("state")) for row in rows
        ]

    def verdicts(self, side: Side) -> Verdicts:
        """Verdicts of people on the answers of a side, by number of the prompt."""
        return verdicts_on(self.prompts, [answer.text for answer in side.answers], self.judge)

    def rewards(self, side: Side) -> list[float]:
        """Rewards of the answers to prompts with feedback; of all answers where none has any."""
        known = [
            reward
            for reward, is_rewardable in zip(side.rewards, self.rewardable, strict=True)
            if is_rewardable
        ]
        return known or side.rewards

    @property
    def size(self) -> int:
        return len(self.rows) + len(self.score_rows) + len(self.prompts) + len(self.constrained_numbers)


def answered_prompts(
    prompts: Sequence[HeldOutPrompt],
    rows: Rows,
    agent: Agent,
    generate_samples: int,
    spare: Sequence[Mapping[str, Any]],
) -> list[HeldOutPrompt]:
    """The prompts that are answered: the first of all, those whose answers themselves are evidence, spare ones.

    Of spare ones at least half of `generate_samples`, however many are rated: what both sides say where nobody rated
    shows whether ratings are complaints (`rl.gates.rules.rule_ratings`).
    """
    first = list(prompts[: max(generate_samples, 0)])
    if generate_samples <= 0:
        return first
    known = {prompt.key for prompt in first}
    kinds = [*GENERATED_KINDS, *([CORRECTIONS] if agent.discrete else [])]
    for kind in kinds:
        keys = {prompt.key for prompt in held_out_prompts({kind: rows.get(kind, ())})}
        wanted = [prompt for prompt in prompts if prompt.key in keys][:MAX_CHECKS]
        first += [prompt for prompt in wanted if prompt.key not in known]
        known |= {prompt.key for prompt in wanted}
    more = [one for one in held_out_prompts({TESTS: spare}) if one.key not in known]
    return first + more[: max(generate_samples - len(first), generate_samples // 2)]


class Ticker:
    """Count of the work items done, reported to `progress` with their total."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, items: int) -> None:
        self.done += items
        if self.progress is not None:
            self.progress(self.done, self.total)


def side_answered(answers: Sequence[Generation], work: EvaluationInput) -> Side:
    """A side that gives answers and no log-probabilities, with their problems and rewards."""
    return Side([], [], list(answers), *_judged(answers, work), {}, answers_only=True)


def _judged(answers: Sequence[Generation], work: EvaluationInput) -> tuple[list[str | None], list[float]]:
    """Per answer why it is not valid, and its reward."""
    judge = work.judge
    problems = [judge.problem(prompt, answer) for prompt, answer in zip(work.prompts, answers, strict=True)]
    rewards = [
        judge.reward(prompt, answer.text, problem)
        for prompt, answer, problem in zip(work.prompts, answers, problems, strict=True)
    ]
    return problems, rewards


def side_measured(policy: LoadedPolicy | LinearSide, work: EvaluationInput, tick: Ticker) -> Side:
    """Scores of the evidence by one policy, and its answers with their problems and rewards."""
    rows, prompts, judge, batch_size = work.rows, work.prompts, work.judge, work.batch_size
    if not isinstance(policy, LinearSide):
        head_check(policy)
    scores: list[tuple[ResponseScore, ResponseScore]] = []
    for start in range(0, len(rows), CHUNK):
        part = rows[start : start + CHUNK]
        if isinstance(policy, LinearSide):
            scores += policy.pairs(part)
        else:
            scores += score_pairs(policy, part, batch_size=batch_size, forms=work.forms(part))
        tick(len(part))
    responses = responses_scored(policy, work, tick)
    answers: list[Generation] = []
    for start in range(0, len(prompts), CHUNK):
        chunk = prompts[start : start + CHUNK]
        answers += generate_answers(
            policy,
            [prompt.messages for prompt in chunk],
            judge.agent,
            states=[prompt.row.get("state") for prompt in chunk],
        )
        tick(len(chunk))
    problems, rewards = _judged(answers, work)
    written: dict[int, Generation] = {}
    at = work.constrained_numbers
    room = WRITTEN_ROOM * max((answers[i].tokens for i in at), default=0)
    for start in range(0, len(at), CHUNK):
        chosen = at[start : start + CHUNK]
        if not isinstance(policy, LinearSide):
            written |= {i: answers[i] for i in chosen if answers[i].unforced}
            asked = [i for i in chosen if i not in written]
            texts = answers_written(policy, [prompts[i].messages for i in asked], judge.agent, room=room)
            written |= dict(zip(asked, texts, strict=True))
        tick(len(chosen))
    return Side(scores, responses, answers, problems, rewards, written)


def responses_scored(
    policy: LoadedPolicy | LinearSide, work: EvaluationInput, tick: Ticker
) -> list[ResponseScore]:
    """Scores of the rated and written answers by one policy; among their options where a side is linear."""
    rows = [row for _, row in work.score_rows]
    if isinstance(policy, LinearSide) or work.options is not None:
        tick(len(rows))
        if isinstance(policy, LinearSide):
            return policy.responses(rows)
        assert work.options is not None
        return choice_scores(policy, rows, work.options, batch_size=work.batch_size)
    found: list[ResponseScore] = []
    for start in range(0, len(work.score_rows), CHUNK):
        part = [row for _, row in work.score_rows[start : start + CHUNK]]
        items = [response_of(row, 0) for row in part]
        found += score_responses(policy, items, batch_size=work.batch_size, forms=work.forms(part))
        tick(len(items))
    return found


def reference_responses(
    policy: LoadedPolicy, base: Sequence[ResponseScore], work: EvaluationInput
) -> Sequence[ResponseScore]:
    """Scores of the rated answers by the reference that a policy was trained against: the base's, or its warm-up's."""
    rated = any(kind in (LABELS, OUTCOMES) for kind, _ in work.score_rows)
    reference = policy.reference if rated else None
    if reference is None:
        return base
    return responses_scored(reference, work, Ticker(None, 0))


def own_reference(
    policy: LoadedPolicy | LinearSide | str | None, side: Side, work: EvaluationInput
) -> Sequence[ResponseScore]:
    """Scores of the rated answers by the reference of one side, where a side is linear: the even choice, or the model
    that an adapter was trained against."""
    if isinstance(policy, LinearSide):
        return policy.reference([row for _, row in work.score_rows])
    assert isinstance(policy, LoadedPolicy)
    if policy.adapter is None:
        return side.responses
    if (reference := policy.reference) is not None:
        return responses_scored(reference, work, Ticker(None, 0))
    with policy.without_adapter():
        return responses_scored(policy, work, Ticker(None, 0))


def other_evidence(
    work: EvaluationInput,
    rows: Rows,
    checks: Mapping[str, Check],
    own: Side,
    other: Side | None,
    references: tuple[Sequence[ResponseScore], Sequence[ResponseScore]],
) -> dict[str, OtherEvidence]:
    """Evidence of every kind beside pairs. Alone, rated answers are compared with the base, the others with nothing; so
    are those that are scored where the other side has no log-probabilities.

    references: scores of the rated answers by the reference of either side, see `reference_responses`.
    """
    evidence: dict[str, OtherEvidence] = {}
    scored = None if other is None or other.answers_only else other
    for kind in dict.fromkeys(kind for kind, _ in work.score_rows):
        positions = [i for i, (one, _) in enumerate(work.score_rows) if one == kind]
        of = [work.score_rows[i][1] for i in positions]
        mine = [own.responses[i] for i in positions]
        from_mine, from_theirs = ([scores[i] for i in positions] for scores in references)
        theirs = [scored.responses[i] for i in positions] if scored is not None else from_theirs
        if kind == CORRECTIONS:
            evidence[kind] = written_evidence(of, mine, theirs if scored is not None else mine)
        else:
            evidence[kind] = rated_evidence(kind, of, mine, theirs, from_mine, from_theirs)
    answered = {prompt.key: i for i, prompt in enumerate(work.prompts)}
    for kind in KINDS:
        if kind in evidence or kind not in rows:
            continue
        wanted = [one for one in held_out_prompts({kind: rows[kind]}) if one.key in answered]
        positions = [answered[prompt.key] for prompt in wanted]
        check = agreement_check(wanted, work.judge) if kind == CORRECTIONS else checks[kind]
        texts = [own.answers[i].text for i in positions]
        against = [other.answers[i].text for i in positions] if other is not None else texts
        evidence[kind] = answered_evidence(kind, wanted, texts, against, check)
        if kind == CORRECTIONS:
            fields = field_figures(wanted, work.judge, texts, against if other is not None else None)
            if fields is not None:
                evidence[kind].figures["fields"] = fields
    return evidence
