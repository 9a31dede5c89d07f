"""Held-out prompts, and what people say of an answer to them: valid, right, liked.

The share of a policy's answers that people would like is estimated from their ratings of held-out answers. Of a prompt
to which somebody rated an answer that does what the policy's answer does, the verdict is known: the share of its raters
who liked it. `rated answers` averages these over clusters of near-identical prompts. It is the replay estimate of Li et
al. 2011 (arXiv 1003.5956): without bias where it is chance which answer to a prompt was shown and rated, too high where
only good ones were. `least` and `most` ask for no such assumption: every answer that nobody rated is disliked, or liked
(Manski 1990).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.agents.base import Agent, InvalidResponse, Message, Row
from rl.agents.fields import answer_action, fields_right, json_read
from rl.datasets.feedback_types import NEUTRAL, RIGHT
from rl.gates.effects import ConcordanceEffect, Effect, effect_of, items_of
from rl.gates.evidence_kinds import (
    ASSUMPTIONS,
    CORRECTIONS,
    KNOWN,
    LABELS,
    OUTCOMES,
    PAIRS,
    RATED,
    REWARDS,
    TESTS,
)
from rl.statistics import mean_interval, wilson_interval
from rl.statistics.intervals import Figure
from rl.training.chat_template import prompt_messages, response_text
from rl.training.policy import Generation
from rl.training.scoring import ResponseScore

Rows = Mapping[str, Sequence[Row]]
"""Kind of evidence (rl.gates.evidence_kinds.KINDS) -> its held-out rows."""


@dataclass
class HeldOutPrompt:
    """One distinct held-out prompt and what people thought of the responses to it."""

    messages: list[Message]
    row: Row
    liked: list[str] = field(default_factory=list)
    disliked: list[str] = field(default_factory=list)
    demonstrations: list[str] = field(default_factory=list)
    """Responses that people wrote themselves."""

    @property
    def key(self) -> str:
        return prompt_key(self.messages)

    @property
    def expected(self) -> str:
        """An answer that people wrote or liked; empty where there is none."""
        return next(iter([*self.demonstrations, *self.liked]), "")


def prompt_key(messages: Sequence[Message]) -> str:
    """Key that is equal for equal prompts."""
    return json.dumps(messages, sort_keys=True)


def hash_of(row: Row) -> str:
    """Identity of a row's prompt: its hash, or the prompt itself where a row has none."""
    return row.get("prompt_hash") or prompt_key(row["prompt"])


def held_out_prompts(rows: Rows) -> list[HeldOutPrompt]:
    """Distinct prompts in the order of their first row, pairs before the other kinds. Raises ValueError."""
    prompts: dict[str, HeldOutPrompt] = {}
    for kind, kind_rows in rows.items():
        for number, row in enumerate(kind_rows):
            messages = prompt_messages(row, number)
            prompt = prompts.setdefault(prompt_key(messages), HeldOutPrompt(messages, row))
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


LOOP_CHARS, LOOP_SHARE, LOOP_GRAM = 64, 0.7, 8
"""A text of at least so many characters loops where such a share of its substrings of LOOP_GRAM characters stand in it
before."""


def loops(text: str) -> bool:
    """True of a degenerate text that repeats itself."""
    grams = [text[start : start + LOOP_GRAM] for start in range(len(text) - LOOP_GRAM + 1)]
    return len(text) >= LOOP_CHARS and 1 - len(set(grams)) / len(grams) >= LOOP_SHARE


