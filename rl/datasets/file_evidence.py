"""Evidence in a file of any known format, and files of prompts; read without importing."""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from feedback import selectors
from feedback.storage.problem_rows import RowReader
from feedback.storage.responses import completion_read
from feedback.storage.sql import chunks
from feedback.transfer import formats
from feedback.transfer.formats.files import rows
from feedback.transfer.formats.own_tools import ENTRY
from feedback.transfer.formats.records import (
    FormatRefused,
    ImportedComparison,
    ImportedDecision,
    ImportedRating,
    ImportedReference,
    ImportedTrace,
    OutcomeReference,
    Record,
    RowError,
    RowRefused,
    RowSkipped,
    check_json,
    messages_of,
)
from rl.agents import get_agent
from rl.agents.base import Agent, ChoiceAgent, Scenario
from rl.datasets.evidence import (
    SIMULATED_RATER,
    Prompt,
    Response,
    candidates_read,
    correction_read,
    tools_of,
    with_reasoning,
)
from rl.datasets.feedback_types import (
    CandidatesEvidence,
    ComparisonEvidence,
    CorrectionEvidence,
    DemonstrationEvidence,
    Evidence,
    RatingEvidence,
    RewardEvidence,
    rating_value,
)
from rl.datasets.reward_records import RewardsRefused, reward_plan
from rl.recipes.sft import DEMONSTRATIONS
from rl.rewards.answers import facts_of
from rl.rewards.base import RewardSample
from rl.rewards.horizons import DecisionFeedback, HorizonPlan, rewards_over_time

logger = logging.getLogger("rl.datasets")

REWARDED_AT_ONCE = 400
"""Decisions of a file whose rewards are calculated together."""


@dataclass(frozen=True, slots=True)
class _UnratedDecision:
    """A decision without ratings, with outcomes or a trace."""

    record: ImportedDecision
    response: Response


