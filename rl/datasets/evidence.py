"""Where the evidence of a dataset comes from: the database, or files of any known format."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from feedback import formats, selectors
from feedback.agreement import LabelAggregated, labels_aggregated
from feedback.collection import agent_settings
from feedback.formats.records import (
    FormatRefused,
    ImportedComparison,
    ImportedDecision,
    ImportedRating,
    ImportedReference,
    ImportedTrace,
    OutcomeReference,
    RowRefused,
    RowSkipped,
    completion_read,
)
from feedback.formats.simulation import ENTRY
from feedback.models import Aggregation
from rl.agents import get_agent
from rl.agents.base import Agent, ChoiceAgent, Scenario
from rl.examples import Rewarded
from rl.judgements import Compared, Completion, Corrected, Evidence, Judged, Listed, rating_value
from rl.models import RewardRecord
from rl.rewards.rows import facts_of

logger = logging.getLogger("rl.datasets")

SIMULATED = "simulated"
"""The kind of rater whose word is marked in every row made from it."""


REASONS: dict[str, str] = {
    "not_text": "pairs whose prompt holds something else than text (an image, a sound)",
    "refused_row": "rows of the file that could not be read",
    "no_preference": "rows of the file that carry no preference (a prompt, a demonstration)",
    "beside_a_person": "simulated verdicts on responses that a person rated, where raters are weighted by reliability",
    "other_agent": "rows of the file that belong to another agent",
    "repeated_prompt": "rows of a file of prompts whose prompt stands there before",
}
"""Reasons for leaving something out beside those of rl.pairs, and what each number counts."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What was asked, and what the app knew."""

    messages: list[dict[str, Any]]
    state: Any = None
    tools: list[Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What verifiable rewards need: tests, the right answer."""


class EvidenceSource(Protocol):
    """Evidence on an agent's prompts. The prompts themselves are asked for later, for those that gave pairs alone."""

    agent: str
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

    def rewarded(self) -> Iterator[Rewarded]:
        """Responses without a verdict whose outcomes say what they are worth; to be read after `evidence`."""
        ...

    def prompt_hashes(self) -> list[str]:
        """Every prompt that was asked, judged or not; complete once `evidence` is exhausted."""
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
            completion = completion_read(fact.response, fact.metadata)
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
        together = self._weighted()
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
            if value is None:
                continue
            if (label := together.get(rating.decision)) is not None:
                if simulated and not label.simulated:
                    left_out["beside_a_person"] += 1
                    continue
                value = label.probability_good
            yield Judged(response.prompt_hash, response.completion, value, simulated, tags)
        yield from self._corrections(responses, corrected)

    def _weighted(self) -> dict[uuid.UUID, LabelAggregated]:
        """What raters say together of each decision, each heard as far as they are reliable, where the agent's settings
        want that; otherwise nothing, and every rating counts the same."""
        if agent_settings(self.agent).aggregation != Aggregation.DAWID_SKENE:
            return {}
        return {label.decision: label for label in labels_aggregated(self.agent, Aggregation.DAWID_SKENE)}

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

    def rewarded(self) -> Iterator[Rewarded]:
        """As EvidenceSource: a decision counts where its reward knows more than what was known at once."""
        known = RewardRecord.objects.filter(agent=self.agent, superseded_by__isnull=True, value__isnull=False)
        known = known.exclude(delayed=None, strategic=None).order_by("decision")
        earned: dict[uuid.UUID, tuple[float, bool]] = {
            pk: (value, simulated)
            for pk, value, simulated in known.values_list("decision", "value", "simulated")
            if value is not None
        }
        for fact in selectors.responses_without_verdict(list(earned)):
            value, simulated = earned[fact.id]
            spokesman = (not fact.has_state, fact.id)
            self._spokesmen[fact.prompt_hash] = min(
                spokesman, self._spokesmen.get(fact.prompt_hash, spokesman)
            )
            completion = completion_read(fact.response, fact.metadata)
            yield Rewarded(fact.prompt_hash, completion, value, simulated, tuple(fact.tags))

    def _count(self, rater_kind: str) -> bool:
        simulated = rater_kind == SIMULATED
        self.feedback_count += 1
        self.simulated_count += simulated
        return simulated

    def prompts(self, prompt_hashes: list[str]) -> dict[str, Prompt]:
        ids = [self._spokesmen[prompt_hash][1] for prompt_hash in prompt_hashes]
        return {
            fact.prompt_hash: Prompt(
                fact.messages, fact.state, fact.metadata.get("tools"), facts_of(fact.metadata)
            )
            for fact in selectors.prompt_facts(ids)
        }

    def prompt_hashes(self) -> list[str]:
        return list(self._spokesmen)

    def query(self) -> dict[str, Any]:
        newest = selectors.feedback_counts(self.agent).newest_at
        return {
            "newest_rating_at": newest.isoformat() if newest else None,
            "aggregation": agent_settings(self.agent).aggregation,
        }


def _candidates(stored: list[Any] | None) -> tuple[tuple[str, float | None], ...]:
    """Listed responses as (text, score): stored are texts, or {response, score?}."""
    return tuple(
        (item, None) if isinstance(item, str) else (item["response"], item.get("score"))
        for item in stored or ()
    )


class FileEvidence:
    """What a file of a known format says, without importing it."""

    def __init__(
        self, agent: str, path: Path, *, format: str = "auto", ratings_path: Path | None = None
    ) -> None:
        self.agent = agent
        self.path = path
        self.format = formats.named(formats.detect(path) if format == "auto" else format).name
        self.ratings_path = ratings_path
        self.feedback_count = 0
        self.simulated_count = 0
        self._prompts: dict[str, Prompt] = {}
        self._scenarios: dict[str, Scenario] | None = None

    def evidence(self, left_out: Counter[str]) -> Iterator[Evidence]:
        """As EvidenceSource. Raises FormatRefused for a file that is damaged or cannot be read."""
        self.feedback_count = self.simulated_count = 0
        refused: list[RowRefused] = []
        decisions: dict[uuid.UUID, _Response] = {}
        # of a named rater's comparisons of the same two decisions the last one stands, on whichever sides they were
        named: dict[tuple[frozenset[Any], str], ImportedComparison] = {}
        for record in formats.read(self.path, self.format, self.ratings_path):
            if isinstance(record, RowRefused):
                if record.broken:
                    raise FormatRefused(f"{self.path} line {record.line}: {record.reason}")
                refused.append(record)
            elif isinstance(record, ImportedTrace):
                pass  # what an agent did on the way says nothing of its responses
            elif isinstance(record, (RowSkipped, ImportedReference, OutcomeReference)):
                left_out["no_preference"] += 1
            elif isinstance(record, ImportedComparison):
                if isinstance(record.left, uuid.UUID):
                    named[frozenset((record.left, record.right)), record.rater] = record
                else:
                    yield from self._compared(record, decisions, left_out)
            elif self.format == "ratchet" and record.agent != self.agent:
                # other formats only suggest an agent
                left_out["other_agent"] += 1
            else:
                try:
                    yield from self._judged(record, decisions, left_out)
                except ValueError as error:
                    refused.append(RowRefused(record.line, record.key, str(error)))
        for comparison in named.values():
            yield from self._compared(comparison, decisions, left_out)
        if refused:
            left_out["refused_row"] += len(refused)
            first = refused[0]
            logger.warning(
                "%s: %d rows refused; the first is line %d: %s",
                self.path,
                len(refused),
                first.line,
                first.reason,
            )

    def _judged(
        self, record: ImportedDecision, decisions: dict[uuid.UUID, _Response], left_out: Counter[str]
    ) -> Iterator[Evidence]:
        if not record.messages:
            record = self._asked(record)
        response = self._response(record)
        if record.id:
            decisions[record.id] = response
        agent, said = get_agent(self.agent), False
        for rating in _standing(record.ratings):
            simulated, tags = self._count(rating.rater_kind), (*rating.tags, *response.tags)
            value = rating_value(rating.thumb, rating.stars, rating.score)
            if rating.correction is not None:
                valid = agent.is_valid(rating.correction, record.state)
                yield Corrected(
                    response.prompt_hash, response.completion, rating.correction, valid, simulated, tags
                )
            elif value is None:
                left_out["no_verdict"] += 1
            if value is not None:
                yield Judged(response.prompt_hash, response.completion, value, simulated, tags)
            said = True
        candidates = _candidates(record.candidates)
        if candidates and (said or any(score is not None for _, score in candidates)):
            yield Listed(response.prompt_hash, response.completion, candidates)
        elif not said:
            left_out["no_preference"] += 1

    def _compared(
        self, record: ImportedComparison, decisions: dict[uuid.UUID, _Response], left_out: Counter[str]
    ) -> Iterator[Evidence]:
        left, right = (
            decisions.get(side) if isinstance(side, uuid.UUID) else self._response(side)
            for side in (record.left, record.right)
        )
        if record.withdrawn or left is None or right is None:
            left_out["no_preference"] += 1
            return
        simulated = self._count(record.rater_kind)
        tags = (*record.tags, *left.tags, *right.tags)
        yield Compared(
            left.prompt_hash, left.completion, right.completion, record.preference, simulated, tags
        )

    def _response(self, record: ImportedDecision) -> _Response:
        prompt_hash = selectors.prompt_hash(self.agent, record.messages)
        known = self._prompts.get(prompt_hash)
        if known is None or known.state is None:
            self._prompts[prompt_hash] = Prompt(
                record.messages, record.state, record.metadata.get("tools"), facts_of(record.metadata)
            )
        completion = record.response
        if isinstance(completion, str):
            completion = completion_read(completion, record.metadata)
        return _Response(prompt_hash, completion, record.tags)

    def _asked(self, record: ImportedDecision) -> ImportedDecision:
        """A simulation's entry as the agent would have asked and answered it. Raises ValueError."""
        entry, agent = record.metadata[ENTRY], get_agent(self.agent)
        state = self._state(entry, agent)
        response = entry.get("response")
        if response is None:
            if not isinstance(agent, ChoiceAgent):
                raise ValueError("response: expected a text, found nothing")
            option = entry.get(agent.answer_key)
            if not isinstance(option, str):
                raise ValueError(f"{agent.answer_key}: expected the option chosen, found {option!r}")
            response = agent.respond(option)
        return replace(record, messages=agent.render(state), response=response, state=state, metadata={})

    def _state(self, entry: dict[str, Any], agent: Agent) -> Any:
        state = entry.get("state", entry.get("scenario"))
        if isinstance(state, dict):
            return state
        if self._scenarios is None:
            self._scenarios = {scenario.key: scenario for scenario in agent.scenarios()}
        if state not in self._scenarios:
            raise ValueError(
                f"scenario: expected a state or one of the {len(self._scenarios)} scenarios of agent {agent.slug}, "
                f"found {state!r}"
            )
        return self._scenarios[state].state

    def _count(self, rater_kind: str) -> bool:
        simulated = rater_kind == SIMULATED
        self.feedback_count += 1
        self.simulated_count += simulated
        return simulated

    def prompts(self, prompt_hashes: list[str]) -> dict[str, Prompt]:
        return {prompt_hash: self._prompts[prompt_hash] for prompt_hash in prompt_hashes}

    def rewarded(self) -> Iterator[Rewarded]:
        return iter(())  # a file tells of no rewards

    def prompt_hashes(self) -> list[str]:
        return list(self._prompts)

    def query(self) -> dict[str, Any]:
        files = [self.path, *([self.ratings_path] if self.ratings_path else [])]
        return {"format": self.format, "files": [{"name": f.name, "sha256": _sha256(f)} for f in files]}


def _standing(ratings: tuple[ImportedRating, ...]) -> list[ImportedRating]:
    """Of each named rater the last word, unless it takes back; everything that nobody in particular said."""
    last = {rating.rater: rating for rating in ratings}
    return [r for r in ratings if not r.withdrawn and (not r.rater or last[r.rater] is r)]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
