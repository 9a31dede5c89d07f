"""Types of evidence (verdicts, preferences, corrections, options), identity of responses, known answers. Pure.

If the agent itself knows a prompt's right answer, only that one is right. Otherwise people vote on answers that do the
same: a rating votes for or against its answer; a correction or demonstration votes for the written answer, and a
correction also against the replaced one. An answer is right with more votes for than against, else wrong. Comparisons
decide only on answers without ratings and demonstrations: right if every comparison preferred them, else wrong. An
answer on neither list is unknown and counts as not right.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from feedback.messages import Completion, Message
from rl.agents.base import Agent, answer_plain
from rl.agents.fields import answer_action
from rl.gates.evidence_kinds import CORRECTIONS, KNOWN, LABELS, PAIRS

Row: TypeAlias = dict[str, Any]
"""A row of a dataset: its prompt, and fields that depend on the dataset's kind."""

Split: TypeAlias = Literal["train", "eval", "holdout"]
SPLITS: tuple[Split, ...] = ("train", "eval", "holdout")

SplitOf: TypeAlias = Callable[[str], Split]
"""Prompt hash -> split (`rl.datasets.splits`). Call it only after all evidence was read."""

_WRITTEN = ("comparison", "correction", "demonstration", "teacher")
SOURCES = (*_WRITTEN, "ratings", "candidates", "implied", "reward", "answer", "decision")
"""Sources of a row, strongest evidence first; `decision` is a recorded prompt, with or without feedback."""

NEUTRAL = 0.5
"""Value of a rating that is neither for nor against a response."""

_AS_MESSAGES = "\x00"
"""First character of the key of a completion made of messages. No stored text may contain it."""


def rating_value(thumb: str = "", stars: int | None = None, score: float | None = None) -> float | None:
    """Value of a rating in [0, 1]: its score, else (stars - 1) / 4, else thumb up 1, down 0; None without a verdict.

    Not averaged: a thumb beside 4 stars is the same verdict on a coarser scale.
    """
    if score is not None:
        return float(score)
    if stars is not None:
        return (stars - 1) / 4
    return {"up": 1.0, "down": 0.0}.get(thumb)


@dataclass(frozen=True, slots=True)
class RatingEvidence:
    """One rater's verdict on one response to a prompt; value in [0, 1]."""

    prompt_hash: str
    response: Completion
    value: float
    simulated: bool = False
    tags: tuple[str, ...] = ()
    feedback: tuple[uuid.UUID, ...] = ()
    """Ids of the feedback behind it."""


