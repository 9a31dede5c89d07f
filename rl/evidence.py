"""Where the evidence of a dataset comes from: the database, or files of any known format."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from feedback import selectors
from rl.agents import get_agent
from rl.pairs import Compared, Completion, Corrected, Evidence, Judged, Listed, rating_value

SIMULATED = "simulated"
"""The kind of rater whose word is marked in every row made from it."""


REASONS: dict[str, str] = {
    "not_text": "pairs whose prompt holds something else than text (an image, a sound)",
    "refused_row": "rows of the file that could not be read",
    "no_preference": "rows of the file that carry no preference (a prompt, a demonstration)",
}
"""Reasons for leaving something out beside those of rl.pairs, and what each number counts."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What was asked, and what the app knew."""

    messages: list[dict[str, Any]]
    state: Any = None
    tools: list[Any] | None = None


class EvidenceSource(Protocol):
    """Evidence on an agent's prompts. The prompts themselves are asked for later, for those that gave pairs alone."""

    feedback_count: int
    """Ratings and comparisons read; complete once `evidence` is exhausted."""
    simulated_count: int
    """Those of them that a simulated rater gave."""

    def evidence(self, left_out: Counter[str]) -> Iterator[Evidence]:
        """Everything known; what says nothing of preferences is counted in `left_out` (see rl.pairs.REASONS)."""
        ...

    def prompts(self, prompt_hashes: list[str]) -> dict[str, Prompt]:
        """The prompts of these hashes."""
        ...

    def query(self) -> dict[str, Any]:
        """What tells this source from another, for the snapshot's record."""
        ...


@dataclass(frozen=True, slots=True)
class _Response:
    """A decision that somebody judged, without its prompt."""

    prompt_hash: str
    completion: Completion
    tags: tuple[str, ...]


class DatabaseEvidence:
    """What was rated here. One streamed query each for responses, ratings and comparisons; prompts stay outside."""

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.feedback_count = 0
        self.simulated_count = 0
        self._spokesmen: dict[str, tuple[bool, uuid.UUID]] = {}

    def evidence(self, left_out: Counter[str]) -> Iterator[Evidence]:
        self.feedback_count = self.simulated_count = 0
        responses: dict[uuid.UUID, _Response] = {}
        for fact in selectors.response_facts(self.agent):
            # one decision speaks for its prompt, always the same: of those with a state the one with the least id
            spokesman = (not fact.has_state, fact.id)
            self._spokesmen[fact.prompt_hash] = min(
                spokesman, self._spokesmen.get(fact.prompt_hash, spokesman)
            )
            completion = completion_stored(fact.response, fact.metadata)
            candidates = _candidates(fact.candidates)
            if fact.judged:
                responses[fact.id] = _Response(fact.prompt_hash, completion, tuple(fact.tags))
            if candidates and (fact.judged or any(score is not None for _, score in candidates)):
                yield Listed(fact.prompt_hash, completion, candidates)
        yield from self._ratings(responses, left_out)
        for comparison in selectors.comparison_facts(self.agent):
            left, right = responses.get(comparison.left), responses.get(comparison.right)
            if left is None or right is None:
                continue  # decided after the responses were read: the next snapshot has it
            simulated = self._count(comparison.rater_kind)
            tags = (*comparison.tags, *left.tags, *right.tags)
            yield Compared(
                left.prompt_hash, left.completion, right.completion, comparison.preference, simulated, tags
            )

    def _ratings(
        self, responses: dict[uuid.UUID, _Response], left_out: Counter[str]
    ) -> Iterator[Judged | Corrected]:
        corrected: list[tuple[uuid.UUID, str, bool, tuple[str, ...]]] = []
        for rating in selectors.rating_facts(self.agent):
            response = responses.get(rating.decision)
            if response is None:
                continue
            simulated = self._count(rating.rater_kind)
            tags = (*rating.tags, *response.tags)
            value = rating_value(rating.thumb, rating.stars, rating.score)
            if rating.correction is not None:
                corrected.append((rating.decision, rating.correction, simulated, tags))
            elif value is None:
                left_out["no_verdict"] += 1
            if value is not None:
                yield Judged(response.prompt_hash, response.completion, value, simulated, tags)
        yield from self._corrections(responses, corrected)

    def _corrections(
        self,
        responses: dict[uuid.UUID, _Response],
        corrected: list[tuple[uuid.UUID, str, bool, tuple[str, ...]]],
    ) -> Iterator[Corrected]:
        agent = get_agent(self.agent)
        states: dict[uuid.UUID, Any] = {}
        if agent.structured:
            ids = list({decision for decision, *_ in corrected})
            states = {fact.id: fact.state for fact in selectors.prompt_facts(ids)}
        for decision, correction, simulated, tags in corrected:
            response = responses[decision]
            valid = agent.is_valid(correction, states.get(decision))
            yield Corrected(response.prompt_hash, response.completion, correction, valid, simulated, tags)

    def _count(self, rater_kind: str) -> bool:
        simulated = rater_kind == SIMULATED
        self.feedback_count += 1
        self.simulated_count += simulated
        return simulated

    def prompts(self, prompt_hashes: list[str]) -> dict[str, Prompt]:
        ids = [self._spokesmen[prompt_hash][1] for prompt_hash in prompt_hashes]
        return {
            fact.prompt_hash: Prompt(fact.messages, fact.state, fact.metadata.get("tools"))
            for fact in selectors.prompt_facts(ids)
        }

    def query(self) -> dict[str, Any]:
        newest = selectors.feedback_counts(self.agent).newest_at
        return {"newest_rating_at": newest.isoformat() if newest else None}


def completion_stored(response: str, metadata: dict[str, Any]) -> Completion:
    """A decision's response as it is trained on: its text, or the chat messages an importer stored as JSON."""
    if metadata.get("response_is") != "messages":
        return response
    messages: list[dict[str, Any]] = json.loads(response)
    return messages


def _candidates(stored: list[Any] | None) -> tuple[tuple[str, float | None], ...]:
    """Listed responses as (text, score): stored are texts, or {response, score?}."""
    return tuple(
        (item, None) if isinstance(item, str) else (item["response"], item.get("score"))
        for item in stored or ()
    )