class AnswerJudge:
    """Checks of an answer: validity, equality with another, correctness, reward."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

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

    def _deed(self, response: str) -> object:
        try:
            return self.agent.deed(response)
        except InvalidResponse:
            return json_read(response)

    def opinion(self, prompt: HeldOutPrompt, answer: str) -> float:
        done = self.action(answer)
        liked = done in {self.action(response) for response in [*prompt.liked, *prompt.demonstrations]}
        disliked = done in {self.action(response) for response in prompt.disliked}
        return NEUTRAL if liked == disliked else float(liked)

    def is_known(self, prompt: HeldOutPrompt, answer: str) -> bool:
        """True if people wrote, liked or disliked an answer that does the same."""
        return self.does_one_of(answer, [*prompt.liked, *prompt.demonstrations, *prompt.disliked])

    def judged(
        self, prompts: Sequence[HeldOutPrompt], answers: Sequence[Generation]
    ) -> tuple[list[str | None], list[float]]:
        """Of each answer why it is not valid, and its reward."""
        both = list(zip(prompts, answers, strict=True))
        problems = [self.problem(prompt, answer) for prompt, answer in both]
        return problems, [
            0.0 if problem is not None else self.opinion(prompt, answer.text)
            for (prompt, answer), problem in zip(both, problems, strict=True)
        ]

    def ground_truth(self, prompts: Sequence[HeldOutPrompt], answers: Sequence[Generation]) -> Figure | None:
        found = [self.right(prompt.row, answer.text) for prompt, answer in zip(prompts, answers, strict=True)]
        known = [right for right in found if right is not None]
        return wilson_interval(sum(known), len(known)).as_dict() if known else None

    def right(self, row: Row, answer: str) -> bool | None:
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


def slices_of(row: Row) -> list[str]:
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


# --- Liked answers ------------------------------------------------------------------------------------------

Verdicts = Mapping[int, float]
"""Number of a prompt -> share of raters who liked the answer to it, in [0, 1]; prompts without a verdict left out."""


def verdicts_on(prompts: Sequence[HeldOutPrompt], answers: Sequence[str], judge: AnswerJudge) -> Verdicts:
    """Verdicts of raters on the answers, or of ones that do the same."""
    found: dict[int, float] = {}
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        done = judge.action(answer)
        liked = sum(judge.action(text) == done for text in [*prompt.liked, *prompt.demonstrations])
        disliked = sum(judge.action(text) == done for text in prompt.disliked)
        if liked + disliked:
            found[number] = liked / (liked + disliked)
    return found


def liked_share(prompts: Sequence[HeldOutPrompt], verdicts: Verdicts) -> dict[str, object] | None:
    """{"value", "low", "high", "n", "of", "least", "most", "estimator", "assumes"}: the share with its 95 % interval
    over `n` clusters of prompts with a verdict, out of `of` that were answered; None without a verdict."""
    if not verdicts:
        return None
    known = _means(prompts, verdicts)
    of = len(_means(prompts, dict.fromkeys(range(len(prompts)), 0.0)))
    total, n = math.fsum(known.values()), len(known)
    return {
        **share_of(list(known.values())),
        "of": of,
        "least": total / of,
        "most": (total + of - n) / of,
        "estimator": RATED,
        "assumes": ASSUMPTIONS[RATED],
    }


def liked_difference(prompts: Sequence[HeldOutPrompt], own: Verdicts, other: Verdicts) -> Figure:
    """Difference of the share to a rival's, over prompts on which both have a verdict: value, low, high, n."""
    both = {number: own[number] - other[number] for number in own.keys() & other.keys()}
    return mean_interval(list(_means(prompts, both).values()), bounds=(-1.0, 1.0)).as_dict()


def _means(prompts: Sequence[HeldOutPrompt], values: Mapping[int, float]) -> dict[str, float]:
    """The mean of each cluster of prompts; a prompt without a near-identical one is a cluster of its own."""
    groups: dict[str, list[float]] = {}
    for number, value in sorted(values.items()):
        name = prompts[number].row.get("cluster") or prompts[number].key
        groups.setdefault(name, []).append(value)
    return {name: math.fsum(group) / len(group) for name, group in groups.items()}


def share_of(values: Sequence[float]) -> Figure:
    """Mean of values in [0, 1] with its 95 % interval: Wilson's where all are 0 or 1, else Student's."""
    if all(value in (0.0, 1.0) for value in values):
        return wilson_interval(round(math.fsum(values)), len(values)).as_dict()
    return mean_interval(values, bounds=(0.0, 1.0)).as_dict()


# --- Held-out evidence beside pairs ---

ScoredRow = tuple[str, Row]
"""A kind and a row of it whose `completion` is scored."""

Check = Callable[[Sequence[Row], Sequence[str]], Sequence[float | None]]
"""(held-out rows, one generated answer each) -> a value each, more is better, or None where nothing can be said."""

GENERATED_KINDS = (TESTS, KNOWN, REWARDS)
"""Kinds whose evidence is what a check says of generated answers."""

MAX_CHECKS = 256
"""Prompts of a kind, at most, that are answered because the answers themselves are the evidence."""


@dataclass(frozen=True)
class OtherEvidence:
    """Items of one kind and its figures."""

    kind: str
    records: list[dict[str, Any]]
    figures: dict[str, Any]


def rows_scored(rows: Mapping[str, Sequence[Row]], agent: Agent) -> list[ScoredRow]:
    """The rows of every kind whose own response is scored: rated answers, and written ones where the agent's answers
    are free text (of a structured agent the greedy answer itself is compared)."""
    kinds = [LABELS, OUTCOMES, *([] if agent.discrete else [CORRECTIONS])]
    return [(kind, row) for kind in kinds for row in rows.get(kind, ())]


def rated_evidence(
    kind: str,
    rows: Sequence[Row],
    own: Sequence[ResponseScore],
    other: Sequence[ResponseScore],
    own_reference: Sequence[ResponseScore],
    other_reference: Sequence[ResponseScore],
) -> OtherEvidence:
    """Rated answers: how far the policy moved each from the other side, and how well each side knows what is liked.

    How far a side moved an answer is measured from the reference it was trained against: the base model, or its
    warm-up. Where both have the same, their distance from each other is what remains.
    """
    entries = []
    for row, *scores in zip(rows, own, other, own_reference, other_reference, strict=True):
        mine, theirs, from_mine, from_theirs = (score.mean_logp for score in scores)
        moved, other_moved = mine - from_mine, theirs - from_theirs
        rated = {"value": float(row["score"]), "shift": moved - other_moved}
        entries.append(case_of(row, moved, other_moved) | rated)
    effect = effect_of(kind, items_of(entries))
    figures: dict[str, object] = {"responses": len(rows), **_figures(entries, effect)}
    if isinstance(effect, ConcordanceEffect):
        found = effect.interval(0.95)
        shown = {"value": found.value, "low": found.low, "high": found.high}
        figures["concordance"] = {name: 0.5 + value for name, value in shown.items()} | {"n": effect.n}
    return OtherEvidence(kind, entries, figures)


