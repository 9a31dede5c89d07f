"""Types of evidence (verdicts, preferences, corrections, listed options) and the identity of responses. Pure."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from feedback.messages import Completion, Message
from rl.agents.base import answer_plain

Row: TypeAlias = dict[str, Any]
"""A row of a dataset: its prompt, and fields that depend on the dataset's kind."""

Split: TypeAlias = Literal["train", "eval", "holdout"]
SPLITS: tuple[Split, ...] = ("train", "eval", "holdout")

SplitOf: TypeAlias = Callable[[str], Split]
"""Prompt hash -> split (`rl.datasets.splits`). Call it only after all evidence was read."""

_WRITTEN = ("comparison", "correction", "demonstration", "teacher")
SOURCES = (*_WRITTEN, "ratings", "candidates", "implied", "reward", "decision")
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
    """A response to imitate; `source` is one of DEMONSTRATIONS."""

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


def _call_plain(call: Any) -> Any:
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
