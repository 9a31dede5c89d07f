"""Rows of a dataset out of evidence: each kind's reader and maker, and the prompts beside."""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from backend.installation import PROGRAM
from feedback import selectors
from feedback.messages import MessageError, messages_read
from rl.datasets.evidence import DatabaseEvidence, EvidenceSource, Prompt
from rl.datasets.examples import (
    REWARD_KINDS,
    Example,
    JudgementSet,
    RowSet,
    examples_from_evidence,
    examples_sampled,
    judgements_from_evidence,
    judgements_sampled,
    prompt_examples,
)
from rl.datasets.feedback_types import Completion, DemonstrationEvidence, Evidence
from rl.datasets.file_evidence import FileEvidence, PromptFile, holds_prompts
from rl.datasets.pairs import Pair, PairSet, pairs_from_evidence, sample_pairs
from rl.datasets.prompt_clusters import ClusteredPrompt, prompt_text
from rl.datasets.reward_records import reward_threshold as agent_reward_threshold
from rl.datasets.snapshots import DatasetRefused
from rl.datasets.splits import SourceSplits
from rl.models import Snapshot
from rl.recipes import DATASET_CONFIG
from rl.recipes.sft import EXAMPLE_SOURCES

PROMPTS_AT_ONCE = 1000
"""Prompts held in memory while rows are written."""


def source_opened(
    agent: str,
    source: str,
    data_file: str | Path | None = None,
    ratings_file: str | Path | None = None,
    file_format: str = "auto",
    kind: str = "",
    put_off: Collection[uuid.UUID] = (),
    *,
    keep_reasoning: bool = False,
) -> EvidenceSource:
    """Evidence recorded here ("db"), without the feedback of the ids `put_off`, or read from a file ("file");
    of the kind `prompts`, a file may hold prompts alone. keep_reasoning: responses carry their reasoning.

    Raises DatasetRefused for an agent nobody knows, FormatRefused for a file that cannot be read.
    """
    if source == "db":
        known = selectors.agent_slugs()
        if agent not in known:
            there = f"known are {', '.join(known)}" if known else "no decisions are recorded yet"
            raise DatasetRefused(
                f"no decision of agent {agent!r} is recorded; {there}. Record decisions first, or import a file: "
                f"`{PROGRAM} import_feedback FILE --agent {agent}`"
            )
        return DatabaseEvidence(agent, put_off, keep_reasoning=keep_reasoning)
    if source != "file":
        raise DatasetRefused(f"a source is db or file, found {source!r}")
    if data_file is None:
        raise DatasetRefused("--source file needs --data-file FILE")
    if kind == Snapshot.Kind.PROMPTS and file_format == "auto" and holds_prompts(Path(data_file)):
        return PromptFile(agent, Path(data_file))
    ratings = None if ratings_file is None else Path(ratings_file)
    return FileEvidence(
        agent, Path(data_file), format=file_format, ratings_path=ratings, keep_reasoning=keep_reasoning
    )


def making_knobs(
    agent: str,
    kind: str,
    *,
    rating_margin: float | None = None,
    max_pairs_per_prompt: int | None = None,
    reward_threshold: float | None = None,
    sources: Collection[str] = EXAMPLE_SOURCES,
    implied: bool = False,
) -> dict[str, Any]:
    """Arguments of `make_rows` for a kind: those given, else the agent's settings and DATASET_CONFIG.

    pairs, alone or with scores: rating_margin, max_pairs_per_prompt, alone also `implied` if asked for; labels:
    threshold; corrections: sources, some of EXAMPLE_SOURCES.
    """
    if kind in (Snapshot.Kind.PAIRS, Snapshot.Kind.PAIRS_AND_SCORES):
        given = {"rating_margin": rating_margin, "max_pairs_per_prompt": max_pairs_per_prompt}
        knobs = {name: DATASET_CONFIG[name] if value is None else value for name, value in given.items()}
        return knobs | ({"implied": True} if implied and kind == Snapshot.Kind.PAIRS else {})
    if kind == Snapshot.Kind.LABELS:
        return {"threshold": agent_reward_threshold(agent) if reward_threshold is None else reward_threshold}
    return {"sources": tuple(sources)} if kind == Snapshot.Kind.CORRECTIONS else {}