def written_evidence(
    rows: Sequence[Row], own: Sequence[ResponseScore], other: Sequence[ResponseScore]
) -> OtherEvidence:
    """Free texts that people wrote: log-likelihood per token on either side; of several to a prompt the mean."""
    prompts: dict[str, list[tuple[float, float]]] = {}
    first: dict[str, Row] = {}
    for row, mine, theirs in zip(rows, own, other, strict=True):
        prompts.setdefault(hash_of(row), []).append((mine.mean_logp, theirs.mean_logp))
        first.setdefault(hash_of(row), row)
    stored = [
        case_of(first[name], *(_mean(side) for side in zip(*found, strict=True)))
        for name, found in prompts.items()
    ]
    return _evidence(CORRECTIONS, stored)


def answered_evidence(
    kind: str, asked: Sequence[HeldOutPrompt], own: Sequence[str], other: Sequence[str], check: Check
) -> OtherEvidence:
    """Generated answers that a check gives values: tests, rewards, agreement with what people wrote. Prompts where it
    has nothing to say of one side are left out."""
    rows = [prompt.row for prompt in asked]
    values = zip(rows, check(rows, own), check(rows, other), strict=True)
    stored = [
        case_of(row, float(mine), float(theirs))
        for row, mine, theirs in values
        if mine is not None and theirs is not None
    ]
    return _evidence(kind, stored)


def _evidence(kind: str, stored: list[dict[str, object]]) -> OtherEvidence:
    return OtherEvidence(kind, stored, _figures(stored, effect_of(kind, items_of(stored))))


def agreement_check(asked: Sequence[HeldOutPrompt], judge: AnswerJudge) -> Check:
    """Check that an answer does what one that people wrote does."""
    written = {id(prompt.row): {judge.action(text) for text in prompt.demonstrations} for prompt in asked}

    def check(rows: Sequence[Row], answers: Sequence[str]) -> list[float | None]:
        return [
            float(judge.action(text) in written[id(row)]) for row, text in zip(rows, answers, strict=True)
        ]

    return check


def field_figures(
    asked: Sequence[HeldOutPrompt], judge: AnswerJudge, own: Sequence[str], other: Sequence[str] | None
) -> dict[str, Any] | None:
    """Mean share of the fields of what people wrote that either side's answers have, with 95 % intervals; None where
    answers have one field or none. other: None where nothing is compared."""
    sides = [
        [judge.fields_right(text, prompt.demonstrations) for prompt, text in zip(asked, texts, strict=True)]
        for texts in (own, *([other] if other is not None else []))
    ]
    known = [values for values in zip(*sides, strict=True) if None not in values]
    if not judge.agent.structured or not known:
        return None
    found = dict(zip(("own", "against"), map(list, zip(*known, strict=True)), strict=False))
    figures = {side: mean_interval(values, bounds=(0.0, 1.0)).as_dict() for side, values in found.items()}
    if "against" in found:
        gains = [mine - theirs for mine, theirs in zip(found["own"], found["against"], strict=True)]
        figures["difference"] = mean_interval(gains, bounds=(-1.0, 1.0)).as_dict()
    return figures


def right_answer_check(judge: AnswerJudge) -> Check:
    """Check of an answer against the list of right ones of its row (`rl.datasets.feedback_types`). An answer on neither
    list is not right."""

    def check(rows: Sequence[Row], answers: Sequence[str]) -> list[float | None]:
        return [float(judge.does_one_of(text, row[RIGHT])) for row, text in zip(rows, answers, strict=True)]

    return check


def case_of(row: Row, own: float, other: float) -> dict[str, object]:
    """One item of evidence as it is stored: what both sides did at a row."""
    facts = {"prompt_hash": hash_of(row), "cluster": row.get("cluster", ""), "slices": slices_of(row)}
    return {**facts, "own": own, "other": other}


def _figures(stored: Sequence[Row], effect: Effect | None) -> dict[str, object]:
    """Prompts, the figure of either side, the paired difference with its 95 % interval and two-sided p."""
    figures: dict[str, Any] = {"prompts": len({one["cluster"] or one["prompt_hash"] for one in stored})}
    if effect is None:
        return figures
    own, other = effect.sides
    return figures | {
        "unit": effect.unit,
        "value": own,
        "against_value": other,
        "difference": effect.interval(0.95).as_dict(),
        "p_value": min(1.0, 2 * min(effect.better(), effect.worse())),
    }


def side_figure(stored: Sequence[Row], side: str) -> Figure:
    """The figure of one side alone with its 95 % interval: a share where all are 0 or 1, else a mean."""
    values = [float(one[side]) for one in stored]
    if all(value in (0.0, 1.0) for value in values):
        return wilson_interval(round(sum(values)), len(values)).as_dict()
    return mean_interval(values).as_dict()


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
