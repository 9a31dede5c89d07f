"""Open a source of evidence, make rows of a kind from it, and add the prompts."""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from backend.installation import PROGRAM
from feedback import selectors
from feedback.messages import Message, MessageError, messages_read
from feedback.storage.sql import chunks
from rl.datasets.evidence import REASONS as EVIDENCE_REASONS
from rl.datasets.evidence import DatabaseEvidence, EvidenceSource, Prompt
from rl.datasets.examples import (
    EXAMPLE_REASONS,
    REWARD_KINDS,
    Example,
    answers_thinned,
    examples_from_evidence,
    judgements_from_evidence,
    prompt_examples,
)
from rl.datasets.feedback_types import Completion, DemonstrationEvidence, Evidence, Row
from rl.datasets.file_evidence import FileEvidence, PromptFile, holds_prompts
from rl.datasets.pairs import REASONS as PAIR_REASONS
from rl.datasets.pairs import Pair, RowSet, pairs_from_evidence
from rl.datasets.prompt_clusters import ClusteredPrompt, prompt_text
from rl.datasets.reward_records import reward_threshold as agent_reward_threshold
from rl.datasets.snapshots import DatasetRefused
from rl.datasets.splits import SourceSplits
from rl.models import Snapshot
from rl.recipes import DATASET_CONFIG
from rl.recipes.sft import ANSWER, FEEDBACK_SOURCES

PROMPTS_AT_ONCE = 1000
"""Prompts held in memory at a time."""

REASONS = EVIDENCE_REASONS | EXAMPLE_REASONS | PAIR_REASONS
"""Reason for leaving evidence out -> what its number counts."""


@dataclass(frozen=True)
class FeedbackFile:
    """A file of feedback in any format of feedback.transfer.formats, read without importing it."""

    path: Path
    ratings_path: Path | None = None
    """Second file of formats that have two."""
    validation_path: Path | None = None
    """File of the same format whose prompts are held out, and no others; None: the prompts are split."""


@dataclass(frozen=True)
class RowRules:
    """How evidence becomes rows; each rule applies to some kinds."""

    reward_threshold: float | None = None
    """Labels: lowest reward, in (0, 1), of a good response that nobody rated; None: the agent's reward settings."""
    sources: tuple[str, ...] = FEEDBACK_SOURCES
    """Corrections: where demonstrations may come from."""
    implied: bool = False
    """Pairs: include those implied by a verdict on one of several listed options."""
    keep_reasoning: bool = False
    """Responses carry the reasoning recorded with them."""

    def knobs(self, agent: str, kind: str) -> dict[str, object]:
        """Keyword arguments of the function that makes rows of this kind."""
        if kind in (Snapshot.Kind.PAIRS, Snapshot.Kind.PAIRS_AND_SCORES):
            knobs = {name: DATASET_CONFIG[name] for name in ("rating_margin", "max_pairs_per_prompt")}
            return knobs | ({"implied": True} if self.implied and kind == Snapshot.Kind.PAIRS else {})
        if kind == Snapshot.Kind.LABELS:
            threshold = self.reward_threshold
            return {"threshold": agent_reward_threshold(agent) if threshold is None else threshold}
        return {"sources": self.sources} if kind == Snapshot.Kind.CORRECTIONS else {}


def agent_check(agent: str) -> None:
    """Raises DatasetRefused for an agent without a recorded decision."""
    known = selectors.agent_slugs()
    if agent not in known:
        there = f"known are {', '.join(known)}" if known else "no decisions are recorded yet"
        raise DatasetRefused(
            f"no decision of agent {agent!r} is recorded; {there}. Record decisions first, or import a file: "
            f"`{PROGRAM} import_feedback FILE --agent {agent}`"
        )


def source_opened(
    agent: str,
    file: FeedbackFile | None = None,
    kind: str = "",
    put_off: Collection[uuid.UUID] = (),
    *,
    keep_reasoning: bool = False,
) -> EvidenceSource:
    """The evidence recorded here, without the feedback `put_off`, or the evidence in a file.

    For the kind `prompts`, a file may hold prompts alone. Raises DatasetRefused for an unknown agent, FormatRefused for
    a file that cannot be read.
    """
    if file is None:
        agent_check(agent)
        return DatabaseEvidence(agent, put_off, keep_reasoning=keep_reasoning)
    if kind == Snapshot.Kind.PROMPTS and holds_prompts(file.path):
        return PromptFile(agent, file.path, file.validation_path)
    return FileEvidence(
        agent,
        file.path,
        ratings_path=file.ratings_path,
        validation_path=file.validation_path,
        keep_reasoning=keep_reasoning,
    )


def make_rows(
    given: EvidenceSource, kind: str, left_out: Counter[str], knobs: dict[str, Any], *, dry_run: bool
) -> RowSet[Any]:
    """Rows of a kind, without their prompts. Unless this is a dry run, new prompts get their side of the split."""
    splits = SourceSplits(
        given.agent,
        dry_run=dry_run,
        clustered=partial(clustered_prompts, given),
        validation=given.validation_prompts if isinstance(given, FileEvidence) else None,
    )
    evidence = _evidence(given, splits, kind, left_out)
    if kind == Snapshot.Kind.PAIRS:
        return pairs_from_evidence(evidence, splits, **knobs)
    if kind == Snapshot.Kind.PAIRS_AND_SCORES:
        return judgements_from_evidence(evidence, splits, **knobs)
    if kind == Snapshot.Kind.PROMPTS:
        for _ in evidence:
            pass  # All prompts are known once the evidence is read.
        hashes = given.prompt_hashes()
        splits.settle(hashes)
        return prompt_examples(hashes, splits)
    if ANSWER not in knobs.get("sources", ()):
        return examples_from_evidence(evidence, kind, splits, **knobs)
    answers: list[DemonstrationEvidence] = []
    rows = examples_from_evidence(_with_answers(evidence, given, splits, answers), kind, splits, **knobs)
    return answers_thinned(rows, splits.clusters([one.prompt_hash for one in answers]))