@dataclass(frozen=True, slots=True)
class ComparisonEvidence:
    """One rater's preference between two responses to a prompt: left, right, tie or both_bad."""

    prompt_hash: str
    left: Completion
    right: Completion
    preference: str
    simulated: bool = False
    tags: tuple[str, ...] = ()
    feedback: tuple[uuid.UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class CorrectionEvidence:
    """One rater's better response; `valid`: the agent could act on it."""

    prompt_hash: str
    response: Completion
    correction: Completion
    valid: bool = True
    simulated: bool = False
    tags: tuple[str, ...] = ()
    feedback: tuple[uuid.UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class CandidatesEvidence:
    """The options of a decision, each with the app's score in [0, 1] or None."""

    prompt_hash: str
    response: Completion
    candidates: tuple[tuple[str, float | None], ...]
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DemonstrationEvidence:
    """A response to imitate; `source` is one of DEMONSTRATIONS, or ANSWER for one that nobody judged."""

    prompt_hash: str
    response: Completion
    source: str = "demonstration"
    simulated: bool = False
    tags: tuple[str, ...] = ()
    feedback: tuple[uuid.UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class RewardEvidence:
    """Reward in [0, 1] of a response without a verdict."""

    prompt_hash: str
    response: Completion
    value: float
    simulated: bool = False
    tags: tuple[str, ...] = ()
    measured: bool = True
    """True if it rests on an outcome, a trace or a configured reward function; False: on comparisons alone."""
    feedback: tuple[uuid.UUID, ...] = ()


Evidence: TypeAlias = (
    RatingEvidence
    | ComparisonEvidence
    | CorrectionEvidence
    | CandidatesEvidence
    | DemonstrationEvidence
    | RewardEvidence
)


def completion_key(completion: Completion) -> str:
    """Key of a completion: the text, or marked JSON of its messages without ids of calls."""
    if isinstance(completion, str):
        return completion
    turns = [_without_ids(message) for message in completion]
    return _AS_MESSAGES + json.dumps(turns, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _without_ids(message: Message) -> Message:
    """A message without ids of calls and white space in their arguments."""
    found = {key: value for key, value in message.items() if key not in ("tool_call_id", "id")}
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [_call_plain(call) for call in calls]
    return found


def _call_plain(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {"type": "function", "function": function}
    return {
        "type": "function",
        "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


def completion_of(key: str) -> Completion:
    if not key.startswith(_AS_MESSAGES):
        return key
    messages: list[Message] = json.loads(key[len(_AS_MESSAGES) :])
    return messages


def plain_key(key: str) -> str:
    """A key without surrounding white space and with JSON keys in a fixed order."""
    if not key.startswith(_AS_MESSAGES):
        return answer_plain(key)
    turns = json.loads(key[len(_AS_MESSAGES) :])
    for turn in turns:
        for call in turn.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                function["arguments"] = answer_plain(function["arguments"])
    return _AS_MESSAGES + json.dumps(turns, sort_keys=True, ensure_ascii=False)


class Spellings:
    """Spellings of the responses to one prompt: JSON with keys in another order, or white space around a text."""

    __slots__ = ("_written",)

    def __init__(self) -> None:
        self._written: dict[str, dict[str, int]] = {}

    def key(self, completion: Completion) -> str:
        """Key shared by all spellings of a response; counts this spelling."""
        written = completion_key(completion)
        key = plain_key(written)
        times = self._written.setdefault(key, {})
        times[written] = times.get(written, 0) + 1
        return key

    def completion(self, key: str) -> Completion:
        """The most frequent spelling; ties by character order."""
        times = self._written[key]
        return completion_of(min(times, key=lambda written: (-times[written], written)))


def same_response(one: Completion, other: Completion) -> bool:
    """True if two responses differ only in white space or the order of JSON keys."""
    return bare(completion_key(one)) == bare(completion_key(other))


def bare(key: str) -> str:
    """A key without any white space; equal for equal responses."""
    return "".join(plain_key(key).split())


def digest_of(*parts: str) -> str:
    """SHA-256 of texts, as hex."""
    text = "\x01".join(parts)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# --- Known answers of held-out prompts: right and wrong answers, from all human feedback. Pure ---

RIGHT, WRONG = "right", "wrong"
"""Columns of a row of the kind `known`: lists of responses."""

OF_PEOPLE = ("comparison", "correction", "ratings")
"""Sources of pairs with human judgements on both answers."""

JUDGED_FIELDS = ("chosen", "rejected", "completion", "score", "label", "margin", "source", "votes")
"""Columns that a row loses when it represents its prompt."""


@dataclass
class _Answer:
    """Votes on one answer."""

    text: str
    liked: float = 0.0
    disliked: float = 0.0
    written: int = 0
    replaced: int = 0
    rated: bool = False
    """True with any thumb, stars or score, even a neutral one."""
    preferred: int = 0
    beaten: int = 0

    @property
    def is_right(self) -> bool | None:
        """None if undecided."""
        if self.liked or self.disliked or self.written or self.replaced:
            # A thumb down with a correction is one vote against, hence max.
            return self.liked + self.written > max(self.disliked, self.replaced)
        if self.rated or not (self.preferred or self.beaten):
            return None
        return not self.beaten


@dataclass
class _Prompt:
    row: Row
    answers: dict[Any, _Answer] = field(default_factory=dict)
    truths: list[str] = field(default_factory=list)
    simulated: bool = False


def known_rows(rows: Mapping[str, Sequence[Row]], agent: Agent) -> list[Row]:
    """One row per prompt with a known answer, with lists `right` and `wrong`; rows: kind -> held-out rows.

    For agents that answer in free text, only answers that the agent itself knows count: two wordings of one answer
    cannot be told from two answers.
    """
    prompts: dict[str, _Prompt] = {}
    kinds = (KNOWN, PAIRS, LABELS, CORRECTIONS) if agent.discrete else (KNOWN,)
    for kind in kinds:
        for row in rows.get(kind, ()):
            name = row.get("prompt_hash") or json.dumps(row["prompt"], sort_keys=True)
            prompt = prompts.setdefault(name, _Prompt(row))
            if kind == KNOWN:
                prompt.truths = agent.truths(row.get("state"))
            else:
                _count(prompt, kind, row, agent)
    found = []
    for prompt in prompts.values():
        right = prompt.truths or [one.text for one in prompt.answers.values() if one.is_right]
        wrong = [one.text for one in prompt.answers.values() if one.is_right is False]
        if wrong and not right:
            right = _left_over(prompt, agent)
        if right or wrong:
            facts = {name: value for name, value in prompt.row.items() if name not in JUDGED_FIELDS}
            simulated = prompt.simulated and not prompt.truths
            found.append(
                {**facts, "simulated": simulated, RIGHT: right, WRONG: [] if prompt.truths else wrong}
            )
    return found


def _left_over(prompt: _Prompt, agent: Agent) -> list[str]:
    """The only answer of a closed set that is not known to be wrong, or []."""
    wrong = {action for action, answer in prompt.answers.items() if answer.is_right is False}
    left = [one for one in agent.choices(prompt.row.get("state")) if answer_action(agent, one) not in wrong]
    return left if len(left) == 1 else []


def known_digest(rows: Sequence[Row]) -> str:
    """SHA-256 of the lists; changes with any further feedback."""
    lists = sorted([str(row.get("prompt_hash", "")), sorted(row[RIGHT]), sorted(row[WRONG])] for row in rows)
    return hashlib.sha256(json.dumps(lists).encode()).hexdigest()


def _count(prompt: _Prompt, kind: str, row: Row, agent: Agent) -> None:
    if kind == PAIRS and row.get("source", "comparison") not in OF_PEOPLE:
        return
    prompt.simulated |= bool(row.get("simulated"))
    votes = max(int(row.get("votes", 1)), 1)
    if kind == LABELS:
        answer = _answer(prompt, row["completion"], agent)
        answer.rated = True
        share = float(row["score"])
        if share != NEUTRAL:
            answer.liked += votes * share
            answer.disliked += votes * (1 - share)
    elif kind == CORRECTIONS:
        _answer(prompt, row["completion"], agent).written += votes
    else:
        chosen, rejected = (_answer(prompt, row[side], agent) for side in ("chosen", "rejected"))
        if chosen is not rejected:  # Two spellings of one answer are no preference.
            chosen.preferred += 1
            if row.get("source") == "correction":
                rejected.replaced += votes
            else:
                rejected.beaten += 1


def _answer(prompt: _Prompt, completion: Any, agent: Agent) -> _Answer:
    text = completion if isinstance(completion, str) else completion[0]["content"]
    return prompt.answers.setdefault(answer_action(agent, text), _Answer(text))
