"""Sources of a dataset's evidence: the database, or files of any known format."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from django.db.models import Q

from feedback import selectors
from feedback.agreement.report import LabelAggregated, labels_aggregated
from feedback.explorer.bulk_readers import outcome_facts
from feedback.models import Aggregation
from feedback.storage.problem_rows import RowReader
from feedback.storage.responses import completion_read
from feedback.storage.sampling import agent_settings
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
from rl.models import RewardRecord
from rl.recipes.sft import DEMONSTRATIONS
from rl.rewards.rows import facts_of

logger = logging.getLogger("rl.datasets")

SIMULATED_RATER = "simulated"
"""The kind of rater whose word is marked in every row made from it."""


REASONS: dict[str, str] = {
    "not_text": "pairs whose prompt holds something else than text (an image, a sound)",
    "refused_row": "rows of the file that could not be read",
    "unreadable": "decisions that could not be read: `/problems/` names each and says why",
    "no_preference": "rows of the file that carry no preference (a prompt, a demonstration)",
    "beside_a_person": "simulated verdicts on responses that a person rated, where raters are weighted by reliability",
    "other_agent": "rows of the file that belong to another agent",
    "near_identical": "held-out rows whose prompt is nearly one that is trained or tuned on",
    "repeated_prompt": "rows of a file of prompts whose prompt stands there before",
    "reward_pending": "decisions with outcomes or a trace whose reward is not calculated yet: run calculate_rewards",
}
"""Reasons for leaving something out beside those of rl.datasets.pairs, and what each number counts."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt of a decision, and the facts the app knew."""

    messages: list[dict[str, Any]]
    state: Any = None
    tools: list[Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts for verifiable rewards: tests, the right answer."""
    unit: str = ""
    trace: str = ""
    """Unit and trace of the decision that stands for the prompt; "" without one."""


class EvidenceSource(Protocol):
    """Evidence on an agent's prompts. The prompts themselves are asked for later, for those that gave pairs alone."""

    agent: str
    feedback_count: int
    """Ratings and comparisons read; complete once `evidence` is exhausted."""
    simulated_count: int
    """Number of those that a simulated rater gave."""
    rows: RowReader
    """Reader that counts database rows which could not be read; of a file, whose bad rows are counted as they
    are read, nothing."""

    def evidence(self, left_out: Counter[str]) -> Iterator[Evidence]:
        """Everything known; what says nothing of preferences is counted in `left_out` (rl.datasets.pairs.REASONS)."""
        ...

    def prompts(self, prompt_hashes: list[str]) -> dict[str, Prompt]:
        """The prompts of these hashes, of those that can be read."""
        ...

    def rewards(self, left_out: Counter[str], *, compared: bool) -> Iterator[RewardEvidence]:
        """Responses without a verdict of which outcomes or a trace say what they are worth, or, where `compared`,
        nothing but comparisons; to be read after `evidence`."""
        ...

    def demonstrations(self) -> Iterator[DemonstrationEvidence]:
        """Responses to be imitated that `evidence` did not give; to be read after it."""
        ...

    def prompt_hashes(self) -> list[str]:
        """Every prompt that was asked, judged or not; complete once `evidence` is exhausted."""
        ...

    def query(self) -> dict[str, Any]:
        """Identity of this source, for the snapshot's record."""
        ...


@dataclass(frozen=True, slots=True)
class Response:
    """A decision that somebody judged, without its prompt."""

    prompt_hash: str
    completion: Completion
    tags: tuple[str, ...]


class DatabaseEvidence:
    """Evidence from here. One streamed query each for responses, ratings and comparisons; prompts stay outside."""

    def __init__(
        self, agent: str, put_off: Collection[uuid.UUID] = (), *, keep_reasoning: bool = False
    ) -> None:
        """`put_off`: ids of feedback that is left for another time. keep_reasoning: responses carry the reasoning that
        was recorded beside them."""
        self.agent = agent
        self.keep_reasoning = keep_reasoning
        self.feedback_count = 0
        self.simulated_count = 0
        self.rows = RowReader(agent, "dataset")
        self._put_off = frozenset(put_off)
        self._spokesmen: dict[str, tuple[bool, uuid.UUID]] = {}
        self._compared: dict[uuid.UUID, list[uuid.UUID]] = {}

    def _completion(self, fact: selectors.ResponseFact) -> Completion:
        completion = completion_read(fact.response, fact.metadata)
        return with_reasoning(completion, fact.reasoning) if self.keep_reasoning else completion

    def _speaks(self, fact: selectors.ResponseFact | selectors.DecisionPrompt) -> None:
        """One decision speaks for its prompt, always the same: of those with a state the one with the least id."""
        spokesman = (not fact.has_state, fact.id)
        self._spokesmen[fact.prompt_hash] = min(spokesman, self._spokesmen.get(fact.prompt_hash, spokesman))

    def evidence(self, left_out: Counter[str]) -> Iterator[Evidence]:
        self.feedback_count = self.simulated_count = 0
        self._compared = {}
        responses: dict[uuid.UUID, Response] = {}
        for fact in selectors.response_facts(self.agent):
            with self.rows.row(fact.id):
                completion = self._completion(fact)
                candidates = candidates_read(fact.candidates)
                self._speaks(fact)
                if fact.judged:
                    responses[fact.id] = Response(fact.prompt_hash, completion, tuple(fact.tags))
                if candidates and (fact.judged or any(score is not None for _, score in candidates)):
                    yield CandidatesEvidence(fact.prompt_hash, completion, candidates)
        yield from self._ratings(responses, left_out)
        for comparison in selectors.comparison_facts(self.agent):
            left, right = responses.get(comparison.left), responses.get(comparison.right)
            if left is None or right is None or comparison.id in self._put_off:
                continue  # decided after the responses were read: the next snapshot has it
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
        joint_labels = self._weighted_labels()
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
            if (label := joint_labels.get(rating.decision)) is not None:
                if simulated and not label.simulated:
                    left_out["beside_a_person"] += 1
                    continue
                value = label.probability_good
            yield RatingEvidence(
                response.prompt_hash, response.completion, value, simulated, tags, (rating.id,)
            )
        yield from self._corrections(responses, corrections)

    def _weighted_labels(self) -> dict[uuid.UUID, LabelAggregated]:
        """Aggregated labels of decisions, each rater weighted by reliability, where the agent's settings want
        that; otherwise none, and every rating counts the same."""
        if agent_settings(self.agent).aggregation != Aggregation.DAWID_SKENE:
            return {}
        return {label.decision: label for label in labels_aggregated(self.agent, Aggregation.DAWID_SKENE)}

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
                    item.text,
                    valid,
                    item.simulated,
                    item.tags,
                    item.feedback,
                )

    def rewards(self, left_out: Counter[str], *, compared: bool) -> Iterator[RewardEvidence]:
        """Read rewards of decisions: one counts where its reward knows more than what was known at once."""
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
            # what nobody sent as a rating or an outcome, a trace, goes by the decision it was said of
            feedback_ids = outcomes.get(fact.id) or (
                [fact.id] if is_measured else self._compared.get(fact.id, [])
            )
            if not self._put_off.isdisjoint(feedback_ids):
                continue
            with self.rows.row(fact.id):
                completion = self._completion(fact)
                self._speaks(fact)
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
                self._speaks(fact)
                for source in DEMONSTRATIONS:
                    if source in fact.tags:
                        yield DemonstrationEvidence(
                            fact.prompt_hash, completion, source, False, tuple(fact.tags), (fact.id,)
                        )

    def _count(self, rater_kind: str) -> bool:
        simulated = rater_kind == SIMULATED_RATER
        self.feedback_count += 1
        self.simulated_count += simulated
        return simulated

    def prompts(self, prompt_hashes: list[str]) -> dict[str, Prompt]:
        ids = [self._spokesmen[prompt_hash][1] for prompt_hash in prompt_hashes]
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
            self._speaks(fact)
        return list(self._spokesmen)

    def query(self) -> dict[str, Any]:
        newest = selectors.feedback_counts(self.agent).newest_at
        return {
            "newest_rating_at": newest.isoformat() if newest else None,
            "aggregation": agent_settings(self.agent).aggregation,
        }


@dataclass(frozen=True, slots=True)
class _Correction:
    """Correction that a rater wrote in place of a response."""

    decision: uuid.UUID
    text: str
    simulated: bool
    tags: tuple[str, ...]
    feedback: tuple[uuid.UUID, ...]


def with_reasoning(completion: Completion, reasoning: str) -> Completion:
    """A response as messages, whose first one has its reasoning; itself where there is none."""
    if not reasoning:
        return completion
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    return [{**completion[0], "reasoning": reasoning}, *completion[1:]]


def tools_of(metadata: Mapping[str, Any]) -> list[Any] | None:
    """The tools a prompt offered, where `tools` is what a chat has there: a list of objects. An app may call something
    else by that name."""
    tools = metadata.get("tools")
    described = isinstance(tools, list) and bool(tools) and all(isinstance(tool, dict) for tool in tools)
    return tools if described else None


def candidates_read(stored: list[Any] | None) -> tuple[tuple[str, float | None], ...]:
    """Listed responses as (text, score): stored are texts, or {response, score?}."""
    return tuple(
        (item, None) if isinstance(item, str) else (item["response"], item.get("score"))
        for item in stored or ()
    )
