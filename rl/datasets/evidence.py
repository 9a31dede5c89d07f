"""Sources of evidence: the protocol, and the one that reads the database."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from django.db.models import Q

from feedback import selectors
from feedback.explorer.bulk_readers import outcome_facts
from feedback.messages import Message
from feedback.storage.problem_rows import RowReader
from feedback.storage.responses import completion_read
from rl.agents import get_agent
from rl.datasets.feedback_types import (
    CandidatesEvidence,
    ComparisonEvidence,
    Completion,
    CorrectionEvidence,
    DemonstrationEvidence,
    Evidence,
    RatingEvidence,
    RewardEvidence,
    rating_value,
)
from rl.datasets.reward_records import pending_with_evidence, reward_settings
from rl.datasets.teachers import teacher_log
from rl.models import RewardRecord
from rl.recipes.sft import ANSWER, DEMONSTRATIONS
from rl.rewards.answers import facts_of

logger = logging.getLogger("rl.datasets")

SIMULATED_RATER = "simulated"
"""Kind of rater that marks every row made from its feedback."""

REASONS: dict[str, str] = {
    "not_text": "pairs whose prompt is not only text (an image, a sound)",
    "refused_row": "unreadable rows of the file",
    "unreadable": "unreadable decisions; `/problems/` names each and says why",
    "no_preference": "rows of the file without a preference (a prompt, a demonstration)",
    "other_agent": "rows of the file for another agent",
    "near_identical": "held-out rows whose prompt is nearly identical to one in training or tuning",
    "repeated_prompt": "repeated prompts in a file of prompts",
    "reward_pending": "decisions with outcomes or a trace without a calculated reward: run calculate_rewards",
}
"""Reason for leaving evidence out, besides those of rl.datasets.pairs -> what its number counts."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, with the app's state and facts."""

    messages: list[Message]
    state: Any = None
    tools: list[Any] | None = None
    facts: dict[str, object] = field(default_factory=dict)
    """Facts for verifiable rewards: tests, the right answer."""
    unit: str = ""
    trace: str = ""
    """Unit and trace of the decision that represents the prompt; may be empty."""


class EvidenceSource(Protocol):
    """Evidence on an agent's prompts. Prompts are read later, and only those with rows."""

    agent: str
    feedback_count: int
    """Ratings and comparisons read; final once `evidence` is exhausted."""
    simulated_count: int
    """The simulated ones among them."""
    rows: RowReader
    """Counts unreadable database rows; a file's bad rows are counted in `left_out` instead."""

    def evidence(self, left_out: Counter[str]) -> Iterator[Evidence]:
        """All evidence but rewards; feedback without a preference is counted in `left_out`."""
        ...

    def prompts(self, prompt_hashes: list[str]) -> dict[str, Prompt]:
        """Hash -> prompt, without unreadable ones."""
        ...

    def rewards(self, left_out: Counter[str], *, compared: bool) -> Iterator[RewardEvidence]:
        """Rewards of responses without a verdict, from outcomes, traces or, if `compared`, comparisons alone.

        Read `evidence` first.
        """
        ...

    def demonstrations(self) -> Iterator[DemonstrationEvidence]:
        """Demonstrations that are not in `evidence`. Read `evidence` first."""
        ...

    def prompt_hashes(self) -> list[str]:
        """Every prompt, with or without feedback; complete once `evidence` is exhausted."""
        ...

    def query(self) -> dict[str, object]:
        """What identifies this source, for the snapshot's record."""
        ...


@dataclass(frozen=True, slots=True)
class Response:
    """A judged response, without its prompt."""

    prompt_hash: str
    completion: Completion
    tags: tuple[str, ...]