def make_rows(
    given: EvidenceSource, kind: str, left_out: Counter[str], knobs: dict[str, Any], *, dry_run: bool
) -> RowSet:
    """The rows of a kind from what is known, without their prompts.

    Prompts that stand on no side of the split yet are drawn one, for good unless this is a dry run.
    """
    splits = SourceSplits(given.agent, dry_run=dry_run, clustered=partial(clustered_prompts, given))
    evidence = _evidence(given, splits, kind, left_out)
    if kind == Snapshot.Kind.PAIRS:
        return pairs_from_evidence(evidence, splits, **knobs)
    if kind == Snapshot.Kind.PAIRS_AND_SCORES:
        return judgements_from_evidence(evidence, splits, **knobs)
    if kind == Snapshot.Kind.PROMPTS:
        for _ in evidence:
            pass  # the prompts are known when all of it was read
        hashes = given.prompt_hashes()
        splits.settle(hashes)
        return prompt_examples(hashes, splits)
    return examples_from_evidence(evidence, kind, splits, **knobs)


def _evidence(
    given: EvidenceSource, splits: SourceSplits, kind: str, left_out: Counter[str]
) -> Iterator[Evidence]:
    """Evidence with the rewards where nobody rated; demonstrations for the kind that is made of them.

    All of it is noted for the split, whatever this kind makes of it.
    """
    shown = kind == Snapshot.Kind.CORRECTIONS
    for item in splits.track_rated(itertools.chain(given.evidence(left_out), given.demonstrations())):
        if shown or not isinstance(item, DemonstrationEvidence):
            yield item
        elif isinstance(given, FileEvidence):
            left_out["no_preference"] += 1
    yield from splits.track_rewarded(given.rewards(left_out, compared=kind in REWARD_KINDS))


def rows_sampled(rows: RowSet, max_samples: int | None) -> RowSet:
    if max_samples is None:
        return rows
    if isinstance(rows, JudgementSet):
        return judgements_sampled(rows, max_samples)
    return (
        sample_pairs(rows, max_samples) if isinstance(rows, PairSet) else examples_sampled(rows, max_samples)
    )


def rows_with_prompts(
    agent: str,
    given: EvidenceSource,
    pairs: RowSet,
    left_out: Counter[str],
    behind: dict[str, set[uuid.UUID]] | None = None,
) -> Iterator[dict[str, Any]]:
    """The pairs with their prompts, in order, reading the prompts of PROMPTS_AT_ONCE pairs at a time.

    behind: where given, collects the ids of the feedback that the rows of each split were made of.
    """
    for start in range(0, len(pairs.rows), PROMPTS_AT_ONCE):
        chunk = pairs.rows[start : start + PROMPTS_AT_ONCE]
        prompts = given.prompts(list(dict.fromkeys(pair.prompt_hash for pair in chunk)))
        for pair in chunk:
            prompt = prompts.get(pair.prompt_hash)
            if prompt is None:
                continue  # counted where it could not be read
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


def _pair_row(agent: str, pair: Pair, prompt: Prompt, messages: list[dict[str, Any]]) -> dict[str, Any]:
    chosen, rejected = pair.chosen, pair.rejected
    if isinstance(chosen, list) or isinstance(rejected, list):
        # a trainer takes two texts or two lists, never one of each
        chosen, rejected = _as_messages(chosen), _as_messages(rejected)
    row: dict[str, Any] = {
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


def _example_row(
    agent: str, example: Example, prompt: Prompt, messages: list[dict[str, Any]]
) -> dict[str, Any]:
    row: dict[str, Any] = {
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


def _prompt_facts(prompt: Prompt) -> dict[str, Any]:
    """Facts of a row about its prompt beside the messages and the state, where there are any."""
    known = {"tools": prompt.tools, "facts": prompt.facts}
    return {name: value for name, value in known.items() if value}


def clustered_prompts(given: EvidenceSource, prompt_hashes: list[str]) -> dict[str, ClusteredPrompt]:
    """Words, unit and trace of those prompts that are plain text: the others make no row of any dataset."""
    found: dict[str, ClusteredPrompt] = {}
    for start in range(0, len(prompt_hashes), PROMPTS_AT_ONCE):
        prompts = given.prompts(prompt_hashes[start : start + PROMPTS_AT_ONCE])
        for name, prompt in prompts.items():
            if (messages := messages_plain(prompt.messages)) is not None:
                found[name] = ClusteredPrompt(prompt_text(messages), prompt.trace, prompt.unit)
    return found


def recorded_prompts(agent: str, prompt_hashes: Collection[str]) -> dict[str, ClusteredPrompt]:
    """The same of prompts recorded here; those whose decisions are gone are missing."""
    source = DatabaseEvidence(agent)
    known = set(source.prompt_hashes())
    return clustered_prompts(source, [name for name in prompt_hashes if name in known])


def _as_messages(completion: Completion) -> list[dict[str, Any]]:
    return completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]


def messages_plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Messages of any dialect as OpenAI writes them, each with its text as content; None where a part is no text, or a
    message cannot be read."""
    try:
        read = messages_read(messages)
    except MessageError:
        return None
    if not all(message.is_text for message in read):
        return None
    return [{**message.bare.dump(), "content": message.text} for message in read]