def _with_answers(
    evidence: Iterable[Evidence],
    given: EvidenceSource,
    splits: SourceSplits,
    answers: list[DemonstrationEvidence],
) -> Iterator[Evidence]:
    """The evidence, then the unrated answers, whose prompts get their sides together; collects these in `answers`."""
    yield from evidence
    if isinstance(given, DatabaseEvidence):
        answers += given.answers()
    splits.settle([one.prompt_hash for one in answers])
    yield from answers


def _evidence(
    given: EvidenceSource, splits: SourceSplits, kind: str, left_out: Counter[str]
) -> Iterator[Evidence]:
    """Evidence, and rewards of responses that nobody rated; demonstrations only for corrections.

    Everything counts for the split, whatever this kind makes of it.
    """
    shown = kind == Snapshot.Kind.CORRECTIONS
    for item in splits.track_rated(itertools.chain(given.evidence(left_out), given.demonstrations())):
        if shown or not isinstance(item, DemonstrationEvidence):
            yield item
        elif isinstance(given, FileEvidence):
            left_out["no_preference"] += 1
    yield from splits.track_rewarded(given.rewards(left_out, compared=kind in REWARD_KINDS))


def rows_with_prompts(
    agent: str,
    given: EvidenceSource,
    pairs: RowSet[Any],
    left_out: Counter[str],
    behind: dict[str, set[uuid.UUID]] | None = None,
) -> Iterator[dict[str, object]]:
    """The rows with their prompts, in order. `behind` collects the ids of the feedback behind each split's rows."""
    for chunk in chunks(pairs.rows, PROMPTS_AT_ONCE):
        prompts = given.prompts(list(dict.fromkeys(pair.prompt_hash for pair in chunk)))
        for pair in chunk:
            prompt = prompts.get(pair.prompt_hash)
            if prompt is None:
                continue  # Counted where it could not be read.
            messages = messages_plain(prompt.messages)
            if messages is None:
                left_out["not_text"] += 1
                continue
            if behind is not None:
                behind.setdefault(pair.split, set()).update(pair.feedback)
            if isinstance(pair, Pair):
                yield _pair_row(agent, pair, prompt, messages)
            else:
                yield _example_row(agent, pair, prompt, messages)


def _pair_row(agent: str, pair: Pair, prompt: Prompt, messages: list[Message]) -> Row:
    chosen, rejected = pair.chosen, pair.rejected
    if isinstance(chosen, list) or isinstance(rejected, list):
        # A trainer takes two texts or two lists, not one of each.
        chosen, rejected = _as_messages(chosen), _as_messages(rejected)
    row: Row = {
        "prompt": messages,
        "chosen": chosen,
        "rejected": rejected,
        "prompt_hash": pair.prompt_hash,
        "agent": agent,
        "source": pair.source,
        "margin": pair.margin,
        "votes": pair.votes,
        "split": pair.split,
        "tags": list(pair.tags),
        "state": prompt.state,
        "simulated": pair.simulated,
    }
    row |= _prompt_facts(prompt)
    if pair.split != "train":
        row |= {"preferred": list(pair.preferred), "dispreferred": list(pair.dispreferred)}
    return row


def _example_row(agent: str, example: Example, prompt: Prompt, messages: list[Message]) -> Row:
    row: Row = {
        "prompt": messages,
        **example.content,
        "prompt_hash": example.prompt_hash,
        "agent": agent,
        "source": example.source,
        "votes": example.votes,
        "split": example.split,
        "tags": list(example.tags),
        "state": prompt.state,
        "simulated": example.simulated,
    }
    return row | _prompt_facts(prompt)


def _prompt_facts(prompt: Prompt) -> dict[str, object]:
    known = {"tools": prompt.tools, "facts": prompt.facts}
    return {name: value for name, value in known.items() if value}


def clustered_prompts(given: EvidenceSource, prompt_hashes: list[str]) -> dict[str, ClusteredPrompt]:
    """Text, unit and trace of the prompts that are plain text; other prompts make no rows."""
    found: dict[str, ClusteredPrompt] = {}
    for chunk in chunks(prompt_hashes, PROMPTS_AT_ONCE):
        prompts = given.prompts(chunk)
        for name, prompt in prompts.items():
            if (messages := messages_plain(prompt.messages)) is not None:
                found[name] = ClusteredPrompt(prompt_text(messages), prompt.trace, prompt.unit)
    return found


def recorded_prompts(agent: str, prompt_hashes: Collection[str]) -> dict[str, ClusteredPrompt]:
    """As `clustered_prompts`, for prompts recorded here; deleted ones are missing."""
    source = DatabaseEvidence(agent)
    known = set(source.prompt_hashes())
    return clustered_prompts(source, [name for name in prompt_hashes if name in known])


def _as_messages(completion: Completion) -> list[Message]:
    return completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]


def messages_plain(messages: list[Message]) -> list[Message] | None:
    """Messages of any dialect in OpenAI's form, with text content; None if one is unreadable or not text."""
    try:
        read = messages_read(messages)
    except MessageError:
        return None
    if not all(message.is_text for message in read):
        return None
    return [{**message.bare.dump(), "content": message.text} for message in read]
