"""What every side of an evaluation is asked, what each did there, and the figures of one and of two compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from rl.agents.base import Agent, Row
from rl.datasets.feedback_types import NEUTRAL, RIGHT, WRONG
from rl.gates.effects import TableEffect, effect_of, items_of
from rl.gates.evidence_kinds import CORRECTIONS, KINDS, LABELS, OUTCOMES, PAIRS, TESTS
from rl.gates.report import Case
from rl.statistics import mcnemar_exact, mean_interval, wilson_interval
from rl.statistics.intervals import Figure
from rl.training.held_out import (
    GENERATED_KINDS,
    MAX_CHECKS,
    AnswerJudge,
    Check,
    HeldOutPrompt,
    OtherEvidence,
    Rows,
    Verdicts,
    agreement_check,
    answered_evidence,
    case_of,
    field_figures,
    hash_of,
    held_out_prompts,
    liked_difference,
    liked_share,
    loops,
    rated_evidence,
    rows_scored,
    share_of,
    side_figure,
    verdicts_on,
    written_evidence,
)
from rl.training.policy import Generation, generate
from rl.training.scoring import ResponseScore
from rl.training.sides import LinearSide, Measurable, ModelSide, generate_answers, kinds_scored

T = TypeVar("T")

WRITTEN_ROOM = 2
"""Tokens of an answer that is written without its list or schema, as a multiple of the longest served answer."""

CHUNK = 64
"""Pairs or prompts worked on between two calls of `progress`."""

Tick = Callable[[int], None]
"""Called with the work items done."""


@dataclass
class Measured:
    """Scores and answers of one side on the held-out evidence."""

    answers: list[Generation]
    problems: list[str | None]
    """Per answer, why it is not valid."""
    rewards: list[float]
    scores: list[tuple[ResponseScore, ResponseScore]] = field(default_factory=list)
    """Of the pairs."""
    responses: list[ResponseScore] = field(default_factory=list)
    """Of the rated and written answers, in the order of `rows_scored`."""
    free_generations: dict[int, Generation] = field(default_factory=dict)
    """Of the prompts whose answer was chosen out of a list or written within a schema, by number, what it writes
    without either."""
    answers_only: bool = False
    """True of a side without log-probabilities: `scores` and `responses` are empty."""

    @property
    def prefers(self) -> list[bool]:
        return [chosen.logp > rejected.logp for chosen, rejected in self.scores]

    @property
    def truncated(self) -> int:
        scores = [score for pair in self.scores for score in pair] + self.responses
        return sum(score.truncated for score in scores)


def answered_prompts(
    prompts: Sequence[HeldOutPrompt], rows: Rows, agent: Agent, generate_samples: int, spare: Sequence[Row]
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


def pair_votes(rows: Sequence[Row]) -> int:
    """Votes that rows with pairs have: distinct prompts, near-identical ones as one."""
    return len({row.get("cluster") or hash_of(row) for row in rows})


def pairs_of_prompts(rows: Sequence[Row], prompts: int | None) -> list[Row]:
    """The rows of the first so many prompts; all without a number."""
    wanted = set(list(dict.fromkeys(map(hash_of, rows)))[:prompts])
    return [row for row in rows if hash_of(row) in wanted]


class HeldOutWork:
    """Evidence and prompts that every side is evaluated on."""

    def __init__(
        self,
        pairs: Sequence[Row],
        others: Rows,
        prompts: Sequence[HeldOutPrompt],
        judge: AnswerJudge,
        checks: Mapping[str, Check],
    ) -> None:
        self.pairs, self.others, self.prompts = pairs, others, prompts
        self.judge, self.checks = judge, checks
        self.score_rows = rows_scored(others, judge.agent)

    @property
    def agent(self) -> Agent:
        return self.judge.agent

    @property
    def rated(self) -> bool:
        """True if answers with ratings are scored, whose distance from a reference counts."""
        return any(kind in (LABELS, OUTCOMES) for kind, _ in self.score_rows)

    @cached_property
    def constrained_numbers(self) -> list[int]:
        """Numbers of the prompts whose answer is chosen among what they list or written within a schema. Not those of
        an agent whose answers are one closed set, which is never written."""
        agent, states = self.agent, [prompt.row.get("state") for prompt in self.prompts]
        return [
            i
            for i, state in enumerate(states)
            if not agent.answers and (agent.choices(state) or agent.schema_served(state) is not None)
        ]

    @cached_property
    def rewardable(self) -> list[bool]:
        """Per prompt asked, whether its reward can tell a good answer from a bad one."""
        return [bool(one.liked or one.disliked or one.demonstrations) for one in self.prompts]

    @property
    def size(self) -> int:
        return len(self.pairs) + len(self.score_rows) + len(self.prompts) + len(self.constrained_numbers)

    # --- What a side does -----------------------------------------------------------------------------------

    def answered(self, answers: Sequence[Generation]) -> Measured:
        """A side that gives answers and no log-probabilities, with their problems and rewards."""
        return Measured(list(answers), *self.judge.judged(self.prompts, answers), answers_only=True)

    def measured(self, side: Measurable, tick: Tick) -> Measured:
        """Scores of the evidence by one side, and its answers with their problems and rewards."""
        speaker = side if isinstance(side, LinearSide) else side.policy
        scores: list[tuple[ResponseScore, ResponseScore]] = []
        for part in _chunks(self.pairs, tick):
            scores += side.pairs(part)
        responses: list[ResponseScore] = []
        for part in _chunks([row for _, row in self.score_rows], tick):
            responses += side.responses(part)
        answers: list[Generation] = []
        for asked in _chunks(self.prompts, tick):
            states = [prompt.row.get("state") for prompt in asked]
            answers += generate_answers(
                speaker, [prompt.messages for prompt in asked], self.agent, states=states
            )
        written: dict[int, Generation] = {}
        room = WRITTEN_ROOM * max((answers[i].tokens for i in self.constrained_numbers), default=0)
        for numbers in _chunks(self.constrained_numbers, tick):
            if isinstance(side, ModelSide):
                written |= self._written(side, numbers, answers, min(room, self.agent.max_new_tokens))
        judged = self.judge.judged(self.prompts, answers)
        return Measured(answers, *judged, scores, responses, written)

    def _written(
        self, side: ModelSide, numbers: Sequence[int], answers: Sequence[Generation], room: int
    ) -> dict[int, Generation]:
        """Free-text answers to the prompts of these numbers, of at most `room` tokens."""
        known = {i: answers[i] for i in numbers if answers[i].unforced}
        asked = [i for i in numbers if i not in known]
        texts = generate(side.policy, [self.prompts[i].messages for i in asked], max_new_tokens=room)
        return known | dict(zip(asked, texts, strict=True))

    def verdicts(self, side: Measured) -> Verdicts:
        """Verdicts of people on the answers of a side, by number of the prompt."""
        return verdicts_on(self.prompts, [answer.text for answer in side.answers], self.judge)

    def liked(self, side: Measured) -> dict[str, Any] | None:
        return liked_share(self.prompts, self.verdicts(side))

    def rewards(self, side: Measured) -> list[float]:
        """Rewards of the answers to prompts with feedback; of all answers where none has any."""
        return self._known_rewards(range(len(self.prompts)), side.rewards)

    def _known_rewards(self, numbers: Sequence[int], rewards: Sequence[float]) -> list[float]:
        known = [reward for i, reward in zip(numbers, rewards, strict=True) if self.rewardable[i]]
        return known or list(rewards)

    def evidence(
        self,
        own: Measured,
        other: Measured | None,
        references: tuple[Sequence[ResponseScore], Sequence[ResponseScore]],
    ) -> dict[str, OtherEvidence]:
        """Evidence of every kind beside pairs. Alone, rated answers are compared with the reference, the others with
        nothing; so are those that are scored where the other side has no log-probabilities.

        references: scores of the rated answers by the reference of either side; empty where nothing is rated.
        """
        evidence: dict[str, OtherEvidence] = {}
        scored = None if other is None or other.answers_only else other
        for kind in dict.fromkeys(kind for kind, _ in self.score_rows):
            at = [i for i, (one, _) in enumerate(self.score_rows) if one == kind]
            rows, mine = [self.score_rows[i][1] for i in at], [own.responses[i] for i in at]
            if kind == CORRECTIONS:
                theirs = [scored.responses[i] for i in at] if scored is not None else mine
                evidence[kind] = written_evidence(rows, mine, theirs)
                continue
            from_mine, from_theirs = ([scores[i] for i in at] for scores in references)
            theirs = [scored.responses[i] for i in at] if scored is not None else from_theirs
            evidence[kind] = rated_evidence(kind, rows, mine, theirs, from_mine, from_theirs)
        for kind in KINDS:
            if kind in evidence or kind not in self.others:
                continue
            asked, at, check = self.checked(kind)
            texts = [own.answers[i].text for i in at]
            against = [other.answers[i].text for i in at] if other is not None else texts
            evidence[kind] = answered_evidence(kind, asked, texts, against, check)
            if kind == CORRECTIONS:
                compared = against if other is not None else None
                if (fields := field_figures(asked, self.judge, texts, compared)) is not None:
                    evidence[kind].figures["fields"] = fields
        return evidence

    def checked(self, kind: str) -> tuple[list[HeldOutPrompt], list[int], Check]:
        """The answered prompts of a kind, their numbers, and the check of their answers."""
        numbers = {prompt.key: i for i, prompt in enumerate(self.prompts)}
        asked = [one for one in held_out_prompts({kind: self.others[kind]}) if one.key in numbers]
        check = agreement_check(asked, self.judge) if kind == CORRECTIONS else self.checks[kind]
        return asked, [numbers[prompt.key] for prompt in asked], check

    # --- Figures --------------------------------------------------------------------------------------------

    def summary(self, side: Measured) -> dict[str, object]:
        """Figures of one side, shares and means with their 95 % intervals."""
        per_token = [chosen.mean_logp > rejected.mean_logp for chosen, rejected in side.scores]
        rewards = self.rewards(side)
        known = sum(reward != NEUTRAL for reward in rewards)
        return {
            "preference_accuracy": self.pairs_share(side.prefers),
            "preference_accuracy_length_normalised": self.pairs_share(per_token),
            "valid_rate": _valid_rate(side.problems),
            "average_reward": mean_interval(rewards, bounds=(0.0, 1.0)).as_dict(),
            "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else None,
            "rewards_known": known,
            **({"written": self.answer_figures(side.free_generations)} if side.free_generations else {}),
        }

    def answer_figures(self, answers: Mapping[int, Generation]) -> dict[str, object]:
        """Figures of answers to the prompts of these numbers, given in another way than they are served."""
        prompts, texts = [self.prompts[i] for i in answers], list(answers.values())
        problems, rewards = self.judge.judged(prompts, texts)
        known = self._known_rewards(list(answers), rewards)
        return {
            "valid_rate": _valid_rate(problems),
            "average_reward": mean_interval(known, bounds=(0.0, 1.0)).as_dict(),
            "ground_truth": self.judge.ground_truth(prompts, texts),
        }

    def answers_compared(self, side: Measured, answers: Sequence[Generation]) -> dict[str, object]:
        """Figures of a side's answers on its quantised base, and the share that does the same."""
        same = sum(
            self.judge.action(own.text) == self.judge.action(other.text)
            for own, other in zip(side.answers, answers, strict=True)
        )
        shares = {"same_answers": wilson_interval(same, len(answers)).as_dict()}
        return shares | self.answer_figures(dict(enumerate(answers)))

    def pair_cases(self, own: Sequence[bool], other: Sequence[bool]) -> list[dict[str, object]]:
        """Items of the pairs as they are stored: whether the preferred response is the more likely one to each side."""
        return [case_of(row, mine, theirs) for row, mine, theirs in zip(self.pairs, own, other, strict=True)]

    def pairs_share(self, right: Sequence[bool]) -> Figure | None:
        """Share of pairs held the right way round, with its 95 % interval: one vote for each prompt or cluster.

        Wilson's interval where all pairs of a prompt agree, as they do where each has one; else Student's over
        prompts. None without a pair.
        """
        if not right:
            return None
        items = items_of(self.pair_cases(right, right))
        return share_of([float(item.policy_score) for item in items if isinstance(item, Case)])

    def pairs_difference(self, own: Measured, other: Measured) -> dict[str, object]:
        """Paired difference of two sides on the same pairs, one vote for each prompt or cluster, and its two-sided p.

        Where every vote is right or wrong: Newcombe's interval, the discordant counts `b` and `c` and McNemar's exact
        p.
        """
        effect = effect_of(PAIRS, items_of(self.pair_cases(own.prefers, other.prefers)))
        assert effect is not None  # pairs are never all rated alike
        found: dict[str, Any] = {"difference": effect.interval(0.95).as_dict()}
        if isinstance(effect, TableEffect):
            p_value = mcnemar_exact(effect.wins, effect.losses)
            return found | {"p_value": p_value, "b": effect.wins, "c": effect.losses}
        return found | {"p_value": min(1.0, 2 * min(effect.better(), effect.worse()))}

    def reward_difference(self, own: Measured, other: Measured) -> Figure:
        gains = [mine - theirs for mine, theirs in zip(self.rewards(own), self.rewards(other), strict=True)]
        return mean_interval(gains, bounds=(-1.0, 1.0)).as_dict()

    def comparison(
        self, name: str, own: Measured, other: Measured, lead: str, evidence: Mapping[str, OtherEvidence]
    ) -> dict[str, Any]:
        """The other side's figures; difference and p-value are of the kind that carries the comparison."""
        if lead in evidence:
            figures = evidence[lead].figures
            carried = {part: figures.get(part) for part in ("difference", "p_value", "unit")}
        else:
            nothing = {"difference": None, "p_value": None}
            carried = {**(self.pairs_difference(own, other) if other.scores else nothing), "unit": "points"}
        verdicts = self.verdicts(own), self.verdicts(other)
        return {
            "against": name,
            **self.summary(other),
            "liked": self.liked(other),
            "liked_difference": liked_difference(self.prompts, *verdicts),
            "kind": lead,
            **carried,
            "average_reward_difference": self.reward_difference(own, other),
            "ground_truth": self.judge.ground_truth(self.prompts, other.answers),
        }

    def evidence_figures(
        self,
        own: Measured,
        other: Measured | None,
        evidence: Mapping[str, OtherEvidence],
        barred: Mapping[str, str],
    ) -> dict[str, dict[str, object]]:
        """Figures of each kind of evidence that is present; of one side alone where nothing is compared, and of a kind
        that is scored where the other side has no log-probabilities."""
        alone = kinds_scored(self.agent) if other is not None and other.answers_only else ()
        figures_by_kind: dict[str, dict[str, object]] = {}
        if (share := self.pairs_share(own.prefers)) is not None:
            facts: dict[str, object] = {
                "prompts": share["n"],
                "pairs": len(self.pairs),
                "unit": "points",
                "value": share["value"],
            }
            theirs = self.pairs_share(other.prefers) if other is not None and PAIRS not in alone else None
            if other is not None and theirs is not None:
                facts |= {"against_value": theirs["value"], **self.pairs_difference(own, other)}
            figures_by_kind[PAIRS] = facts
        for kind in KINDS:
            if kind in evidence:
                figures = dict(evidence[kind].figures)
                if kind not in (LABELS, OUTCOMES):
                    if other is None or kind in alone:
                        figures = {name: figures[name] for name in ("prompts", "fields") if name in figures}
                    figures["own"] = side_figure(evidence[kind].records, "own")
                figures_by_kind[kind] = figures
            if kind in figures_by_kind and kind in barred:
                figures_by_kind[kind]["barred"] = barred[kind]
        return figures_by_kind

    def baseline(
        self, baseline: LinearSide, own: Measured, reference: Sequence[ResponseScore], lead: str
    ) -> dict[str, object]:
        """Figures of a simple classifier on the same evidence, and how the policy differs from it.

        `policy` has those of the policy by the same measure: rated answers by how far each moved them from its own
        reference, whatever the policy is compared with beside.
        """
        side = self.measured(baseline, lambda items: None)
        even = baseline.reference([row for _, row in self.score_rows])

        def alone(one: Measured, scores: Sequence[ResponseScore]) -> dict[str, Any]:
            figures = self.evidence_figures(one, None, self.evidence(one, None, (scores, scores)), {})
            return {**self.summary(one), "carried_by": lead, "evidence": figures}

        result = {
            **alone(side, even),
            "policy": alone(own, reference),
            "average_reward_difference": self.reward_difference(own, side),
        }
        if side.scores:
            result["preference_accuracy_difference"] = self.pairs_difference(own, side)
        return result

    # --- What a gate reads ----------------------------------------------------------------------------------

    def held_out_facts(
        self, own: Measured, other: Measured, evidence: Mapping[str, OtherEvidence], known: Sequence[Row] = ()
    ) -> dict[str, object]:
        """Per item of evidence and per answer what both sides did: the input of the gate's rules. known: held-out rows
        with their lists of right and wrong answers."""
        lists = {hash_of(row): row for row in known}
        alone = kinds_scored(self.agent) if other.answers_only else ()
        return {
            "discrete": self.agent.discrete,
            "cases": [] if other.answers_only else self.pair_cases(own.prefers, other.prefers),
            "others": {kind: one.records for kind, one in evidence.items() if kind not in alone},
            "answers": [self._answer_facts(i, own, other, lists) for i in range(len(self.prompts))],
        }

    def _answer_facts(
        self, i: int, own: Measured, other: Measured, lists: Mapping[str, Row]
    ) -> dict[str, object]:
        prompt, mine, theirs = self.prompts[i], own.answers[i].text, other.answers[i].text
        free = not self.agent.structured and not self.agent.answers
        facts = {
            "prompt_hash": prompt.row.get("prompt_hash", ""),
            "messages": prompt.messages,
            "answer": mine,
            "other_answer": theirs,
            "valid": own.problems[i] is None,
            "other_valid": other.problems[i] is None,
            "reward": own.rewards[i],
            "other_reward": other.rewards[i],
            "judged": self.rewardable[i] and self._both_judged(own.rewards[i], other, i),
            "loops": free and loops(mine),
            **answers_known(self.judge, prompt, mine, theirs, lists),
        }
        if i in own.free_generations and i in other.free_generations:
            written = own.free_generations[i], other.free_generations[i]
            valid = [self.judge.problem(prompt, one) is None for one in written]
            facts |= {
                "written": written[0].text,
                "written_valid": valid[0],
                "other_written_valid": valid[1],
            }
        return facts

    def _both_judged(self, reward: float, other: Measured, number: int) -> bool:
        """False where nobody judged one of the answers and the other side's are recorded: what people rate is mostly
        the recorded answer, so that half a point for what nobody saw would count against every policy that differs."""
        is_known = reward != NEUTRAL and other.rewards[number] != NEUTRAL
        return is_known or not other.answers_only


def answers_known(
    judge: AnswerJudge, prompt: HeldOutPrompt, own: str, other: str, lists: Mapping[str, Row]
) -> dict[str, bool]:
    """Whether two answers to a held-out prompt do the same, whether people said anything of it and of the other answer,
    and whether its right answer is known; empty for free text and for prompts that are not held out."""
    if not judge.agent.discrete or prompt.row.get("split", "holdout") != "holdout":
        return {}
    said = lists.get(prompt.row.get("prompt_hash", ""), {})
    right, wrong = said.get(RIGHT, ()), said.get(WRONG, ())
    return {
        "same": judge.does_one_of(own, [other]),
        "said": bool(right or wrong),
        "other_said": judge.does_one_of(other, [*right, *wrong]),
        "settled": bool(right),
    }


def _valid_rate(problems: Sequence[str | None]) -> Figure:
    return wilson_interval(list(problems).count(None), len(problems)).as_dict()


def _chunks(items: Sequence[T], tick: Tick) -> Iterator[Sequence[T]]:
    """The items, CHUNK at a time, each counted once it is done."""
    for start in range(0, len(items), CHUNK):
        part = items[start : start + CHUNK]
        yield part
        tick(len(part))