class DatabaseEvidence:
    """EvidenceSource of the database: one streamed query each for responses, ratings and comparisons."""

    def __init__(
        self, agent: str, put_off: Collection[uuid.UUID] = (), *, keep_reasoning: bool = False
    ) -> None:
        """put_off: ids of feedback to skip. keep_reasoning: responses carry their recorded reasoning."""
        self.agent = agent
        self.keep_reasoning = keep_reasoning
        self.feedback_count = 0
        self.simulated_count = 0
        self.rows = RowReader(agent, "dataset")
        self._put_off = frozenset(put_off)
        self._representatives: dict[str, tuple[bool, uuid.UUID]] = {}
        self._compared: dict[uuid.UUID, list[uuid.UUID]] = {}

    def _completion(self, fact: selectors.ResponseFact) -> Completion:
        completion = completion_read(fact.response, fact.metadata)
        return with_reasoning(completion, fact.reasoning) if self.keep_reasoning else completion

    def _represent(self, fact: selectors.ResponseFact | selectors.DecisionPrompt) -> None:
        """Choose the decision that represents a prompt: one with a state if possible, then the lowest id."""
        candidate = (not fact.has_state, fact.id)
        self._representatives[fact.prompt_hash] = min(
            candidate, self._representatives.get(fact.prompt_hash, candidate)
        )

    def evidence(self, left_out: Counter[str]) -> Iterator[Evidence]:
        self.feedback_count = self.simulated_count = 0
        self._compared = {}
        responses: dict[uuid.UUID, Response] = {}
        for fact in selectors.response_facts(self.agent):
            with self.rows.row(fact.id):
                completion = self._completion(fact)
                candidates = candidates_read(fact.candidates)
                self._represent(fact)
                if fact.judged:
                    responses[fact.id] = Response(fact.prompt_hash, completion, tuple(fact.tags))
                if candidates and (fact.judged or any(score is not None for _, score in candidates)):
                    yield CandidatesEvidence(fact.prompt_hash, completion, candidates)
        yield from self._ratings(responses, left_out)
        for comparison in selectors.comparison_facts(self.agent):
            left, right = responses.get(comparison.left), responses.get(comparison.right)
            if left is None or right is None or comparison.id in self._put_off:
                continue  # Recorded after the responses were read: in the next snapshot.
            simulated = self._count(comparison.rater_kind)
            tags = (*comparison.tags, *left.tags, *right.tags)
            for side in (comparison.left, comparison.right):
                self._compared.setdefault(side, []).append(comparison.id)
            yield ComparisonEvidence(
                left.prompt_hash,
                left.completion,
                right.completion,
                comparison.preference,
                simulated,
                tags,
                (comparison.id,),
            )

    def _ratings(
        self, responses: dict[uuid.UUID, Response], left_out: Counter[str]
    ) -> Iterator[RatingEvidence | CorrectionEvidence | DemonstrationEvidence]:
        corrections: list[_Correction] = []
        for rating in selectors.rating_facts(self.agent):
            response = responses.get(rating.decision)
            if response is None or rating.id in self._put_off:
                continue
            simulated = self._count(rating.rater_kind)
            tags = (*rating.tags, *response.tags)
            value = rating_value(rating.thumb, rating.stars, rating.score)
            marked = [source for source in DEMONSTRATIONS if source in rating.tags]
            for source in marked:
                yield DemonstrationEvidence(
                    response.prompt_hash, response.completion, source, simulated, tags, (rating.id,)
                )
            if rating.correction is not None:
                corrections.append(
                    _Correction(rating.decision, rating.correction, simulated, tags, (rating.id,))
                )
            elif value is None and not marked:
                left_out["no_verdict"] += 1
            if value is None:
                continue
            yield RatingEvidence(
                response.prompt_hash, response.completion, value, simulated, tags, (rating.id,)
            )
        yield from self._corrections(responses, corrections)

    def _corrections(
        self,
        responses: dict[uuid.UUID, Response],
        corrected: list[_Correction],
    ) -> Iterator[CorrectionEvidence]:
        agent = get_agent(self.agent)
        states: dict[uuid.UUID, Any] = {}
        if agent.structured:
            ids = list({item.decision for item in corrected})
            states = {fact.id: fact.state for fact in selectors.prompt_facts(ids)}
        for item in corrected:
            with self.rows.row(item.decision):
                response = responses[item.decision]
                valid = agent.is_valid(item.text, states.get(item.decision))
                yield CorrectionEvidence(
                    response.prompt_hash,
                    response.completion,
                    correction_read(item.text, response.completion),
                    valid,
                    item.simulated,
                    item.tags,
                    item.feedback,
                )

    def rewards(self, left_out: Counter[str], *, compared: bool) -> Iterator[RewardEvidence]:
        """Stored rewards that rest on an outcome or trace, or if `compared` on comparisons."""
        known = RewardRecord.objects.filter(agent=self.agent, superseded_by__isnull=True, value__isnull=False)
        speaks = Q(measured=True) | Q(delayed__isnull=False) if compared else Q(measured=True)
        known = known.filter(speaks).order_by("decision")
        facts: dict[uuid.UUID, tuple[float, bool, bool]] = {
            pk: (value, simulated, is_measured)
            for pk, value, simulated, is_measured in known.values_list(
                "decision", "value", "simulated", "measured"
            )
            if value is not None
        }
        if waiting := pending_with_evidence(self.agent).count():
            left_out["reward_pending"] += waiting
        outcomes: dict[uuid.UUID, list[uuid.UUID]] = {}
        outcome_names = set(reward_settings(self.agent).outcomes)
        for outcome in outcome_facts(self.agent):
            if outcome.name in outcome_names:
                outcomes.setdefault(outcome.decision, []).append(outcome.id)
        for fact in selectors.responses_without_verdict(list(facts)):
            value, simulated, is_measured = facts[fact.id]
            # A trace is feedback without an id of its own: use the decision's.
            feedback_ids = outcomes.get(fact.id) or (
                [fact.id] if is_measured else self._compared.get(fact.id, [])
            )
            if not self._put_off.isdisjoint(feedback_ids):
                continue
            with self.rows.row(fact.id):
                completion = self._completion(fact)
                self._represent(fact)
                yield RewardEvidence(
                    fact.prompt_hash,
                    completion,
                    value,
                    simulated,
                    tuple(fact.tags),
                    is_measured,
                    tuple(feedback_ids),
                )

    def demonstrations(self) -> Iterator[DemonstrationEvidence]:
        for fact in selectors.responses_tagged(self.agent, DEMONSTRATIONS):
            with self.rows.row(fact.id):
                completion = self._completion(fact)
                self._represent(fact)
                for source in DEMONSTRATIONS:
                    if source in fact.tags:
                        yield DemonstrationEvidence(
                            fact.prompt_hash, completion, source, False, tuple(fact.tags), (fact.id,)
                        )

    def answers(self) -> Iterator[DemonstrationEvidence]:
        """The unrated answers of the policy that answered most: per prompt the most frequent one."""
        given: dict[str, Counter[str]] = {}
        teacher = teacher_log(self.agent)
        facts: dict[tuple[str, str], selectors.ResponseFact] = {}
        for fact in selectors.answers_unjudged(self.agent, teacher.policy) if teacher else ():
            given.setdefault(fact.prompt_hash, Counter())[fact.response] += 1
            facts.setdefault((fact.prompt_hash, fact.response), fact)
        for prompt_hash, counts in given.items():
            text = min(counts, key=lambda one: (-counts[one], one))
            fact = facts[prompt_hash, text]
            with self.rows.row(fact.id):
                completion = self._completion(fact)
                self._represent(fact)
                yield DemonstrationEvidence(prompt_hash, completion, ANSWER, tags=tuple(fact.tags))

    def _count(self, rater_kind: str) -> bool:
        simulated = rater_kind == SIMULATED_RATER
        self.feedback_count += 1
        self.simulated_count += simulated
        return simulated

    def prompts(self, prompt_hashes: list[str]) -> dict[str, Prompt]:
        ids = [self._representatives[prompt_hash][1] for prompt_hash in prompt_hashes]
        prompts_by_hash: dict[str, Prompt] = {}
        for fact in selectors.prompt_facts(ids):
            with self.rows.row(fact.id):
                prompts_by_hash[fact.prompt_hash] = Prompt(
                    fact.messages,
                    fact.state,
                    tools_of(fact.metadata),
                    facts_of(fact.metadata),
                    fact.unit,
                    str(fact.trace or ""),
                )
        return prompts_by_hash

    def prompt_hashes(self) -> list[str]:
        for fact in selectors.decision_prompts(self.agent):
            self._represent(fact)
        return list(self._representatives)

    def query(self) -> dict[str, object]:
        newest = selectors.feedback_counts(self.agent).newest_at
        return {"newest_rating_at": newest.isoformat() if newest else None}