class FileEvidence:
    """EvidenceSource of a file."""

    def __init__(
        self,
        agent: str,
        path: Path,
        *,
        ratings_path: Path | None = None,
        validation_path: Path | None = None,
        keep_reasoning: bool = False,
    ) -> None:
        self.keep_reasoning = keep_reasoning
        self.agent = agent
        self.path = path
        self.format = formats.format_by_name(formats.detect(path)).name
        self.ratings_path = ratings_path
        self.validation_path = validation_path
        self.validation_prompts: set[str] | None = None if validation_path is None else set()
        """Hashes of the validation file's prompts, once the evidence is read; None without such a file."""
        self._validating = False
        self.feedback_count = 0
        self.simulated_count = 0
        self.rows = RowReader(agent, "dataset")
        self._prompts: dict[str, Prompt] = {}
        self._scenarios: dict[str, Scenario] | None = None
        self._numbers = 0
        self._unrated: list[_UnratedDecision] = []
        self._silent: list[Response] = []
        self._traces: dict[uuid.UUID, ImportedTrace] = {}

    def evidence(self, left_out: Counter[str]) -> Iterator[Evidence]:
        """Read the file. Raises FormatRefused if it is damaged or unreadable."""
        self.feedback_count = self.simulated_count = self._numbers = 0
        self._unrated, self._silent, self._traces = [], [], {}
        refusals: list[RowRefused] = []
        decisions: dict[uuid.UUID, Response] = {}
        # A named rater's last comparison of two decisions stands, on whichever sides.
        comparisons: dict[tuple[frozenset[object], str], ImportedComparison] = {}
        for record in self._records():
            if isinstance(record, RowRefused):
                if record.broken:
                    raise FormatRefused(f"{self.path} line {record.line}: {record.reason}")
                refusals.append(record)
            elif isinstance(record, ImportedTrace):
                if record.id is not None:  # Used by the decisions that name it, in `rewards`.
                    self._traces[record.id] = record
            elif isinstance(record, (RowSkipped, ImportedReference, OutcomeReference)):
                left_out["no_preference"] += 1
            elif isinstance(record, ImportedComparison):
                if isinstance(record.left, uuid.UUID):
                    comparisons[frozenset((record.left, record.right)), record.rater] = record
                else:
                    yield from self._comparison_evidence(record, decisions, left_out)
            elif self.format == "ratchet" and record.agent != self.agent:
                # Other formats only suggest an agent.
                left_out["other_agent"] += 1
            else:
                try:
                    yield from self._decision_evidence(record, decisions, left_out)
                except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                    # The agent's own code may fail on an odd state: refuse this row alone.
                    refusals.append(RowRefused(record.line, record.key, str(error)))
        for comparison in comparisons.values():
            yield from self._comparison_evidence(comparison, decisions, left_out)
        if self._silent and (self._numbers or self._unrated):
            # In a file with judged responses, the others are no demonstrations.
            left_out["no_preference"] += len(self._silent)
            self._silent = []
        if refusals:
            left_out["refused_row"] += len(refusals)
            first = refusals[0]
            logger.warning(
                "%s: %d rows refused; the first is line %d: %s",
                self.path,
                len(refusals),
                first.line,
                first.reason,
            )

    def _records(self) -> Iterator[Record]:
        self._validating = False
        yield from formats.read(self.path, self.format, self.ratings_path)
        if self.validation_path is not None:
            self._validating = True
            yield from formats.read(self.validation_path, self.format)

    def _decision_evidence(
        self, record: ImportedDecision, decisions: dict[uuid.UUID, Response], left_out: Counter[str]
    ) -> Iterator[Evidence]:
        if not record.messages:
            record = self._simulated_decision(record)
        response = self._response(record)
        if record.id:
            decisions[record.id] = response
        agent, has_feedback, has_verdict = get_agent(self.agent), False, False
        for rating in _latest_ratings(record.ratings):
            simulated, tags = self._count(rating.rater_kind), (*rating.tags, *response.tags)
            number = self._number()
            value = rating_value(rating.thumb, rating.stars, rating.score)
            if rating.correction is not None:
                valid = agent.is_valid(rating.correction, record.state)
                yield CorrectionEvidence(
                    response.prompt_hash,
                    response.completion,
                    correction_read(rating.correction, response.completion),
                    valid,
                    simulated,
                    tags,
                    number,
                )
            elif value is None:
                left_out["no_verdict"] += 1
            if value is not None:
                yield RatingEvidence(
                    response.prompt_hash, response.completion, value, simulated, tags, number
                )
                has_verdict = True
            has_feedback = True
        demonstrations = [source for source in DEMONSTRATIONS if source in record.tags]
        for source in demonstrations:
            yield DemonstrationEvidence(
                response.prompt_hash, response.completion, source, False, response.tags, self._number()
            )
        earned = not has_verdict and bool(record.outcomes or record.trace)
        if earned:
            self._unrated.append(_UnratedDecision(record, response))
        candidates = candidates_read(record.candidates)
        if candidates and (has_feedback or any(score is not None for _, score in candidates)):
            yield CandidatesEvidence(response.prompt_hash, response.completion, candidates)
        elif not has_feedback and not demonstrations and not earned:
            if record.response:
                self._silent.append(response)
            else:
                left_out["no_preference"] += 1

    def _comparison_evidence(
        self, record: ImportedComparison, decisions: dict[uuid.UUID, Response], left_out: Counter[str]
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
        yield ComparisonEvidence(
            left.prompt_hash,
            left.completion,
            right.completion,
            record.preference,
            simulated,
            tags,
            self._number(),
        )

    def _response(self, record: ImportedDecision) -> Response:
        prompt_hash = selectors.prompt_hash(self.agent, record.messages)
        if self._validating and self.validation_prompts is not None:
            self.validation_prompts.add(prompt_hash)
        known = self._prompts.get(prompt_hash)
        if known is None or known.state is None:
            self._prompts[prompt_hash] = Prompt(
                record.messages,
                record.state,
                tools_of(record.metadata),
                facts_of(record.metadata),
                record.unit,
                str(record.trace or ""),
            )
        completion = record.response
        if isinstance(completion, str):
            completion = completion_read(completion, record.metadata)
        if self.keep_reasoning:
            completion = with_reasoning(completion, record.reasoning)
        return Response(prompt_hash, completion, record.tags)

    def _simulated_decision(self, record: ImportedDecision) -> ImportedDecision:
        """A simulation's entry, rendered as the agent would ask and answer it. Raises ValueError."""
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

    def _state(self, entry: dict[str, object], agent: Agent) -> Any:
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
        simulated = rater_kind == SIMULATED_RATER
        self.feedback_count += 1
        self.simulated_count += simulated
        return simulated

    def prompts(self, prompt_hashes: list[str]) -> dict[str, Prompt]:
        return {prompt_hash: self._prompts[prompt_hash] for prompt_hash in prompt_hashes}

    def rewards(self, left_out: Counter[str], *, compared: bool) -> Iterator[RewardEvidence]:
        """Rewards of the file's outcomes and traces, by the agent's reward plan."""
        if not self._unrated:
            return
        try:
            plan = reward_plan(self.agent)
        except RewardsRefused as refusal:
            raise FormatRefused(str(refusal)) from refusal
        for chunk in chunks(self._unrated, REWARDED_AT_ONCE):
            yield from self._reward_evidence(plan, chunk, left_out)

    def _reward_evidence(
        self, plan: HorizonPlan, unrated: list[_UnratedDecision], left_out: Counter[str]
    ) -> Iterator[RewardEvidence]:
        samples, feedback = [], []
        for item in unrated:
            record = item.record
            trace = self._traces.get(record.trace) if record.trace else None
            facts = {
                "state": record.state,
                "candidates": record.candidates,
                "steps": trace.steps if trace else [],
            }
            if trace is not None and trace.metadata.get("status") == "failed":
                facts["trace_status"] = "failed"
            if record.tokens_out is not None:
                facts["tokens"] = record.tokens_out
            text = record.response if isinstance(record.response, str) else json.dumps(record.response)
            samples.append(RewardSample(record.messages, text, self.agent, facts))
            feedback.append(
                DecisionFeedback(outcomes={outcome.name: outcome.value for outcome in record.outcomes})
            )
        for item, reward in zip(unrated, rewards_over_time(plan, samples, feedback), strict=True):
            if reward.value is None or not reward.measured:
                left_out["no_preference"] += 1
            else:
                response = item.response
                yield RewardEvidence(
                    response.prompt_hash,
                    response.completion,
                    reward.value,
                    False,
                    response.tags,
                    feedback=self._number(),
                )

    def _number(self) -> tuple[uuid.UUID]:
        """An id for the next piece of feedback, so that the feedback behind rows can be counted."""
        self._numbers += 1
        return (uuid.UUID(int=self._numbers),)

    def demonstrations(self) -> Iterator[DemonstrationEvidence]:
        """All responses, if the file judges none of them."""
        for response in self._silent:
            yield DemonstrationEvidence(
                response.prompt_hash,
                response.completion,
                DEMONSTRATIONS[0],
                False,
                response.tags,
                self._number(),
            )

    def prompt_hashes(self) -> list[str]:
        return list(self._prompts)

    def query(self) -> dict[str, object]:
        files = [path for path in (self.path, self.ratings_path, self.validation_path) if path is not None]
        return {"format": self.format, "files": [{"name": f.name, "sha256": _sha256(f)} for f in files]}


def _latest_ratings(ratings: tuple[ImportedRating, ...]) -> list[ImportedRating]:
    """Each named rater's last rating unless it is a withdrawal, and every rating without a rater."""
    last = {rating.rater: rating for rating in ratings}
    return [r for r in ratings if not r.withdrawn and (not r.rater or last[r.rater] is r)]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


PROMPTS = ("prompt", "messages", "question", "problem", "instruction")
"""Columns that may hold the prompt; the first present one counts."""

PLAIN = ("trl", "openai", "llamafactory", "table")
"""Formats whose rows may be prompts with further columns; other formats have their own readers."""

PREFERENCE_COLUMNS = ("chosen", "rejected", "conversations", "preferred_output")
"""Columns of preference rows, which do not hold the prompt in a column."""

NON_FACT_COLUMNS = ("state", "tools", "facts", "completion", "response", "id", "agent")
"""Columns that are not facts about the prompt."""

SAMPLE = 20
"""Rows read to recognise a file of prompts."""


def holds_prompts(path: Path) -> bool:
    """True if most of a file's first rows are prompts. Raises FormatRefused without a file."""
    try:
        if formats.detect(path) not in PLAIN:
            return False
    except FormatRefused:
        pass  # Not a feedback format: it may hold prompts.
    seen = [row.value for row in islice(rows(path), SAMPLE) if not isinstance(row, RowRefused)]
    objects = [row for row in seen if isinstance(row, Mapping)]
    prompt_count = sum(any(row.get(name) for name in PROMPTS) for row in objects)
    return 2 * prompt_count > len(seen) and not any(set(row) & set(PREFERENCE_COLUMNS) for row in objects)


class PromptFile(FileEvidence):
    """Prompts with facts from a file; no feedback."""

    def __init__(self, agent: str, path: Path, validation_path: Path | None = None) -> None:
        self.agent, self.path, self.format, self.ratings_path = agent, path, "prompts", None
        self.validation_path, self._validating = validation_path, False
        self.validation_prompts = None if validation_path is None else set()
        self.feedback_count = self.simulated_count = 0
        self.rows = RowReader(agent, "dataset")
        self._prompts: dict[str, Prompt] = {}
        self._unrated, self._silent, self._traces, self._numbers = [], [], {}, 0

    def evidence(self, left_out: Counter[str]) -> Iterator[Evidence]:
        """Yields nothing; reads the prompts and counts repeated ones in `left_out`."""
        for path in filter(None, (self.path, self.validation_path)):
            self._validating = path == self.validation_path
            self._prompts_read(path, left_out)
        yield from ()

    def _prompts_read(self, path: Path, left_out: Counter[str]) -> None:
        for row in rows(path):
            if isinstance(row, RowRefused):
                if row.broken:
                    raise FormatRefused(f"{path} line {row.line}: {row.reason}")
                left_out["refused_row"] += 1
                continue
            try:
                prompt = prompt_of(row.value)
            except RowError:
                left_out["refused_row"] += 1
                continue
            prompt_hash = selectors.prompt_hash(self.agent, prompt.messages)
            if self._validating and self.validation_prompts is not None:
                self.validation_prompts.add(prompt_hash)
            if prompt_hash in self._prompts:
                left_out["repeated_prompt"] += 1
            else:
                self._prompts[prompt_hash] = prompt


def prompt_of(row: object) -> Prompt:
    """A row as a prompt: messages without a final answer, state, tools, and all other columns as facts.

    Raises RowError without a prompt.
    """
    if not isinstance(row, Mapping):
        raise RowError(f"expected an object, found {row!r:.80}")
    name = next((name for name in PROMPTS if row.get(name)), None)
    if name is None:
        raise RowError(f"expected one of {', '.join(PROMPTS)}, found {', '.join(map(str, row))[:80]}")
    messages = messages_of(row[name], name)
    while len(messages) > 1 and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if name != "messages" and name != "prompt" and isinstance(row.get("input"), str) and row["input"].strip():
        messages[-1]["content"] += f"\n{row['input']}"
    held = row.get("facts")
    facts = {
        key: value
        for key, value in row.items()
        if key not in (name, *NON_FACT_COLUMNS) and value not in (None, "", [], {})
    } | (dict(held) if isinstance(held, Mapping) else {})
    check_json(facts, "facts")
    return Prompt(messages, row.get("state"), row.get("tools") or None, facts)
