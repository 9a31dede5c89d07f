"""Types of feedback as plain facts: verdicts, preferences, corrections, listed options. Pure.

With what every kind of dataset asks of them: what a rating is worth, when two responses are the same.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rl.agents.base import answer_plain

Completion: TypeAlias = str | list[dict[str, Any]]
"""A response: a text, or chat messages where a text cannot say it (tool calls and their results)."""


Split: TypeAlias = Literal["train", "eval", "holdout"]


SPLITS: tuple[Split, ...] = ("train", "eval", "holdout")


SplitOf: TypeAlias = Callable[[str], Split]
"""Prompt hash -> side of the split the prompt stands on. Datasets ask `rl.datasets.splits`; it may be called only when
all evidence was read."""


SOURCES = (
    "comparison", "correction", "demonstration", "teacher", "ratings", "candidates", "implied", "reward", "decision",
)  # fmt: skip
"""Sources of a row, strongest evidence first; `decision` is a recorded prompt, with or without feedback."""


NEUTRAL = 0.5
"""The value of a response nobody complained or cheered about."""


_AS_MESSAGES = "\x00"
"""First character of the key of a completion made of messages. No stored text may contain it."""


def rating_value(thumb: str = "", stars: int | None = None, score: float | None = None) -> float | None:
    """Value of a rating for its response, in [0, 1]; None where it gives no verdict (only tags, notes,
    correction).

    The finest signal speaks: a score as it is, else stars 1..5 as (stars - 1) / 4, else thumb up 1, down 0. They are
    not averaged, because a thumb beside 4 stars is the same verdict said coarsely, not a second one.
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
    """Ids of the feedback that says so, where it is recorded here."""


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
    """One rater's better response to a prompt; `valid` says whether the agent could act on it."""

    prompt_hash: str
    response: Completion
    correction: Completion
    valid: bool = True
    simulated: bool = False
    tags: tuple[str, ...] = ()
    feedback: tuple[uuid.UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class CandidatesEvidence:
    """The options a decision chose among; a score in [0, 1] where the app gave one."""

    prompt_hash: str
    response: Completion
    candidates: tuple[tuple[str, float | None], ...]
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DemonstrationEvidence:
    """A response that was written to be imitated, of one of DEMONSTRATIONS."""

    prompt_hash: str
    response: Completion
    source: str = "demonstration"
    simulated: bool = False
    tags: tuple[str, ...] = ()
    feedback: tuple[uuid.UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class RewardEvidence:
    """Reward in [0, 1] of a response that nobody gave a verdict on."""

    prompt_hash: str
    response: Completion
    value: float
    simulated: bool = False
    tags: tuple[str, ...] = ()
    measured: bool = True
    """True if an outcome, a trace or a reward function the operator named spoke; False where only comparisons
    did."""
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
    """A text that stands for a completion: itself, or marked JSON for messages, without the ids of their calls."""
    if isinstance(completion, str):
        return completion
    turns = [_without_ids(message) for message in completion]
    return _AS_MESSAGES + json.dumps(turns, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs each time the same is said: ids of calls, blanks in their arguments."""
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
    """The completion a key stands for."""
    if not key.startswith(_AS_MESSAGES):
        return key
    messages: list[dict[str, Any]] = json.loads(key[len(_AS_MESSAGES) :])
    return messages


def plain_key(key: str) -> str:
    """A completion's key without what does not change it: blanks, and the order of keys in JSON."""
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
    """Ways in which the responses to one prompt were written: those that say the same are one response.

    A JSON object is the same with its keys in another order, any text with blanks around it.
    """

    __slots__ = ("_written",)

    def __init__(self) -> None:
        self._written: dict[str, dict[str, int]] = {}

    def key(self, completion: Completion) -> str:
        """One key for every spelling of a response; the spelling is counted."""
        written = completion_key(completion)
        key = plain_key(written)
        times = self._written.setdefault(key, {})
        times[written] = times.get(written, 0) + 1
        return key

    def completion(self, key: str) -> Completion:
        """The response of a key as it was written most often; among equals the first by its characters."""
        times = self._written[key]
        return completion_of(min(times, key=lambda written: (-times[written], written)))


def same_response(one: Completion, other: Completion) -> bool:
    """True if two responses differ in nothing but white space or the order of a JSON object's keys: no preference
    between them can be learnt."""
    return bare(completion_key(one)) == bare(completion_key(other))


def bare(key: str) -> str:
    """A key without white space; equal for responses that say the same."""
    return "".join(plain_key(key).split())


def digest_of(*parts: str) -> str:
    """SHA-256 of texts, as hex."""
    text = "\x01".join(parts)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