@dataclass(frozen=True, slots=True)
class _Correction:
    decision: uuid.UUID
    text: str
    simulated: bool
    tags: tuple[str, ...]
    feedback: tuple[uuid.UUID, ...]


def correction_read(text: str, response: Completion) -> Completion:
    """A correction: chat messages if it is JSON of them and replaces chat messages (tool calls), else its text.

    Raises ValueError if such JSON is damaged.
    """
    if isinstance(response, str) or not text.lstrip().startswith("[{"):
        return text
    return completion_read(text, {"response_is": "messages"})


def with_reasoning(completion: Completion, reasoning: str) -> Completion:
    """A response as messages with its reasoning in the first; unchanged without reasoning."""
    if not reasoning:
        return completion
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    return [{**completion[0], "reasoning": reasoning}, *completion[1:]]


def tools_of(metadata: Mapping[str, Any]) -> list[object] | None:
    """Tools offered with a prompt; None unless `tools` is a list of objects, as in chats."""
    tools = metadata.get("tools")
    described = isinstance(tools, list) and bool(tools) and all(isinstance(tool, dict) for tool in tools)
    return tools if described else None


def candidates_read(stored: list[Any] | None) -> tuple[tuple[str, float | None], ...]:
    """(text, score) of stored candidates, which are texts or {response, score?}."""
    return tuple(
        (item, None) if isinstance(item, str) else (item["response"], item.get("score"))
        for item in stored or ()
    )
